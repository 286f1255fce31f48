//! The initramfs: bytes that the kernel unpacks itself.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use podvisor_devices::GuestRam;

use super::BootError;
use super::kernel::{Piece, read_into, regular_file_size};

/// An initramfs (cpio archive, plain or compressed as the kernel understands it).
///
/// Its contents are the kernel's affair and are not looked at.
#[derive(Debug)]
pub struct Initramfs(Source);

#[derive(Debug)]
enum Source {
    File {
        path: PathBuf,
        /// Behind a lock, because reading moves the file's offset.
        file: Mutex<File>,
        size: u64,
    },
    Bytes(Vec<u8>),
}

impl Initramfs {
    /// Opens the initramfs at `path`.
    ///
    /// # Errors
    ///
    /// When the file cannot be opened, is not a regular one, or is empty.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, BootError> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|source| BootError::Open {
            path: path.to_owned(),
            source,
        })?;
        let size = regular_file_size(&file, path)?;
        Ok(Self(Source::File {
            path: path.to_owned(),
            file: Mutex::new(file),
            size,
        }))
    }

    /// Takes an initramfs from memory.
    ///
    /// # Errors
    ///
    /// When there are no bytes.
    pub fn from_bytes(bytes: impl Into<Vec<u8>>) -> Result<Self, BootError> {
        let bytes = bytes.into();
        if bytes.is_empty() {
            return Err(BootError::NotAFile {
                path: PathBuf::from("initramfs"),
                seems: "empty",
            });
        }
        Ok(Self(Source::Bytes(bytes)))
    }

    /// Bytes, never 0.
    pub(super) fn size(&self) -> u64 {
        match &self.0 {
            Source::File { size, .. } => *size,
            Source::Bytes(bytes) => bytes.len() as u64,
        }
    }

    pub(super) fn load(&self, mem: &GuestRam, address: u64) -> Result<(), BootError> {
        match &self.0 {
            Source::File { path, file, size } => {
                let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                let piece = Piece {
                    offset: 0,
                    address,
                    size: *size,
                };
                read_into(&mut file, path, mem, piece)
            }
            Source::Bytes(bytes) => super::write(mem, "the initramfs", address, bytes),
        }
    }
}
