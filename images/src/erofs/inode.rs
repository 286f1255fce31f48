//! Places inodes and encodes what follows each of them: extended attributes and the tail of its
//! data.

use super::BLOCK;
use super::layout::{SLOT, XATTR_ENTRY, XATTR_HEADER, inode_bytes};
use crate::tree::Meta;

/// Name prefixes that EROFS stores as a number (`EROFS_XATTR_INDEX_*`).
const PREFIXES: [(&[u8], u8); 5] = [
    (b"user.", 1),
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"trusted.", 4),
    (b"security.", 6),
];

/// Splits an attribute's name into the number and the rest; `None` for a name that EROFS cannot
/// store.
fn split_xattr(name: &[u8]) -> Option<(u8, &[u8])> {
    PREFIXES.iter().find_map(|(prefix, index)| {
        let rest = name.strip_prefix(*prefix)?;
        // The two ACLs are whole names, the others need something after them.
        let whole = matches!(index, 2 | 3);
        (rest.is_empty() == whole && rest.len() <= 255).then_some((*index, rest))
    })
}

/// Returns whether EROFS can store an attribute of that name.
pub(crate) fn storable_xattr(name: &[u8]) -> bool {
    split_xattr(name).is_some()
}

/// Bytes of an inode's attributes, 0 without any.
pub(super) fn xattr_bytes(meta: &Meta) -> usize {
    let entries: usize = meta
        .xattrs
        .iter()
        .filter_map(|(name, value)| Some(entry_bytes(split_xattr(name)?.1, value)))
        .sum();
    if entries == 0 {
        0
    } else {
        XATTR_HEADER + entries
    }
}

fn entry_bytes(name: &[u8], value: &[u8]) -> usize {
    (XATTR_ENTRY + name.len() + value.len()).next_multiple_of(4)
}

pub(super) fn encode_xattrs(meta: &Meta, out: &mut Vec<u8>) {
    if xattr_bytes(meta) == 0 {
        return;
    }
    out.resize(out.len() + XATTR_HEADER, 0);
    for (name, value) in &meta.xattrs {
        let Some((index, rest)) = split_xattr(name) else {
            continue;
        };
        let end = out.len() + entry_bytes(rest, value);
        // `split_xattr` and the reader of layers bound both lengths.
        out.extend_from_slice(&[rest.len() as u8, index]);
        out.extend_from_slice(&(value.len() as u16).to_le_bytes());
        out.extend_from_slice(rest);
        out.extend_from_slice(value);
        out.resize(end, 0);
    }
}

/// Returns whether `tail` bytes may follow an inode with this many bytes of attributes.
///
/// Half a block is the maximum for data: longer tails would leave as much of the inode area unused
/// as they save.
pub(super) fn may_inline(tail: usize, xattr_bytes: usize) -> bool {
    tail <= BLOCK / 2 && inode_bytes(false) + xattr_bytes + tail <= BLOCK
}

/// Finds the slot of an inode that may start at byte `from` of the inode area: the inode itself and
/// its tail must not cross the end of a block.
pub(super) fn place(from: u64, compact: bool, xattr_bytes: usize, tail: usize) -> u64 {
    let at = from.next_multiple_of(SLOT);
    let block = BLOCK as u64;
    let crosses = |start: u64, length: u64| length > 0 && start % block + length > block;
    let inode = inode_bytes(compact) as u64;
    let fixed = inode + xattr_bytes as u64;
    if crosses(at, inode) || crosses(at + fixed, tail as u64) {
        at.next_multiple_of(block)
    } else {
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attribute_names_are_split_or_refused() {
        assert_eq!(
            split_xattr(b"security.capability"),
            Some((6, b"capability".as_slice()))
        );
        assert_eq!(
            split_xattr(b"system.posix_acl_access"),
            Some((2, b"".as_slice()))
        );
        assert_eq!(split_xattr(b"system.posix_acl_access2"), None);
        assert_eq!(split_xattr(b"user."), None);
        assert_eq!(split_xattr(b"com.apple.x"), None);
    }

    #[test]
    fn neither_an_inode_nor_its_tail_crosses_a_block() {
        assert_eq!(place(4064, true, 0, 0), 4064);
        assert_eq!(place(4064, false, 0, 0), 4096);
        assert_eq!(place(1, false, 0, 100), 32);
        assert_eq!(place(2048, false, 0, 1984), 2048);
        assert_eq!(place(2048, false, 0, 1985), 4096);
        assert_eq!(place(2048, false, 1984, 2048), 2048); // the tail begins the next block
    }
}
