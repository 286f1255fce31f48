//! The header of a qcow2 file, version 3, as specified by QEMU's `docs/interop/qcow2.txt`. All
//! numbers are big-endian.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::Qcow2Error;

/// Bytes of a cluster: the format's default, and the only size that is supported.
pub(super) const CLUSTER: u64 = 1 << CLUSTER_BITS;
const CLUSTER_BITS: u32 = 16;

/// Entries of an L2 table, or of the refcount table: 8 bytes each.
pub(super) const ENTRIES: u64 = CLUSTER / 8;

/// Reference counts in a refcount block: 16 bits each.
pub(super) const COUNTS: u64 = CLUSTER / 2;

/// Bytes of the disk that an L2 table maps: 512 MiB.
const MAPPED: u64 = CLUSTER * ENTRIES;

/// The largest disk. One cluster of the refcount table is enough for twice that size.
pub(super) const MAX_SIZE: u64 = 8 << 40;

/// Bytes of the header that are read: without names and extensions.
const FIXED: usize = 104;

/// Where the name of the base is: after an extension of 16 bytes and the last one, of 8.
const NAME_AT: u64 = FIXED as u64 + 24;

const MAGIC: [u8; 4] = *b"QFI\xfb";
/// The header extension with the format of the base.
const BASE_FORMAT: u32 = 0xe279_2aca;
const MAX_NAME: usize = 1023;

/// Bits of `incompatible_features`.
const DIRTY: u64 = 1;
const CORRUPT: u64 = 2;

/// A flag of an entry of the L1 table, or of a mapped cluster in an L2 table: its target has
/// exactly one reference (`QCOW_OFLAG_COPIED`).
pub(super) const OWN: u64 = 1 << 63;

/// The bits of an entry with the offset of a table or a cluster.
pub(super) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// The fields of a header that the rest of the engine needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Bytes of the disk.
    pub(super) size: u64,
    /// The offset of the L1 table in the file, and the number of its entries.
    pub(super) l1_offset: u64,
    pub(super) l1_entries: u64,
    /// The offset of the refcount table in the file. Only its first cluster is used: it is enough
    /// for the largest disk.
    pub(super) counts_offset: u64,
}

/// Reads big-endian numbers from bytes, one after the other; zeroes after their end.
struct Fields<'b>(&'b [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut field = [0; N];
        let (bytes, rest) = self.0.split_at_checked(N).unwrap_or((self.0, &[]));
        for (to, from) in field.iter_mut().zip(bytes) {
            *to = *from;
        }
        self.0 = rest;
        field
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }
}

/// Entries of the L1 table that a disk of `size` bytes needs.
pub(super) fn l1_entries(size: u64) -> u64 {
    size.div_ceil(MAPPED)
}

impl Header {
    /// Parses the start of the file's first cluster.
    ///
    /// # Errors
    /// If the file is not an overlay that this engine supports.
    pub(super) fn parse(cluster: &[u8]) -> Result<Self, Qcow2Error> {
        let unsupported = |what| Err(Qcow2Error::Unsupported { what });
        let mut fields = Fields(cluster);
        if fields.take() != MAGIC || cluster.len() < FIXED {
            return Err(Qcow2Error::NotQcow2);
        }
        if fields.u32() != 3 {
            return unsupported("another version than 3");
        }
        let (name_at, name_len) = (fields.u64(), fields.u32());
        let cluster_bits = fields.u32();
        let size = fields.u64();
        let encryption = fields.u32();
        let l1_entries_there = u64::from(fields.u32());
        let l1_offset = fields.u64();
        let counts_offset = fields.u64();
        let counts_clusters = u64::from(fields.u32());
        let (snapshots, _) = (fields.u32(), fields.u64());
        let (incompatible, _compatible, autoclear) = (fields.u64(), fields.u64(), fields.u64());
        let count_bits = fields.u32();
        let header_len = fields.u32();
        match incompatible {
            0 => {}
            set if set & CORRUPT != 0 => return Err(Qcow2Error::Marked { state: "corrupt" }),
            set if set & DIRTY != 0 => return Err(Qcow2Error::Marked { state: "dirty" }),
            _ => return unsupported("features that are incompatible"),
        }
        if cluster_bits != CLUSTER_BITS || count_bits != 4 {
            return unsupported("clusters of another size than 64 KiB");
        }
        if encryption != 0 || snapshots != 0 || autoclear != 0 {
            return unsupported("encryption, snapshots or bitmaps");
        }
        if name_at == 0 || name_len == 0 || !is_over_raw(cluster, header_len) {
            return Err(Qcow2Error::NoRawBase);
        }
        if size > MAX_SIZE {
            return Err(Qcow2Error::TooLarge {
                size,
                most: MAX_SIZE,
            });
        }
        let aligned = |offset: u64| offset != 0 && offset.is_multiple_of(CLUSTER);
        if !aligned(l1_offset) || !aligned(counts_offset) {
            return Err(Qcow2Error::Damaged {
                what: "a table lies where none can",
            });
        }
        if l1_entries_there < l1_entries(size) || counts_clusters == 0 {
            return Err(Qcow2Error::Damaged {
                what: "a table is too short",
            });
        }
        Ok(Self {
            size,
            l1_offset,
            // Entries beyond that are not used.
            l1_entries: l1_entries(size),
            counts_offset,
        })
    }
}

/// Where the header has the offset and the length of the base's name.
const BASE_AT: u64 = 8;

/// Returns what to write into a file, and where, so that it has no base.
pub(super) fn without_base() -> (u64, [u8; 12]) {
    (BASE_AT, [0; 12])
}

/// Where the header has the size of the disk, followed by the kind of encryption, which is none,
/// and the number of entries of the L1 table.
const SIZE_AT: u64 = 24;

impl Header {
    /// Returns what to write into the file, and where, for a disk of `size` bytes: as many as the
    /// clusters of its L1 table have entries for.
    ///
    /// # Errors
    /// [`Qcow2Error::TooLarge`].
    pub(super) fn grown(&self, size: u64) -> Result<(u64, Vec<u8>), Qcow2Error> {
        let clusters = self.l1_entries.div_ceil(ENTRIES).max(1);
        let most = clusters.saturating_mul(ENTRIES).saturating_mul(MAPPED);
        let most = most.min(MAX_SIZE);
        if size > most {
            return Err(Qcow2Error::TooLarge { size, most });
        }
        // At most MAX_SIZE / MAPPED.
        let entries = u32::try_from(l1_entries(size)).unwrap_or(u32::MAX);
        let mut bytes = size.to_be_bytes().to_vec();
        bytes.extend(0u32.to_be_bytes());
        bytes.extend(entries.to_be_bytes());
        Ok((SIZE_AT, bytes))
    }
}

/// Whether the header's extensions declare the base as raw.
fn is_over_raw(cluster: &[u8], header_len: u32) -> bool {
    let start = usize::try_from(header_len).unwrap_or(usize::MAX);
    let mut rest = Fields(cluster.get(start..).unwrap_or_default());
    while !rest.0.is_empty() {
        let (kind, len) = (rest.u32(), rest.u32());
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        match kind {
            0 => return false,
            BASE_FORMAT => return rest.0.get(..len) == Some(b"raw"),
            _ => {
                let padded = len.checked_next_multiple_of(8).unwrap_or(usize::MAX);
                rest.0 = rest.0.get(padded..).unwrap_or_default();
            }
        }
    }
    false
}

/// Creates a new overlay of a disk of `size` bytes, rounded down to whole sectors: pieces of the
/// file and their offsets.
///
/// # Errors
/// [`Qcow2Error::Name`] and [`Qcow2Error::TooLarge`].
pub(super) fn new_image(size: u64, name: &Path) -> Result<Vec<(u64, Vec<u8>)>, Qcow2Error> {
    let size = size.saturating_sub(size % crate::blk::SECTOR_SIZE);
    if size > MAX_SIZE {
        return Err(Qcow2Error::TooLarge {
            size,
            most: MAX_SIZE,
        });
    }
    let name = name.as_os_str().as_bytes();
    let name_len = match u32::try_from(name.len()) {
        Ok(len) if name.len() <= MAX_NAME && len > 0 => len,
        _ => return Err(Qcow2Error::Name),
    };
    // Header, refcount table, refcount block, L1 table.
    let [counts_at, block_at, l1_at] = [CLUSTER, 2 * CLUSTER, 3 * CLUSTER];
    let entries = l1_entries(size);
    let l1_clusters = entries.div_ceil(ENTRIES).max(1);
    let l1_entries = u32::try_from(entries).unwrap_or(u32::MAX);

    let mut header = Vec::new();
    header.extend(MAGIC);
    header.extend(3u32.to_be_bytes());
    header.extend(NAME_AT.to_be_bytes());
    header.extend(name_len.to_be_bytes());
    header.extend(CLUSTER_BITS.to_be_bytes());
    header.extend(size.to_be_bytes());
    header.extend(0u32.to_be_bytes());
    header.extend(l1_entries.to_be_bytes());
    header.extend(l1_at.to_be_bytes());
    header.extend(counts_at.to_be_bytes());
    header.extend(1u32.to_be_bytes());
    // No snapshots, no features.
    header.extend([0; 12 + 24]);
    header.extend(4u32.to_be_bytes());
    header.extend((FIXED as u32).to_be_bytes());
    header.extend(BASE_FORMAT.to_be_bytes());
    header.extend(3u32.to_be_bytes());
    header.extend(*b"raw\0\0\0\0\0");
    header.extend([0; 8]);
    header.extend(name);

    let used = l1_clusters.saturating_add(3);
    let counts: Vec<u8> = (0..used).flat_map(|_| 1u16.to_be_bytes()).collect();
    let l1 = usize::try_from(l1_clusters.saturating_mul(CLUSTER)).unwrap_or(0);
    let mut block = counts;
    block.resize(CLUSTER as usize, 0);
    let mut table = block_at.to_be_bytes().to_vec();
    table.resize(CLUSTER as usize, 0);
    Ok(vec![
        (0, header),
        (counts_at, table),
        (block_at, block),
        (l1_at, vec![0; l1]),
    ])
}
