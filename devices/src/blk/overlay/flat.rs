//! A disk as one qcow2 file, which refers to no image.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::header;
use super::qcow2::Qcow2Disk;
use super::{CLUSTER_LEN, Qcow2Error, must_be_empty};
use crate::blk::{Disk, flush_disk, read_disk, write_disk};

/// Bytes that are read at once.
const BATCH: usize = 16 * CLUSTER_LEN;

/// Writes all of a disk, which completes requests at once, to the empty file `to`: as a qcow2 file
/// of its own, in which clusters of zeroes take no space. `go_on` is asked with the bytes that are
/// done; once it says no, this returns false, with the file half written.
///
/// # Errors
/// [`Qcow2Error::NotEmpty`], [`Qcow2Error::TooLarge`], and [`Qcow2Error::Io`] if the disk cannot be
/// read or the file not be written.
pub fn flatten_disk(
    disk: &mut dyn Disk,
    to: &File,
    mut go_on: impl FnMut(u64) -> bool,
) -> Result<bool, Qcow2Error> {
    must_be_empty(to)?;
    let read = Qcow2Error::io("read the disk");
    let write = Qcow2Error::io("write the qcow2 file");
    let size = disk.len();
    // Over an image without bytes, until all are written.
    for (offset, bytes) in header::new_image(size, Path::new("none"))? {
        to.write_all_at(&bytes, offset).map_err(&write)?;
    }
    let mut flat = Qcow2Disk::over_nothing(to.try_clone().map_err(&write)?)?;
    let size = flat.len();
    let mut buffer = vec![0; BATCH];
    let mut at = 0;
    while at < size {
        if !go_on(at) {
            return Ok(false);
        }
        let left = usize::try_from(size.saturating_sub(at)).unwrap_or(usize::MAX);
        let bytes = buffer.get_mut(..left.min(BATCH));
        let bytes = bytes.unwrap_or_default();
        read_disk(disk, at, bytes).map_err(&read)?;
        for cluster in bytes.chunks_mut(CLUSTER_LEN) {
            if cluster.iter().any(|byte| *byte != 0) {
                write_disk(&mut flat, at, cluster).map_err(&write)?;
            }
            at = at.saturating_add(cluster.len() as u64);
        }
    }
    flush_disk(&mut flat).map_err(&write)?;
    let (offset, bytes) = header::without_base();
    to.write_all_at(&bytes, offset).map_err(&write)?;
    to.sync_all().map_err(&write)?;
    Ok(true)
}

impl Qcow2Disk {
    /// Opens a new file of which no cluster is mapped, over zeroes.
    fn over_nothing(file: File) -> Result<Self, Qcow2Error> {
        let nothing = file.try_clone();
        let nothing = nothing.map_err(Qcow2Error::io("write the qcow2 file"))?;
        Self::over(nothing, 0, file)
    }
}
