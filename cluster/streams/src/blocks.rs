//! The data of a disk on their way: a length, and the blocks that are not all zeros.
//!
//! | bytes | what |
//! | --- | --- |
//! | 8 | `PVCOPY1` and a line feed |
//! | 8 | the disk's length in bytes |
//! | 8 and 4, and so many as the second says | a block: where it begins, its length, its data |
//! | 8 and 4 | the end: the first has all bits set, the second none |
//!
//! Numbers are little-endian. Blocks come in order, do not overlap, have 1 byte to 1 MiB, and end
//! within the disk. Without its end a stream was cut off. Nothing is guessed by content: whatever a
//! guest wrote on its disk is data.

use std::io::{self, Read};

const MAGIC: [u8; 8] = *b"PVCOPY1\n";

/// The longest block.
const MAX_BLOCK: usize = 1 << 20;

/// In the place of a block: there are no more.
const END: u64 = u64::MAX;

/// Why a stream cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// It was cut off, or the network failed.
    #[error("failed to read the stream of a disk's data: try again")]
    Read(#[source] io::Error),
    /// It is another format, or of another version.
    #[error("the stream has no disk's data: source and target must be of the same version")]
    Magic,
    /// A block is where there can be none.
    #[error("the stream has {length} bytes at {at} of a disk of {disk} bytes, which cannot be")]
    Block {
        /// Where the block begins.
        at: u64,
        /// Its bytes.
        length: u32,
        /// The disk's bytes.
        disk: u64,
    },
    /// Something follows the end.
    #[error("the stream goes on behind its end")]
    Trailing,
}

/// The beginning of a stream: of a disk of so many bytes.
#[must_use]
pub fn header(length: u64) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(length.to_le_bytes());
    bytes
}

/// Appends a block of 1 MiB at most.
pub fn push_block(stream: &mut Vec<u8>, at: u64, block: &[u8]) {
    let length = u32::try_from(block.len()).unwrap_or(u32::MAX);
    stream.extend(at.to_le_bytes());
    stream.extend(length.to_le_bytes());
    stream.extend(block);
}

/// Appends the end.
pub fn push_end(stream: &mut Vec<u8>) {
    stream.extend(END.to_le_bytes());
    stream.extend(0_u32.to_le_bytes());
}

/// Reads a stream.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    disk: u64,
    /// Nothing may come before this.
    at: u64,
    block: Vec<u8>,
}

impl<R: Read> Reader<R> {
    /// Reads the beginning.
    ///
    /// # Errors
    ///
    /// It was cut off, or is none of such a stream.
    pub fn new(mut input: R) -> Result<Self, StreamError> {
        let mut magic = [0; MAGIC.len()];
        input.read_exact(&mut magic).map_err(StreamError::Read)?;
        if magic != MAGIC {
            return Err(StreamError::Magic);
        }
        let disk = u64::from_le_bytes(array(&mut input)?);
        Ok(Self {
            input,
            disk,
            at: 0,
            block: Vec::new(),
        })
    }

    /// The disk's length in bytes.
    #[must_use]
    pub const fn disk_len(&self) -> u64 {
        self.disk
    }

    /// Reads a block: where it begins, and its data. `None` at the end.
    ///
    /// # Errors
    ///
    /// It was cut off, or is where none can be.
    pub fn next_block(&mut self) -> Result<Option<(u64, &[u8])>, StreamError> {
        let at = u64::from_le_bytes(array(&mut self.input)?);
        let length = u32::from_le_bytes(array(&mut self.input)?);
        if (at, length) == (END, 0) {
            return match self.input.read(&mut [0]).map_err(StreamError::Read)? {
                0 => Ok(None),
                _ => Err(StreamError::Trailing),
            };
        }
        let wrong = StreamError::Block {
            at,
            length,
            disk: self.disk,
        };
        let end = at.checked_add(u64::from(length));
        let Some(end) = end.filter(|end| *end <= self.disk && at >= self.at) else {
            return Err(wrong);
        };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if !(1..=MAX_BLOCK).contains(&length) {
            return Err(wrong);
        }
        self.at = end;
        self.block.resize(length, 0);
        let read = self.input.read_exact(&mut self.block);
        read.map_err(StreamError::Read)?;
        Ok(Some((at, &self.block)))
    }
}

fn array<const N: usize>(input: &mut impl Read) -> Result<[u8; N], StreamError> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes).map_err(StreamError::Read)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Blocks = Vec<(u64, Vec<u8>)>;

    fn read(stream: &[u8]) -> Result<(u64, Blocks), StreamError> {
        let mut reader = Reader::new(stream)?;
        let mut blocks = Vec::new();
        while let Some((at, block)) = reader.next_block()? {
            blocks.push((at, block.to_vec()));
        }
        Ok((reader.disk_len(), blocks))
    }

    fn stream(length: u64, blocks: &[(u64, &[u8])]) -> Vec<u8> {
        let mut stream = header(length);
        for (at, block) in blocks {
            push_block(&mut stream, *at, block);
        }
        push_end(&mut stream);
        stream
    }

    #[test]
    fn blocks_arrive_in_their_places() {
        let (length, blocks) = read(&stream(8, &[(0, b"ab"), (2, b"c"), (7, b"d")])).unwrap();
        let places: Vec<u64> = blocks.iter().map(|(at, _)| *at).collect();
        assert_eq!((length, places), (8, vec![0, 2, 7]));
        let long = vec![1; MAX_BLOCK + 1];
        let length = u64::MAX - 1;
        assert!(read(&stream(length, &[(5, &long[1..])])).is_ok());
        let longer = read(&stream(length, &[(5, &long)]));
        assert!(matches!(longer, Err(StreamError::Block { .. })));
    }

    #[test]
    fn what_was_cut_off_is_no_copy() {
        let whole = stream(8, &[(0, b"ab"), (4, b"c")]);
        for end in 0..whole.len() {
            assert!(matches!(read(&whole[..end]), Err(StreamError::Read(_))));
        }
        let mut more = whole;
        more.push(0);
        assert!(matches!(read(&more), Err(StreamError::Trailing)));
    }

    #[test]
    fn blocks_outside_of_the_disk_are_refused() {
        for blocks in [
            &[(7, &b"ab"[..])][..],
            &[(4, b"a"), (4, b"b")],
            &[(4, b"a"), (0, b"b")],
            &[(u64::MAX, b"a")],
        ] {
            let refused = read(&stream(8, blocks));
            assert!(matches!(refused, Err(StreamError::Block { .. })));
        }
        let mut empty = header(8);
        empty.extend([0; 12]);
        assert!(matches!(read(&empty), Err(StreamError::Block { .. })));
        assert!(matches!(
            read(b"QFI\xfb\0\0\0\x03 and so on"),
            Err(StreamError::Magic)
        ));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_within_bounds(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut given = header(1 << 20);
            given.extend(bytes);
            if let Ok((length, blocks)) = read(&given) {
                let end = blocks.iter().map(|(at, block)| at + block.len() as u64).max();
                prop_assert!(end.unwrap_or(0) <= length);
            }
        }
    }
}
