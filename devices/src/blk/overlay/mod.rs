//! Writable disks over an image that many share and none writes: what differs from it is kept in a
//! file of the disk's own, the overlay.
//!
//! * [`create_overlay`] makes one of an empty file, where the file system can by sharing blocks
//!   with the image, otherwise as a qcow2 file.
//! * `header.rs` is the format: qcow2, version 3, of which this is a strict part (clusters of
//!   64 KiB, no compression, no snapshots, no encryption).
//! * `clusters.rs` knows which clusters of the file are in use, and that they are.
//! * `tables.rs` holds the mapping of the disk's clusters to the file's.
//! * `qcow2.rs` is the [`Disk`](super::Disk): reads, writes and their order.
//!
//! Both files come open. A name in the overlay's header is for other programs: nothing here opens
//! it, and no format is ever detected.

mod clusters;
mod error;
mod header;
mod qcow2;
mod tables;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::ioctl_ficlone;
use rustix::io::Errno;

pub use error::Qcow2Error;
pub use qcow2::Qcow2Disk;

/// How an overlay keeps what differs from its base image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OverlayFormat {
    /// A raw file that shares unchanged blocks with the image within the file system (`FICLONE`).
    Reflink,
    /// A qcow2 file with the clusters that were written.
    Qcow2,
}

/// Makes the empty file `overlay` a writable copy of the raw image `base`: one that shares blocks
/// with it where the file system can do that, and otherwise a qcow2 file. Returns which it is, for
/// [`BlockDevice::overlay`](super::BlockDevice::overlay).
///
/// `name` is the path of the image that the qcow2 file tells other programs, such as `qemu-img`.
///
/// # Errors
/// [`Qcow2Error::NotEmpty`], [`Qcow2Error::Name`], [`Qcow2Error::TooLarge`], and
/// [`Qcow2Error::Io`] when the host refuses.
pub fn create_overlay(
    base: &File,
    name: &Path,
    overlay: &File,
) -> Result<OverlayFormat, Qcow2Error> {
    must_be_empty(overlay)?;
    match ioctl_ficlone(overlay, base) {
        Ok(()) => Ok(OverlayFormat::Reflink),
        // Another file system, one without shared blocks, or what is no regular file.
        Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY | Errno::NOSYS) => {
            create_qcow2(base, name, overlay).map(|()| OverlayFormat::Qcow2)
        }
        Err(error) => Err(Qcow2Error::io("share the blocks of the image")(
            error.into(),
        )),
    }
}

/// As [`create_overlay`], always as qcow2.
///
/// # Errors
/// As [`create_overlay`].
pub fn create_qcow2(base: &File, name: &Path, overlay: &File) -> Result<(), Qcow2Error> {
    must_be_empty(overlay)?;
    let size = super::file::len(base).map_err(Qcow2Error::io("find the size of the image"))?;
    let write = Qcow2Error::io("write the overlay");
    for (offset, bytes) in header::new_image(size, name)? {
        overlay.write_all_at(&bytes, offset).map_err(&write)?;
    }
    overlay.sync_all().map_err(write)
}

/// What is in a file is not destroyed.
fn must_be_empty(overlay: &File) -> Result<(), Qcow2Error> {
    match overlay.metadata() {
        Ok(meta) if meta.is_file() && meta.len() == 0 => Ok(()),
        Ok(_) => Err(Qcow2Error::NotEmpty),
        Err(source) => Err(Qcow2Error::io("look at the overlay")(source)),
    }
}

/// A file that says something that cannot be.
fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests;
