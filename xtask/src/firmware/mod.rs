//! `cargo xtask firmware`: builds EDK2's firmware for Cloud Hypervisor's machine from Debian's
//! source package, into `target/firmware`, and with `--test` boots a guest by it.
//!
//! It is optional: nothing else of this program builds or needs it, since it takes many minutes.
//! docs/firmware.md has the user's view.

mod source;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::host::{self, Request, quote};
use crate::report::Step;
use crate::{cargo, deb, images, paths, process, setup};

/// The name of EDK2's image, and ours.
const IMAGE: &str = "CLOUDHV.fd";

/// The package with GRUB for UEFI, and the file in it that needs no other file.
const GRUB: &str = "grub-efi-amd64-bin";
const GRUB_IMAGE: &str = "usr/lib/grub/x86_64-efi/monolithic/grubx64.efi";

/// What the tests call it.
const GRUB_FILE: &str = "grubx64.efi";

/// What EDK2's own build is called with, in a shell that has read its variables.
const BUILD: &str = "set -- && . ./edksetup.sh && make -C BaseTools ARCH=X64 -j \"$JOBS\" && \
     build -n \"$JOBS\" -a X64 -t GCC5 -b RELEASE -p OvmfPkg/CloudHv/CloudHvX64.dsc \
     -D NETWORK_ENABLE=FALSE";

/// Where it leaves the image.
const BUILT: &str = "Build/CloudHvX64/RELEASE_GCC5/FV/CLOUDHV.fd";

/// About how many modules it builds.
const MODULES: usize = 430;

/// For an emulated host: two boots by the firmware.
const TEST_LIMIT: Duration = Duration::from_secs(1800);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Boot guests by it as well, in the test host
    #[arg(long)]
    test: bool,
}

pub(crate) fn command(args: &Args) -> Result<ExitCode> {
    let image = ensure()?;
    println!("{}", paths::display(&image));
    match args.test {
        true => test(),
        false => Ok(ExitCode::SUCCESS),
    }
}

fn directory() -> PathBuf {
    paths::target().join("firmware")
}

/// Builds it if it is missing or was built otherwise; returns its path.
fn ensure() -> Result<PathBuf> {
    let directory = directory();
    let image = directory.join(IMAGE);
    let key = process::key(&[&source::identity(), BUILD, "1"])?;
    let is_current = || {
        image.is_file() && fs::read_to_string(directory.join("key")).is_ok_and(|built| built == key)
    };
    if is_current() {
        return Ok(image);
    }
    let _lock = process::Lock::take(&directory)?;
    if is_current() {
        return Ok(image);
    }
    setup::ensure(&[setup::FIRMWARE])?;
    let tree = source::unpack(&directory)?;
    build(&tree, &directory.join("build.log"))?;
    let partial = directory.join("partial");
    fs::copy(tree.join(BUILT), &partial).with_context(|| format!("{BUILT} was not built"))?;
    fs::write(directory.join("key"), key)?;
    fs::rename(&partial, &image)?;
    fs::remove_dir_all(&tree)?;
    Ok(image)
}

fn build(tree: &Path, log: &Path) -> Result<()> {
    let mut step = Step::begin("building the firmware, which takes several minutes");
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let out = fs::File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    let errors = out.try_clone()?;
    let mut group = process::Group::spawn(
        process::tied("bash")
            .args(["-c", BUILD])
            .current_dir(tree)
            .env("JOBS", jobs.to_string())
            .env("PYTHON_COMMAND", "/usr/bin/python3")
            .env("LC_ALL", "C")
            .env_remove("WORKSPACE")
            .env_remove("PACKAGES_PATH")
            .env_remove("EDK_TOOLS_PATH")
            .env_remove("CONF_PATH")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors),
    )?;
    let mut modules = 0_usize;
    if let Some(stdout) = group.child().stdout.take() {
        use std::io::Write as _;
        let mut out = std::io::BufWriter::new(out);
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line?;
            out.write_all(&line)?;
            out.write_all(b"\n")?;
            let text = String::from_utf8_lossy(&line);
            if let Some(module) = module(&text) {
                modules += 1;
                step.progress(&format!("{modules} of about {MODULES}: {module}"));
            }
        }
        out.flush()?;
    }
    let status = group.wait()?;
    if !status.success() {
        let log_text = fs::read(log).unwrap_or_default();
        let text = String::from_utf8_lossy(&log_text);
        let first = text
            .lines()
            .find(|line| line.contains("error:") || line.contains(": error "))
            .unwrap_or("no error line was printed");
        bail!(
            "EDK2's build failed ({status}): {}; all of its output is in {}",
            first.trim(),
            paths::display(log)
        );
    }
    step.done();
    Ok(())
}

/// Returns the module that a line of the build begins.
fn module(line: &str) -> Option<&str> {
    let path = line.strip_prefix("Building ... ")?;
    let path = path.split_whitespace().next()?;
    path.rsplit('/').next()
}

/// Boots guests by the firmware.
fn test() -> Result<ExitCode> {
    setup::ensure(&[setup::KERNEL, setup::HOST, setup::BUILD, setup::TEST])?;
    images::small::ensure()?;
    grub()?;
    let step = Step::begin("building the tests");
    let built = cargo::build_tests(&["--package", "podvisor-vmm", "--test", "guest_firmware"])?;
    let program = built.first().context("cargo built no test")?;
    step.done();
    let step = Step::begin("booting guests by the firmware");
    let script = format!(
        "cd {} && exec {} --test-threads=1 --nocapture",
        quote(&program.directory.display().to_string()),
        quote(&program.path.display().to_string()),
    );
    let mut copies = vec![program.path.clone()];
    copies.extend([IMAGE, GRUB_FILE].map(|name| directory().join(name)));
    let status = host::run_request(Request {
        command: vec!["sh".to_owned(), "-c".to_owned(), script],
        // Without it, QEMU's emulation of a guest's guest ends with a failed assertion, likely at
        // a write to CR8 while an interrupt waits: this firmware writes CR8 in each interrupt.
        icount: true,
        copies,
        limit: Some(TEST_LIMIT),
        ..Request::default()
    })?;
    step.done();
    Ok(ExitCode::from(status))
}

/// Fetches the boot loader that the tests put on their disks.
fn grub() -> Result<()> {
    let directory = directory();
    let image = directory.join(GRUB_FILE);
    if image.is_file() {
        return Ok(());
    }
    let tree = deb::unpack(GRUB, "GRUB for the tests", &directory.join("grub"))?;
    let partial = directory.join("grub.partial");
    fs::copy(tree.join(GRUB_IMAGE), &partial)
        .with_context(|| format!("the package {GRUB} has no {GRUB_IMAGE}"))?;
    fs::rename(&partial, &image)?;
    fs::remove_dir_all(directory.join("grub"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_of_edk2s_build_is_told_by_its_line() {
        let line = "Building ... /x/MdePkg/Library/BaseLib/BaseLib.inf [X64]";
        assert_eq!(module(line), Some("BaseLib.inf"));
        assert_eq!(module("\"gcc\" -c Building ... "), None);
        assert_eq!(module("Building ... "), None);
    }
}
