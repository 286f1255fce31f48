//! Debian packages: which ones each step needs and why, and their installation.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::process;
use crate::report::Step;

/// A Debian package and its purpose.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Package {
    name: &'static str,
    why: &'static str,
}

const fn package(name: &'static str, why: &'static str) -> Package {
    Package { name, why }
}

/// Building the guest kernel.
pub(crate) const KERNEL: &[Package] = &[
    package("linux-source-6.12", "the guest kernel's source"),
    package("gcc", "compiles the guest kernel"),
    package("make", "builds the guest kernel"),
    package("flex", "the guest kernel's build"),
    package("bison", "the guest kernel's build"),
    package("bc", "the guest kernel's build"),
    package("libelf-dev", "objtool of the guest kernel's build"),
    package("xz-utils", "unpacks the guest kernel's source"),
];

/// Additional packages for the kernel with types for eBPF.
pub(crate) const FULL_KERNEL: &[Package] = &[package(
    "dwarves",
    "makes the kernel's types (BTF) of its debug information",
)];

/// Building the UEFI firmware.
pub(crate) const FIRMWARE: &[Package] = &[
    package("acpica-tools", "compiles the firmware's ACPI tables"),
    package("g++", "compiles the tools of the firmware's build"),
    package("gcc", "compiles the firmware"),
    package("libc6-dev", "compiles the tools of the firmware's build"),
    package("make", "builds the firmware"),
    package("nasm", "assembles the firmware"),
    package("patch", "applies Debian's changes to the firmware's source"),
    package("python3", "the firmware's build"),
    package("uuid-dev", "compiles the tools of the firmware's build"),
    package("xz-utils", "unpacks the firmware's source"),
];

/// Running the emulated test host.
pub(crate) const HOST: &[Package] = &[
    package("qemu-system-x86", "emulates a machine whose KVM is sound"),
    package("busybox-static", "the shell of the test host's initramfs"),
    package("e2fsprogs", "makes the test host's disk"),
    package("kmod", "orders the test host's kernel modules"),
    package("xz-utils", "unpacks the test host's kernel"),
];

/// Building the agent and the product.
pub(crate) const BUILD: &[Package] = &[
    package("gcc", "links programs"),
    package("libc6-dev", "links programs, and the agent statically"),
];

/// Additional packages for tests.
pub(crate) const TEST: &[Package] = &[
    package("busybox-static", "images of tests"),
    package("containernetworking-plugins", "networks of pods"),
    package("docker-registry", "a real registry to pull from"),
    package("dosfstools", "checks the FAT volumes that podvisor writes"),
    package("fdisk", "looks for partitions on those volumes"),
    package("libseccomp-dev", "what seccomp filters are compared with"),
    package("btrfs-progs", "a file system with shared blocks"),
    package("e2fsprogs", "file systems of guests that were killed"),
    package(
        "erofs-utils",
        "checks the EROFS images that podvisor writes",
    ),
    package("g++", "builds libFuzzer for the fuzz targets"),
    package("iproute2", "looks at networks of pods"),
    package("iptables", "host ports of pods"),
    package("mtools", "reads the FAT volumes that podvisor writes"),
    package("openssl", "signs images"),
    package("passt", "networks of containers without a privilege"),
    package("qemu-utils", "disk images in all variants, to compare with"),
    package("skopeo", "another client of registries, to compare with"),
    package("strace", "ends a pull at each of its writes"),
    package("xz-utils", "packs disk images"),
    package("zstd", "packs disk images"),
];

/// The small system that virtual machines boot in tests, and other disks of it.
pub(crate) const SMALL: &[Package] = &[
    package("busybox-static", "the small system's programs"),
    package("dosfstools", "FAT file systems of disks"),
    package("e2fsprogs", "the small system's root"),
    package("fdisk", "checks partition tables that tests write"),
    package("kmod", "orders the small system's kernel modules"),
    package("mtools", "files in FAT file systems"),
    package("xfsprogs", "XFS file systems of disks"),
];

/// Images created by other tools, for tests and benchmarks.
pub(crate) const IMAGES: &[Package] = &[
    package("acl", "an image with POSIX ACLs"),
    package("attr", "an image with extended attributes"),
    package("buildah", "makes images to run"),
    package("busybox-static", "images of tests"),
    package("docker-registry", "a real registry to pull from"),
    package("libcap2-bin", "an image with file capabilities"),
    package("mmdebstrap", "makes a full Debian root"),
    package("skopeo", "converts images, and pushes them"),
    package(
        "umoci",
        "makes images, and unpacks them to compare podvisor's trees with",
    ),
];

/// Additional packages for `cargo xtask bench pull`.
pub(crate) const BENCH_PULL: &[Package] = &[package("containerd", "a peer that pulls images")];

/// Additional packages for `cargo xtask bench start`.
pub(crate) const BENCH_START: &[Package] = &[package("runc", "a peer that runs containers")];

/// Additional packages for `cargo xtask bench cri`.
pub(crate) const BENCH_CRI: &[Package] = &[
    package("containerd", "a peer that runs pods"),
    package("runc", "runs containerd's containers"),
];

/// Building the package.
pub(crate) const PACKAGE: &[Package] = &[
    package("xz-utils", "packs the Debian package"),
    package("zstd", "packs the archive"),
];

/// Additional packages for the demo.
pub(crate) const DEMO: &[Package] = &[
    package(
        "containernetworking-plugins",
        "the CNI plugins that connect a pod",
    ),
    package("docker-registry", "a real registry to pull from"),
    package("busybox-static", "the demo's image"),
    package("iproute2", "looks at networks of pods"),
    package("iptables", "host ports of pods"),
];

/// Additional packages for Kubernetes' validation suite.
pub(crate) const CRITEST: &[Package] = &[
    package("busybox-static", "images of the suite"),
    package("gcc", "compiles the suite's programs for images"),
    package("util-linux", "makes shared memory in the host"),
];

/// Additional packages for `cargo xtask cluster --try`.
pub(crate) const CLUSTER: &[Package] = &[package("curl", "asks the cluster that is tried")];

/// Everything, for `cargo xtask setup`.
pub(crate) const ALL: &[&[Package]] = &[
    KERNEL,
    FIRMWARE,
    HOST,
    BUILD,
    TEST,
    SMALL,
    IMAGES,
    BENCH_PULL,
    BENCH_START,
    BENCH_CRI,
    PACKAGE,
    DEMO,
    CRITEST,
    CLUSTER,
];

/// Installs those of `groups` that are missing; prints nothing if there are none.
pub(crate) fn ensure(groups: &[&[Package]]) -> Result<()> {
    let mut wanted: Vec<Package> = Vec::new();
    for package in groups.iter().copied().flatten() {
        if !wanted.iter().any(|known| known.name == package.name) {
            wanted.push(*package);
        }
    }
    let mut absent = missing(&wanted)?;
    if absent.is_empty() {
        return Ok(());
    }
    let names = names_of(&absent);
    let prefix = privilege(&names)?;
    for package in &absent {
        eprintln!("missing: {} ({})", package.name, package.why);
    }

    let step = Step::begin(format!("installing {}", names.join(", ")));
    apt(prefix, &["update", "-qq"], &[])
        .context("Debian's package lists cannot be fetched; is the network up?")?;
    let conflicts = conflicts(&names)?;
    if !conflicts.is_empty() {
        bail!("{}", conflict_message(&names, &conflicts));
    }
    apt(prefix, INSTALL, &names)?;
    absent = missing(&wanted)?;
    if absent.is_empty() {
        step.done();
        return Ok(());
    }
    bail!(
        "apt-get has not installed {}; install it and run this again",
        names_of(&absent).join(", ")
    )
}

/// Nothing that is installed is ever removed: it may be of a newer release, or another project's.
const INSTALL: &[&str] = &[
    "install",
    "-y",
    "-qq",
    "--no-install-recommends",
    "--no-remove",
];

/// Returns the installed packages that apt would remove for these.
fn conflicts(names: &[&str]) -> Result<Vec<String>> {
    let mut command = Command::new("apt-get");
    command
        .args(["install", "--simulate", "-y", "--no-install-recommends"])
        .args(names)
        .env("LC_ALL", "C")
        .stderr(Stdio::null());
    // What apt cannot do at all is reported by the installation.
    let simulated = command.output().context("apt-get cannot be run")?;
    Ok(removed(&String::from_utf8_lossy(&simulated.stdout)))
}

/// Reads what a simulation removes: `Remv NAME [VERSION] …`.
fn removed(simulation: &str) -> Vec<String> {
    let lines = simulation.lines();
    let removed = lines.filter_map(|line| line.strip_prefix("Remv ")?.split(' ').next());
    removed.map(str::to_owned).collect()
}

fn conflict_message(wanted: &[&str], conflicts: &[String]) -> String {
    format!(
        "apt would remove {} to install {}, and nothing of yours is removed here. Install them \
         yourself in versions that go together (often those of the same release: apt-get install \
         -t RELEASE {}), then run this again",
        conflicts.join(", "),
        wanted.join(", "),
        wanted.join(" ")
    )
}

fn names_of(packages: &[Package]) -> Vec<&'static str> {
    packages.iter().map(|package| package.name).collect()
}

fn missing(wanted: &[Package]) -> Result<Vec<Package>> {
    let listed = Command::new("dpkg-query")
        .args(["-W", "-f", "${binary:Package} ${db:Status-Status}\n"])
        .args(wanted.iter().map(|package| package.name))
        .stderr(Stdio::null())
        .output();
    let Ok(listed) = listed else {
        bail!(
            "this is not Debian (no dpkg-query): install what these packages hold and put their programs on PATH: {}",
            wanted
                .iter()
                .map(|package| package.name)
                .collect::<Vec<_>>()
                .join(" ")
        );
    };
    let text = String::from_utf8_lossy(&listed.stdout);
    let installed: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_suffix(" installed"))
        .map(|name| name.split(':').next().unwrap_or(name))
        .collect();
    Ok(wanted
        .iter()
        .filter(|package| !installed.contains(&package.name))
        .copied()
        .collect())
}

/// Returns how to become root: not at all, or by a sudo without a password.
fn privilege(names: &[&str]) -> Result<&'static [&'static str]> {
    if rustix::process::geteuid().is_root() {
        return Ok(&[]);
    }
    let sudo = Command::new("sudo")
        .args(["-n", "true"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if sudo.is_ok_and(|status| status.success()) {
        return Ok(&["sudo", "-n"]);
    }
    bail!(
        "packages are missing and this user may not install them; run as root: apt-get install {}",
        names.join(" ")
    )
}

fn apt(prefix: &[&str], arguments: &[&str], names: &[&str]) -> Result<()> {
    let mut words = prefix
        .iter()
        .chain(&["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"]);
    let mut command = process::tied(words.next().unwrap_or(&"env"));
    command
        .args(words)
        .args(["-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=300"])
        .args(arguments)
        .args(names)
        .stdin(Stdio::null())
        // stdout is reserved for the command that needs the packages.
        .stdout(std::io::stderr());
    process::run(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_apt_would_remove_is_named_and_not_removed() {
        let simulation = "NOTE: This is only a simulation!\n\
                          Remv qemu-utils [1:8.2+bpo12]\n\
                          Inst qemu-system-x86 (1:7.2 Debian:12) []\n\
                          Remv qemu-block-extra [1:8.2+bpo12]\n";
        let conflicts = removed(simulation);
        assert_eq!(conflicts, ["qemu-utils", "qemu-block-extra"]);
        assert!(removed("Inst make (4.3 Debian:12)\n").is_empty());
        let message = conflict_message(&["qemu-system-x86"], &conflicts);
        assert!(
            message.contains("would remove qemu-utils, qemu-block-extra"),
            "{message}"
        );
        assert!(message.contains("-t RELEASE qemu-system-x86"), "{message}");
        assert!(INSTALL.contains(&"--no-remove"));
    }

    #[test]
    fn packages_that_do_not_exist_are_missing_and_dpkg_is_not() {
        let wanted = [
            package("dpkg", "itself"),
            package("no-such-package", "a test"),
        ];
        let missing = missing(&wanted).unwrap();
        assert_eq!(missing.len(), 1);
        assert_eq!(missing[0].name, "no-such-package");
    }
}
