//! The initramfs: bytes that the kernel unpacks itself.

use std::fs::File;
use std::path::{Path, PathBuf};

use podvisor_devices::GuestRam;

use super::BootError;
use super::source::{FileRange, Source};

/// An initramfs (cpio archive, plain or compressed as the kernel supports it).
///
/// Its contents are not checked; the kernel unpacks them.
#[derive(Debug)]
pub struct Initramfs(Contents);

#[derive(Debug)]
enum Contents {
    File(Source),
    Bytes(Vec<u8>),
}

impl Initramfs {
    /// Opens the initramfs at `path`.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be opened, is not a regular one, or is empty.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, BootError> {
        Source::open(path.as_ref()).map(|source| Self(Contents::File(source)))
    }

    /// Creates an initramfs from a file that is open for reading; messages call it "initramfs".
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn from_file(file: File) -> Result<Self, BootError> {
        Source::new(file, PathBuf::from("initramfs")).map(|source| Self(Contents::File(source)))
    }

    /// Creates an initramfs from memory.
    ///
    /// # Errors
    ///
    /// Fails if there are no bytes.
    pub fn from_bytes(bytes: impl Into<Vec<u8>>) -> Result<Self, BootError> {
        let bytes = bytes.into();
        if bytes.is_empty() {
            return Err(BootError::NotAFile {
                path: PathBuf::from("initramfs"),
                seems: "empty",
            });
        }
        Ok(Self(Contents::Bytes(bytes)))
    }

    /// Returns the number of bytes, never 0.
    pub(super) fn size(&self) -> u64 {
        match &self.0 {
            Contents::File(source) => source.size(),
            Contents::Bytes(bytes) => bytes.len() as u64,
        }
    }

    pub(super) fn load(&self, mem: &GuestRam, address: u64) -> Result<(), BootError> {
        match &self.0 {
            Contents::File(source) => {
                let whole = FileRange {
                    offset: 0,
                    address,
                    size: source.size(),
                };
                source.load(mem, std::iter::once(whole))
            }
            Contents::Bytes(bytes) => super::write(mem, "the initramfs", address, bytes),
        }
    }
}
