//! Collects small writes into large ones and leaves long runs of zeros out.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

const CAPACITY: usize = 1 << 20;
/// Zeros are left out in runs of this many bytes, aligned.
const HOLE: u64 = 64 << 10;

#[derive(Debug)]
pub(super) struct Output {
    file: File,
    buffer: Vec<u8>,
    /// File offset of the buffer.
    offset: u64,
    /// Zeros must be written: the file has other data there.
    dense: bool,
}

impl Output {
    pub(super) fn new(file: File) -> Self {
        Self {
            file,
            buffer: Vec::with_capacity(CAPACITY),
            offset: 0,
            dense: false,
        }
    }

    /// Writes `bytes` at `offset`; unless `dense` is set, the file must read as zeros there.
    pub(super) fn write_at(
        &mut self,
        offset: u64,
        mut bytes: &[u8],
        dense: bool,
    ) -> io::Result<()> {
        if self.offset + self.buffer.len() as u64 != offset || self.dense != dense {
            self.flush()?;
            (self.offset, self.dense) = (offset, dense);
        }
        while !bytes.is_empty() {
            let (now, rest) = bytes.split_at(bytes.len().min(CAPACITY - self.buffer.len()));
            self.buffer.extend_from_slice(now);
            bytes = rest;
            if self.buffer.len() == CAPACITY {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Makes a range read as zeros, and frees its disk space if the host's file system can.
    pub(super) fn clear(&mut self, offset: u64, length: u64) -> io::Result<()> {
        self.flush()?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(&self.file, flags, offset, length) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                let zeros = [0; HOLE as usize];
                let mut done = 0;
                while done < length {
                    let now = (length - done).min(HOLE);
                    self.file
                        .write_all_at(&zeros[..now as usize], offset + done)?;
                    done += now;
                }
                Ok(())
            }
            other => Ok(other?),
        }
    }

    /// Writes the buffered rest and sets the file's length.
    pub(super) fn finish(mut self, length: u64) -> io::Result<()> {
        self.flush()?;
        self.file.set_len(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        let end = self.offset + self.buffer.len() as u64;
        let mut start = self.offset;
        let mut at = self.offset;
        while at < end {
            let next = ((at / HOLE + 1) * HOLE).min(end);
            let part = &self.buffer[(at - self.offset) as usize..(next - self.offset) as usize];
            if !self.dense && is_zero(part) {
                self.write(start, at)?;
                start = next;
            }
            at = next;
        }
        self.write(start, end)?;
        self.offset = end;
        self.buffer.clear();
        Ok(())
    }

    fn write(&self, start: u64, end: u64) -> io::Result<()> {
        let bytes = &self.buffer[(start - self.offset) as usize..(end - self.offset) as usize];
        if bytes.is_empty() {
            Ok(())
        } else {
            self.file.write_all_at(bytes, start)
        }
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    let (head, words, tail) = {
        let (words, tail) = bytes.as_chunks::<16>();
        (bytes.first(), words, tail)
    };
    head.is_none_or(|first| *first == 0)
        && words.iter().all(|word| u128::from_ne_bytes(*word) == 0)
        && tail.iter().all(|byte| *byte == 0)
}
