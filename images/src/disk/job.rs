//! Limits of a conversion, and its errors.

use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};

use super::Qcow2Error;
use crate::Limits;

/// Why a file is not a disk image that can be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The input could not be read, or the compressed data is damaged.
    #[error("the file cannot be read to its end; it is damaged or cut off")]
    Read(#[source] io::Error),
    /// The disk image cannot be written.
    #[error("the disk image cannot be written")]
    Write(#[source] io::Error),
    /// The qcow2 file is not usable.
    #[error("the qcow2 file cannot be used")]
    Qcow2(#[from] Qcow2Error),
    /// A format that is not supported.
    #[error("it is in {0} format; convert it by `qemu-img convert -O qcow2`")]
    Format(&'static str),
    /// The file is empty.
    #[error("it is empty")]
    Empty,
    /// More than allowed.
    #[error("it has more than {limit} bytes of {what}, which is more than is allowed")]
    TooLarge {
        /// Data, disk or file.
        what: &'static str,
        /// The bound.
        limit: u64,
    },
    /// The conversion was cancelled.
    #[error("the conversion was cancelled")]
    Cancelled,
}

/// Limits and cancellation of a conversion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job<'a> {
    pub(crate) limits: &'a Limits,
    pub(crate) cancelled: &'a AtomicBool,
}

impl Job<'_> {
    pub(super) fn check_cancelled(&self) -> Result<(), ConvertError> {
        if self.cancelled.load(Ordering::Relaxed) {
            Err(ConvertError::Cancelled)
        } else {
            Ok(())
        }
    }

    pub(super) fn check_file_size(&self, bytes: u64) -> Result<(), ConvertError> {
        self.check_cancelled()?;
        at_most("file", bytes, self.limits.disk_file_bytes)
    }
}

/// Returns an error if there are more bytes than allowed.
pub(super) fn at_most(what: &'static str, bytes: u64, limit: u64) -> Result<(), ConvertError> {
    if bytes > limit {
        Err(ConvertError::TooLarge { what, limit })
    } else {
        Ok(())
    }
}

/// Reads until the buffer is full or the input ends.
pub(super) fn fill(input: &mut dyn Read, buffer: &mut [u8]) -> Result<usize, ConvertError> {
    let mut have = 0;
    while have < buffer.len() {
        match input.read(&mut buffer[have..]) {
            Ok(0) => break,
            Ok(got) => have += got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ConvertError::Read(error)),
        }
    }
    Ok(have)
}
