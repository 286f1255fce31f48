//! The on-disk structures, little endian (Linux, `fs/erofs/erofs_fs.h`).

use super::BLOCK;

pub(super) const SUPER_OFFSET: usize = 1024;
pub(super) const MAGIC: u32 = 0xE0F5_E1E2;
const COMPAT_SB_CHKSUM: u32 = 0x1;
const COMPAT_MTIME: u32 = 0x2;

/// Bytes of a slot; an inode's number (nid) is the slot that it starts in.
pub(super) const SLOT: u64 = 32;
pub(super) const DIRENT: usize = 12;
pub(super) const XATTR_HEADER: usize = 12;
pub(super) const XATTR_ENTRY: usize = 4;

/// File types in directory entries.
pub(super) mod file_type {
    pub(crate) const REGULAR: u8 = 1;
    pub(crate) const DIR: u8 = 2;
    pub(crate) const CHAR: u8 = 3;
    pub(crate) const BLOCK: u8 = 4;
    pub(crate) const FIFO: u8 = 5;
    pub(crate) const SYMLINK: u8 = 7;
}

/// Where an inode's data is (`i_format`, bits 1 to 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataLayout {
    /// All of it in blocks.
    Plain = 0,
    /// Whole blocks in blocks, the rest after the inode.
    Inline = 2,
}

#[derive(Debug)]
pub(super) struct Superblock {
    pub(super) root_nid: u16,
    pub(super) inodes: u64,
    pub(super) build_time: i64,
    pub(super) blocks: u32,
    pub(super) meta_block: u32,
    pub(super) uuid: [u8; 16],
}

impl Superblock {
    /// Block 0, with its checksum.
    pub(super) fn encode(&self) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        let mut put = Cursor {
            bytes: &mut block,
            at: SUPER_OFFSET,
        };
        put.u32(MAGIC);
        put.u32(0); // the checksum, below
        put.u32(COMPAT_SB_CHKSUM | COMPAT_MTIME);
        put.u8(BLOCK.trailing_zeros() as u8);
        put.u8(0);
        put.u16(self.root_nid);
        put.u64(self.inodes);
        put.u64(self.build_time as u64);
        put.u32(0); // nanoseconds of the build time
        put.u32(self.blocks);
        put.u32(self.meta_block);
        put.u32(0); // shared xattrs: none
        put.bytes(&self.uuid);
        // Volume name, incompatible features, compression, extra devices: all zero.
        let checksum = crc32c(&block[SUPER_OFFSET..]);
        block[SUPER_OFFSET + 4..SUPER_OFFSET + 8].copy_from_slice(&checksum.to_le_bytes());
        block
    }
}

/// CRC-32C as the kernel computes it: starts with all ones, no inversion at the end.
fn crc32c(bytes: &[u8]) -> u32 {
    bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            let low = crc & 1;
            crc >> 1 ^ (low.wrapping_neg() & 0x82F6_3B78)
        })
    })
}

/// An inode without what follows it. It takes 32 bytes if everything fits, otherwise 64.
#[derive(Debug)]
pub(super) struct RawInode {
    pub(super) layout: DataLayout,
    pub(super) xattr_bytes: usize,
    /// Type and permission bits, as in `st_mode`.
    pub(super) mode: u16,
    pub(super) links: u32,
    pub(super) size: u64,
    /// First data block, or the device number in the encoding of the kernel's `new_encode_dev`.
    pub(super) location: u32,
    pub(super) number: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mtime: i64,
    pub(super) mtime_nsec: u32,
}

impl RawInode {
    pub(super) fn encode(&self, compact: bool, out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + inode_bytes(compact), 0);
        let mut put = Cursor {
            bytes: &mut out[start..],
            at: 0,
        };
        put.u16(u16::from(!compact) | (self.layout as u16) << 1);
        put.u16(xattr_count(self.xattr_bytes));
        put.u16(self.mode);
        if compact {
            put.u16(self.links as u16);
            put.u32(self.size as u32);
            put.u32(0);
            put.u32(self.location);
            put.u32(self.number);
            put.u16(self.uid as u16);
            put.u16(self.gid as u16);
        } else {
            put.u16(0);
            put.u64(self.size);
            put.u32(self.location);
            put.u32(self.number);
            put.u32(self.uid);
            put.u32(self.gid);
            put.u64(self.mtime as u64);
            put.u32(self.mtime_nsec);
            put.u32(self.links);
        }
    }
}

pub(super) fn inode_bytes(compact: bool) -> usize {
    if compact { 32 } else { 64 }
}

/// `i_xattr_icount`: 4-byte units after the header, plus one for the header.
fn xattr_count(bytes: usize) -> u16 {
    if bytes == 0 {
        0
    } else {
        ((bytes - XATTR_HEADER) / 4 + 1) as u16
    }
}

struct Cursor<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Cursor<'_> {
    fn bytes(&mut self, bytes: &[u8]) {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
    fn u8(&mut self, value: u8) {
        self.bytes(&[value]);
    }
    fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }
    fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }
    fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc32c_without_the_last_inversion() {
        assert_eq!(!crc32c(b"123456789"), 0xE306_9283);
    }
}
