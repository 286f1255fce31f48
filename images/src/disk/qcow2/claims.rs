//! Records which of a file's clusters are in use, so that no two things overlap.

use std::collections::BTreeMap;

use crate::disk::convert_error::Qcow2Error;

/// Clusters of a file; bounds the memory for claims to 64 MiB.
const CLUSTERS: u64 = 1 << 28;
/// Words of a piece of a bitmap.
const PIECE: usize = 512;

/// Host clusters by their content. Compressed clusters may share theirs, all others may not.
#[derive(Debug)]
pub(super) struct Claims {
    cluster_bits: u32,
    whole: Bitmap,
    compressed: Bitmap,
}

impl Claims {
    pub(super) fn new(cluster_bits: u32) -> Self {
        Self {
            cluster_bits,
            whole: Bitmap::default(),
            compressed: Bitmap::default(),
        }
    }

    /// Claims the cluster at `offset` for a table or for data.
    pub(super) fn whole(&mut self, what: &'static str, offset: u64) -> Result<(), Qcow2Error> {
        let cluster = self.cluster(offset)?;
        if self.compressed.has(cluster) || !self.whole.set(cluster) {
            return Err(Qcow2Error::Overlap { what, offset });
        }
        Ok(())
    }

    /// Records that compressed data starts at `offset`.
    pub(super) fn compressed(&mut self, offset: u64) -> Result<(), Qcow2Error> {
        let cluster = self.cluster(offset)?;
        if self.whole.has(cluster) {
            let what = "compressed cluster";
            return Err(Qcow2Error::Overlap { what, offset });
        }
        self.compressed.set(cluster);
        Ok(())
    }

    fn cluster(&self, offset: u64) -> Result<u64, Qcow2Error> {
        let cluster = offset >> self.cluster_bits;
        if cluster < CLUSTERS {
            Ok(cluster)
        } else {
            Err(Qcow2Error::Clusters)
        }
    }
}

#[derive(Debug, Default)]
struct Bitmap(BTreeMap<u64, Box<[u64; PIECE]>>);

impl Bitmap {
    fn place(bit: u64) -> (u64, usize, u64) {
        let word = bit / 64;
        let within = word % PIECE as u64;
        // Less than PIECE, so the cast loses nothing.
        (word / PIECE as u64, within as usize, 1 << (bit % 64))
    }

    fn has(&self, bit: u64) -> bool {
        let (piece, word, mask) = Self::place(bit);
        self.0
            .get(&piece)
            .is_some_and(|piece| piece[word] & mask != 0)
    }

    /// Sets a bit; returns false if it was set already.
    fn set(&mut self, bit: u64) -> bool {
        let (piece, word, mask) = Self::place(bit);
        let piece = self.0.entry(piece).or_insert_with(|| Box::new([0; PIECE]));
        let new = piece[word] & mask == 0;
        piece[word] |= mask;
        new
    }
}
