//! A block request: the chain's header, read once and checked (§5.2.6).

use super::SECTOR_SIZE;
use crate::GuestRam;
use crate::virtio::{Chain, Fault};

/// Bytes of the header: type, reserved, sector.
const HEADER_LEN: usize = 16;

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

/// What a chain asks for. Offsets and lengths are in bytes and within the disk.
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
    GetId {
        len: usize,
    },
    /// Answered with this status and nothing else.
    Refuse(Status),
}

/// Where the data of a write begins in the device-readable part.
pub(super) const WRITE_DATA: usize = HEADER_LEN;

impl Request {
    /// Parses the chain.
    ///
    /// # Errors
    /// When there is no whole header or no room for the status byte: such a request cannot
    /// even be refused.
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
            4 => Self::Flush,
            8 => Self::GetId {
                len: data_in.min(ID_LEN),
            },
            _ => Self::Refuse(Status::Unsupported),
        })
    }
}

struct Extent {
    sector: u64,
    len: usize,
}

impl Extent {
    /// The byte offset, when the extent is whole sectors within the disk.
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
