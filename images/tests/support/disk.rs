//! Disks in the formats of disk images.

use std::path::Path;
use std::process::Command;

use podvisor_images::Disk;

/// A disk of some megabytes: noise, and holes.
pub fn raw() -> Vec<u8> {
    let mut disk = vec![0; 6 << 20];
    for (index, block) in disk.chunks_mut(64 << 10).enumerate() {
        if index % 3 != 2 {
            let mut state = index as u64 + 1;
            block.fill_with(|| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 56) as u8
            });
        }
    }
    disk
}

pub fn qemu_img(arguments: &[&str], paths: &[&Path]) {
    let out = Command::new("qemu-img")
        .args(arguments)
        .args(paths)
        .output()
        .expect("qemu-img is needed: apt-get install qemu-utils");
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
}

pub fn qcow2(raw: &[u8], arguments: &[&str]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("raw"), dir.path().join("qcow2"));
    std::fs::write(&from, raw).unwrap();
    let all = [&["convert", "-f", "raw", "-O", "qcow2"], arguments].concat();
    qemu_img(&all, &[&from, &to]);
    std::fs::read(to).unwrap()
}

pub fn content(disk: &Disk) -> Vec<u8> {
    std::fs::read(disk.path()).unwrap()
}
