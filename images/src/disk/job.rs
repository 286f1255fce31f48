//! Limits of a conversion.

use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};

use super::convert_error::ConvertError;
use crate::Limits;

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
