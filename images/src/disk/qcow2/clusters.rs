//! Decoding of table entries, and decompression of clusters.

use std::io::Read;

use flate2::{Decompress, FlushDecompress};

use super::header::{Codec, Header};
use super::plan::Packed;
use crate::decompress::ZstdReader;
use crate::disk::convert_error::Qcow2Error;

/// Bits of an entry that are an offset.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;

/// Where a guest cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Nowhere: it reads as zeros.
    Zero,
    /// In its own host cluster.
    Whole(u64),
    /// Compressed.
    Packed(Packed),
}

/// Returns the L2 table's offset in an L1 entry; `None` if there is no table.
pub(super) fn l2_offset(entry: u64, header: &Header) -> Result<Option<u64>, Qcow2Error> {
    aligned("L2 table", entry & OFFSET, header)
}

/// Reads an entry of an L2 table.
pub(super) fn place(entry: u64, guest: u64, header: &Header) -> Result<Place, Qcow2Error> {
    if entry & COMPRESSED != 0 {
        // The offset to the byte is in the low bits, the number of additional sectors in those
        // above.
        let bits = 62 - (header.cluster_bits - 8);
        let start = entry & ((1 << bits) - 1);
        let sectors = (entry & (COMPRESSED - 1)) >> bits;
        // Below 2^61 and 2^14.
        let end = ((start >> 9) + sectors + 1) << 9;
        return Ok(Place::Packed(Packed { start, end, guest }));
    }
    if entry & ZERO != 0 {
        return match header.version {
            2 => Err(Qcow2Error::ZeroInVersion2),
            _ => Ok(Place::Zero),
        };
    }
    let offset = aligned("cluster", entry & OFFSET, header)?;
    Ok(offset.map_or(Place::Zero, Place::Whole))
}

fn aligned(what: &'static str, offset: u64, header: &Header) -> Result<Option<u64>, Qcow2Error> {
    match offset {
        0 => Ok(None),
        offset if offset % header.cluster() == 0 => Ok(Some(offset)),
        offset => Err(Qcow2Error::Unaligned { what, offset }),
    }
}

/// Decompresses clusters.
pub(super) struct Unpacker {
    codec: Codec,
    deflate: Decompress,
    cluster: Vec<u8>,
}

impl Unpacker {
    pub(super) fn new(header: &Header) -> Self {
        Self {
            codec: header.codec,
            deflate: Decompress::new(false),
            // At most 2 MiB.
            cluster: vec![0; header.cluster() as usize],
        }
    }

    /// Decompresses the cluster that `data` starts with. Returns it and how many bytes of `data` it
    /// took, or slightly fewer; `None` if it is not a whole one.
    pub(super) fn unpack(&mut self, data: &[u8]) -> Option<(&[u8], u64)> {
        let used = match self.codec {
            Codec::Deflate => self.inflate(data)?,
            Codec::Zstd => {
                let mut rest = data;
                ZstdReader::new(&mut rest)
                    .read_exact(&mut self.cluster)
                    .ok()?;
                (data.len() - rest.len()) as u64
            }
        };
        Some((&self.cluster, used))
    }

    fn inflate(&mut self, data: &[u8]) -> Option<u64> {
        self.deflate.reset(false);
        let flush = FlushDecompress::Finish;
        let status = self.deflate.decompress(data, &mut self.cluster, flush);
        // Bytes after it in the last sector are ignored, and a full cluster is enough.
        let whole = status.is_ok() && self.deflate.total_out() == self.cluster.len() as u64;
        whole.then(|| self.deflate.total_in())
    }
}
