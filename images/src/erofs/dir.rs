//! Directory data: blocks of entries sorted by name, each block with its entries first and their
//! names after.

use super::BLOCK;
use super::layout::DIRENT;

/// A directory's entry: name, inode number, file type.
pub(super) type DirEntry<'a> = (&'a [u8], u64, u8);

/// Returns how many entries go into each block, and the total length in bytes. `names` are the
/// lengths of the names, sorted by name.
pub(super) fn plan(names: impl Iterator<Item = usize>) -> (Vec<usize>, u64) {
    let mut counts = vec![0];
    let mut used = 0;
    for name in names {
        if used + DIRENT + name > BLOCK {
            counts.push(0);
            used = 0;
        }
        used += DIRENT + name;
        if let Some(count) = counts.last_mut() {
            *count += 1;
        }
    }
    let size = (counts.len() - 1) * BLOCK + used;
    (counts, size as u64)
}

/// Encodes sorted entries, all blocks but the last padded with zeros.
pub(super) fn encode(entries: &[DirEntry<'_>]) -> Vec<u8> {
    let (counts, size) = plan(entries.iter().map(|(name, ..)| name.len()));
    let mut out = Vec::with_capacity(size as usize);
    let mut rest = entries;
    for (index, count) in counts.iter().enumerate() {
        out.resize(index * BLOCK, 0);
        let (block, after) = rest.split_at(*count);
        rest = after;
        let mut name_at = block.len() * DIRENT;
        for (name, nid, file_type) in block {
            out.extend_from_slice(&nid.to_le_bytes());
            // Offsets within a block fit 16 bits.
            out.extend_from_slice(&(name_at as u16).to_le_bytes());
            out.extend_from_slice(&[*file_type, 0]);
            name_at += name.len();
        }
        block
            .iter()
            .for_each(|(name, ..)| out.extend_from_slice(name));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_block_ends_before_the_entry_that_does_not_fit() {
        let names: Vec<Vec<u8>> = (0..40).map(|i| vec![b'a' + i as u8 % 26; 200]).collect();
        let entries: Vec<DirEntry<'_>> = names.iter().map(|name| (name.as_slice(), 7, 1)).collect();
        let (counts, size) = plan(names.iter().map(Vec::len));
        assert_eq!(counts, [19, 19, 2]); // 19 * 212 = 4028
        let bytes = encode(&entries);
        assert_eq!(bytes.len() as u64, size);
        assert_eq!(bytes.len(), 2 * BLOCK + 2 * 212);
        assert_eq!(
            u16::from_le_bytes([bytes[BLOCK + 8], bytes[BLOCK + 9]]),
            19 * 12
        );
        assert!(bytes[4028..BLOCK].iter().all(|byte| *byte == 0));
    }
}
