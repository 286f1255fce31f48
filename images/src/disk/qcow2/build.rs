//! Builds qcow2 files whose clusters are in any order, for tests.

use std::io::Write;

pub(super) fn put(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

/// Creates the disk of 64 clusters, and the list of those that have data.
fn disk(data: &[(u64, u8)], cluster: usize) -> (Vec<u8>, Vec<u64>) {
    let mut disk = vec![0; 64 * cluster];
    for (guest, byte) in data {
        let at = *guest as usize * cluster;
        let bytes = disk[at..at + cluster].iter_mut().enumerate();
        // Some compress well and some badly.
        bytes.for_each(|(index, found)| {
            *found = byte.wrapping_add((index * index / 50) as u8 & (byte >> 3));
        });
    }
    let mut guests: Vec<u64> = data.iter().map(|(guest, _)| *guest).collect();
    guests.sort_unstable();
    guests.dedup();
    (disk, guests)
}

fn header(file: &mut [u8], bits: u32, size: usize, tables: u64, l1: u64) {
    file[..4].copy_from_slice(b"QFI\xfb");
    file[7] = 3;
    file[23] = bits as u8;
    put(file, 24, size as u64);
    file[39] = tables as u8;
    put(file, 40, l1);
    file[99] = 4;
    file[103] = 104;
}

fn shuffle(count: u64, seed: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..count).collect();
    order.sort_by_key(|item| (item ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    order
}

/// Builds a file whose clusters, tables included, are in an order determined by `seed`; returns it
/// with its disk.
pub(super) fn build(data: &[(u64, u8)], seed: u64, bits: u32) -> (Vec<u8>, Vec<u8>) {
    let cluster = 1usize << bits;
    let (disk, guests) = disk(data, cluster);
    let entries = cluster as u64 / 8;
    let tables = 64u64.div_ceil(entries);
    // L1, L2 tables and data.
    let order = shuffle(1 + tables + guests.len() as u64, seed);
    let place = |item: u64| (order[item as usize] + 1) * cluster as u64;
    let mut file = vec![0; (order.len() + 1) * cluster];
    header(&mut file, bits, disk.len(), tables, place(0));
    for table in 0..tables {
        put(&mut file, (place(0) + table * 8) as usize, place(1 + table));
    }
    for (item, guest) in (1 + tables..).zip(&guests) {
        let at = place(1 + guest / entries) + guest % entries * 8;
        put(&mut file, at as usize, place(item));
        let (from, to) = (*guest as usize * cluster, place(item) as usize);
        file[to..to + cluster].copy_from_slice(&disk[from..from + cluster]);
    }
    (file, disk)
}

/// The same with compressed clusters, each directly after the previous one.
pub(super) fn build_packed(data: &[(u64, u8)], seed: u64, bits: u32) -> (Vec<u8>, Vec<u8>) {
    let cluster = 1usize << bits;
    let (disk, guests) = disk(data, cluster);
    let entries = cluster as u64 / 8;
    let tables = 64u64.div_ceil(entries);
    let mut file = vec![0; cluster];
    let mut places = vec![(0, 0); 1 + tables as usize + guests.len()];
    for item in shuffle(places.len() as u64, seed) {
        let content = match item.checked_sub(1 + tables) {
            // A table, which needs its own cluster.
            None => {
                file.resize(file.len().next_multiple_of(cluster), 0xee);
                vec![0; cluster]
            }
            Some(index) => {
                let at = guests[index as usize] as usize * cluster;
                let mut deflate =
                    flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
                deflate.write_all(&disk[at..at + cluster]).unwrap();
                deflate.finish().unwrap()
            }
        };
        places[item as usize] = (file.len(), content.len());
        file.extend_from_slice(&content);
    }
    let l1 = places[0].0;
    header(&mut file, bits, disk.len(), tables, l1 as u64);
    for table in 0..tables as usize {
        put(&mut file, l1 + table * 8, places[1 + table].0 as u64);
    }
    for (item, guest) in (1 + tables as usize..).zip(&guests) {
        let (start, length) = places[item];
        let sectors = (start + length - 1) / 512 - start / 512;
        let shift = 62 - (bits - 8);
        let entry = 1 << 62 | (sectors as u64) << shift | start as u64;
        let at = places[1 + (guest / entries) as usize].0 + (guest % entries * 8) as usize;
        put(&mut file, at, entry);
    }
    (file, disk)
}
