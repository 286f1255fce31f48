//! Disks for tests, made without root's rights: file systems from directories by the file systems'
//! own tools, and a partition table around them.
//!
//! `cargo xtask small` makes the *small system* of them in `target/small`: Debian's cloud kernel,
//! an initial file system with its modules, and a root of busybox. [`Small`] finds it.
#![forbid(unsafe_code)]

mod gpt;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub use gpt::{Gpt, PartitionType};

/// The UUID of the small system's root.
pub const SMALL_UUID: &str = "5b5e8a2e-6f0e-4c0c-9f0e-706f64766973";

/// The parts of the small system.
#[derive(Clone, Debug)]
pub struct Small {
    directory: PathBuf,
    /// The kernel's release, as `uname -r` prints it.
    pub release: String,
}

impl Small {
    /// Finds it below cargo's `target`.
    ///
    /// # Errors
    ///
    /// If it was not made; the error says how.
    pub fn open(target: &Path) -> io::Result<Self> {
        let directory = target.join("small");
        let release = fs::read_to_string(directory.join("release")).map_err(|error| {
            let path = directory.display();
            io::Error::new(error.kind(), format!("no {path}: run `cargo xtask small`"))
        })?;
        Ok(Self { directory, release })
    }

    /// The disk: GPT with one partition of ext4, whose GRUB menu starts the kernel.
    #[must_use]
    pub fn disk(&self) -> PathBuf {
        self.directory.join("small.raw")
    }

    /// Debian's kernel, a bzImage.
    #[must_use]
    pub fn kernel(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    /// The initial file system, which mounts `root=` and goes on there.
    #[must_use]
    pub fn initrd(&self) -> PathBuf {
        self.directory.join("initrd.img")
    }

    /// A second initial file system, with the modules of XFS and btrfs.
    #[must_use]
    pub fn more(&self) -> PathBuf {
        self.directory.join("more.img")
    }

    /// The root's files without kernel and boot loader: what [`ext4`] makes a root of.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.directory.join("root")
    }
}

/// Makes an ext4 file system of `mib` MiB with a directory's files.
///
/// # Errors
///
/// If `mke2fs` fails or is not installed.
pub fn ext4(image: &Path, mib: u64, uuid: &str, directory: &Path) -> io::Result<()> {
    sized(image, mib)?;
    run(Command::new("mke2fs")
        .env("PATH", path())
        .args([
            "-q",
            "-F",
            "-t",
            "ext4",
            "-E",
            "root_owner=0:0",
            "-U",
            uuid,
            "-L",
            "small",
            "-d",
        ])
        .arg(directory)
        .arg(image))
}

/// Makes a btrfs file system of `mib` MiB with a directory's files.
///
/// # Errors
///
/// If `mkfs.btrfs` fails or is not installed.
pub fn btrfs(image: &Path, mib: u64, uuid: &str, directory: &Path) -> io::Result<()> {
    sized(image, mib)?;
    run(Command::new("mkfs.btrfs")
        .env("PATH", path())
        .args(["-q", "-f", "-U", uuid, "-L", "small", "--rootdir"])
        .arg(directory)
        .arg(image))
}

/// Makes an XFS file system of `mib` MiB with a directory's files, which are regular files and
/// directories only.
///
/// # Errors
///
/// If `mkfs.xfs` fails or is not installed, or a name has a blank.
pub fn xfs(image: &Path, mib: u64, uuid: &str, directory: &Path) -> io::Result<()> {
    sized(image, mib)?;
    let prototype = image.with_extension("proto");
    let mut text = String::from("none\n0 0\nd--755 0 0\n");
    prototype_of(directory, &mut text)?;
    text.push_str("$\n");
    fs::write(&prototype, text)?;
    run(Command::new("mkfs.xfs")
        .env("PATH", path())
        .args(["-q", "-f", "-L", "small", "-m"])
        .arg(format!("uuid={uuid}"))
        .arg("-p")
        .arg(&prototype)
        .arg(image))
}

/// Lists a directory as `mkfs.xfs` wants it.
fn prototype_of(directory: &Path, text: &mut String) -> io::Result<()> {
    let mut entries: Vec<_> = fs::read_dir(directory)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        let (path, kind) = (entry.path(), entry.file_type()?);
        if name.contains(' ') {
            return Err(io::Error::other(format!("{} has a blank", path.display())));
        }
        if kind.is_dir() {
            text.push_str(&format!("{name} d--755 0 0\n"));
            prototype_of(&path, text)?;
            text.push_str("$\n");
        } else if kind.is_symlink() {
            let to = fs::read_link(&path)?;
            text.push_str(&format!("{name} l--777 0 0 {}\n", to.display()));
        } else {
            text.push_str(&format!("{name} ---755 0 0 {}\n", path.display()));
        }
    }
    Ok(())
}

/// Makes a FAT file system of `mib` MiB with a directory's files.
///
/// # Errors
///
/// If `mkfs.vfat` or `mcopy` fails or is not installed.
pub fn vfat(image: &Path, mib: u64, label: &str, directory: &Path) -> io::Result<()> {
    sized(image, mib)?;
    run(Command::new("mkfs.vfat")
        .env("PATH", path())
        .args(["-n", label])
        .arg(image))?;
    let entries = fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.path()));
    let paths: Vec<PathBuf> = entries.collect::<Result<_, _>>()?;
    if paths.is_empty() {
        return Ok(());
    }
    run(Command::new("mcopy")
        .arg("-sQi")
        .arg(image)
        .args(paths)
        .arg("::"))
}

fn sized(image: &Path, mib: u64) -> io::Result<()> {
    fs::File::create(image)?.set_len(mib << 20)
}

/// File systems' tools are in `sbin`, which users' PATH may not have.
fn path() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/sbin:/sbin")
}

/// Runs a tool quietly; its error output is the error.
fn run(command: &mut Command) -> io::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("failed to start {name}: run `cargo xtask setup`"),
        )
    })?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{name} failed: {}", text.trim())))
}
