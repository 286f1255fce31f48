//! A block request: the chain's header, read once and checked (§5.2.6).

use super::disk::SECTOR_SIZE;
use crate::GuestRam;
use crate::virtio::{Chain, Fault};

/// Bytes of the header: type, reserved, sector.
const HEADER_LEN: usize = 16;

/// Request types with a range for data (§5.2.6).
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// Bytes of such a range; a request has one.
const RANGE_LEN: usize = 16;

/// How many ranges are looked at of a request with more than one.
const LOOKED_AT: usize = 256;

/// `VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP`.
const UNMAP: u32 = 1;

/// The limit of one discard request: 1 GiB, which costs the host some metadata.
pub(super) const MAX_DISCARD_SECTORS: u32 = 1 << 21;

/// The limit of one write-zeroes request: 16 MiB, which the host may have to write.
pub(super) const MAX_WRITE_ZEROES_SECTORS: u32 = 1 << 15;

/// Bytes of the answer to `VIRTIO_BLK_T_GET_ID`.
pub(super) const ID_LEN: usize = 20;

/// The status byte that ends every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// The request of a chain. Offsets and lengths are in bytes and within the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Read {
        offset: u64,
        len: usize,
    },
    Write {
        offset: u64,
        len: usize,
    },
    Flush,
    Discard {
        offset: u64,
        len: u64,
    },
    WriteZeroes {
        offset: u64,
        len: u64,
        unmap: bool,
    },
    GetId {
        len: usize,
    },
    /// Completed with this status, without any data.
    Refuse(Status),
}

/// The offset of a write's data in the device-readable part.
pub(super) const WRITE_DATA: usize = HEADER_LEN;

impl Request {
    /// Parses the chain.
    ///
    /// # Errors
    /// If there is no complete header or no room for the status byte: such a request cannot even be
    /// refused.
    pub(super) fn parse(
        chain: &Chain,
        mem: &GuestRam,
        disk_sectors: u64,
        read_only: bool,
    ) -> Result<Self, Fault> {
        let mut header = [0; HEADER_LEN];
        chain.read(mem, 0, &mut header)?;
        let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
        let sector = u64::from_le_bytes(sector);
        let data_in = chain
            .writable_len()
            .checked_sub(1)
            .ok_or_else(|| Fault::protocol("a block request without a status byte"))?;
        let data_out = chain.readable_len().saturating_sub(HEADER_LEN);
        let extent = |len: usize| Extent { sector, len }.check(disk_sectors);
        Ok(match u32::from_le_bytes([t0, t1, t2, t3]) {
            0 => match extent(data_in) {
                Some(offset) => Self::Read {
                    offset,
                    len: data_in,
                },
                None => Self::Refuse(Status::IoError),
            },
            1 => match extent(data_out) {
                Some(offset) if !read_only => Self::Write {
                    offset,
                    len: data_out,
                },
                _ => Self::Refuse(Status::IoError),
            },
            // There is nothing to make durable; the host would flush its own disk.
            4 if read_only => Self::Refuse(Status::Ok),
            4 => Self::Flush,
            // A read-only disk does not offer these (§5.2.6.2).
            DISCARD | WRITE_ZEROES if read_only => Self::Refuse(Status::Unsupported),
            kind @ (DISCARD | WRITE_ZEROES) => {
                let mut range = [0; RANGE_LEN];
                if data_out == RANGE_LEN {
                    chain.read(mem, HEADER_LEN, &mut range)?;
                    Self::range(kind, range, disk_sectors)
                } else {
                    Self::Refuse(status_of_ranges(kind, chain, mem, data_out)?)
                }
            }
            8 => Self::GetId {
                len: data_in.min(ID_LEN),
            },
            _ => Self::Refuse(Status::Unsupported),
        })
    }

    /// `struct virtio_blk_discard_write_zeroes`: sector, number of sectors, flags.
    fn range(kind: u32, range: [u8; RANGE_LEN], disk_sectors: u64) -> Self {
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = range;
        let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let count = u32::from_le_bytes([n0, n1, n2, n3]);
        let flags = u32::from_le_bytes(flags);
        let max = match kind {
            DISCARD => MAX_DISCARD_SECTORS,
            _ => MAX_WRITE_ZEROES_SECTORS,
        };
        if flags & !known_flags(kind) != 0 {
            return Self::Refuse(Status::Unsupported);
        }
        let whole = usize::try_from(u64::from(count).saturating_mul(SECTOR_SIZE));
        let extent = whole.ok().map(|len| Extent { sector, len });
        let Some(offset) = extent.and_then(|extent| extent.check(disk_sectors)) else {
            return Self::Refuse(Status::IoError);
        };
        let len = u64::from(count).saturating_mul(SECTOR_SIZE);
        match (count, kind) {
            (0, _) => Self::Refuse(Status::Ok),
            _ if count > max => Self::Refuse(Status::IoError),
            (_, DISCARD) => Self::Discard { offset, len },
            _ => Self::WriteZeroes {
                offset,
                len,
                unmap: flags & UNMAP != 0,
            },
        }
    }
}

/// The flags that a range of such a request may have (§5.2.6.2).
fn known_flags(kind: u32) -> u32 {
    match kind {
        DISCARD => 0,
        _ => UNMAP,
    }
}

/// Returns why a request of `len` bytes that are not one range is refused: an unknown flag comes
/// before the number of ranges (§5.2.6.2).
fn status_of_ranges(kind: u32, chain: &Chain, mem: &GuestRam, len: usize) -> Result<Status, Fault> {
    if !len.is_multiple_of(RANGE_LEN) {
        return Ok(Status::IoError);
    }
    let mut ranges = [[0; RANGE_LEN]; LOOKED_AT];
    let bytes = ranges.as_flattened_mut();
    let bytes = bytes.get_mut(..len.min(LOOKED_AT * RANGE_LEN));
    chain.read(mem, HEADER_LEN, bytes.unwrap_or(&mut []))?;
    let is_unknown = |[.., a, b, c, d]: &[u8; RANGE_LEN]| {
        u32::from_le_bytes([*a, *b, *c, *d]) & !known_flags(kind) != 0
    };
    Ok(match ranges.iter().any(is_unknown) {
        true => Status::Unsupported,
        false => Status::IoError,
    })
}

struct Extent {
    sector: u64,
    len: usize,
}

impl Extent {
    /// Returns the byte offset if the extent consists of whole sectors within the disk.
    fn check(&self, disk_sectors: u64) -> Option<u64> {
        let len = u64::try_from(self.len).ok()?;
        if !len.is_multiple_of(SECTOR_SIZE) {
            return None;
        }
        let end = self.sector.checked_add(len.checked_div(SECTOR_SIZE)?)?;
        if end > disk_sectors {
            return None;
        }
        self.sector.checked_mul(SECTOR_SIZE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_must_be_whole_sectors_within_the_disk() {
        let check = |sector, len| Extent { sector, len }.check(8);
        assert_eq!(check(0, 512), Some(0));
        assert_eq!(check(7, 512), Some(7 * 512));
        assert_eq!(check(0, 4096), Some(0));
        assert_eq!(check(8, 0), Some(4096));
        assert_eq!(check(7, 1024), None);
        assert_eq!(check(8, 512), None);
        assert_eq!(check(0, 511), None);
        assert_eq!(check(u64::MAX, 512), None);
        assert_eq!(check(u64::MAX / 512, usize::MAX & !511), None);
    }
}
