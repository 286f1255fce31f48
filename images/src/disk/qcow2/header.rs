//! The header (QEMU's docs/interop/qcow2.txt, "Header").

use crate::Limits;
use crate::disk::convert_error::Qcow2Error;

/// First bytes of a qcow2 file, and of its predecessor.
pub(in crate::disk) const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Bytes of the longest header that is read.
pub(super) const HEADER: usize = 112;
/// Maximum bytes of an L1 table. The largest virtual disk that qemu-img creates with its default
/// cluster size needs 16 KiB for each TiB.
const L1_BYTES: u64 = 8 << 20;

/// How clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Codec {
    Deflate,
    Zstd,
}

/// The header fields that are needed to read the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) cluster_bits: u32,
    /// Bytes of the disk.
    pub(super) size: u64,
    /// Entries of the L1 table that map a part of the disk.
    pub(super) l1_entries: u64,
    pub(super) l1_offset: u64,
    pub(super) codec: Codec,
}

fn u32_at(bytes: &[u8; HEADER], at: usize) -> u32 {
    bytes[at..]
        .first_chunk()
        .map_or(0, |field| u32::from_be_bytes(*field))
}

fn u64_at(bytes: &[u8; HEADER], at: usize) -> u64 {
    bytes[at..]
        .first_chunk()
        .map_or(0, |field| u64::from_be_bytes(*field))
}

impl Header {
    /// Parses the first bytes of a file, padded with zeros if there are fewer.
    pub(super) fn parse(bytes: &[u8; HEADER], limits: &Limits) -> Result<Self, Qcow2Error> {
        let version = u32_at(bytes, 4);
        if bytes[..4] != MAGIC || !matches!(version, 2 | 3) {
            return Err(Qcow2Error::Version(version));
        }
        if u64_at(bytes, 8) != 0 {
            return Err(Qcow2Error::BackingFile);
        }
        if u32_at(bytes, 32) != 0 {
            return Err(Qcow2Error::Encrypted);
        }
        let codec = if version == 3 {
            codec(bytes)?
        } else {
            Codec::Deflate
        };
        let cluster_bits = u32_at(bytes, 20);
        if !(9..=21).contains(&cluster_bits) {
            return Err(Qcow2Error::Header("cluster size"));
        }
        let size = u64_at(bytes, 24);
        let limit = limits.disk_bytes;
        if size > limit {
            return Err(Qcow2Error::Size { size, limit });
        }
        // Below 2^34 for every size, since an entry maps at least 32 KiB.
        let l1_entries = size.div_ceil(1 << (2 * cluster_bits - 3));
        if l1_entries * 8 > L1_BYTES {
            return Err(Qcow2Error::L1Size);
        }
        if u64::from(u32_at(bytes, 36)) < l1_entries {
            return Err(Qcow2Error::Header("L1 table's size"));
        }
        let header = Self {
            version,
            cluster_bits,
            size,
            l1_entries,
            l1_offset: u64_at(bytes, 40),
            codec,
        };
        let overlaps = header.l1_offset < header.cluster() && l1_entries > 0;
        if !header.l1_offset.is_multiple_of(header.cluster()) || overlaps {
            return Err(Qcow2Error::Header("L1 table's place"));
        }
        Ok(header)
    }

    /// Bytes of a cluster.
    pub(super) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Entries of an L2 table.
    pub(super) fn l2_entries(&self) -> u64 {
        self.cluster() / 8
    }
}

/// Reads version 3's features; all that change the meaning of the rest must be known.
fn codec(bytes: &[u8; HEADER]) -> Result<Codec, Qcow2Error> {
    /// Refcounts may be wrong, but they are not read.
    const DIRTY: u64 = 1 << 0;
    const CORRUPT: u64 = 1 << 1;
    const EXTERNAL_DATA: u64 = 1 << 2;
    const COMPRESSION_TYPE: u64 = 1 << 3;
    const EXTENDED_L2: u64 = 1 << 4;
    let incompatible = u64_at(bytes, 72);
    let has = |feature| incompatible & feature != 0;
    let unknown =
        incompatible & !(DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION_TYPE | EXTENDED_L2);
    if unknown != 0 {
        return Err(Qcow2Error::UnknownFeatures(unknown));
    }
    if has(EXTERNAL_DATA) {
        return Err(Qcow2Error::ExternalData);
    }
    if has(CORRUPT) {
        return Err(Qcow2Error::MarkedCorrupt);
    }
    if has(EXTENDED_L2) {
        return Err(Qcow2Error::ExtendedL2);
    }
    if u32_at(bytes, 96) > 6 {
        return Err(Qcow2Error::Header("refcount order"));
    }
    let length = u32_at(bytes, 100);
    if length < 104 || !length.is_multiple_of(8) {
        return Err(Qcow2Error::Header("header's length"));
    }
    // The field exists if the header is long enough.
    let kind = if length > 104 { bytes[104] } else { 0 };
    match (kind, has(COMPRESSION_TYPE)) {
        (0, false) => Ok(Codec::Deflate),
        (1, true) => Ok(Codec::Zstd),
        _ => Err(Qcow2Error::Header("compression type")),
    }
}
