//! Sends pages of guest memory.

use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use super::stream::{MAX_PAGES, MessageKind, Stream, StreamError};
use crate::memory::{GuestMemory, MemoryError, PageSet, runs_of_data};

/// How often progress is told.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// A stream that memory is sent on.
#[derive(Debug)]
pub(crate) struct Sender<S> {
    pub(crate) stream: Stream<S>,
    /// Bytes per second at most.
    bandwidth: Option<u64>,
    buffer: Vec<u8>,
    /// When progress was told last.
    told: Instant,
    /// Bytes of memory and disks that were sent so far, zeroes included.
    pub(crate) sent: u64,
}

/// Why pages were not sent.
#[derive(Debug)]
pub(crate) enum SendEnd {
    Failed(StreamError),
    Memory(MemoryError),
    Disk(std::io::Error),
    Cancelled,
}

impl From<StreamError> for SendEnd {
    fn from(error: StreamError) -> Self {
        Self::Failed(error)
    }
}

/// Which pages of zeroes the other side needs to be told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Zeroes {
    /// None: its memory is new.
    Skip,
    /// All: it may have older contents.
    Send,
}

impl<S: Read + Write> Sender<S> {
    pub(crate) fn new(stream: Stream<S>, bandwidth: Option<u64>) -> Self {
        Self {
            stream,
            bandwidth,
            buffer: vec![0; MAX_PAGES],
            told: Instant::now(),
            sent: 0,
        }
    }

    /// Sends these pages as they are now; `tell` is told from time to time how many bytes are left,
    /// and may cancel. Returns when the last byte is on its way.
    pub(crate) fn pages(
        &mut self,
        memory: &GuestMemory,
        pages: &PageSet,
        zeroes: Zeroes,
        mut tell: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<(), SendEnd> {
        let (began, all, mut done) = (Instant::now(), pages.bytes(), 0);
        for range in pages.ranges(MAX_PAGES as u64) {
            let len = (range.end - range.start) as usize;
            let bytes = &mut self.buffer[..len];
            // Only what was found to be memory is ever marked: a page that is left out is lost.
            memory.read(range.start, bytes).map_err(SendEnd::Memory)?;
            self.range(range.start, len, zeroes)?;
            done += len as u64;
            self.sent += len as u64;
            self.pace(began, done, all.saturating_sub(done), &mut tell)?;
        }
        Ok(())
    }

    /// Waits until so many bytes may have been sent since `began`, and tells from time to time that
    /// `left` bytes are left.
    pub(super) fn pace(
        &mut self,
        began: Instant,
        done: u64,
        left: u64,
        tell: &mut impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<(), SendEnd> {
        loop {
            if self.told.elapsed() >= TELL_EVERY {
                self.told = Instant::now();
                if tell(self.sent, left).is_break() {
                    return Err(SendEnd::Cancelled);
                }
            }
            let early = self.due(done).saturating_sub(began.elapsed());
            if early.is_zero() {
                return Ok(());
            }
            std::thread::sleep(early.min(TELL_EVERY));
        }
    }

    /// Returns after how long this many bytes may have been sent.
    fn due(&self, bytes: u64) -> Duration {
        let Some(bandwidth) = self.bandwidth else {
            return Duration::ZERO;
        };
        let millis = bytes.saturating_mul(1000) / bandwidth.max(1);
        Duration::from_millis(millis)
    }

    /// Sends the first `len` bytes of the buffer as the pages from `start` on.
    fn range(&mut self, start: u64, len: usize, zeroes: Zeroes) -> Result<(), StreamError> {
        let bytes = &self.buffer[..len];
        let mut at = 0;
        let zero = |stream: &mut Stream<S>, from: usize, to: usize| {
            if zeroes == Zeroes::Skip || from == to {
                return Ok(());
            }
            let len = (to - from) as u64;
            stream.send(MessageKind::Zeroes, start + from as u64, &len.to_le_bytes())
        };
        for run in runs_of_data(bytes) {
            zero(&mut self.stream, at, run.start)?;
            let number = start + run.start as u64;
            self.stream
                .send(MessageKind::Pages, number, &bytes[run.clone()])?;
            at = run.end;
        }
        zero(&mut self.stream, at, len)
    }

    /// Ends a round, and waits until the other side has all of it.
    pub(crate) fn round(&mut self, number: u32) -> Result<(), StreamError> {
        self.stream.send(MessageKind::Round, number.into(), &[])?;
        let answer = self.stream.expect(MessageKind::Received)?;
        match answer == u64::from(number) {
            true => Ok(()),
            false => Err(StreamError::Unexpected {
                found: MessageKind::Received as u32,
            }),
        }
    }
}
