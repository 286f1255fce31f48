//! A body between the network and the thread that converts it.

use std::io::{self, Read};

use bytes::{Buf as _, Bytes};
use tokio::sync::mpsc;

/// Pieces that wait for the conversion.
const QUEUE: usize = 32;

enum Piece {
    Bytes(Bytes),
    End,
    Broken(io::ErrorKind),
}

/// The network's end.
pub(super) struct Sender(mpsc::Sender<Piece>);

/// The conversion's end.
pub(super) struct Input {
    queue: mpsc::Receiver<Piece>,
    piece: Bytes,
    has_ended: bool,
}

/// A body that is not there yet.
pub(super) fn channel() -> (Sender, Input) {
    let (sender, queue) = mpsc::channel(QUEUE);
    let input = Input {
        queue,
        piece: Bytes::new(),
        has_ended: false,
    };
    (Sender(sender), input)
}

impl Sender {
    /// Sends bytes; `false` if nobody reads them any longer.
    pub(super) async fn send(&self, bytes: Bytes) -> bool {
        self.0.send(Piece::Bytes(bytes)).await.is_ok()
    }

    /// Says that this was all.
    pub(super) async fn end(self) {
        let _ = self.0.send(Piece::End).await;
    }

    /// Says that the rest does not come.
    pub(super) async fn fail(self, why: io::ErrorKind) {
        let _ = self.0.send(Piece::Broken(why)).await;
    }
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.has_ended {
            match self.queue.blocking_recv() {
                Some(Piece::Bytes(piece)) => self.piece = piece,
                Some(Piece::End) => self.has_ended = true,
                Some(Piece::Broken(why)) => return Err(why.into()),
                // Who sent is gone without a word.
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        let length = buffer.len().min(self.piece.len());
        if let Some(buffer) = buffer.get_mut(..length) {
            self.piece.copy_to_slice(buffer);
        }
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(input: Input) -> io::Result<Vec<u8>> {
        let mut input = input;
        let mut all = Vec::new();
        input.read_to_end(&mut all).map(|_| all)
    }

    #[tokio::test]
    async fn only_a_body_that_was_ended_has_an_end() {
        let (sender, input) = channel();
        for part in ["ab", "", "c"] {
            assert!(sender.send(Bytes::from_static(part.as_bytes())).await);
        }
        sender.end().await;
        let all = tokio::task::spawn_blocking(|| read(input)).await.unwrap();
        assert_eq!(all.unwrap(), b"abc");

        let (sender, input) = channel();
        sender.send(Bytes::from_static(b"ab")).await;
        drop(sender);
        let cut = tokio::task::spawn_blocking(|| read(input)).await.unwrap();
        assert_eq!(cut.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);

        let (sender, input) = channel();
        sender.fail(io::ErrorKind::TimedOut).await;
        let cut = tokio::task::spawn_blocking(|| read(input)).await.unwrap();
        assert_eq!(cut.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_conversion_that_ended_takes_nothing() {
        let (sender, input) = channel();
        drop(input);
        assert!(!sender.send(Bytes::from_static(b"x")).await);
    }
}
