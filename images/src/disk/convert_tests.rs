use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use super::super::qcow2::tests::{converted, qemu_img, text};
use super::*;
use crate::Limits;

/// Compresses with a program.
fn packed(program: &[&str], bytes: &[u8]) -> Vec<u8> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    io::Seek::rewind(&mut file).unwrap();
    let out = Command::new(program[0])
        .args(&program[1..])
        .stdin(Stdio::from(file))
        .output()
        .expect("gzip, xz-utils and zstd are needed");
    assert!(out.status.success());
    out.stdout
}

fn files() -> (Vec<u8>, Vec<u8>) {
    let raw: Vec<u8> = (0..300_000u32)
        .flat_map(|i| (i / 1000).to_le_bytes())
        .collect();
    let raw = raw[..raw.len() / 512 * 512].to_vec();
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("raw"), dir.path().join("qcow2"));
    std::fs::write(&from, &raw).unwrap();
    qemu_img(&[
        "convert",
        "-f",
        "raw",
        "-O",
        "qcow2",
        text(&from),
        text(&to),
    ]);
    (raw, std::fs::read(to).unwrap())
}

#[test]
fn both_formats_are_read_in_every_packing() {
    let (raw, qcow2) = files();
    let packings: &[&[&str]] = &[
        &["cat"],
        &["gzip", "-c"],
        &["xz", "-c"],
        &["zstd", "-c", "--long=27"],
    ];
    for (format, file) in [(DiskFormat::Raw, &raw), (DiskFormat::Qcow2, &qcow2)] {
        for packing in packings {
            let bytes = packed(packing, file);
            let (done, disk, _) = converted(&bytes[..], &Limits::default()).unwrap();
            assert!(disk == raw, "{format} {packing:?}");
            assert_eq!(done.format, format);
            assert_eq!(done.digest, Digest::of(&bytes));
        }
    }
}

#[test]
fn what_is_cut_off_or_damaged_is_refused() {
    let (raw, qcow2) = files();
    for packing in [&["gzip", "-c"][..], &["xz", "-c"], &["zstd", "-c"]] {
        for file in [&raw, &qcow2] {
            let bytes = packed(packing, file);
            for cut in [1, bytes.len() / 2, bytes.len() - 1] {
                let cut = converted(&bytes[..cut.max(20)], &Limits::default());
                assert!(
                    matches!(cut, Err(ConvertError::Read(_) | ConvertError::Qcow2(_))),
                    "{packing:?}"
                );
            }
            let mut damaged = bytes.clone();
            let middle = bytes.len() / 2;
            damaged[middle] ^= 0x55;
            assert!(
                converted(&damaged[..], &Limits::default()).is_err(),
                "{packing:?}"
            );
        }
    }
    assert!(matches!(
        converted(&b""[..], &Limits::default()),
        Err(ConvertError::Empty)
    ));
}

#[test]
fn other_formats_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let raw = dir.path().join("raw");
    std::fs::write(&raw, vec![7; 100_000]).unwrap();
    for (format, name) in [
        ("vmdk", "VMDK"),
        ("vdi", "VDI"),
        ("vhdx", "VHDX"),
        ("vpc", "VHD"),
        ("qed", "QED"),
    ] {
        let out = dir.path().join(format);
        qemu_img(&["convert", "-f", "raw", "-O", format, text(&raw), text(&out)]);
        match converted(File::open(out).unwrap(), &Limits::default()) {
            Err(ConvertError::Format(found)) => assert_eq!(found, name),
            other => panic!("{format}: {:?}", other.map(|(done, ..)| done)),
        }
    }
}

#[test]
fn bombs_end_at_the_limits() {
    let limits = Limits {
        disk_bytes: 10 << 20,
        disk_file_bytes: 1 << 20,
        disk_data_bytes: 1 << 20,
        ..Limits::default()
    };
    let zeros = packed(&["gzip", "-c"], &vec![0; 20 << 20]);
    let ones = packed(&["xz", "-c"], &vec![1; 2 << 20]);
    let what = |bytes: &[u8]| match converted(bytes, &limits) {
        Err(ConvertError::TooLarge { what, .. }) => what,
        other => panic!("{:?}", other.map(|(done, ..)| done)),
    };
    assert_eq!(what(&zeros), "disk");
    assert_eq!(what(&ones), "data");
    assert_eq!(what(&vec![0; 2 << 20]), "file");
    // A qcow2 file that is longer when decompressed than a file may be.
    let mut padded = files().1;
    padded.resize(2 << 20, 0);
    assert_eq!(what(&packed(&["zstd", "-c"], &padded)), "file");
}

#[test]
fn a_wrong_checksum_is_told_before_what_is_wrong_with_the_file() {
    let (_, mut qcow2) = files();
    let checksum: Checksum = Digest::of(&qcow2).to_string().parse().unwrap();
    qcow2[15] = 200;
    let job = Job {
        limits: &Limits::default(),
        cancelled: &AtomicBool::new(false),
    };
    let out = tempfile::tempfile().unwrap();
    match convert(&qcow2[..], Some(&checksum), out, &job) {
        Err(Failure::Checksum(actual)) => {
            assert_eq!(actual.to_string(), Digest::of(&qcow2).to_string());
        }
        other => panic!("{other:?}"),
    }
}

/// Returns one byte at a time.
struct Trickle<'a>(&'a [u8]);

impl Read for Trickle<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = buffer.len().min(1);
        self.0.read(&mut buffer[..length])
    }
}

#[test]
fn what_trickles_in_is_recognised_all_the_same() {
    let (raw, qcow2) = files();
    for packing in [
        &["cat"][..],
        &["gzip", "-c"],
        &["xz", "-c"],
        &["zstd", "-c"],
    ] {
        let bytes = packed(packing, &qcow2);
        let (done, disk, _) = converted(Trickle(&bytes), &Limits::default()).unwrap();
        assert!(
            disk == raw && done.format == DiskFormat::Qcow2,
            "{packing:?}"
        );
    }
}
