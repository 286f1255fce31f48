//! A descriptor chain, walked once and bounded when it is taken from the ring.

use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemory, GuestMemoryError, VolatileSlice};

use super::region::{bytes_in_region, slice_in_region};
use crate::GuestRam;

/// The most descriptors that a chain may have, direct or indirect, empty or not. This is also the
/// limit of one `preadv` or `pwritev` call (`IOV_MAX`).
pub const MAX_SEGMENTS: usize = 1024;

/// The cost of a descriptor in a budget of bytes: walking it is not free either.
const DESCRIPTOR_COST: usize = 64;

/// One buffer of a chain, or the part of it that lies in one region of guest memory: guest physical
/// address and length in bytes, never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its guest physical address.
    pub addr: GuestAddress,
    /// Its length in bytes.
    pub len: u32,
}

/// A chain whose buffers are not what the device's protocol asks for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChainError {
    /// The device-readable part ends too early.
    #[error("{len} bytes at offset {offset} of a chain with {have} device-readable bytes")]
    ShortReadable {
        /// Where the access started.
        offset: usize,
        /// How many bytes it wanted.
        len: usize,
        /// How many there are.
        have: usize,
    },
    /// The device-writable part ends too early.
    #[error("{len} bytes at offset {offset} of a chain with {have} device-writable bytes")]
    ShortWritable {
        /// Where the access started.
        offset: usize,
        /// How many bytes it wanted.
        len: usize,
        /// How many there are.
        have: usize,
    },
    /// A buffer is not in guest memory.
    #[error("a buffer lies outside guest memory")]
    Memory(#[source] GuestMemoryError),
}

/// A descriptor chain that the device owns: device-readable segments first, then
/// device-writable ones (§2.7.4.2). It must be returned with [`super::Queue::complete`].
///
/// The segments are a copy. What a driver does to its descriptors afterwards changes nothing;
/// the *contents* of a buffer can change at any time, so read a header once and keep the copy.
#[derive(Debug)]
#[must_use = "a chain that is not completed is lost to the driver"]
pub struct Chain {
    pub(super) head: u16,
    pub(super) segments: Vec<Segment>,
    /// How many of `segments` are device-readable.
    pub(super) readable: usize,
    pub(super) readable_len: usize,
    pub(super) writable_len: usize,
    /// Descriptors that were walked, including empty ones.
    pub(super) descriptors: usize,
}

impl Chain {
    /// Adds a buffer that was found to lie in `mem` completely: a segment for each region of memory
    /// that it touches.
    pub(super) fn push(&mut self, mem: &GuestRam, addr: GuestAddress, len: u32, writable: bool) {
        let (mut addr, mut left) = (addr, len);
        while left > 0 {
            let there = bytes_in_region(mem, addr).unwrap_or(u64::MAX);
            let len = u32::try_from(there).unwrap_or(u32::MAX).min(left);
            self.segments.push(Segment { addr, len });
            if !writable {
                self.readable = self.readable.saturating_add(1);
            }
            addr = GuestAddress(addr.0.saturating_add(len.into()));
            left = left.saturating_sub(len);
        }
        let total = match writable {
            true => &mut self.writable_len,
            false => &mut self.readable_len,
        };
        *total = total.saturating_add(len as usize);
    }

    /// The head descriptor's index.
    #[must_use]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// How many descriptors the driver used for the chain, including empty ones: the cost of
    /// walking it.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        self.descriptors
    }

    /// The cost of walking the chain in a budget of bytes.
    #[must_use]
    pub fn cost(&self) -> usize {
        self.descriptors.max(1).saturating_mul(DESCRIPTOR_COST)
    }

    /// Bytes that the device may read.
    #[must_use]
    pub fn readable_len(&self) -> usize {
        self.readable_len
    }

    /// Bytes that the device may write.
    #[must_use]
    pub fn writable_len(&self) -> usize {
        self.writable_len
    }

    /// Copies `buf.len()` bytes out of the device-readable part, from `offset` bytes into it.
    ///
    /// # Errors
    /// If the part is shorter than that.
    pub fn read(&self, mem: &GuestRam, offset: usize, buf: &mut [u8]) -> Result<(), ChainError> {
        self.check_readable(offset, buf.len())?;
        copy_out(self.readable_segments(), mem, offset, buf)
    }

    /// Copies `buf.len()` bytes out of the device-writable part, where the guest may have changed
    /// what the device wrote.
    pub(crate) fn read_back(
        &self,
        mem: &GuestRam,
        offset: usize,
        buf: &mut [u8],
    ) -> Result<(), ChainError> {
        self.check_writable(offset, buf.len())?;
        copy_out(self.writable_segments(), mem, offset, buf)
    }

    /// Copies a plain structure out of the device-readable part.
    ///
    /// # Errors
    /// If the part is shorter than that.
    pub fn read_obj<T: ByteValued + Default>(
        &self,
        mem: &GuestRam,
        offset: usize,
    ) -> Result<T, ChainError> {
        let mut value = T::default();
        self.read(mem, offset, value.as_mut_slice())?;
        Ok(value)
    }

    /// Copies `buf` into the device-writable part, `offset` bytes into it.
    ///
    /// # Errors
    /// If the part is shorter than that.
    pub fn write(&self, mem: &GuestRam, offset: usize, buf: &[u8]) -> Result<(), ChainError> {
        let len = buf.len();
        self.check_writable(offset, len)?;
        let mut rest = buf;
        for piece in pieces(self.writable_segments(), offset, len) {
            let Some((now, later)) = rest.split_at_checked(piece.len as usize) else {
                break;
            };
            slice(mem, piece)?
                .write_slice(now, 0)
                .map_err(|error| ChainError::Memory(error.into()))?;
            rest = later;
        }
        Ok(())
    }

    /// The memory of `len` device-readable bytes from `offset` on, for vectored I/O without
    /// a copy.
    ///
    /// # Errors
    /// If the part is shorter than that.
    pub fn readable_slices<'m>(
        &self,
        mem: &'m GuestRam,
        offset: usize,
        len: usize,
        out: &mut Vec<VolatileSlice<'m>>,
    ) -> Result<(), ChainError> {
        self.check_readable(offset, len)?;
        out.clear();
        append_slices(self.readable_segments(), mem, offset, len, out)
    }

    /// The memory of `len` device-writable bytes from `offset` on, for vectored I/O without
    /// a copy.
    ///
    /// # Errors
    /// If the part is shorter than that.
    pub fn writable_slices<'m>(
        &self,
        mem: &'m GuestRam,
        offset: usize,
        len: usize,
        out: &mut Vec<VolatileSlice<'m>>,
    ) -> Result<(), ChainError> {
        out.clear();
        self.append_writable_slices(mem, offset, len, out)
    }

    /// As [`Self::writable_slices`], after those that `out` has already.
    pub(crate) fn append_writable_slices<'m>(
        &self,
        mem: &'m GuestRam,
        offset: usize,
        len: usize,
        out: &mut Vec<VolatileSlice<'m>>,
    ) -> Result<(), ChainError> {
        self.check_writable(offset, len)?;
        append_slices(self.writable_segments(), mem, offset, len, out)
    }

    /// The device-readable segments from `offset` on.
    pub(crate) fn readable_parts(&self, offset: usize) -> impl Iterator<Item = Segment> + '_ {
        pieces(self.readable_segments(), offset, usize::MAX)
    }

    /// The device-writable segments.
    pub(crate) fn writable_parts(&self) -> impl Iterator<Item = Segment> + '_ {
        self.writable_segments().iter().copied()
    }

    fn check_readable(&self, offset: usize, len: usize) -> Result<(), ChainError> {
        let have = self.readable_len;
        match offset.checked_add(len) {
            Some(end) if end <= have => Ok(()),
            _ => Err(ChainError::ShortReadable { offset, len, have }),
        }
    }

    fn check_writable(&self, offset: usize, len: usize) -> Result<(), ChainError> {
        let have = self.writable_len;
        match offset.checked_add(len) {
            Some(end) if end <= have => Ok(()),
            _ => Err(ChainError::ShortWritable { offset, len, have }),
        }
    }

    fn readable_segments(&self) -> &[Segment] {
        self.segments.get(..self.readable).unwrap_or(&[])
    }

    fn writable_segments(&self) -> &[Segment] {
        self.segments.get(self.readable..).unwrap_or(&[])
    }
}

/// Copies `buf.len()` bytes out of segments that have as many from `offset` on.
fn copy_out(
    segments: &[Segment],
    mem: &GuestRam,
    offset: usize,
    buf: &mut [u8],
) -> Result<(), ChainError> {
    let len = buf.len();
    let mut rest = buf;
    for piece in pieces(segments, offset, len) {
        let Some((now, later)) = rest.split_at_mut_checked(piece.len as usize) else {
            break;
        };
        slice(mem, piece)?
            .read_slice(now, 0)
            .map_err(|error| ChainError::Memory(error.into()))?;
        rest = later;
    }
    Ok(())
}

fn append_slices<'m>(
    segments: &[Segment],
    mem: &'m GuestRam,
    offset: usize,
    len: usize,
    out: &mut Vec<VolatileSlice<'m>>,
) -> Result<(), ChainError> {
    for piece in pieces(segments, offset, len) {
        out.push(slice(mem, piece)?);
    }
    Ok(())
}

/// The memory of a part of a segment.
fn slice(mem: &GuestRam, piece: Segment) -> Result<VolatileSlice<'_>, ChainError> {
    let len = piece.len as usize;
    match slice_in_region(mem, piece.addr, len) {
        Some(slice) => Ok(slice),
        // Says what is wrong: a segment lies in one region of the memory that it was found in.
        None => mem.get_slice(piece.addr, len).map_err(ChainError::Memory),
    }
}

/// The parts of `segments` that cover `len` bytes from `offset` on.
fn pieces(
    segments: &[Segment],
    mut offset: usize,
    mut len: usize,
) -> impl Iterator<Item = Segment> + '_ {
    segments.iter().filter_map(move |segment| {
        let whole = segment.len as usize;
        if offset >= whole {
            offset = offset.saturating_sub(whole);
            return None;
        }
        let take = whole.saturating_sub(offset).min(len);
        if take == 0 {
            return None;
        }
        // Neither can wrap: the whole segment was found to lie in guest memory.
        let addr = GuestAddress(segment.addr.0.saturating_add(offset as u64));
        let piece = Segment {
            addr,
            len: u32::try_from(take).ok()?,
        };
        offset = 0;
        len = len.saturating_sub(take);
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::memory;
    use proptest::prelude::*;

    fn chain(readable: &[u32], writable: &[u32]) -> Chain {
        let mut at = 0x1000;
        let segments = readable
            .iter()
            .chain(writable)
            .map(|&len| {
                let segment = Segment {
                    addr: GuestAddress(at),
                    len,
                };
                at += u64::from(len) + 7;
                segment
            })
            .collect();
        Chain {
            head: 0,
            segments,
            readable: readable.len(),
            readable_len: readable.iter().map(|&l| l as usize).sum(),
            writable_len: writable.iter().map(|&l| l as usize).sum(),
            descriptors: readable.len() + writable.len(),
        }
    }

    #[test]
    fn reads_and_writes_cross_segments() {
        let mem = memory(1 << 20);
        let chain = chain(&[3, 5, 2], &[1, 4]);
        mem.write_slice(b"abc", GuestAddress(0x1000)).unwrap();
        mem.write_slice(b"defgh", GuestAddress(0x100a)).unwrap();
        let mut buf = [0; 5];
        chain.read(&mem, 2, &mut buf).unwrap();
        assert_eq!(&buf, b"cdefg");
        chain.write(&mem, 0, b"WXYZ").unwrap();
        assert_eq!(mem.read_obj::<u8>(chain.segments[3].addr).unwrap(), b'W');
        let mut tail = [0; 3];
        mem.read_slice(&mut tail, chain.segments[4].addr).unwrap();
        assert_eq!(&tail, b"XYZ");
    }

    #[test]
    fn accesses_beyond_a_part_are_refused() {
        let mem = memory(1 << 20);
        let chain = chain(&[4], &[4]);
        assert!(chain.read(&mem, 1, &mut [0; 4]).is_err());
        assert!(chain.read(&mem, usize::MAX, &mut [0; 2]).is_err());
        assert!(chain.write(&mem, 0, &[0; 5]).is_err());
        assert!(chain.read_obj::<u64>(&mem, 0).is_err());
    }

    proptest! {
        #[test]
        fn slices_cover_exactly_what_was_asked(
            lens in proptest::collection::vec(1u32..300, 1..12),
            offset in 0usize..2000,
            len in 0usize..2000,
        ) {
            let mem = memory(1 << 20);
            let chain = chain(&lens, &[]);
            let mut out = Vec::new();
            let fits = offset + len <= chain.readable_len();
            match chain.readable_slices(&mem, offset, len, &mut out) {
                Ok(()) => {
                    prop_assert!(fits);
                    prop_assert_eq!(out.iter().map(|s| s.len()).sum::<usize>(), len);
                }
                Err(_) => prop_assert!(!fits),
            }
        }
    }
}
