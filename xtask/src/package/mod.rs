//! `cargo xtask package`: two Debian packages, and for each an archive of the same tree for other
//! systems.
//!
//! Builds are reproducible: files have the time of the last commit, programs do not contain their
//! build directory, and packing is single-threaded. [`tree`] has the installed files, [`licences`]
//! the legal texts, [`scripts`] dpkg's scripts, [`cluster`] the second package.

mod cluster;
mod licences;
mod scripts;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::report::Step;
use crate::{cargo, guest, kernel, paths, process, setup};
use tree::Tree;

/// Debian's name of the architecture.
const ARCHITECTURE: &str = "amd64";

/// What dpkg is told of a package.
#[derive(Debug)]
struct Package {
    name: &'static str,
    /// Description and optional dependencies.
    control: &'static str,
    conffiles: &'static str,
    scripts: &'static [(&'static str, &'static str)],
}

const PODVISOR: Package = Package {
    name: "podvisor",
    control: CONTROL,
    conffiles: "/etc/podvisor/config.toml\n",
    scripts: &scripts::SCRIPTS,
};

/// `podvisor` is static.
const CONTROL: &str = "\
Package: podvisor
Version: @VERSION@
Architecture: @ARCHITECTURE@
Maintainer: The podvisor developers <developers@podvisor.invalid>
Installed-Size: @KIB@
Section: admin
Priority: optional
Recommends: containernetworking-plugins, iptables, kmod, openssh-client, passt
Suggests: podvisor-cluster
Description: pods and containers in virtual machines of their own
 A container runtime whose pods are small virtual machines on KVM: one program
 with its own virtual machine monitor, guest kernel and agent, which serves the
 Container Runtime Interface to a kubelet and runs containers at the terminal.
";

pub(crate) fn command() -> Result<ExitCode> {
    setup::ensure(&[setup::BUILD, setup::KERNEL, setup::PACKAGE])?;
    let [kernel, initramfs] = guest::ensure()?;
    let retpoline = kernel::ensure_variant(&kernel::RETPOLINE)?;
    let full = kernel::ensure_variant(&kernel::FULL)?;
    let [loader_kernel, loader] = guest::ensure_loader()?;
    let agent = guest::ensure_agent()?;
    let step = Step::begin("building podvisor");
    let programs = cargo::build_static(&["podvisor-cri", "podvisor-cluster"])?;
    let podvisor = programs.join("podvisor");
    step.done();

    let step = Step::begin("packing");
    let directory = paths::target().join("package");
    match fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error)
                .with_context(|| format!("{} cannot be removed", directory.display()));
        }
        _ => {}
    }
    let time = time()?;
    let root = directory.join(PODVISOR.name);
    let tree = Tree::new(&root)?;
    install(&tree, &podvisor, &initramfs)?;
    install_kernels(&tree, &[&kernel, &retpoline, &full, &loader_kernel])?;
    tree.copy(&loader, "usr/lib/podvisor/loader.cpio", 0o644)?;
    tree.copy(&agent, "usr/lib/podvisor/podvisor-ga", 0o755)?;
    let mut made = pack(&PODVISOR, &tree, &root, &time)?.to_vec();
    let root = directory.join(cluster::PACKAGE.name);
    let tree = Tree::new(&root)?;
    cluster::install(&tree, &programs.join("podvisor-cluster"))?;
    made.extend(pack(&cluster::PACKAGE, &tree, &root, &time)?);
    step.done();
    for path in made {
        println!("{}", paths::display(&path));
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes a package and an archive of a tree, and removes the tree; returns them.
fn pack(package: &Package, tree: &Tree, root: &Path, time: &str) -> Result<[PathBuf; 2]> {
    let directory = root.parent().context("a package has no directory")?;
    let version = env!("CARGO_PKG_VERSION");
    let name = format!("{}_{version}_{ARCHITECTURE}", package.name);
    let archive = archive(root, &directory.join(&name), time)?;
    control(package, tree, root)?;
    let deb = debian(root, directory.join(format!("{name}.deb")), time)?;
    fs::remove_dir_all(root)?;
    Ok([deb, archive])
}

/// Copies all files to their installed places.
fn install(tree: &Tree, podvisor: &Path, initramfs: &Path) -> Result<()> {
    tree.copy(podvisor, "usr/bin/podvisor", 0o755)?;
    tree.copy(initramfs, "usr/lib/podvisor/initramfs.cpio", 0o644)?;
    let deploy = paths::root().join("deploy");
    for (file, place) in [
        (
            "podvisor.service",
            "usr/lib/systemd/system/podvisor.service",
        ),
        ("modules.conf", "usr/lib/modules-load.d/podvisor.conf"),
        ("apparmor", "usr/share/podvisor/apparmor"),
    ] {
        tree.copy(&deploy.join(file), place, 0o644)?;
    }
    let config = process::output(Command::new(podvisor).args(["config", "default"]))?;
    tree.write("etc/podvisor/config.toml", &(config + "\n"))?;
    describe(tree, podvisor, PODVISOR.name)?;

    let documents = "usr/share/doc/podvisor";
    for file in self::documents()? {
        let place = format!("{documents}/{}", file.display());
        tree.copy(&paths::root().join(&file), &place, 0o644)?;
    }
    tree.write(
        &format!("{documents}/copyright"),
        &licences::copyright(&kernel::source_version()?),
    )?;
    tree.write(
        &format!("{documents}/third-party-licences"),
        &licences::third_party(&["podvisor-cri", "podvisor-agent"])?,
    )
}

/// Writes a program's completions and manual pages, which it prints itself.
fn describe(tree: &Tree, program: &Path, name: &str) -> Result<()> {
    let said = |arguments: &[&str]| process::output(Command::new(program).args(arguments));
    for (shell, place) in [
        (
            "bash",
            format!("usr/share/bash-completion/completions/{name}"),
        ),
        (
            "fish",
            format!("usr/share/fish/vendor_completions.d/{name}.fish"),
        ),
        ("zsh", format!("usr/share/zsh/vendor-completions/_{name}")),
    ] {
        tree.write(&place, &(said(&["completions", shell])? + "\n"))?;
    }
    let manual = tree.directory("usr/share/man/man1")?;
    said(&["manual", &manual.display().to_string()])?;
    tree.compress(&manual)
}

/// Returns the documents to install, whose relative links have to resolve.
fn documents() -> Result<Vec<PathBuf>> {
    let mut files = vec![PathBuf::from("README.md"), PathBuf::from("CHANGELOG.md")];
    for (directory, ends) in [
        ("docs", &["md"][..]),
        ("docs/adr", &["md"]),
        ("docs/how-to", &["md"]),
        ("docs/pictures", &["svg"]),
        ("deploy", &["md", "yaml"]),
        ("benches/results", &["md", "json", "svg"]),
    ] {
        let failed = || format!("{directory}/ cannot be read");
        for entry in fs::read_dir(paths::root().join(directory)).with_context(failed)? {
            let file = Path::new(directory).join(entry.with_context(failed)?.file_name());
            let end = file.extension().and_then(|end| end.to_str());
            if end.is_some_and(|end| ends.contains(&end)) {
                files.push(file);
            }
        }
    }
    Ok(files)
}

/// Copies each kernel to where podvisor looks for it, and its configuration next to the documents.
fn install_kernels(tree: &Tree, kernels: &[&Path]) -> Result<()> {
    for kernel in kernels {
        let name = kernel
            .file_name()
            .context("a kernel has no name")?
            .display();
        tree.copy(kernel, &format!("usr/lib/podvisor/{name}"), 0o644)?;
        let config = format!("usr/share/doc/podvisor/{name}.config");
        tree.copy(&kernel.with_extension("config"), &config, 0o644)?;
    }
    Ok(())
}

/// Writes dpkg's control files.
fn control(package: &Package, tree: &Tree, root: &Path) -> Result<()> {
    let sums = tree.checksums()?;
    let control = package
        .control
        .replace("@VERSION@", env!("CARGO_PKG_VERSION"))
        .replace("@ARCHITECTURE@", ARCHITECTURE)
        .replace("@KIB@", &tree.kib()?.to_string());
    let tree = Tree::new(&root.join("DEBIAN"))?;
    tree.write("control", &control)?;
    if !package.conffiles.is_empty() {
        tree.write("conffiles", package.conffiles)?;
    }
    tree.write("md5sums", &sums)?;
    for (name, script) in package.scripts {
        tree.write(name, script)?;
        tree.permit(name, 0o755)?;
    }
    Ok(())
}

fn debian(root: &Path, package: PathBuf, time: &str) -> Result<PathBuf> {
    let mut command = process::tied("dpkg-deb");
    command
        .args(["--root-owner-group", "--threads-max=1", "-Zxz", "--build"])
        .args([root, &package])
        .env("SOURCE_DATE_EPOCH", time)
        .stdout(std::io::stderr());
    process::run(&mut command)?;
    Ok(package)
}

fn archive(root: &Path, name: &Path, time: &str) -> Result<PathBuf> {
    let with = |end: &str| PathBuf::from(format!("{}.{end}", name.display()));
    let tar = with("tar");
    let mut command = process::tied("tar");
    command
        .args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"])
        .arg(format!("--mtime=@{time}"))
        // Without the access time and PID of PAX headers.
        .args(["--format=gnu", "--create", "--file"])
        .arg(&tar)
        .arg("--directory")
        .arg(root)
        .arg(".");
    process::run(&mut command)?;
    let mut command = process::tied("zstd");
    command.args(["-19", "--quiet", "--rm", "-T1"]).arg(&tar);
    process::run(&mut command)?;
    Ok(with("tar.zst"))
}

/// Returns the time of the last change to the sources, in seconds since 1970.
fn time() -> Result<String> {
    if let Ok(time) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(time);
    }
    process::output(
        Command::new("git")
            .args(["log", "-1", "--format=%ct"])
            .current_dir(paths::root()),
    )
    .context("the time of the last commit is not known: set SOURCE_DATE_EPOCH")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the targets of a page's relative links, without fragments.
    fn links(text: &str) -> impl Iterator<Item = &str> {
        let targets = text.split("](").skip(1);
        let targets = targets.filter_map(|rest| rest.split([')', '#']).next());
        targets.filter(|target| !target.is_empty() && !target.contains("://"))
    }

    #[test]
    fn the_links_of_installed_pages_lead_to_what_is_installed() {
        let documents = documents().unwrap();
        let mut count = 0;
        for page in documents
            .iter()
            .filter(|page| page.extension() == Some("md".as_ref()))
        {
            let text = fs::read_to_string(paths::root().join(page)).unwrap();
            for link in links(&text) {
                let target = paths::root().join(page.parent().unwrap()).join(link);
                let target = target.canonicalize().unwrap_or(target);
                let target = target.strip_prefix(paths::root().canonicalize().unwrap());
                let is_there = target.is_ok_and(|target| documents.iter().any(|d| d == target));
                assert!(is_there, "{}: {link}", page.display());
                count += 1;
            }
        }
        assert!(count > 20, "{count}");
    }

    /// Returns the lines of a section of podvisor's unit.
    fn unit(section: &str) -> Vec<String> {
        unit_of("deploy/podvisor.service", section)
    }

    /// Returns the lines of a section of a unit.
    pub(super) fn unit_of(file: &str, section: &str) -> Vec<String> {
        let text = fs::read_to_string(paths::root().join(file)).unwrap();
        let lines = text
            .lines()
            .skip_while(|line| *line != format!("[{section}]"));
        let lines = lines.skip(1).take_while(|line| !line.starts_with('['));
        lines.map(str::to_owned).collect()
    }

    #[test]
    fn what_commands_take_by_default_comes_with_the_package() {
        let recommends = CONTROL
            .lines()
            .find_map(|line| line.strip_prefix("Recommends: "));
        let recommends: Vec<_> = recommends.unwrap().split(", ").collect();
        for (package, of) in [
            ("containernetworking-plugins", "root's network"),
            ("iptables", "root's network"),
            ("passt", "the network of users without root"),
            ("openssh-client", "the key of `vm run`, and `vm ssh`"),
        ] {
            assert!(recommends.contains(&package), "{package}: {of}");
        }
    }

    #[test]
    fn the_daemon_is_started_before_kubelets_and_never_given_up() {
        let has = |section: &str, line: &str| unit(section).iter().any(|have| have == line);
        assert!(has("Unit", "StartLimitIntervalSec=0"));
        assert!(has(
            "Unit",
            "Before=kubelet.service k3s.service k3s-agent.service"
        ));
        assert!(has("Service", "Restart=always"));
        assert!(has("Service", "KillMode=process"));
    }
}
