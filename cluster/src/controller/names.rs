//! Names of objects that are made: given by what they are for, so that nothing is made twice.

/// The length of a [`hash`].
pub(super) const HASH: usize = 8;

/// Returns what makes a name unique: unlike the first part of a random id, a hash of it does not
/// repeat parts that ids may have in common.
pub(super) fn hash(text: &str) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in text.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("{:08x}", (hash >> 32) ^ (hash & 0xffff_ffff))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_has_its_length_and_tells_texts_apart() {
        let hashes: std::collections::BTreeSet<_> =
            (0..1000).map(|n| hash(&format!("uid-{n}"))).collect();
        assert_eq!(hashes.len(), 1000);
        assert!(hashes.iter().all(|hash| hash.len() == HASH));
    }
}
