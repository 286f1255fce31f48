//! `cargo xtask kernel`: builds `target/guest/vmlinux` (uncompressed ELF with a PVH entry) from
//! Debian's Linux source and `images/kernel/guest.config`; docs/kernel.md has the reasons.
//!
//! The result is cached under the hash of source, configuration, compiler and this recipe.
//!
//! | file | contents |
//! | --- | --- |
//! | `alignment_padding` | leaves out of the ELF file what only aligns its parts |
//! | `jump_table` | sorts the table of patchable branches, as the kernel would at each boot |

mod alignment_padding;
mod jump_table;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::process::{self, Group, Lock};
use crate::report::Step;
use crate::{paths, setup};

/// Debian's package with the source.
const SOURCE: &str = "linux-source-6.12";

/// The archive in it.
const ARCHIVE: &str = "/usr/src/linux-source-6.12.tar.xz";

/// To be raised when this file builds a different kernel from the same inputs.
const RECIPE: &str = "3";

/// Parts of the source that our configurations do not use; their Kconfig files and makefiles are
/// kept, because the configuration reads them.
const LEFT_OUT: &[&str] = &[
    "*/Documentation/*/*",
    "*/drivers/gpu/drm/*/*.[ch]",
    "*/drivers/infiniband/*.[ch]",
    "*/drivers/media/*.[ch]",
    "*/drivers/net/wireless/*.[ch]",
    "*/drivers/scsi/*.[ch]",
    "*/drivers/staging/*.[ch]",
    "*/sound/*.[ch]",
    "*/tools/testing/*",
];

/// Lines that are taken out of the source, or put into it, because no option of the configuration
/// does it.
#[derive(Debug)]
struct Edit {
    file: &'static str,
    /// Whole lines before them, which are kept, if the lines themselves are not unique.
    after: &'static [&'static str],
    /// Consecutive whole lines, ignoring surrounding white space; with those before them they occur
    /// exactly once.
    lines: &'static [&'static str],
    /// Whole lines that come in their place.
    with: &'static [&'static str],
}

/// Takes lines out.
const fn without(file: &'static str, lines: &'static [&'static str]) -> Edit {
    Edit {
        file,
        after: &[],
        lines,
        with: &[],
    }
}

/// docs/kernel.md has the savings of each of them, and why nothing is lost.
const EDITS: &[Edit] = &[
    without("mm/slub.c", &["late_initcall(slab_late_init);"]),
    without("arch/x86/kernel/apic/io_apic.c", &["clear_IO_APIC();"]),
    without(
        "arch/x86/kernel/apic/apic.c",
        &[
            "ret = save_ioapic_entries();",
            "if (ret) {",
            r#"pr_info("Saving IO-APIC state failed: %d\n", ret);"#,
            "return;",
            "}",
        ],
    ),
    without(
        "arch/x86/kernel/apic/apic.c",
        &[
            "mask_ioapic_entries();",
            "",
            "/* If irq_remapping_prepare() succeeded, try to enable it */",
        ],
    ),
    without(
        "arch/x86/kernel/apic/apic.c",
        &["if (ir_stat < 0)", "restore_ioapic_entries();"],
    ),
    without(
        "arch/x86/pci/init.c",
        &[
            "if (!raw_pci_ops && !raw_pci_ext_ops)",
            "printk(KERN_ERR",
            r#""PCI: Fatal: No config space access function found\n");"#,
        ],
    ),
    without("drivers/ptp/Kconfig", &["select NET_PTP_CLASSIFY"]),
    // `jump_table` does it.
    Edit {
        file: "kernel/jump_label.c",
        after: &["cpus_read_lock();", "jump_label_lock();"],
        lines: &["jump_label_sort_entries(iter_start, iter_stop);"],
        with: &[],
    },
    Edit {
        file: "fs/fuse/inode.c",
        after: &["sb->s_time_gran = parent_sb->s_time_gran;"],
        lines: &[],
        with: &["sb->s_flags |= parent_sb->s_flags & SB_NOSEC;"],
    },
];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Build from this configuration fragment instead of images/kernel/guest.config
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Write the kernel to this file instead of target/guest/vmlinux
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Build target/guest/vmlinux-retpoline, for CPUs that need retpolines and return thunks
    #[arg(long, conflicts_with_all = ["config", "output", "full"])]
    retpoline: bool,
    /// Build target/guest/vmlinux-loader, which starts the kernels of distributions' disks
    #[arg(long, conflicts_with_all = ["config", "output", "full", "retpoline"])]
    loader: bool,
    /// Build target/guest/vmlinux-full, with what few pods use: eBPF tracing, NFS, IPsec and others
    #[arg(long, conflicts_with_all = ["config", "output"])]
    full: bool,
}

/// docs/loader.md has the saving, and why nothing is lost.
const LOADER_EDITS: &[Edit] = &[Edit {
    file: "kernel/kexec_file.c",
    after: &[],
    lines: &["if (ksegment->kbuf == pi->purgatory_buf)", "continue;"],
    with: &["continue;"],
}];

/// The configuration of the loader's kernel, which is none of the others' with additions.
const LOADER_CONFIG: &str = "images/kernel/loader.config";

/// The configuration for all CPUs.
const CONFIG: &str = "images/kernel/guest.config";

/// A kernel besides the usual one: what is laid over its configuration.
#[derive(Debug)]
pub(crate) struct Variant {
    /// Ends the name of its file.
    name: &'static str,
    /// Laid over each other in this order.
    fragments: &'static [&'static str],
    /// What compiling it takes beyond [`setup::KERNEL`].
    packages: &'static [setup::Package],
}

/// For CPUs that need retpolines and return thunks.
pub(crate) const RETPOLINE: Variant = Variant {
    name: "retpoline",
    fragments: &["images/kernel/retpoline.config"],
    packages: &[],
};

/// With what few pods use, for all CPUs.
pub(crate) const FULL: Variant = Variant {
    name: "full",
    fragments: &[
        "images/kernel/retpoline.config",
        "images/kernel/full.config",
    ],
    packages: setup::FULL_KERNEL,
};

pub(crate) fn command(args: &Args) -> Result<()> {
    let variants = [(args.retpoline, &RETPOLINE), (args.full, &FULL)];
    if let Some((_, variant)) = variants.iter().find(|(wanted, _)| *wanted) {
        println!("{}", paths::display(&ensure_variant(variant)?));
        return Ok(());
    }
    if args.loader {
        println!("{}", paths::display(&ensure_loader()?));
        return Ok(());
    }
    let config = args
        .config
        .clone()
        .unwrap_or_else(|| paths::root().join(CONFIG));
    let output = args
        .output
        .clone()
        .unwrap_or_else(|| paths::guest().join("vmlinux"));
    build(&config, &[], &output)?;
    println!("{}", paths::display(&output));
    Ok(())
}

/// Builds the guest kernel if it is missing; returns its path.
pub(crate) fn ensure() -> Result<PathBuf> {
    let output = paths::guest().join("vmlinux");
    build(&paths::root().join(CONFIG), &[], &output)?;
    Ok(output)
}

/// Like [`ensure`], for a kernel with additions.
pub(crate) fn ensure_variant(variant: &Variant) -> Result<PathBuf> {
    setup::ensure(&[variant.packages])?;
    let mut fragment = String::new();
    for name in [CONFIG].iter().chain(variant.fragments) {
        let path = paths::root().join(name);
        fragment += &fs::read_to_string(&path)
            .with_context(|| format!("{} cannot be read", path.display()))?;
    }
    fs::create_dir_all(paths::guest())?;
    let name = format!("vmlinux-{}", variant.name);
    let config = paths::guest().join(format!("{name}.wanted"));
    fs::write(&config, fragment)
        .with_context(|| format!("{} cannot be written", config.display()))?;
    let output = paths::guest().join(name);
    build(&config, &[], &output)?;
    Ok(output)
}

/// Builds the loader's kernel if it is missing; returns its path.
pub(crate) fn ensure_loader() -> Result<PathBuf> {
    let output = paths::guest().join("vmlinux-loader");
    build(&paths::root().join(LOADER_CONFIG), LOADER_EDITS, &output)?;
    Ok(output)
}

/// Returns the version of Debian's package from which the guest kernel is built.
pub(crate) fn source_version() -> Result<String> {
    process::output(Command::new("dpkg-query").args(["-W", "-f", "${Version}", SOURCE]))
}

/// `more` are edits of code that no other kernel compiles: they leave the others' results as they
/// are.
fn build(config: &Path, more: &[Edit], output: &Path) -> Result<()> {
    setup::ensure(&[setup::KERNEL])?;
    let archive = Path::new(ARCHIVE);
    let fragment = fs::read_to_string(config)
        .with_context(|| format!("{} cannot be read", config.display()))?;
    let source = process::sha256(archive)?;
    let compiler = process::output(Command::new("gcc").arg("--version"))?;
    let options: Vec<&str> = options(&fragment).collect();
    let key = process::key(&[
        RECIPE,
        &source,
        &edits_key(more),
        &options.join("\n"),
        &compiler,
    ])?;

    let key_file = output.with_extension("key");
    let current = |key_file: &Path| {
        output.is_file() && fs::read_to_string(key_file).is_ok_and(|built| built == key)
    };
    if current(&key_file) {
        return Ok(());
    }
    let directory = paths::guest().join("kernel");
    let _lock = Lock::take(&directory)?;
    if current(&key_file) {
        return Ok(());
    }

    let tree = unpack(archive, &source, &directory)?;
    configure(&tree, config, &fragment)?;
    compile(&tree, archive, &directory.join("build.log"))?;

    let vmlinux = tree.join("vmlinux");
    let notes = process::output(Command::new("readelf").arg("-n").arg(&vmlinux))?;
    if !notes.contains("Xen") {
        bail!("the kernel was built without a PVH entry (no Xen ELF note)");
    }
    if let Some(parent) = output.parent() {
        fs::create_dir_all(parent)?;
    }
    let partial = output.with_extension("partial");
    process::run(
        process::tied("strip")
            .arg("-s")
            .arg("-o")
            .arg(&partial)
            .arg(&vmlinux),
    )?;
    let mut kernel = fs::read(&partial)?;
    let unexpected = "the kernel's ELF file is not as expected";
    if options.contains(&"CONFIG_JUMP_LABEL=y") {
        // Once stripped, it has no symbols to find its tables.
        let symbols = process::output(Command::new("nm").arg(&vmlinux))?;
        let table = jump_table::find(&symbols).context(unexpected)?;
        jump_table::sort(&mut kernel, table).context(unexpected)?;
    }
    let slim = alignment_padding::remove(&kernel).context(unexpected)?;
    fs::write(&partial, slim)?;
    fs::copy(tree.join(".config"), output.with_extension("config"))?;
    fs::rename(&partial, output)?;
    fs::write(&key_file, key)?;
    Ok(())
}

/// The part of a kernel's key that stands for its edits.
fn edits_key(more: &[Edit]) -> String {
    match more {
        [] => format!("{EDITS:?}"),
        more => format!("{EDITS:?} {more:?}"),
    }
}

/// Unpacks and edits the source, unless that was done before.
fn unpack(archive: &Path, digest: &str, directory: &Path) -> Result<PathBuf> {
    let tree = directory.join("source");
    let key_file = directory.join("source.key");
    let key = format!("{digest} {LEFT_OUT:?} {EDITS:?} {LOADER_EDITS:?}");
    if tree.is_dir() && fs::read_to_string(&key_file).is_ok_and(|unpacked| unpacked == key) {
        return Ok(tree);
    }
    let step = Step::begin(format!("unpacking {}", archive.display()));
    let _ = fs::remove_file(&key_file);
    if tree.exists() {
        fs::remove_dir_all(&tree)?;
    }
    fs::create_dir_all(&tree)?;
    process::run(
        process::tied("tar")
            .args(
                LEFT_OUT
                    .iter()
                    .map(|pattern| format!("--exclude={pattern}")),
            )
            .arg("--strip-components=1")
            .arg("-C")
            .arg(&tree)
            .arg("-xf")
            .arg(archive),
    )?;
    for edit in EDITS.iter().chain(LOADER_EDITS) {
        let file = tree.join(edit.file);
        let text = fs::read_to_string(&file)
            .with_context(|| format!("{} cannot be read", file.display()))?;
        let text = edited(&text, edit).with_context(|| {
            format!(
                "{} does not have the lines {:?} exactly once: the source is not as expected",
                edit.file,
                [edit.after, edit.lines].concat()
            )
        })?;
        fs::write(&file, text).with_context(|| format!("{} cannot be written", file.display()))?;
    }
    fs::write(&key_file, key)?;
    step.done();
    Ok(tree)
}

/// `text` with an edit's one place changed; `None` when there is not exactly one.
fn edited(text: &str, edit: &Edit) -> Option<String> {
    let all: Vec<&str> = text.split_inclusive('\n').collect();
    let wanted = [edit.after, edit.lines].concat();
    let is_it = |at: &usize| {
        let here = all[*at..].iter().map(|line| line.trim());
        here.take(wanted.len()).eq(wanted.iter().copied())
    };
    let mut places = (0..all.len()).filter(is_it);
    let (Some(place), None) = (places.next(), places.next()) else {
        return None;
    };
    let (before, rest) = all.split_at(place + edit.after.len());
    let with: Vec<String> = edit.with.iter().map(|line| format!("\t{line}\n")).collect();
    let after = rest[edit.lines.len()..].concat();
    Some([before.concat(), with.concat(), after].concat())
}

/// Applies the fragment to `allnoconfig`; every line of the fragment must remain in effect.
fn configure(tree: &Path, config: &Path, fragment: &str) -> Result<()> {
    process::output(
        Command::new("make")
            .arg("-C")
            .arg(tree)
            .args(["-s", "allnoconfig"])
            .env("KCONFIG_ALLCONFIG", std::path::absolute(config)?),
    )?;
    let result = fs::read_to_string(tree.join(".config"))?;
    let lost = lost(fragment, &result);
    if lost.is_empty() {
        return Ok(());
    }
    bail!(
        "the kernel's configuration system dropped what {} asks for: {} (an option was renamed, or what it depends on is not set)",
        paths::display(config),
        lost.join(", ")
    )
}

/// Returns a fragment's lines without its comments.
fn options(fragment: &str) -> impl Iterator<Item = &str> {
    fragment
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with("CONFIG_"))
}

/// Returns the lines of `fragment` that are not in effect in `config`.
fn lost<'a>(fragment: &'a str, config: &str) -> Vec<&'a str> {
    let set: Vec<&str> = config
        .lines()
        .filter(|line| line.starts_with("CONFIG_"))
        .collect();
    options(fragment)
        .filter(|line| match line.strip_suffix("=n") {
            Some(option) => set
                .iter()
                .any(|have| have.split('=').next() == Some(option)),
            None => !set.contains(line),
        })
        .collect()
}

/// Runs the kernel's build, with its output in `log`.
fn compile(tree: &Path, archive: &Path, log: &Path) -> Result<()> {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut step = Step::begin(format!("compiling the guest kernel with {jobs} jobs"));
    // The build's date is that of the source, so that the same inputs give the same kernel.
    let date = process::output(
        Command::new("date")
            .args(["-u", "-r"])
            .arg(archive)
            .env("LC_ALL", "C"),
    )?;
    let mut group = Group::spawn(
        process::tied("sh")
            .arg("-c")
            .arg("exec make -C \"$0\" -j\"$1\" vmlinux 2>&1")
            .arg(tree)
            .arg(jobs.to_string())
            .env("KBUILD_BUILD_TIMESTAMP", date)
            .env("KBUILD_BUILD_USER", "podvisor")
            .env("KBUILD_BUILD_HOST", "podvisor")
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::piped()),
    )?;
    let mut text = String::new();
    let mut objects = 0_usize;
    if let Some(stdout) = group.child().stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let line = String::from_utf8_lossy(&line?).into_owned();
            if line.starts_with("  ") {
                objects += 1;
                step.progress(&format!("{objects}: {}", line.trim()));
            }
            text.push_str(&line);
            text.push('\n');
        }
    }
    let status = group.wait()?;
    fs::write(log, &text).with_context(|| format!("{} cannot be written", log.display()))?;
    if !status.success() {
        let first = text
            .lines()
            .find(|line| line.contains("error") || line.contains("Error "))
            .unwrap_or("no error line was printed");
        bail!(
            "the guest kernel's build failed: {first}\nthe whole log is {}",
            paths::display(log)
        );
    }
    step.done();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Edit, edited, lost, without};

    #[test]
    fn an_edit_changes_its_one_place_or_fails() {
        let text = "a\n\tcall();\nb call();\n";
        let out = |lines| edited(text, &without("", lines));
        assert_eq!(out(&["call();"]).unwrap(), "a\nb call();\n");
        assert_eq!(out(&["call();", "b call();"]).unwrap(), "a\n");
        assert_eq!(out(&["b call();", ""]), None);
        assert_eq!(out(&["missing();"]), None);
        let twice = "a\ncall();\nb\n  call();\n";
        assert_eq!(edited(twice, &without("", &["call();"])), None);
        let one = Edit {
            after: &["b"],
            ..without("", &["call();"])
        };
        assert_eq!(edited(twice, &one).unwrap(), "a\ncall();\nb\n");
        let other = Edit {
            after: &["c"],
            ..without("", &["call();"])
        };
        assert_eq!(edited(twice, &other), None);
        let more = Edit {
            after: &["b"],
            with: &["more();"],
            ..without("", &[])
        };
        let text = edited(twice, &more).unwrap();
        assert_eq!(text, "a\ncall();\nb\n\tmore();\n  call();\n");
    }

    #[test]
    fn every_option_asked_for_must_have_its_value() {
        let fragment = "# why\nCONFIG_A=y\nCONFIG_B=64\nCONFIG_C=n\nCONFIG_D=n\nCONFIG_E=y\n";
        let config = "CONFIG_A=y\nCONFIG_B=32\n# CONFIG_C is not set\nCONFIG_D=y\n";
        assert_eq!(
            lost(fragment, config),
            ["CONFIG_B=64", "CONFIG_D=n", "CONFIG_E=y"]
        );
    }

    #[test]
    fn the_fragments_name_each_option_once() {
        let fragments = [super::CONFIG].iter().chain(super::FULL.fragments);
        let text: String = fragments
            .map(|path| std::fs::read_to_string(crate::paths::root().join(path)).unwrap())
            .collect();
        let mut names: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("CONFIG_"))
            .filter_map(|line| line.split('=').next())
            .collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
