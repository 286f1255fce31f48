//! Reads a stream ahead on a separate thread, so that decompression runs in parallel with the use
//! of its result.

use std::io::{self, Read};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

/// Bytes that are handed over in one piece.
const PIECE: usize = 256 << 10;
/// Maximum number of pieces read ahead.
const PIECES: usize = 4;

/// The reading side. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct ReadAhead {
    /// An empty piece marks the end of the stream.
    filled: Receiver<io::Result<Vec<u8>>>,
    /// Returns pieces to be filled again.
    used: SyncSender<Vec<u8>>,
    piece: Vec<u8>,
    at: usize,
    ended: bool,
    thread: Option<JoinHandle<()>>,
}

impl ReadAhead {
    /// Starts reading `input`.
    ///
    /// # Errors
    /// If no thread can be created.
    pub(super) fn new(mut input: impl Read + Send + 'static) -> io::Result<Self> {
        let (send_filled, filled) = sync_channel(PIECES);
        let (used, receive_used) = sync_channel(PIECES);
        for _ in 0..PIECES {
            // There is room for all of them.
            let _ = used.send(Vec::new());
        }
        let work = move || {
            // Either channel closes when the reader is dropped.
            while let Ok(mut piece) = receive_used.recv() {
                let filled = fill(&mut input, &mut piece);
                let last = filled.is_err() || piece.is_empty();
                if send_filled.send(filled.map(|()| piece)).is_err() || last {
                    return;
                }
            }
        };
        let thread = Builder::new().name("decompress".to_owned()).spawn(work)?;
        Ok(Self {
            filled,
            used,
            piece: Vec::new(),
            at: 0,
            ended: false,
            thread: Some(thread),
        })
    }

    /// Waits for the next piece.
    fn next(&mut self) -> io::Result<()> {
        let spent = std::mem::take(&mut self.piece);
        self.at = 0;
        if !spent.is_empty() {
            // The thread may have ended after its last piece.
            let _ = self.used.send(spent);
        }
        match self.filled.recv() {
            Ok(piece) => {
                self.ended = !piece.as_ref().is_ok_and(|piece| !piece.is_empty());
                self.piece = piece?;
                Ok(())
            }
            Err(_) => {
                self.ended = true;
                // It reports its end, unless it panicked.
                match self.thread.take().map(JoinHandle::join) {
                    Some(Err(panic)) => std::panic::resume_unwind(panic),
                    _ => Err(io::ErrorKind::UnexpectedEof.into()),
                }
            }
        }
    }
}

impl Read for ReadAhead {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.piece.len() {
            if self.ended || buffer.is_empty() {
                return Ok(0);
            }
            self.next()?;
        }
        let rest = &self.piece[self.at..];
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        self.at += count;
        Ok(count)
    }
}

/// Fills `piece`, or as much of it as the stream has.
fn fill(input: &mut impl Read, piece: &mut Vec<u8>) -> io::Result<()> {
    piece.resize(PIECE, 0);
    let mut length = 0;
    while length < PIECE {
        match input.read(&mut piece[length..]) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    piece.truncate(length);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|i| (i * 7 / 3) as u8).collect()
    }

    #[test]
    fn everything_comes_in_order_and_then_the_end() {
        for size in [0, 1, PIECE, 10 * PIECE + 5] {
            let data = bytes(size);
            let mut ahead = ReadAhead::new(io::Cursor::new(data.clone())).unwrap();
            let mut read = Vec::new();
            ahead.read_to_end(&mut read).unwrap();
            assert_eq!(read, data);
            assert_eq!(ahead.read(&mut [0; 8]).unwrap(), 0);
        }
    }

    /// Returns some bytes, then an error.
    struct Broken(usize);

    impl Read for Broken {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            if self.0 == 0 {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let count = buffer.len().min(self.0);
            self.0 -= count;
            Ok(count)
        }
    }

    #[test]
    fn an_error_comes_where_it_was_and_the_stream_has_ended() {
        let mut ahead = ReadAhead::new(Broken(PIECE)).unwrap();
        let mut read = vec![1; PIECE];
        ahead.read_exact(&mut read).unwrap();
        let error = ahead.read(&mut read).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert_eq!(ahead.read(&mut read).unwrap(), 0);
    }

    #[test]
    #[should_panic(expected = "the decoder's own fault")]
    fn a_panic_of_the_thread_is_passed_on() {
        struct Panics;
        impl Read for Panics {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                panic!("the decoder's own fault");
            }
        }
        let _ = ReadAhead::new(Panics).unwrap().read(&mut [0; 8]);
    }

    #[test]
    fn the_thread_ends_when_nobody_reads() {
        struct Endless(#[expect(dead_code, reason = "held")] Arc<()>);
        impl Read for Endless {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                Ok(buffer.len())
            }
        }
        let alive = Arc::new(());
        let mut ahead = ReadAhead::new(Endless(Arc::clone(&alive))).unwrap();
        ahead.read_exact(&mut [0; 8]).unwrap();
        let thread = ahead.thread.take().unwrap();
        drop(ahead);
        thread.join().unwrap();
        assert_eq!(Arc::strong_count(&alive), 1);
    }
}
