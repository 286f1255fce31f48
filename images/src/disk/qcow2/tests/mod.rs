//! Files of `qemu-img` in all their variants, the same with their clusters shuffled, and hostile
//! ones (`hostile.rs`).

mod hostile;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;

use proptest::prelude::*;

use super::build::{self, put};
use super::convert::convert_with;
use super::plan::Plan;
use crate::Limits;
use crate::disk::sparse::SparseFile;
use crate::disk::{ConvertError, Converted, Failure, Job, convert};

pub(in crate::disk) fn qemu_img(arguments: &[&str]) {
    let out = Command::new("qemu-img")
        .args(arguments)
        .output()
        .expect("qemu-img is needed: apt-get install qemu-utils");
    assert!(
        out.status.success(),
        "qemu-img {arguments:?}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
}

pub(in crate::disk) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Converts, and returns the disk and the space that the file takes.
pub(in crate::disk) fn converted(
    input: impl Read + Send,
    limits: &Limits,
) -> Result<(Converted, Vec<u8>, u64), ConvertError> {
    let mut out = tempfile::tempfile().unwrap();
    let job = Job {
        limits,
        cancelled: &AtomicBool::new(false),
    };
    let done = match convert(input, None, out.try_clone().unwrap(), &job) {
        Ok(done) => done,
        Err(Failure::Convert(error)) => return Err(error),
        Err(Failure::Checksum(_)) => unreachable!(),
    };
    let mut disk = Vec::new();
    out.seek(SeekFrom::Start(0)).unwrap();
    out.read_to_end(&mut disk).unwrap();
    let blocks = std::os::unix::fs::MetadataExt::blocks(&out.metadata().unwrap());
    Ok((done, disk, blocks * 512))
}

/// A disk with data, text that compresses, zeros that are written, and holes.
fn disk(length: usize) -> Vec<u8> {
    let mut disk = vec![0; length];
    let mut state = 1u64;
    for (index, block) in disk.chunks_mut(8192).enumerate() {
        match index % 7 {
            0 | 3 => block.fill_with(|| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 56) as u8
            }),
            1 => block.fill(b'a' + (index % 26) as u8),
            5 => block[17] = 1,
            _ => {}
        }
    }
    disk
}

struct Files {
    dir: tempfile::TempDir,
    disk: Vec<u8>,
}

impl Files {
    fn new(length: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let disk = disk(length);
        std::fs::write(dir.path().join("disk.raw"), &disk).unwrap();
        Self { dir, disk }
    }

    /// The disk in qcow2, by qemu-img.
    fn qcow2(&self, options: &str, more: &[&str]) -> Vec<u8> {
        let (raw, out) = (
            self.dir.path().join("disk.raw"),
            self.dir.path().join("disk.qcow2"),
        );
        let mut arguments = vec!["convert", "-f", "raw", "-O", "qcow2", "-o", options];
        arguments.extend(more);
        arguments.extend([text(&raw), text(&out)]);
        qemu_img(&arguments);
        std::fs::read(out).unwrap()
    }
}

#[test]
fn what_qemu_img_writes_comes_back_byte_for_byte() {
    let files = Files::new(3 << 20);
    let variants: &[(&str, &[&str])] = &[
        ("compat=0.10", &[]),
        ("compat=1.1", &[]),
        ("compat=1.1,lazy_refcounts=on", &[]),
        ("compat=1.1,refcount_bits=1", &[]),
        ("compat=1.1,refcount_bits=64", &[]),
        ("preallocation=metadata", &[]),
        ("preallocation=full", &[]),
        ("cluster_size=512", &[]),
        ("cluster_size=4k", &[]),
        ("cluster_size=2M", &[]),
        ("compat=0.10", &["-c"]),
        ("compression_type=zlib", &["-c"]),
        ("compression_type=zstd", &["-c"]),
        ("compression_type=zstd,cluster_size=512", &["-c"]),
        ("cluster_size=512", &["-c"]),
        ("cluster_size=2M", &["-c"]),
        ("compression_type=zstd,cluster_size=2M", &["-c"]),
        // Out of order, and with zeros written as data.
        ("cluster_size=4k", &["-W", "-m", "16"]),
        ("cluster_size=4k", &["-c", "-W", "-m", "16"]),
        ("cluster_size=64k", &["-S", "0"]),
    ];
    for (options, more) in variants {
        let qcow2 = files.qcow2(options, more);
        let (done, disk, _) = converted(&qcow2[..], &Limits::default())
            .unwrap_or_else(|error| panic!("{options} {more:?}: {error:?}"));
        assert!(disk == files.disk, "{options} {more:?}");
        assert_eq!(done.digest, crate::Digest::of(&qcow2));
        assert_eq!(done.size, disk.len() as u64);
    }
}

#[test]
fn odd_sizes_are_kept_and_parts_of_sectors_filled_up() {
    for length in [1 << 20, (1 << 20) + 512, 66_048, 512] {
        let files = Files::new(length);
        for options in ["cluster_size=64k", "cluster_size=512"] {
            let (done, disk, _) =
                converted(&files.qcow2(options, &[])[..], &Limits::default()).unwrap();
            assert!(disk == files.disk, "{length} {options}");
            assert_eq!(done.size, length as u64);
        }
    }
    let (done, disk, _) = converted(&b"tiny"[..], &Limits::default()).unwrap();
    assert_eq!(
        (done.size, &disk[..5], disk.len()),
        (512, &b"tiny\0"[..], 512)
    );
}

#[test]
fn holes_take_no_space() {
    let dir = tempfile::tempdir().unwrap();
    let raw = dir.path().join("raw");
    let file = File::create(&raw).unwrap();
    file.set_len(1 << 30).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[7; 100_000], 900 << 20).unwrap();
    let out = dir.path().join("qcow2");
    qemu_img(&["convert", "-O", "qcow2", text(&raw), text(&out)]);
    let (done, _, taken) = converted(File::open(out).unwrap(), &Limits::default()).unwrap();
    assert_eq!(done.size, 1 << 30);
    assert!(taken <= 200 << 10, "{taken} bytes taken");
}

#[test]
fn snapshots_and_bitmaps_are_passed_over() {
    let files = Files::new(2 << 20);
    let path = files.dir.path().join("disk.qcow2");
    files.qcow2("compat=1.1", &[]);
    qemu_img(&["snapshot", "-c", "before", text(&path)]);
    qemu_img(&["bitmap", "--add", "--enable", text(&path), "dirty"]);
    let out = Command::new("qemu-io")
        .args(["-c", "write -P 5 100k 300k", "-c", "write -z 1M 128k"])
        .arg(&path)
        .output()
        .expect("qemu-io is needed: apt-get install qemu-utils");
    assert!(out.status.success());
    let mut expected = files.disk.clone();
    expected[100 << 10..400 << 10].fill(5);
    expected[1 << 20..(1 << 20) + (128 << 10)].fill(0);
    let (_, disk, _) = converted(File::open(path).unwrap(), &Limits::default()).unwrap();
    assert!(disk == expected);
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// The same disk with the clusters after the header in another order: the one of `order`, as far as
/// it goes.
fn shuffled(qcow2: &[u8], order: impl Fn(u64) -> u64) -> Vec<u8> {
    let cluster = 1u64 << u32::from_be_bytes(qcow2[20..24].try_into().unwrap());
    let mut file = qcow2.to_vec();
    file.resize(file.len().next_multiple_of(cluster as usize), 0);
    let count = file.len() as u64 / cluster;
    // L1 tables of more than a cluster must stay contiguous, so they and everything before them
    // stay.
    let l1 = u64_at(&file, 40);
    let l1_entries = u64::from(u32::from_be_bytes(file[36..40].try_into().unwrap()));
    let l1_clusters = (l1_entries * 8).div_ceil(cluster);
    let movable: Vec<u64> = (1..count)
        .filter(|host| {
            l1_clusters == 1 || !(l1 / cluster..l1 / cluster + l1_clusters).contains(host)
        })
        .collect();
    let mut targets = movable.clone();
    targets.sort_by_key(|host| order(*host));
    let mut to: Vec<u64> = (0..count).collect();
    movable
        .iter()
        .zip(&targets)
        .for_each(|(from, target)| to[*from as usize] = *target);
    let moved = |entry: u64| match entry & OFFSET {
        0 => entry,
        offset => (entry & !OFFSET) | (to[(offset / cluster) as usize] * cluster),
    };
    for index in 0..l1_entries {
        let at = (l1 + index * 8) as usize;
        let l2 = u64_at(&file, at) & OFFSET;
        if l2 != 0 {
            for entry in 0..cluster / 8 {
                let at = (l2 + entry * 8) as usize;
                let value = u64_at(&file, at);
                assert!(value & (1 << 62) == 0, "compressed data crosses clusters");
                put(&mut file, at, moved(value));
            }
        }
        let value = u64_at(&file, at);
        put(&mut file, at, moved(value));
    }
    put(&mut file, 40, to[(l1 / cluster) as usize] * cluster);
    let mut out = vec![0; file.len()];
    for host in 0..count {
        let (from, target) = (
            (host * cluster) as usize,
            (to[host as usize] * cluster) as usize,
        );
        out[target..target + cluster as usize]
            .copy_from_slice(&file[from..from + cluster as usize]);
    }
    out
}

#[test]
fn clusters_and_tables_may_come_in_any_order() {
    let files = Files::new(2 << 20);
    for options in ["cluster_size=64k", "cluster_size=4k", "cluster_size=512"] {
        let qcow2 = files.qcow2(options, &[]);
        let backwards = shuffled(&qcow2, |host| u64::MAX - host);
        let mixed = shuffled(&qcow2, |host| host.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for (what, bytes) in [("backwards", backwards), ("mixed", mixed)] {
            assert_ne!(bytes, qcow2);
            let (_, disk, taken) = converted(&bytes[..], &Limits::default()).unwrap();
            assert!(disk == files.disk, "{options} {what}");
            let data = disk
                .chunks(4096)
                .filter(|block| block.iter().any(|byte| *byte != 0));
            assert!(
                taken <= data.count() as u64 * 4096 + (64 << 10),
                "{options} {what}: {taken}"
            );
        }
    }
}

/// Reports the maximum space that the output took while the input was read.
struct Watch<'a> {
    input: &'a [u8],
    out: File,
    most: &'a mut u64,
    last: &'a mut u64,
}

impl Read for Watch<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        *self.last = std::os::unix::fs::MetadataExt::blocks(&self.out.metadata()?) * 512;
        *self.most = (*self.most).max(*self.last);
        let length = buffer.len().min(64 << 10);
        self.input.read(&mut buffer[..length])
    }
}

#[test]
fn no_space_is_taken_but_the_disks_and_the_tables() {
    let files = Files::new(8 << 20);
    let tight = files.qcow2("cluster_size=64k", &[]);
    let backwards = shuffled(&tight, |host| u64::MAX - host);
    for (what, mut bytes) in [("in order", tight), ("backwards", backwards)] {
        // So that data is read after all of it is in its place.
        bytes.resize(bytes.len() + (4 << 20), 0x55);
        let out = tempfile::tempfile().unwrap();
        let (mut most, mut last) = (0, 0);
        let input = Watch {
            input: &bytes,
            out: out.try_clone().unwrap(),
            most: &mut most,
            last: &mut last,
        };
        let job = Job {
            limits: &Limits::default(),
            cancelled: &AtomicBool::new(false),
        };
        convert(input, None, out, &job).unwrap();
        let data = files.disk.chunks(4096);
        let data = data.filter(|block| block.iter().any(|byte| *byte != 0));
        let data = data.count() as u64 * 4096;
        assert!(last <= data + (512 << 10), "{what}: {last} of {data}");
        assert!(most <= data + (512 << 10), "{what}: {most} of {data}");
    }
}

/// The compressed disk with its L1 and L2 tables moved after all data.
#[test]
fn tables_may_come_after_compressed_clusters() {
    let files = Files::new(2 << 20);
    for options in ["cluster_size=64k", "cluster_size=4k,compression_type=zstd"] {
        let mut file = files.qcow2(options, &["-c"]);
        let cluster = 1usize << u32::from_be_bytes(file[20..24].try_into().unwrap());
        let l1 = u64_at(&file, 40) as usize;
        let l1_bytes = u32::from_be_bytes(file[36..40].try_into().unwrap()) as usize * 8;
        let append = |file: &mut Vec<u8>, from: usize, length: usize| {
            file.resize(file.len().next_multiple_of(cluster), 0);
            let at = file.len();
            file.extend_from_within(from..from + length);
            file[from..from + length].fill(0xee);
            at as u64
        };
        for at in (l1..l1 + l1_bytes).step_by(8) {
            let l2 = u64_at(&file, at) & OFFSET;
            if l2 != 0 {
                let moved = append(&mut file, l2 as usize, cluster);
                put(&mut file, at, moved);
            }
        }
        let moved = append(&mut file, l1, l1_bytes);
        put(&mut file, 40, moved);
        let (_, disk, _) = converted(&file[..], &Limits::default()).unwrap();
        assert!(disk == files.disk, "{options}");
    }
}

#[test]
fn tables_that_the_plan_has_no_room_for_wait_for_the_end() {
    let files = Files::new(2 << 20);
    let limits = Limits::default();
    let job = Job {
        limits: &limits,
        cancelled: &AtomicBool::new(false),
    };
    for (options, more) in [("cluster_size=4k", &[][..]), ("cluster_size=512", &["-c"])] {
        let tight = files.qcow2(options, more);
        let mut variants = vec![tight.clone()];
        if more.is_empty() {
            variants.push(shuffled(&tight, |host| {
                host.wrapping_mul(0x9e37_79b9_7f4a_7c15)
            }));
        }
        for (file, capacity) in variants
            .iter()
            .flat_map(|file| [(file, 0), (file, 20), (file, 70)])
        {
            let mut out = tempfile::tempfile().unwrap();
            let mut sparse = SparseFile::new(out.try_clone().unwrap(), u64::MAX);
            let size =
                convert_with(&mut &file[..], &mut sparse, &job, Plan::new(capacity)).unwrap();
            sparse.finish(size).unwrap();
            let mut disk = Vec::new();
            out.seek(SeekFrom::Start(0)).unwrap();
            out.read_to_end(&mut disk).unwrap();
            assert!(disk == files.disk, "{options} {capacity}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_order_of_clusters_gives_the_same_disk(
        data in prop::collection::vec((0u64..64, any::<u8>()), 1..40),
        seed in any::<u64>(),
        bits in 9u32..13,
    ) {
        let (file, disk) = build::build(&data, seed, bits);
        let (_, back, _) = converted(&file[..], &Limits::default()).unwrap();
        prop_assert!(back == disk);
    }

    #[test]
    fn any_order_of_compressed_clusters_gives_the_same_disk(
        data in prop::collection::vec((0u64..64, any::<u8>()), 1..40),
        seed in any::<u64>(),
        bits in 9u32..13,
    ) {
        let (file, disk) = build::build_packed(&data, seed, bits);
        let (_, back, _) = converted(&file[..], &Limits::default()).unwrap();
        prop_assert!(back == disk);
    }
}
