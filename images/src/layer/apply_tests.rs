use std::io::{Seek, SeekFrom, Write};
use std::process::Command;

use super::*;
use crate::tarball::Tarball;

fn blob(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    file
}

fn build_with(layers: &[Vec<u8>], limits: &Limits) -> Result<tempfile::NamedTempFile, LayerError> {
    let out = tempfile::NamedTempFile::new().unwrap();
    let file = out.reopen().unwrap();
    let mut unpacker = Unpacker::new(file, limits.clone(), Arc::default());
    for layer in layers {
        unpacker.layer(blob(layer), Digest::of(layer))?;
    }
    unpacker.finish([7; 16])?;
    Ok(out)
}

fn build(layers: &[Vec<u8>]) -> Result<tempfile::NamedTempFile, LayerError> {
    build_with(layers, &Limits::default())
}

/// What `fsck.erofs` of erofs-utils says; it also unpacks everything.
fn fsck(image: &tempfile::NamedTempFile) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let out = Command::new("fsck.erofs")
        .arg(format!("--extract={}", dir.path().join("root").display()))
        .arg(image.path())
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    dir
}

fn rich() -> Vec<Vec<u8>> {
    let noise: Vec<u8> = (0..50_000u32)
        .flat_map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes())
        .collect();
    let mut base = Tarball::new()
        .dir("./", 0o755)
        .dir("usr", 0o755)
        .dir("usr/bin", 0o755)
        .file("usr/bin/large", 0o4755, &noise)
        .file("usr/bin/exact", 0o755, &noise[..8192])
        .file("usr/bin/block-and-tail", 0o755, &noise[..4196])
        .file("usr/bin/big-tail", 0o755, &noise[..4095])
        .file("empty", 0o600, b"")
        .symlink("bin", "usr/bin")
        .symlink("long-link", &"x/".repeat(2040))
        .hardlink("usr/bin/second", "usr/bin/large")
        .device("null", b'3', 1, 3)
        .device("disk", b'4', 259, 70_000)
        .device("pipe", b'6', 0, 0)
        .pax("SCHILY.xattr.user.note", b"hello")
        .pax(
            "SCHILY.xattr.security.capability",
            &[1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        )
        .pax("mtime", b"1600000000.123456789")
        .file("with-xattrs", 0o755, b"caps")
        .pax("SCHILY.xattr.user.large", &[b'v'; 9000])
        .file("with-large-xattrs", 0o644, b"data")
        .owner(4_000_000_000, 70_000)
        .file("far-owner", 0o644, b"x")
        .entry(b"latin\xe9", b'0', 0o644, b"", (0, 0), b"not UTF-8")
        .dir("many", 0o1777);
    for i in 0..700 {
        base = base.file(
            &format!("many/a-rather-long-name-of-a-file-{i:04}"),
            0o644,
            b"!",
        );
    }
    base = base.file(
        &format!("deep/{}/{}", "n".repeat(255), "m".repeat(200)),
        0o644,
        b"long name",
    );
    let upper = Tarball::new()
        .file("many/.wh.a-rather-long-name-of-a-file-0001", 0, b"")
        .file(".wh.empty", 0, b"")
        .file("usr/bin/new", 0o755, &noise[..100])
        .hardlink("linked-across", "usr/bin/exact")
        .file("usr/bin/.wh.exact", 0, b"");
    vec![base.finish(), upper.finish()]
}

#[test]
fn erofs_utils_accept_and_unpack_the_image() {
    let image = build(&rich()).unwrap();
    let dir = fsck(&image);
    let root = dir.path().join("root");
    let read = |name: &str| std::fs::read(root.join(name)).unwrap();
    assert_eq!(read("usr/bin/large").len(), 200_000);
    assert_eq!(read("usr/bin/large"), read("usr/bin/second"));
    assert_eq!(read("linked-across"), read("usr/bin/large")[..8192]);
    assert_eq!(read("usr/bin/big-tail"), read("usr/bin/large")[..4095]);
    assert_eq!(
        read("usr/bin/block-and-tail"),
        read("usr/bin/large")[..4196]
    );
    assert_eq!(read("many/a-rather-long-name-of-a-file-0699"), b"!");
    for gone in [
        "empty",
        "many/a-rather-long-name-of-a-file-0001",
        "usr/bin/exact",
    ] {
        assert!(!root.join(gone).exists(), "{gone}");
    }
}

#[test]
fn the_same_layers_give_the_same_bytes() {
    let bytes = |image: tempfile::NamedTempFile| std::fs::read(image.path()).unwrap();
    let first = bytes(build(&rich()).unwrap());
    assert_eq!(
        Digest::of(&first),
        Digest::of(&bytes(build(&rich()).unwrap()))
    );
    assert_eq!(first.len() % 4096, 0);
}
