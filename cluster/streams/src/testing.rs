//! What tests of other crates need, too.

use std::io::{self, Read};

/// Gives few bytes at a time, as a connection may.
#[derive(Debug)]
pub struct SlowReader<'a> {
    rest: &'a [u8],
    step: usize,
}

impl<'a> SlowReader<'a> {
    /// Creates a reader of these bytes, which gives at most `step` of them at once.
    #[must_use]
    pub fn new(bytes: &'a [u8], step: usize) -> Self {
        Self { rest: bytes, step }
    }
}

impl Read for SlowReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.step.min(buffer.len()).min(self.rest.len());
        let (now, later) = self.rest.split_at(length);
        buffer[..length].copy_from_slice(now);
        self.rest = later;
        Ok(length)
    }
}
