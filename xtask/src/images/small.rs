//! `cargo xtask small`: a system as small as one with a distribution's kernel can be, for tests of
//! virtual machines that boot from a disk. In `target/small`:
//!
//! | name | what it is |
//! | --- | --- |
//! | `small.raw` | the disk: GPT, one partition of ext4, a menu of GRUB's |
//! | `vmlinuz`, `initrd.img`, `release` | Debian's cloud kernel, its modules with busybox, its release |
//! | `more.img` | a second initial file system, with the modules of XFS and btrfs |
//! | `root/` | the root's files, to make other disks of |
//!
//! Besides busybox, the root has Debian's qemu-guest-agent with its libraries, and the modules that
//! are loaded when a shared directory is mounted, or memory is plugged in.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use podvisor_test_disks::{Gpt, PartitionType, SMALL_UUID, ext4};

use crate::report::Step;
use crate::{deb, paths, process, setup};

const GUEST_AGENT: &str = "qemu-guest-agent";
const KERNEL: &str = "linux-image-cloud-amd64";
const INITRAMFS_INIT: &str = include_str!("small/initramfs-init.sh");
const INIT: &str = include_str!("small/init.sh");
const UDHCPC: &str = include_str!("small/udhcpc.sh");
const SHUTDOWN: &str = include_str!("small/shutdown.sh");
const GRUB: &str = include_str!("small/grub.cfg");

/// What the initial file system loads, each with what it needs. Those that a kernel has built in
/// are passed over.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_mmio",
    "virtio_blk",
    "crc32c_generic",
    "ext4",
    "virtio_net",
    "af_packet",
    "virtio_console",
    "virtio_rng",
    "nls_cp437",
    "nls_ascii",
    "nls_iso8859-1",
    "nls_utf8",
    "vfat",
    "isofs",
    "button",
    "evdev",
];

/// What a second initial file system loads, for roots of other kinds.
const MORE_MODULES: &[&str] = &["xfs", "btrfs"];

/// What is loaded from the root when it is asked for, with the names that the kernel has for it.
const LATE_MODULES: &[(&str, &str)] = &[
    ("virtiofs", "fs-virtiofs"),
    ("virtio_mem", "virtio:d00000018v*"),
];

/// The size of the root, of which little is used.
const ROOT_MIB: u64 = 64;

pub(crate) fn command() -> Result<()> {
    println!("{}", paths::display(&ensure()?));
    Ok(())
}

/// Makes the small system if it is missing; returns its directory.
pub(crate) fn ensure() -> Result<PathBuf> {
    let directory = paths::target().join("small");
    let busybox = Path::new("/bin/busybox");
    setup::ensure(&[setup::SMALL])?;
    let digest = process::sha256(busybox)?;
    let modules = [MODULES, MORE_MODULES].concat().join(" ");
    let parts = [
        "4",
        INITRAMFS_INIT,
        INIT,
        UDHCPC,
        SHUTDOWN,
        GRUB,
        &modules,
        &digest,
    ];
    let key = process::key(&parts)?;
    let is_current = || fs::read_to_string(directory.join("key")).is_ok_and(|made| made == key);
    if is_current() {
        return Ok(directory);
    }
    let _lock = process::Lock::take(&paths::target().join("small-kernel"))?;
    if is_current() {
        return Ok(directory);
    }
    let (kernel, modules) = kernel()?;
    let step = Step::begin("making the small system");
    let partial = directory.with_extension("partial");
    for old in [&partial, &directory] {
        if old.exists() {
            fs::remove_dir_all(old)?;
        }
    }
    fs::create_dir_all(&partial)?;
    let release = name_of(&modules)?;
    fs::copy(&kernel, partial.join("vmlinuz"))?;
    fs::write(partial.join("release"), &release)?;
    let base = Base {
        modules: &modules,
        release: &release,
    };
    fs::write(partial.join("initrd.img"), base.initramfs(busybox)?)?;
    fs::write(partial.join("more.img"), base.more()?)?;
    let root = partial.join("root");
    make_root(&root, busybox)?;
    base.late(&root)?;

    // The disk has the same root, and what boots it.
    let boot = root.join("boot");
    fs::create_dir_all(boot.join("grub"))?;
    fs::copy(&kernel, boot.join(format!("vmlinuz-{release}")))?;
    let initrd = boot.join(format!("initrd.img-{release}"));
    fs::copy(partial.join("initrd.img"), initrd)?;
    let menu = GRUB
        .replace("@UUID@", SMALL_UUID)
        .replace("@RELEASE@", &release);
    fs::write(boot.join("grub/grub.cfg"), menu)?;
    let image = partial.join("root.ext4");
    ext4(&image, ROOT_MIB, SMALL_UUID, &root)?;
    let disk = partial.join("small.raw");
    Gpt::new()
        .partition(1, PartitionType::Linux, &image)
        .write(&disk)?;
    fs::remove_file(&image)?;
    fs::remove_dir_all(&boot)?;
    fs::create_dir(&boot)?;
    fs::write(partial.join("key"), key)?;
    fs::rename(&partial, &directory)?;
    step.done();
    Ok(directory)
}

fn make_root(root: &Path, busybox: &Path) -> Result<()> {
    for name in [
        "bin", "sbin", "boot", "dev", "etc", "proc", "sys", "tmp", "run", "var", "root", "mnt",
    ] {
        fs::create_dir_all(root.join(name))?;
    }
    fs::copy(busybox, root.join("bin/busybox"))?;
    let listed = process::output(Command::new(busybox).arg("--list"))?;
    for name in listed.lines().filter(|name| *name != "busybox") {
        symlink("/bin/busybox", root.join("bin").join(name))?;
    }
    guest_agent(root)?;
    for (path, text) in [
        ("sbin/init", INIT),
        ("sbin/shutdown", SHUTDOWN),
        ("etc/udhcpc", UDHCPC),
    ] {
        fs::write(root.join(path), text)?;
        fs::set_permissions(root.join(path), fs::Permissions::from_mode(0o755))?;
    }
    for (path, text) in [
        ("etc/os-release", "ID=small\nPRETTY_NAME=\"Small system\"\n"),
        ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
        ("etc/shadow", "root:*:19000:0:99999:7:::\n"),
        ("etc/group", "root:x:0:\n"),
    ] {
        fs::write(root.join(path), text)?;
    }
    Ok(())
}

/// Copies qemu-guest-agent and the libraries that it loads.
fn guest_agent(root: &Path) -> Result<()> {
    let listed = process::output(Command::new("apt-cache").args([
        "depends",
        "--recurse",
        "--no-recommends",
        "--no-suggests",
        "--no-conflicts",
        "--no-breaks",
        "--no-replaces",
        "--no-enhances",
        GUEST_AGENT,
    ]))?;
    // Lines that are indented say why; virtual packages are in brackets.
    let is_package = |line: &&str| !line.starts_with([' ', '<', '|']) && !line.is_empty();
    let is_library = |name: &&str| {
        *name == GUEST_AGENT
            || (name.starts_with("lib") && !name.contains("perl"))
            || *name == "zlib1g"
    };
    let mut packages: Vec<&str> = listed
        .lines()
        .filter(is_package)
        .filter(is_library)
        .collect();
    packages.sort_unstable();
    packages.dedup();
    let download = paths::target().join("small-agent");
    let tree = deb::unpack_all(&packages, "QEMU's guest agent", &[], &download)?;
    let directories = ["lib", "usr/lib"]
        .map(|base| tree.join(base).join("x86_64-linux-gnu"))
        .map(|path| path.display().to_string())
        .join(":");
    let program = ["usr/sbin/qemu-ga", "usr/bin/qemu-ga"]
        .map(|path| tree.join(path))
        .into_iter()
        .find(|path| path.is_file())
        .context("the package holds no qemu-ga")?;
    let loader = ["lib64", "usr/lib64"]
        .map(|base| tree.join(base).join("ld-linux-x86-64.so.2"))
        .into_iter()
        .find_map(|path| fs::canonicalize(path).ok())
        .unwrap_or_else(|| tree.join("lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"));
    let loaded = process::output(
        Command::new(&loader)
            .args(["--library-path", &directories, "--list"])
            .arg(&program),
    )?;
    fs::create_dir_all(root.join("lib64"))?;
    fs::create_dir_all(root.join("lib"))?;
    fs::copy(&program, root.join("sbin/qemu-ga"))?;
    fs::copy(&loader, root.join("lib64/ld-linux-x86-64.so.2"))?;
    // `libc.so.6 => /path/libc.so.6 (0x…)`
    let libraries = loaded.lines().filter_map(|line| line.split_once(" => "));
    for (name, path) in libraries {
        let path = path.split(" (").next().unwrap_or_default();
        let name = name.trim();
        if !name.contains('/') {
            fs::copy(path, root.join("lib").join(name)).with_context(|| format!("no {name}"))?;
        }
    }
    Ok(())
}

/// Debian's kernel, of which initial file systems are made.
struct Base<'a> {
    modules: &'a Path,
    release: &'a str,
}

impl Base<'_> {
    /// Packs busybox, the modules in the order in which they load, and the script.
    fn initramfs(&self, busybox: &Path) -> Result<Vec<u8>> {
        let mut archive = podvisor_cpio::Writer::new(Vec::new());
        for directory in ["bin", "dev", "modules", "modules/1"] {
            archive.directory(directory)?;
        }
        archive.character_device("dev/console", 0o600, (5, 1))?;
        archive.file("bin/busybox", 0o755, &fs::read(busybox)?)?;
        archive.file("init", 0o755, INITRAMFS_INIT.as_bytes())?;
        self.pack(&mut archive, "modules/1", MODULES, &[])?;
        Ok(archive.finish()?)
    }

    /// Packs the modules that the first archive lacks.
    fn more(&self) -> Result<Vec<u8>> {
        let mut archive = podvisor_cpio::Writer::new(Vec::new());
        for directory in ["modules", "modules/2"] {
            archive.directory(directory)?;
        }
        let loaded = self.files(MODULES)?;
        self.pack(&mut archive, "modules/2", MORE_MODULES, &loaded)?;
        Ok(archive.finish()?)
    }

    /// Copies the modules that are loaded later to a root.
    fn late(&self, root: &Path) -> Result<()> {
        let directory = root.join("lib/modules").join(self.release);
        fs::create_dir_all(&directory)?;
        let (mut depends, mut aliases) = (String::new(), String::new());
        for (module, alias) in LATE_MODULES {
            // What a module needs goes before it.
            let mut names: Vec<String> = Vec::new();
            for path in self.files(&[module])? {
                let name = name_of(&path)?;
                fs::copy(&path, directory.join(&name))?;
                depends.push_str(&format!("{name}: {}\n", names.join(" ")));
                names.push(name);
            }
            aliases.push_str(&format!("alias {alias} {module}\n"));
        }
        fs::write(directory.join("modules.dep"), depends)?;
        fs::write(directory.join("modules.alias"), aliases)?;
        symlink("/bin/busybox", root.join("sbin/modprobe"))?;
        Ok(())
    }

    fn pack(
        &self,
        archive: &mut podvisor_cpio::Writer<Vec<u8>>,
        directory: &str,
        modules: &[&str],
        loaded: &[PathBuf],
    ) -> Result<()> {
        let mut order = String::new();
        for path in self.files(modules)? {
            if loaded.contains(&path) {
                continue;
            }
            let name = format!("{directory}/{}", name_of(&path)?);
            archive.file(&name, 0o644, &fs::read(&path)?)?;
            order.push_str(&format!("/{name}\n"));
        }
        archive.file(&format!("{directory}/order"), 0o644, order.as_bytes())?;
        Ok(())
    }

    /// The files of modules and of what they need, in the order in which they load.
    fn files(&self, modules: &[&str]) -> Result<Vec<PathBuf>> {
        let base = self.modules.ancestors().nth(3);
        let base = base.context("modules are not below lib/modules")?;
        let mut files: Vec<PathBuf> = Vec::new();
        for module in modules {
            let listed = process::output(
                Command::new("/sbin/modprobe")
                    .args(["-S", self.release, "-d"])
                    .arg(base)
                    .args(["--show-depends", module]),
            )
            .with_context(|| format!("{KERNEL} has no module {module}"))?;
            for path in listed
                .lines()
                .filter_map(|line| line.strip_prefix("insmod "))
            {
                let path = PathBuf::from(path.trim());
                if !files.contains(&path) {
                    files.push(path);
                }
            }
        }
        Ok(files)
    }
}

fn name_of(path: &Path) -> Result<String> {
    let name = path.file_name().context("a path has no name")?;
    Ok(name.to_string_lossy().into_owned())
}

/// Downloads Debian's cloud kernel, or uses the one that was downloaded before; returns its file
/// and the directory of its modules.
fn kernel() -> Result<(PathBuf, PathBuf)> {
    let base = paths::target().join("small-kernel");
    let find = |tree: &Path| -> Option<(PathBuf, PathBuf)> {
        let modules = fs::read_dir(tree.join("lib/modules"))
            .ok()?
            .next()?
            .ok()?
            .path();
        let release = modules.file_name()?.to_string_lossy().into_owned();
        let kernel = tree.join("boot").join(format!("vmlinuz-{release}"));
        let is_complete = kernel.is_file() && modules.join("modules.dep").is_file();
        is_complete.then_some((kernel, modules))
    };
    if let Some(found) = find(&base.join("download/tree")) {
        return Ok(found);
    }
    let depends = process::output(Command::new("apt-cache").args(["depends", KERNEL]))?;
    let package = depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .find(|name| name.starts_with("linux-image-"));
    let Some(package) = package else {
        bail!("apt-cache knows no {KERNEL}: run `apt-get update`");
    };
    let tree = deb::unpack(package, "Debian's cloud kernel", &base.join("download"))?;
    // A merged /usr, in packages of newer releases.
    if !tree.join("lib").exists() && tree.join("usr/lib").is_dir() {
        symlink("usr/lib", tree.join("lib"))?;
    }
    let modules = fs::read_dir(tree.join("lib/modules"))?;
    let modules = modules
        .flatten()
        .next()
        .context("the package holds no modules")?;
    process::run(
        process::tied("/sbin/depmod")
            .arg("-b")
            .arg(&tree)
            .arg(modules.file_name()),
    )?;
    find(&tree).with_context(|| format!("the package {package} holds no kernel"))
}
