//! Disks written to files of their own.

use super::*;
use crate::blk::FileDisk;

/// Writes the disk to a file of its own.
fn flat(rig: &mut Rig) -> File {
    let mut options = File::options();
    let file = options.read(true).write(true).create_new(true);
    let file = file.open(rig.path("flat")).unwrap();
    let disk = rig.disk.as_mut().unwrap();
    assert!(flatten_disk(disk, &file, |_| true).unwrap());
    file
}

#[test]
fn a_flat_disk_needs_no_image_and_qemu_reads_the_same() {
    let mut contents = numbered(3 << 20 | 512);
    let mut rig = Rig::new(&contents);
    for (offset, bytes) in [(0x1_0000, vec![7; 512]), (0x2_0200, vec![0; 0x3_0000])] {
        rig.write(offset, &bytes);
        let at = usize::try_from(offset).unwrap();
        contents[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    let len = flat(&mut rig).metadata().unwrap().len();
    std::fs::remove_file(rig.path("base")).unwrap();
    let (path, raw) = (rig.path("flat"), rig.path("raw"));
    qemu_img(&["check", "-q", "-f", "qcow2"], &[&path]);
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw"], &[&path, &raw]);
    assert!(std::fs::read(raw).unwrap() == contents);
    // Two whole clusters of zeroes are not in it: tables take five.
    assert!(
        len <= (contents.len() as u64).next_multiple_of(CLUSTER) + 3 * CLUSTER,
        "{len}"
    );
    let info = Command::new("qemu-img").arg("info").arg(&path).output();
    let info = String::from_utf8(info.unwrap().stdout).unwrap();
    assert!(!info.contains("backing"), "{info}");
}

#[test]
fn a_disk_of_zeroes_is_flattened_to_its_tables() {
    let mut rig = Rig::sparse(1 << 30);
    let len = flat(&mut rig).metadata().unwrap().len();
    assert!(len <= 5 * CLUSTER, "{len}");
}

#[test]
fn flattening_stops_when_it_is_told_to_and_overwrites_nothing() {
    let mut disk = FileDisk::new(tempfile::tempfile().unwrap()).unwrap();
    let full = tempfile::tempfile().unwrap();
    full.set_len(1).unwrap();
    let refused = flatten_disk(&mut disk, &full, |_| true);
    assert!(matches!(refused, Err(Qcow2Error::NotEmpty)));
    let large = tempfile::tempfile().unwrap();
    large.set_len(8 << 20).unwrap();
    let mut disk = FileDisk::new(large).unwrap();
    let mut asked = Vec::new();
    let until = |done| {
        asked.push(done);
        done < 3 << 20
    };
    let ended = flatten_disk(&mut disk, &tempfile::tempfile().unwrap(), until);
    assert!(!ended.unwrap());
    assert_eq!(asked, [0, 1 << 20, 2 << 20, 3 << 20]);
}
