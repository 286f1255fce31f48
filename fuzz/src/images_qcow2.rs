//! Disk images from an untrusted source.

use arbitrary::{Arbitrary, Unstructured};

/// The cluster size of generated files.
const CLUSTER: usize = 512;
/// The number of clusters of these files: enough for tables and data in any order.
const CLUSTERS: u16 = 64;

/// The content of a cluster of the file.
#[derive(Arbitrary, Debug)]
enum Content {
    Bytes(u8),
    /// Entries of a table: cluster and flags.
    Table(Vec<(u16, u8)>),
    /// A deflate-compressed cluster, at an offset.
    Packed(u16, u8),
}

#[derive(Arbitrary, Debug)]
struct File {
    version: bool,
    incompatible: u8,
    zstd: bool,
    size: u16,
    l1_size: u8,
    l1: u16,
    clusters: Vec<(u16, Content)>,
    cut: u16,
}

/// Half of all inputs are files as they are, the other half describe qcow2 files with valid
/// headers.
pub fn run(data: &[u8]) {
    let Some((first, rest)) = data.split_first() else {
        return;
    };
    if first & 1 == 0 {
        podvisor_images::fuzzing::disk(rest);
        return;
    }
    if let Ok(file) = File::arbitrary(&mut Unstructured::new(rest)) {
        podvisor_images::fuzzing::disk(&build(&file));
    }
}

fn offset(cluster: u16) -> u64 {
    u64::from(cluster % CLUSTERS) * CLUSTER as u64
}

fn build(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::from(CLUSTERS) * CLUSTER];
    let length = bytes.len();
    for (at, content) in &file.clusters {
        // Lies within the file.
        let start = offset(*at) as usize;
        match content {
            Content::Bytes(byte) => bytes[start..start + CLUSTER].fill(*byte),
            Content::Table(entries) => {
                for (index, (cluster, flags)) in entries.iter().take(CLUSTER / 8).enumerate() {
                    let flags = u64::from(*flags);
                    // Compressed data starts anywhere, whole clusters at their offset.
                    let within = if flags & 0x40 == 0 { 0 } else { flags & 0x3f };
                    let entry = offset(*cluster) | flags >> 6 << 62 | within | flags >> 5 & 1;
                    let at = start + index * 8;
                    bytes[at..at + 8].copy_from_slice(&entry.to_be_bytes());
                }
            }
            Content::Packed(within, byte) => {
                let start = (start + usize::from(within % 512)).min(length - 16);
                // 512 letters `b`; with another byte something else, or invalid.
                let mut packed = [0x4b, 0x4a, 0x1a, 0x05, 0x23, 0x19, 0x00, 0x00];
                packed[usize::from(byte % 8)] ^= byte >> 3;
                bytes[start..start + packed.len()].copy_from_slice(&packed);
            }
        }
    }
    let size = u64::from(file.size) * 64;
    let l1_size = u32::from(file.l1_size).max(u32::try_from(size.div_ceil(32 << 10)).unwrap_or(0));
    bytes[..4].copy_from_slice(b"QFI\xfb");
    bytes[4..8].copy_from_slice(&(2 + u32::from(file.version)).to_be_bytes());
    bytes[8..20].fill(0);
    bytes[20..24].copy_from_slice(&9u32.to_be_bytes());
    bytes[24..32].copy_from_slice(&size.to_be_bytes());
    bytes[32..36].fill(0);
    bytes[36..40].copy_from_slice(&l1_size.to_be_bytes());
    bytes[40..48].copy_from_slice(&offset(file.l1).max(CLUSTER as u64).to_be_bytes());
    let zstd = u8::from(file.zstd);
    bytes[72..80].copy_from_slice(&u64::from(file.incompatible & 1 | zstd << 3).to_be_bytes());
    bytes[96..104].copy_from_slice(&[0, 0, 0, 4, 0, 0, 0, 112]);
    bytes[104] = zstd;
    bytes.truncate(length - usize::from(file.cut) % length);
    bytes
}

#[cfg(test)]
mod tests {
    #[test]
    fn smoke() {
        crate::smoke::run("images_qcow2", super::run);
    }
}
