//! A VM's own disk: what its guest has written, over the image that it began with.
//!
//! The image is linked into the VM's directory, so that it stays there when the store removes it.
//! The name of the other file tells its format: what is in it is the guest's, which could pretend
//! another one.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use podvisor_images::Disk;

use crate::cli::size;
use crate::machine::{DiskContents, DiskMove, MachineDisk, OverlayFormat, create_grown_overlay};

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
    match fs::hard_link(image.path(), &base) {
        // Another file system, or one without links.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EXDEV | libc::EPERM)) => {
            let copied = fs::copy(image.path(), &base);
            copied.with_context(|| format!("failed to copy the image to {}", base.display()))?;
        }
        linked => {
            linked.with_context(|| format!("failed to link the image as {}", base.display()))?
        }
    }
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

/// Opens the disk of a VM.
pub(super) fn open_root(dir: &Path) -> anyhow::Result<MachineDisk> {
    let (path, format) = find(dir);
    let base = dir.join(BASE);
    let file = |path: &Path, is_writable: bool| {
        let mut options = File::options();
        let opened = options.read(true).write(is_writable).open(path);
        opened.with_context(|| format!("failed to open the VM's disk {}", path.display()))
    };
    Ok(MachineDisk {
        moves: DiskMove::default(),
        contents: DiskContents::Overlay {
            base: file(&base, false)?,
            overlay: file(&path, true)?,
            format,
        },
        serial: SERIAL.to_owned(),
    })
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
