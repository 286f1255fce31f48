//! Files that no `qemu-img` writes.

use std::io::Write;

use proptest::prelude::*;

use super::super::build::{self, put};
use super::converted;
use crate::Limits;
use crate::disk::ConvertError;
use crate::disk::convert_error::Qcow2Error;

fn qcow2_error(bytes: &[u8]) -> Qcow2Error {
    match converted(bytes, &Limits::default()) {
        Err(ConvertError::Qcow2(error)) => error,
        other => panic!("{:?}", other.map(|(converted, ..)| converted)),
    }
}

/// A small file: header, L1 table at 64 KiB, L2 at 128 KiB, one cluster of ones at 192 KiB.
fn small() -> Vec<u8> {
    let mut file = vec![0; 256 << 10];
    file[..4].copy_from_slice(b"QFI\xfb");
    file[7] = 3;
    file[23] = 16;
    put(&mut file, 24, 1 << 20);
    file[39] = 1;
    put(&mut file, 40, 64 << 10);
    file[99] = 4;
    file[103] = 104;
    put(&mut file, 64 << 10, 128 << 10 | 1 << 63);
    put(&mut file, 128 << 10, 192 << 10 | 1 << 63);
    file[192 << 10..].fill(1);
    file
}

#[test]
fn hostile_files_are_refused_in_words() {
    let (_, disk, _) = converted(&small()[..], &Limits::default()).unwrap();
    assert!(disk[..65536] == [1; 65536] && disk.len() == 1 << 20);
    type Damage = fn(&mut Vec<u8>);
    let cases: &[(Damage, &str)] = &[
        (|file| file[7] = 1, "of version 1"),
        (|file| file[7] = 4, "of version 4"),
        (|file| file[15] = 200, "needs a backing file"),
        (|file| file[79] = 4, "data is in an external file"),
        (|file| file[35] = 1, "is encrypted"),
        (|file| file[35] = 2, "is encrypted"),
        (|file| file[79] = 2, "marked as corrupt"),
        (|file| file[79] = 16, "extended L2 entries"),
        (
            |file| file[72] = 0x80,
            "unknown here (incompatible bits 0x8000000000000000)",
        ),
        (|file| file[79] = 8, "the compression type in its header"),
        (|file| file[23] = 8, "the cluster size in its header"),
        (|file| file[23] = 22, "the cluster size in its header"),
        (|file| file[23] = 255, "the cluster size in its header"),
        (|file| file[99] = 7, "the refcount order in its header"),
        (|file| file[103] = 72, "the header's length in its header"),
        (|file| file[24] = 0xff, "at most 2199023255552 are allowed"),
        (
            |file| (file[23], file[27]) = (9, 1 << 5),
            "L1 table is larger than 8 MiB",
        ),
        (|file| file[39] = 0, "the L1 table's size in its header"),
        (|file| file[47] = 1, "the L1 table's place in its header"),
        (
            |file| put(file, 40, 0),
            "the L1 table's place in its header",
        ),
        (|file| put(file, 40, 1 << 50), "more than 2^28 clusters"),
        (
            |file| put(file, 40, u64::MAX << 16),
            "more than 2^28 clusters",
        ),
        (
            |file| put(file, 40, 1 << 30),
            "its L1 table at 0x40000000 is past its end",
        ),
        (
            |file| put(file, 64 << 10, 1 << 30),
            "its L2 table at 0x40000000 is past its end",
        ),
        (
            |file| put(file, 128 << 10, 1 << 30),
            "its cluster at 0x40000000 is past its end",
        ),
        (
            |file| put(file, 128 << 10, 1 << 55),
            "more than 2^28 clusters",
        ),
        (
            |file| put(file, 64 << 10, 0x20200),
            "the L2 table at 0x20200 is not aligned",
        ),
        (
            |file| put(file, 128 << 10, 0x30200),
            "the cluster at 0x30200 is not aligned",
        ),
        (
            |file| put(file, 128 << 10, 0x10000),
            "at 0x10000, something else is where a cluster should be",
        ),
        (
            |file| put(file, 128 << 10, 0x20000),
            "at 0x20000, something else is where a cluster should be",
        ),
        (
            |file| put(file, 64 << 10, 0x10000),
            "at 0x10000, something else is where a L2 table should be",
        ),
        (
            |file| {
                put(file, (128 << 10) + 8, 192 << 10);
            },
            "at 0x30000, something else is where a cluster should be",
        ),
        (
            |file| put(file, 128 << 10, 1 << 62 | 192 << 10),
            "the compressed cluster at 0x30000 cannot be decompressed",
        ),
        (
            |file| put(file, 128 << 10, 1 << 62 | 64 << 10),
            "at 0x10000, something else is where a compressed cluster should be",
        ),
        (
            |file| put(file, 128 << 10, 1 << 62 | 1 << 40),
            "its cluster at 0x10000000000 is past its end",
        ),
        (
            |file| {
                file[7] = 2;
                put(file, 128 << 10, 1);
            },
            "a zero cluster in a file of version 2",
        ),
        (
            |file| file.truncate(64 << 10),
            "its L1 table at 0x10000 is past its end",
        ),
        (
            |file| file.truncate(128 << 10),
            "its L2 table at 0x20000 is past its end",
        ),
        (
            |file| file.truncate(192 << 10),
            "its cluster at 0x30000 is past its end",
        ),
        (
            |file| file.truncate(60),
            "the header's length in its header",
        ),
    ];
    for (index, (damage, words)) in cases.iter().enumerate() {
        let mut file = small();
        damage(&mut file);
        let message = qcow2_error(&file).to_string();
        assert!(message.contains(words), "{index}: {message}");
    }
}

#[test]
fn a_dirty_file_and_zero_clusters_are_read() {
    let mut file = small();
    file[79] = 1;
    put(&mut file, (128 << 10) + 8, 1);
    // A preallocated zero cluster.
    put(&mut file, 128 << 10, 192 << 10 | 1);
    let (_, disk, _) = converted(&file[..], &Limits::default()).unwrap();
    assert!(disk.iter().all(|byte| *byte == 0));
}

/// A disk of 512 MiB, all of whose clusters are one compressed cluster of `byte`.
fn all_the_same(byte: u8) -> Vec<u8> {
    let mut file = small();
    put(&mut file, 24, 512 << 20);
    let mut deflate = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
    deflate.write_all(&[byte; 65536]).unwrap();
    let packed = deflate.finish().unwrap();
    file[192 << 10..][..packed.len()].copy_from_slice(&packed);
    for at in (128 << 10..192 << 10).step_by(8) {
        put(&mut file, at, 1 << 62 | 192 << 10);
    }
    file
}

#[test]
fn one_compressed_cluster_that_stands_for_many_is_bounded_by_the_limits() {
    let limits = Limits {
        disk_data_bytes: 10 << 20,
        ..Limits::default()
    };
    let error = converted(&all_the_same(1)[..], &limits).unwrap_err();
    assert!(
        matches!(error, ConvertError::TooLarge { what: "data", .. }),
        "{error:?}"
    );
}

#[test]
fn zeros_of_compressed_clusters_count() {
    let file = all_the_same(0);
    // The file has 256 KiB.
    let (_, disk, _) = converted(&file[..], &Limits::default()).unwrap();
    assert!(disk.iter().all(|byte| *byte == 0));
    let with = |ratio, bytes| Limits {
        disk_unpacked_ratio: ratio,
        disk_unpacked_bytes: bytes,
        ..Limits::default()
    };
    for enough in [with(4096, 0), with(0, 512 << 20)] {
        converted(&file[..], &enough).unwrap();
    }
    for less in [with(512, 0), with(0, (512 << 20) - 1)] {
        let error = converted(&file[..], &less).unwrap_err();
        let what = "decompressed clusters";
        assert!(
            matches!(error, ConvertError::TooLarge { what: found, .. } if found == what),
            "{error:?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_damaged_file_gives_a_disk_or_an_error(
        data in prop::collection::vec((0u64..64, any::<u8>()), 1..40),
        seed in any::<u64>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let (mut file, _) = build::build(&data, seed, 9);
        damage.iter().for_each(|(at, byte)| {
            let at = at.index(file.len());
            file[at] = *byte;
        });
        file.truncate(cut.index(file.len()) + 1);
        let limits = Limits { disk_bytes: 1 << 30, ..Limits::default() };
        let _ = converted(&file[..], &limits);
    }
}
