//! A VM's own disk: what its guest has written, over the image that it began with.
//!
//! The image is linked into the VM's directory, so that it stays there when the store removes it.
//! The name of the other file tells its format: what is in it is the guest's, which could pretend
//! another one.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use podvisor_images::Disk;

use rustix::fs::ioctl_ficlone;
use serde::{Deserialize, Serialize};

use super::saved::sync;
use crate::cli::size;
use crate::machine::{
    BlockDevice, DiskContents, DiskMove, MachineDisk, OverlayFormat, create_grown_overlay,
    create_qcow2, flatten_disk, grow_overlay,
};

/// The image.
const BASE: &str = "base.img";

/// What the guest has written, as a file that shares blocks with the image.
const REFLINK: &str = "disk.raw";

/// What the guest has written, as a file with the differences.
const QCOW2: &str = "disk.qcow2";

/// The serial number by which the loader finds it.
pub(super) const SERIAL: &str = "root";

/// Makes the disk of a new VM, which has at least `size` bytes; returns how many it has.
pub(super) fn create(dir: &Path, image: &Disk, size: Option<u64>) -> anyhow::Result<u64> {
    let least = image.virtual_size();
    let size = size.unwrap_or(least);
    ensure!(
        size >= least,
        "--disk {}: the image has {}, and a disk is not made smaller; ask for as much or more",
        size::human(size),
        size::human(least)
    );
    // Nobody removes it meanwhile.
    let pinned = image.open()?;
    let base = dir.join(BASE);
    link(image.path(), &base)?;
    drop(pinned);
    let new = dir.join("disk.new");
    let overlay = open(&new, true).with_context(|| failed(&new))?;
    let made = create_grown_overlay(&open(&base, false)?, &base, &overlay, size);
    let name = match made.with_context(|| failed(&new))? {
        OverlayFormat::Reflink => REFLINK,
        _ => QCOW2,
    };
    fs::rename(&new, dir.join(name)).with_context(|| failed(&dir.join(name)))?;
    Ok(size)
}

/// Links an image that nobody writes, or copies it.
fn link(image: &Path, base: &Path) -> anyhow::Result<()> {
    match fs::hard_link(image, base) {
        // Another file system, or one without links.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EXDEV | libc::EPERM)) => {
            let copied = fs::copy(image, base).map(drop);
            copied.with_context(|| format!("failed to copy the image to {}", base.display()))
        }
        linked => linked.with_context(|| format!("failed to link the image as {}", base.display())),
    }
}

/// Makes the empty file for a copy of a VM's own disk, in the directory of a snapshot.
pub(super) fn create_copy(dir: &Path, snapshot: &Path) -> anyhow::Result<File> {
    let (own, _) = find(dir);
    let copy = snapshot.join(own.file_name().unwrap_or_default());
    open(&copy, true).with_context(|| failed(&copy))
}

/// Makes the disk of a clone: the image of its origin, and the disk of a snapshot.
pub(super) fn clone(origin: &Path, snapshot: &Path, dir: &Path) -> anyhow::Result<()> {
    link(&origin.join(BASE), &dir.join(BASE))?;
    let (disk, _) = find(snapshot);
    copy(&disk, &dir.join(disk.file_name().unwrap_or_default()))
}

/// Copies a file of a disk, by shared blocks where the file system has them.
pub(super) fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let copied = || -> io::Result<()> {
        let (mut from, mut to) = (File::open(from)?, open(to, true)?);
        if ioctl_ficlone(&to, &from).is_err() {
            io::copy(&mut from, &mut to)?;
        }
        to.sync_all()
    };
    let copied = copied().inspect_err(|_| drop(fs::remove_file(to)));
    copied.with_context(|| {
        format!(
            "failed to copy the disk {} to {}",
            from.display(),
            to.display()
        )
    })
}

/// Makes the disk of a VM that is off larger.
pub(super) fn grow(dir: &Path, size: u64) -> anyhow::Result<()> {
    let (path, format) = find(dir);
    let grow = || {
        let mut options = File::options();
        anyhow::Ok(grow_overlay(
            &options.read(true).write(true).open(&path)?,
            format,
            size,
        )?)
    };
    grow().with_context(|| format!("failed to grow the VM's disk {}", path.display()))
}

/// Disks of a VM that were replaced, and can be had back.
#[derive(Debug, Default)]
#[must_use]
pub(super) struct Swapped(Vec<SwappedFile>);

#[derive(Debug)]
struct SwappedFile {
    own: PathBuf,
    before: PathBuf,
}

/// Replaces the disk of a VM that is off, and the other disks with these names, by copies of a
/// snapshot's. Each is whole at any time; who is killed in between swaps all of them again.
pub(super) fn swap(dir: &Path, snapshot: &Path, others: Vec<PathBuf>) -> anyhow::Result<Swapped> {
    let (disk, _) = find(snapshot);
    let disk = disk.file_name().map(PathBuf::from).unwrap_or_default();
    let mut swapped = Swapped::default();
    for name in std::iter::once(disk).chain(others) {
        match swap_file(dir, snapshot, &name) {
            Ok(file) => swapped.0.push(file),
            Err(error) => {
                swapped.undo()?;
                return Err(error);
            }
        }
    }
    Ok(swapped)
}

fn swap_file(dir: &Path, snapshot: &Path, name: &Path) -> anyhow::Result<SwappedFile> {
    let own = dir.join(name);
    let beside = |ending: &str| {
        let mut path = own.clone().into_os_string();
        path.push(ending);
        PathBuf::from(path)
    };
    let (new, before) = (beside(".new"), beside(".before"));
    for left in [&new, &before] {
        match fs::remove_file(left) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", left.display()));
            }
            _ => {}
        }
    }
    copy(&snapshot.join(name), &new)?;
    let replaced = fs::hard_link(&own, &before).and_then(|()| fs::rename(&new, &own));
    let replaced = replaced.and_then(|()| sync(dir));
    replaced.with_context(|| format!("cannot replace the VM's disk {}", own.display()))?;
    Ok(SwappedFile { own, before })
}

impl Swapped {
    /// Forgets the disks from before.
    pub(super) fn keep(self) -> anyhow::Result<()> {
        for SwappedFile { before, .. } in self.0 {
            let removed = fs::remove_file(&before);
            removed.with_context(|| format!("cannot remove {}", before.display()))?;
        }
        Ok(())
    }

    /// Takes back the disks from before.
    pub(super) fn undo(self) -> anyhow::Result<()> {
        for SwappedFile { own, before } in self.0 {
            let taken = fs::rename(&before, &own);
            taken.with_context(|| {
                format!(
                    "cannot rename {} to {}, which is the VM's disk",
                    before.display(),
                    own.display()
                )
            })?;
        }
        Ok(())
    }
}

/// What another host has to know of a VM's disk to make one that its contents come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DiskShape {
    /// It is a file with the differences from the image.
    pub(super) is_qcow2: bool,
    /// Bytes of the disk.
    pub(super) size: u64,
    /// Bytes of the image.
    pub(super) image: u64,
}

/// Returns the shape of a VM's disk.
pub(super) fn shape(dir: &Path) -> anyhow::Result<DiskShape> {
    let (path, format) = find(dir);
    let file = existing(&path, false)?;
    let is_qcow2 = format != OverlayFormat::Reflink;
    let size = match is_qcow2 {
        false => file.metadata().map(|meta| meta.len()),
        true => {
            // Of the header: where the file's format has the size of its disk.
            let mut size = [0; 8];
            let read = file.read_exact_at(&mut size, 24);
            read.map(|()| u64::from_be_bytes(size))
        }
    };
    let size = size.with_context(|| format!("failed to read {}", path.display()))?;
    let image = open_image(dir)?.metadata();
    let image = image.context("failed to read the VM's image")?.len();
    Ok(DiskShape {
        is_qcow2,
        size,
        image,
    })
}

/// Opens the image that a VM's disk began with.
pub(super) fn open_image(dir: &Path) -> anyhow::Result<File> {
    existing(&dir.join(BASE), false)
}

/// Makes the empty file of the image of a VM that comes from another host.
pub(super) fn create_image(dir: &Path) -> anyhow::Result<File> {
    let path = dir.join(BASE);
    open(&path, true).with_context(|| failed(&path))
}

/// Links an image of this host as that of a VM that comes.
pub(super) fn link_image(dir: &Path, image: &Disk) -> anyhow::Result<()> {
    let pinned = image.open()?;
    let linked = link(image.path(), &dir.join(BASE));
    drop(pinned);
    linked
}

/// Makes the disk of a VM that comes, over its image, which is there: its contents come later.
pub(super) fn create_empty(dir: &Path, shape: &DiskShape) -> anyhow::Result<()> {
    let path = dir.join(match shape.is_qcow2 {
        true => QCOW2,
        false => REFLINK,
    });
    let make = || {
        let file = open(&path, true)?;
        match shape.is_qcow2 {
            false => file.set_len(shape.size)?,
            true => {
                let base = dir.join(BASE);
                create_qcow2(&File::open(&base)?, &base, &file)?;
                grow_overlay(&file, OverlayFormat::Qcow2, shape.size)?;
            }
        }
        anyhow::Ok(())
    };
    make().with_context(|| failed(&path))
}

/// Opens the disk of a VM.
pub(super) fn open_root(dir: &Path) -> anyhow::Result<MachineDisk> {
    let (path, format) = find(dir);
    let base = existing(&dir.join(BASE), false)?;
    let image = base.metadata().context("failed to read the VM's image")?;
    Ok(MachineDisk {
        // Over the same image on both hosts.
        moves: DiskMove::Copied(format!("{} bytes", image.len())),
        contents: DiskContents::Overlay {
            base,
            overlay: existing(&path, true)?,
            format,
        },
        serial: SERIAL.to_owned(),
    })
}

/// Writes the disk in `dir`, over the image of the VM in `vm`, to an empty file, as qcow2 without
/// an image. Nobody else may write the disk meanwhile. Returns false, with the file half written,
/// as soon as `go_on` does.
pub(super) fn flatten(
    vm: &Path,
    dir: &Path,
    to: &File,
    go_on: impl Fn() -> bool,
) -> anyhow::Result<bool> {
    let (path, format) = find(dir);
    let base = existing(&vm.join(BASE), false)?;
    let mut disk = BlockDevice::overlay(base, existing(&path, true)?, format)?;
    let flat = flatten_disk(disk.disk_mut(), to, |_| go_on());
    flat.with_context(|| format!("failed to copy the VM's disk {}", path.display()))
}

fn existing(path: &Path, is_writable: bool) -> anyhow::Result<File> {
    let mut options = File::options();
    let opened = options.read(true).write(is_writable).open(path);
    opened.with_context(|| format!("failed to open the VM's disk {}", path.display()))
}

fn find(dir: &Path) -> (PathBuf, OverlayFormat) {
    let reflink = dir.join(REFLINK);
    match reflink.exists() {
        true => (reflink, OverlayFormat::Reflink),
        false => (dir.join(QCOW2), OverlayFormat::Qcow2),
    }
}

fn open(path: &Path, is_new: bool) -> io::Result<File> {
    let mut options = File::options();
    options.read(true);
    if is_new {
        options.write(true).create_new(true);
    }
    options.open(path)
}

fn failed(path: &Path) -> String {
    format!("failed to create the VM's disk {}", path.display())
}

#[cfg(test)]
mod tests {
    use podvisor_images::Store;

    use super::*;

    #[test]
    fn a_snapshots_disk_takes_the_place_of_a_vms_and_may_be_given_back() {
        let root = tempfile::tempdir().unwrap();
        let dir = |name: &str| {
            let dir = root.path().join(name);
            fs::create_dir(&dir).unwrap();
            dir
        };
        let (vm, snapshot, clone_dir) = (dir("vm"), dir("snapshot"), dir("clone"));
        fs::write(vm.join(BASE), "image").unwrap();
        fs::write(vm.join(QCOW2), "now").unwrap();
        let mut file = create_copy(&vm, &snapshot).unwrap();
        io::Write::write_all(&mut file, b"then").unwrap();
        let own = || fs::read_to_string(vm.join(QCOW2)).unwrap();
        // What somebody was killed over is in nobody's way.
        fs::write(vm.join("disk.qcow2.before"), "old").unwrap();
        let swapped = swap(&vm, &snapshot, Vec::new()).unwrap();
        assert_eq!(own(), "then");
        swapped.undo().unwrap();
        assert_eq!(own(), "now");
        swap(&vm, &snapshot, Vec::new()).unwrap().keep().unwrap();
        assert_eq!(own(), "then");
        assert_eq!(fs::read_dir(&vm).unwrap().count(), 2);
        // With another disk, and nothing is replaced if that one is missing.
        let (data, other) = (PathBuf::from("data"), || {
            fs::read_to_string(vm.join("data")).unwrap()
        });
        fs::write(vm.join(QCOW2), "now").unwrap();
        fs::write(vm.join("data"), "data now").unwrap();
        swap(&vm, &snapshot, vec![data.clone()]).unwrap_err();
        assert_eq!((own(), other()), ("now".into(), "data now".into()));
        fs::write(snapshot.join("data"), "data then").unwrap();
        let all = swap(&vm, &snapshot, vec![data]).unwrap();
        assert_eq!((own(), other()), ("then".into(), "data then".into()));
        all.undo().unwrap();
        assert_eq!((own(), other()), ("now".into(), "data now".into()));
        clone(&vm, &snapshot, &clone_dir).unwrap();
        let read = |name: &str| fs::read_to_string(clone_dir.join(name)).unwrap();
        assert_eq!((read(BASE), read(QCOW2)), ("image".into(), "then".into()));
    }

    /// On a file system that shares blocks or on one that does not: what comes is of the same kind.
    #[test]
    fn a_disk_that_comes_has_the_shape_of_the_one_that_it_leaves() {
        let root = tempfile::tempdir().unwrap();
        for (number, file) in [QCOW2, REFLINK].into_iter().enumerate() {
            let dir = |name: &str| {
                let dir = root.path().join(format!("{name}{number}"));
                fs::create_dir(&dir).unwrap();
                fs::write(dir.join(BASE), vec![1; 1 << 20]).unwrap();
                dir
            };
            let (from, to) = (dir("from"), dir("to"));
            let shape_there = DiskShape {
                is_qcow2: file == QCOW2,
                size: 3 << 20,
                image: 1 << 20,
            };
            create_empty(&from, &shape_there).unwrap();
            let found = shape(&from).unwrap();
            assert_eq!(found, shape_there);
            create_empty(&to, &found).unwrap();
            assert_eq!(shape(&to).unwrap(), found);
            let moves = |dir: &Path| open_root(dir).unwrap().moves;
            assert_eq!(moves(&from), moves(&to));
        }
    }

    #[test]
    fn a_disk_outlives_its_image_and_is_never_smaller() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path().join("images")).unwrap();
        let file = root.path().join("disk.img");
        fs::write(&file, [b'x'; 1 << 16]).unwrap();
        let image = store.import_disk(&file).unwrap();
        let dir = root.path().join("vm");
        fs::create_dir(&dir).unwrap();
        let said = create(&dir, &image, Some(512)).unwrap_err().to_string();
        assert!(said.contains("--disk"), "{said}");
        assert_eq!(create(&dir, &image, Some(1 << 20)).unwrap(), 1 << 20);
        store.remove(&image.id().to_string()).unwrap();
        let disk = open_root(&dir).unwrap();
        let DiskContents::Overlay { base, format, .. } = disk.contents else {
            panic!("{disk:?}");
        };
        assert_eq!(base.metadata().unwrap().len(), 1 << 16);
        assert_eq!(format, find(&dir).1);
    }
}
