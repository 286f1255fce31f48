//! The consoles of a source and a target, with the time of each byte of the guest's sequence.

use std::io::Read;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::boot::ahead_of_others;

/// The time limit for the guest's next byte, also on an emulated host.
const PATIENCE: Duration = Duration::from_secs(120);

/// The least of the sequence's bytes; nothing else on a console is one.
const FIRST: u8 = 0x80;

/// Which console it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Source,
    Target,
}

/// What was read at once; nothing if the console has ended.
#[derive(Debug)]
struct Piece {
    side: Side,
    at: Instant,
    bytes: Vec<u8>,
}

/// The sequence of one guest, wherever it runs.
#[derive(Debug)]
pub(super) struct Sequence {
    sender: Sender<Piece>,
    pieces: Receiver<Piece>,
    follower: Follower,
}

/// Follows a sequence from its source to its target.
#[derive(Debug, Default)]
struct Follower {
    last: Option<(Side, u8, Instant)>,
    /// How many bytes each side has sent.
    counts: [usize; 2],
    /// The longest time between two bytes of the source.
    longest: Duration,
    /// From the last byte of the source to the first of the target.
    gap: Option<Gap>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    pub(super) last: Instant,
    pub(super) first: Instant,
}

impl Sequence {
    pub(super) fn new() -> Self {
        let (sender, pieces) = channel();
        Self {
            sender,
            pieces,
            follower: Follower::default(),
        }
    }

    /// Reads a console on a thread of its own, until it ends.
    pub(super) fn read(&self, side: Side, mut console: impl Read + Send + 'static) {
        let sender = self.sender.clone();
        thread::spawn(move || {
            let _first = ahead_of_others();
            let mut buffer = [0; 4096];
            loop {
                let len = console.read(&mut buffer).unwrap_or(0);
                let bytes = buffer.get(..len).unwrap_or_default().to_vec();
                let at = Instant::now();
                if sender.send(Piece { side, at, bytes }).is_err() || len == 0 {
                    return;
                }
            }
        });
    }

    /// Waits for `count` more bytes of the sequence on a side's console.
    pub(super) fn wait_for(&mut self, side: Side, count: usize) -> Result<()> {
        let enough = self.follower.counts[side as usize] + count;
        while self.follower.counts[side as usize] < enough {
            self.step()?;
        }
        Ok(())
    }

    /// Returns the longest time between two bytes of the source since the last call.
    pub(super) fn longest(&mut self) -> Duration {
        std::mem::take(&mut self.follower.longest)
    }

    /// Waits until the guest has stood still and runs again, at its target.
    pub(super) fn gap(&mut self) -> Result<Gap> {
        loop {
            if let Some(gap) = self.follower.gap {
                return Ok(gap);
            }
            self.step()?;
        }
    }

    fn step(&mut self) -> Result<()> {
        let piece = match self.pieces.recv_timeout(PATIENCE) {
            Ok(piece) => piece,
            Err(RecvTimeoutError::Timeout) => bail!("the guest was silent for {PATIENCE:?}"),
            Err(RecvTimeoutError::Disconnected) => bail!("nobody reads the consoles"),
        };
        // A source may end when its guest has gone.
        ensure!(
            !piece.bytes.is_empty() || piece.side == Side::Source && self.follower.gap.is_some(),
            "the console of the {:?} has ended",
            piece.side
        );
        self.follower.follow(&piece)
    }
}

impl Follower {
    fn follow(&mut self, piece: &Piece) -> Result<()> {
        let (side, at) = (piece.side, piece.at);
        for byte in piece.bytes.iter().filter(|byte| **byte >= FIRST) {
            if let Some((before, last, last_at)) = self.last {
                let expected = last.checked_add(1).unwrap_or(FIRST);
                ensure!(
                    *byte == expected,
                    "the guest's sequence has {byte} at the {side:?} after {last} at the {before:?}"
                );
                if before == side {
                    if side == Side::Source {
                        self.longest = self.longest.max(at - last_at);
                    }
                } else {
                    ensure!(side == Side::Target, "the guest runs at its source again");
                    self.gap = Some(Gap {
                        last: last_at,
                        first: at,
                    });
                }
            }
            self.last = Some((side, *byte, at));
            let count = self.counts.get_mut(side as usize);
            *count.context("there are two sides")? += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(side: Side, at: Instant, bytes: &[u8]) -> Piece {
        Piece {
            side,
            at,
            bytes: bytes.to_vec(),
        }
    }

    #[test]
    fn the_gap_is_between_the_last_byte_here_and_the_first_one_there() {
        let began = Instant::now();
        let at = |millis| began + Duration::from_millis(millis);
        let mut follower = Follower::default();
        for (side, millis, bytes) in [
            (Side::Source, 1, &b"ready\r\n\xfd"[..]),
            (Side::Source, 2, &b"\xfe\xff"[..]),
            (Side::Target, 40, &b"a message\x80"[..]),
            (Side::Target, 41, &b"\x81"[..]),
        ] {
            follower.follow(&piece(side, at(millis), bytes)).unwrap();
        }
        let gap = follower.gap.unwrap();
        assert_eq!((gap.last, gap.first), (at(2), at(40)));
        assert_eq!(follower.counts, [3, 2]);
        assert_eq!(follower.longest, Duration::from_millis(1));
    }

    #[test]
    fn a_byte_that_is_missing_and_a_second_copy_are_told() {
        let now = Instant::now();
        let mut follower = Follower::default();
        let mut follow = |side, bytes| follower.follow(&piece(side, now, bytes));
        follow(Side::Source, b"\x85").unwrap();
        let missing = follow(Side::Target, b"\x87").unwrap_err().to_string();
        assert!(missing.contains("135 at the Target after 133"), "{missing}");
        follow(Side::Target, b"\x86").unwrap();
        let second = follow(Side::Source, b"\x87").unwrap_err().to_string();
        assert!(second.contains("runs at its source again"), "{second}");
    }
}
