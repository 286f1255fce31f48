//! Writable disks over an image that many share and that is never written: the differences are
//! stored in a separate file, the overlay.
//!
//! * [`create_overlay`] creates one in an empty file, by sharing blocks with the image if the file
//!   system can do that, otherwise as a qcow2 file. [`create_grown_overlay`] creates a larger disk,
//!   and [`grow_overlay`] makes one larger later.
//! * `header.rs` is the format: qcow2, version 3, of which this is a strict subset (clusters of 64
//!   KiB, no compression, no snapshots, no encryption).
//! * `clusters.rs` tracks which clusters of the file are in use, in memory and in the file.
//! * `tables.rs` holds the mapping of the disk's clusters to the file's.
//! * `qcow2.rs` is the [`Disk`](super::Disk): reads, writes and their order.
//! * `flat.rs` writes a disk to a file that needs no image any more.
//!
//! Both files are passed in open. The name in the overlay's header is only for other programs:
//! nothing here opens it, and formats are never detected.

mod clusters;
mod error;
mod flat;
mod header;
mod qcow2;
mod tables;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::ioctl_ficlone;
use rustix::io::Errno;

use header::Header;

pub use error::Qcow2Error;
pub use flat::flatten_disk;
pub use qcow2::Qcow2Disk;

/// Bytes of the first cluster, which has the header.
const CLUSTER_LEN: usize = header::CLUSTER as usize;

/// How an overlay stores the differences from its base image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OverlayFormat {
    /// A raw file that shares unchanged blocks with the image within the file system (`FICLONE`).
    Reflink,
    /// A qcow2 file with the clusters that were written.
    Qcow2,
}

/// Turns the empty file `overlay` into a writable copy of the raw image `base`: one that shares
/// blocks with it if the file system can do that, and otherwise a qcow2 file. Returns the format,
/// for [`BlockDevice::overlay`](super::BlockDevice::overlay).
///
/// `name` is the path of the image that the qcow2 file refers to, for other programs such as
/// `qemu-img`.
///
/// # Errors
/// [`Qcow2Error::NotEmpty`], [`Qcow2Error::Name`], [`Qcow2Error::TooLarge`], and
/// [`Qcow2Error::Io`] if an operation on the host fails.
pub fn create_overlay(
    base: &File,
    name: &Path,
    overlay: &File,
) -> Result<OverlayFormat, Qcow2Error> {
    create_grown_overlay(base, name, overlay, 0)
}

/// As [`create_overlay`], but the disk has at least `size` bytes, rounded up to whole sectors: it
/// reads as zeros behind the end of the image.
///
/// # Errors
/// As [`create_overlay`].
pub fn create_grown_overlay(
    base: &File,
    name: &Path,
    overlay: &File,
    size: u64,
) -> Result<OverlayFormat, Qcow2Error> {
    must_be_empty(overlay)?;
    let size = size.checked_next_multiple_of(crate::blk::SECTOR_SIZE);
    let size = size.unwrap_or(u64::MAX);
    match ioctl_ficlone(overlay, base) {
        Ok(()) => {
            let grown = overlay.metadata().and_then(|meta| match meta.len() < size {
                true => overlay.set_len(size),
                false => Ok(()),
            });
            grown.map_err(Qcow2Error::io("grow the overlay"))?;
            Ok(OverlayFormat::Reflink)
        }
        // Another file system, one without shared blocks, or not a regular file.
        Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY | Errno::NOSYS) => {
            write_qcow2(base, name, overlay, size).map(|()| OverlayFormat::Qcow2)
        }
        Err(error) => Err(Qcow2Error::io("share the blocks of the image")(
            error.into(),
        )),
    }
}

/// As [`create_overlay`], but always as qcow2.
///
/// # Errors
/// As [`create_overlay`].
pub fn create_qcow2(base: &File, name: &Path, overlay: &File) -> Result<(), Qcow2Error> {
    must_be_empty(overlay)?;
    write_qcow2(base, name, overlay, 0)
}

/// Makes the disk of an overlay larger: at least `size` bytes, rounded up to whole sectors, which
/// read as zeroes behind its end. A [`Qcow2Disk`] of it that is open follows with
/// [`Disk::refresh`](super::Disk::refresh).
///
/// # Errors
/// [`Qcow2Error::Smaller`]; [`Qcow2Error::TooLarge`] for more than the file's tables can say, which
/// is 4 TiB or the size that it was created with; the others if the file is not such an overlay.
pub fn grow_overlay(overlay: &File, format: OverlayFormat, size: u64) -> Result<(), Qcow2Error> {
    let size = size.checked_next_multiple_of(crate::blk::SECTOR_SIZE);
    let size = size.unwrap_or(u64::MAX);
    let write = Qcow2Error::io("grow the overlay");
    let not_below = |now: u64| match size < now {
        true => Err(Qcow2Error::Smaller { size, now }),
        false => Ok(()),
    };
    match format {
        OverlayFormat::Reflink => {
            not_below(super::file::len(overlay).map_err(&write)?)?;
            overlay.set_len(size).map_err(&write)?;
        }
        OverlayFormat::Qcow2 => {
            let mut first = vec![0; CLUSTER_LEN];
            let read = Qcow2Error::io("read the overlay");
            overlay.read_exact_at(&mut first, 0).map_err(read)?;
            let header = Header::parse(&first)?;
            not_below(header.size)?;
            let (offset, bytes) = header.grown(size)?;
            overlay.write_all_at(&bytes, offset).map_err(&write)?;
        }
    }
    overlay.sync_all().map_err(write)
}

/// Writes an empty overlay of at least `size` bytes.
fn write_qcow2(base: &File, name: &Path, overlay: &File, size: u64) -> Result<(), Qcow2Error> {
    let len = super::file::len(base).map_err(Qcow2Error::io("find the size of the image"))?;
    let size = size.max(len);
    let write = Qcow2Error::io("write the overlay");
    for (offset, bytes) in header::new_image(size, name)? {
        overlay.write_all_at(&bytes, offset).map_err(&write)?;
    }
    overlay.sync_all().map_err(write)
}

/// Never overwrites existing data.
fn must_be_empty(overlay: &File) -> Result<(), Qcow2Error> {
    match overlay.metadata() {
        Ok(meta) if meta.is_file() && meta.len() == 0 => Ok(()),
        Ok(_) => Err(Qcow2Error::NotEmpty),
        Err(source) => Err(Qcow2Error::io("look at the overlay")(source)),
    }
}

/// The error of a file with inconsistent content.
fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests;
