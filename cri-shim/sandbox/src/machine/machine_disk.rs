//! A disk of a machine whose guest has an operating system of its own.

use std::fs::File;
use std::io;

use podvisor_vmm::{
    BlockDevice, Disk, DiskPart, FileDisk, IoEngine, OverlayFormat, Qcow2Disk, grow_overlay,
    open_disk_for_writing,
};
use serde::{Deserialize, Serialize};

use super::error::MachineError;

/// Most bytes of a disk that is made of files, whatever it has here.
const MAX_MADE: u64 = 64 << 20;

/// A disk of a machine.
#[derive(Debug)]
pub struct MachineDisk {
    /// What it contains.
    pub contents: DiskContents,
    /// The serial number by which the guest finds it; at most 20 bytes.
    pub serial: String,
    /// What becomes of it when the machine moves to another host.
    pub moves: DiskMove,
}

/// What becomes of a disk when its machine moves to another host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiskMove {
    /// Both hosts open the same one.
    #[default]
    Shared,
    /// Each host has its own with the same contents, which nobody writes. Both have this name.
    Same(String),
    /// It is of this host alone: what differs from a new disk goes with the memory. A new disk of
    /// this name is the same on both hosts.
    Copied(String),
}

/// The contents of a disk.
#[derive(Debug)]
pub enum DiskContents {
    /// A file or block device with the disk's bytes.
    Raw {
        /// Open for reading, and for writing unless `is_read_only`.
        file: File,
        /// The guest cannot write it.
        is_read_only: bool,
    },
    /// A file or block device whose first sectors are not the guest's.
    Part {
        /// Open for reading and writing.
        file: File,
        /// Sectors of 512 bytes before the guest's first one.
        first: u32,
    },
    /// An image that stays as it is, and a file with the differences.
    Overlay {
        /// The image, open for reading.
        base: File,
        /// The differences, open for reading and writing.
        overlay: File,
        /// How they are stored.
        format: OverlayFormat,
    },
}

/// Whether a machine locks the disks that it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Locks {
    Taken,
    /// When the machine that has them has ended.
    Later,
}

impl MachineDisk {
    /// Returns the device, which locks the disk.
    pub(crate) fn locked_device(&self) -> Result<BlockDevice, MachineError> {
        Ok(self.device(Locks::Taken)?.serial(&self.serial))
    }

    /// Returns the disk's one file, if it has one.
    pub(crate) fn raw_file(&self) -> Option<&File> {
        match &self.contents {
            DiskContents::Raw { file, .. } => Some(file),
            DiskContents::Part { .. } | DiskContents::Overlay { .. } => None,
        }
    }

    /// Makes a disk that the guest may write larger. A block device has grown already, by whoever
    /// gave it.
    pub(super) fn grow(&self, bytes: u64) -> io::Result<()> {
        match &self.contents {
            DiskContents::Overlay {
                overlay, format, ..
            } => grow_overlay(overlay, *format, bytes).map_err(io::Error::other),
            DiskContents::Raw {
                file,
                is_read_only: false,
            } => grow_file(file, bytes),
            DiskContents::Raw { .. } | DiskContents::Part { .. } => {
                let why = "it is read-only, or not all of its device is the guest's";
                Err(io::Error::new(io::ErrorKind::Unsupported, why))
            }
        }
    }

    /// Returns the file that has what the guest wrote; `None` if it cannot write.
    pub(super) fn written(&self) -> Option<&File> {
        match &self.contents {
            DiskContents::Raw { file, is_read_only } => (!is_read_only).then_some(file),
            DiskContents::Part { file, .. } => Some(file),
            DiskContents::Overlay { overlay, .. } => Some(overlay),
        }
    }

    pub(super) fn device(&self, locks: Locks) -> Result<BlockDevice, MachineError> {
        let is_shared = self.moves == DiskMove::Shared;
        let device = match &self.contents {
            DiskContents::Raw {
                file,
                is_read_only: false,
            } if locks == Locks::Later && is_shared => BlockDevice::new(open_unlocked(file)?),
            DiskContents::Raw { file, is_read_only } => {
                let device = BlockDevice::from_file(again(file)?)?;
                match is_read_only {
                    true => device.read_only(),
                    false => device,
                }
            }
            DiskContents::Part { file, first } => {
                let whole = match locks == Locks::Later && is_shared {
                    true => open_unlocked(file)?,
                    false => open_disk_for_writing(again(file)?, IoEngine::Sync)?,
                };
                BlockDevice::new(Box::new(DiskPart::after(*first, whole)))
            }
            DiskContents::Overlay {
                base,
                overlay,
                format,
            } => BlockDevice::overlay(again(base)?, again(overlay)?, *format)?,
        };
        Ok(match self.moves {
            DiskMove::Copied(_) => device.copied(),
            DiskMove::Shared | DiskMove::Same(_) => device,
        })
    }

    /// Opens a disk whose contents come: an overlay of the same image, or a file of zeroes.
    pub(super) fn open_new(&self, len: u64) -> io::Result<Box<dyn Disk>> {
        let file = match &self.contents {
            DiskContents::Overlay {
                base,
                overlay,
                format: OverlayFormat::Qcow2,
            } => {
                let disk = Qcow2Disk::open(base.try_clone()?, overlay.try_clone()?);
                return Ok(Box::new(disk.map_err(io::Error::other)?));
            }
            DiskContents::Overlay { overlay: file, .. } | DiskContents::Raw { file, .. } => file,
            DiskContents::Part { .. } => return Err(io::ErrorKind::Unsupported.into()),
        };
        // Its own contents may have another length, as those of cloud-init's disk.
        let ours = file.metadata()?.len();
        if len > ours.max(MAX_MADE) {
            return Err(io::Error::other(format!(
                "it has {len} bytes there, and {ours} here"
            )));
        }
        file.set_len(0)?;
        file.set_len(len)?;
        let disk = open_disk_for_writing(file.try_clone()?, IoEngine::Sync);
        disk.map_err(io::Error::other)
    }
}

/// Makes a disk's file larger.
fn grow_file(file: &File, bytes: u64) -> io::Result<()> {
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Ok(());
    }
    let now = meta.len();
    if bytes < now {
        let why = format!("it has {now} bytes, and a disk is not made smaller");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    file.set_len(bytes)?;
    file.sync_all()
}

/// Opens a disk that a machine on another host still has: it is locked later.
fn open_unlocked(file: &File) -> Result<Box<dyn Disk>, MachineError> {
    let disk = FileDisk::new(again(file)?).map_err(MachineError::Duplicate)?;
    Ok(Box::new(disk))
}

/// Returns another descriptor of an open file.
pub(super) fn again(file: &File) -> Result<File, MachineError> {
    file.try_clone().map_err(MachineError::Duplicate)
}
