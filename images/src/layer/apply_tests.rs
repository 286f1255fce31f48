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

/// Runs `fsck.erofs` of erofs-utils, which also unpacks everything.
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

fn read(image: &tempfile::NamedTempFile) -> BTreeMap<Vec<u8>, crate::erofs::reader::FileStat> {
    crate::erofs::reader::read(&std::fs::read(image.path()).unwrap())
}

#[test]
fn every_attribute_of_every_kind_of_file_is_kept() {
    let files = read(&build(&rich()).unwrap());
    let get = |name: &str| &files[name.as_bytes()];
    let (large, across) = (get("usr/bin/large"), get("linked-across"));
    assert_eq!(
        (large.mode, large.links, large.data.len()),
        (0o104_755, 2, 200_000)
    );
    assert_eq!(large.nid, get("usr/bin/second").nid);
    assert_eq!((across.links, across.data.len()), (1, 8192));
    assert_eq!(get("bin").data, b"usr/bin");
    assert_eq!(get("long-link").data.len(), 4080);
    assert_eq!(
        (get("null").mode, get("null").device),
        (0o020_600, 1 << 8 | 3)
    );
    // 70000 is 0x11170: the low byte, the major number, the rest.
    assert_eq!(get("disk").device, 0x70 | 259 << 8 | 0x11100 << 12);
    assert_eq!(get("pipe").mode, 0o010_600);
    let caps = get("with-xattrs");
    assert_eq!(caps.mtime, (1_600_000_000, 123_456_789));
    assert_eq!(caps.xattrs["user.note"], b"hello");
    assert_eq!(caps.xattrs["security.capability"].len(), 20);
    assert_eq!(get("with-large-xattrs").xattrs["user.large"], [b'v'; 9000]);
    assert_eq!(get("with-large-xattrs").data, b"data");
    let far = get("far-owner");
    assert_eq!(
        (far.uid, far.gid, far.mtime),
        (4_000_000_000, 70_000, (1_700_000_000, 0))
    );
    assert_eq!(files[&b"latin\xe9"[..]].data, b"not UTF-8");
    assert_eq!((get("many").mode, get("many").links), (0o041_777, 2));
    assert_eq!(
        files
            .keys()
            .filter(|path| path.starts_with(b"many/"))
            .count(),
        699
    );
    assert_eq!(get("deep").uid, 0);
    assert_eq!(get("").links, 2 + 3);
}

#[test]
fn what_replaced_files_held_is_not_in_the_image() {
    let secret = b"correct horse battery staple ".repeat(1000);
    let base = Tarball::new()
        .file("secret", 0o600, &secret)
        .file("other", 0o600, &[1; 5000])
        .finish();
    let upper = Tarball::new()
        .file(".wh.secret", 0, b"")
        .file("new", 0o644, &[0; 9000])
        .finish();
    let image = std::fs::read(build(&[base, upper]).unwrap().path()).unwrap();
    assert!(!image.windows(12).any(|window| window == b"horse batter"));
    let files = crate::erofs::reader::read(&image);
    assert_eq!(files[&b"new"[..]].data, [0; 9000]);
    // The new file reuses the secret's space.
    assert!(image.len() < secret.len() + 5 * 4096);
}

#[test]
fn sparse_files_of_all_formats_are_whole_and_take_no_space() {
    let gib = 1u64 << 30;
    let map = format!("2\n4096\n3\n{}\n4\n", gib - 4);
    let mut in_data = map.clone().into_bytes();
    in_data.resize(512, 0);
    in_data.extend_from_slice(b"abcdefg");
    let number = |value: u64| format!("{value:011o}\0").into_bytes();
    let old = Tarball::new()
        .header(b"old", b'S', 0o644, b"", (0, 0), 7)
        .unfinished();
    let mut header: [u8; 512] = old.try_into().unwrap();
    header[257..265].copy_from_slice(b"ustar  \0");
    header[386..398].copy_from_slice(&number(4096));
    header[398..410].copy_from_slice(&number(3));
    header[410..422].copy_from_slice(&number(gib - 4));
    header[422..434].copy_from_slice(&number(4));
    header[483..495].copy_from_slice(&number(gib));
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut tar = header.to_vec();
    tar.extend_from_slice(&Tarball::new().data(b"abcdefg").unfinished());
    let rest = Tarball::new()
        .pax("GNU.sparse.major", b"1")
        .pax("GNU.sparse.minor", b"0")
        .pax("GNU.sparse.name", b"new")
        .pax("GNU.sparse.realsize", gib.to_string().as_bytes())
        .file("GNUSparseFile.0/new", 0o644, &in_data)
        .pax("GNU.sparse.size", gib.to_string().as_bytes())
        .pax("GNU.sparse.map", format!("4096,3,{},4", gib - 4).as_bytes())
        .file("middle", 0o644, b"abcdefg")
        .finish();
    tar.extend_from_slice(&rest);
    let image = build(&[tar]).unwrap();
    let metadata = image.as_file().metadata().unwrap();
    assert!(metadata.len() > 3 * gib);
    assert!(std::os::unix::fs::MetadataExt::blocks(&metadata) * 512 < 1 << 20);
    fsck_only(&image);
    let mut head = vec![0; 8192];
    std::os::unix::fs::FileExt::read_exact_at(image.as_file(), &mut head, 4096).unwrap();
    assert_eq!(&head[4096..4099], b"abc");
}

fn fsck_only(image: &tempfile::NamedTempFile) {
    let out = Command::new("fsck.erofs")
        .arg(image.path())
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
}

/// The error's message, with those of its causes.
fn words(error: &LayerError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

#[test]
fn hostile_layers_are_refused_in_words() {
    let tar = Tarball::new;
    let huge_pax = vec![b'x'; 2 << 20];
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        (
            "parent",
            tar().file("a/../../etc/passwd", 0o644, b"x").finish(),
            "it contains \"..\"",
        ),
        (
            "parent of the root",
            tar().file("/../etc/passwd", 0o644, b"x").finish(),
            "it contains \"..\"",
        ),
        (
            "link out",
            tar().hardlink("a", "../etc/shadow").finish(),
            "it contains \"..\"",
        ),
        (
            "link to a file of the host",
            tar().hardlink("a", "/etc/shadow").finish(),
            "hard link to \"etc/shadow\", which does not exist",
        ),
        (
            "link to nothing",
            tar().hardlink("a", "b").finish(),
            "hard link to \"b\", which does not exist",
        ),
        (
            "link to directory",
            tar().dir("d", 0o755).hardlink("a", "d").finish(),
            "which is a directory",
        ),
        (
            "below a link in a circle",
            tar()
                .symlink("l", "/m")
                .symlink("m", "l")
                .file("l/passwd", 0o644, b"x")
                .finish(),
            "its parent \"l\" leads through too many symbolic links",
        ),
        (
            "below a file",
            tar().file("f", 0o644, b"").dir("f/d", 0o755).finish(),
            "is not a directory",
        ),
        (
            "root as file",
            tar()
                .file("./", 0o644, b"")
                .entry(b".", b'0', 0, b"", (0, 0), b"")
                .finish(),
            "the root must be a directory",
        ),
        (
            "long name",
            tar().file(&"n".repeat(256), 0o644, b"").finish(),
            "longer than 255 bytes",
        ),
        (
            "long path",
            tar().file(&"n/".repeat(2100), 0o644, b"").finish(),
            "it is too long",
        ),
        (
            "deep path",
            tar().file(&"n/".repeat(1100), 0o644, b"").finish(),
            "too many parts",
        ),
        (
            "long link",
            tar().symlink("l", &"t".repeat(5000)).finish(),
            "more than 4095 bytes",
        ),
        (
            "empty link",
            tar().symlink("l", "").finish(),
            "symbolic link to nothing",
        ),
        (
            "empty whiteout",
            tar().file("d/.wh.", 0, b"").finish(),
            "whiteout that names nothing",
        ),
        (
            "dot whiteout",
            tar().file("d/.wh...", 0, b"").finish(),
            "whiteout that names nothing",
        ),
        (
            "type",
            tar().entry(b"v", b'V', 0, b"", (0, 0), b"").finish(),
            "do not have",
        ),
        (
            "device",
            tar().device("d", b'3', 4096, 0).finish(),
            "that Linux cannot have",
        ),
        (
            "owner",
            tar().owner(1 << 32, 0).file("f", 0o644, b"").finish(),
            "beyond 32 bits",
        ),
        (
            "xattrs",
            tar()
                .pax("SCHILY.xattr.user.x", &[0; 70_000])
                .file("f", 0, b"")
                .finish(),
            "extended attributes",
        ),
        (
            "pax bomb",
            tar().pax("comment", &huge_pax).file("f", 0, b"").finish(),
            "extended headers for one entry",
        ),
        (
            "pax lies",
            tar()
                .header(b"p", b'x', 0, b"", (0, 0), 9)
                .data(b"99 path=a")
                .finish(),
            "broken header (extended header)",
        ),
        (
            "cut data",
            tar()
                .header(b"f", b'0', 0, b"", (0, 0), 5000)
                .data(b"short")
                .unfinished(),
            "in the middle of an entry",
        ),
        (
            "cut header",
            tar().file("f", 0, b"x").unfinished()[..300].to_vec(),
            "in the middle of an entry",
        ),
        ("no tar", vec![b'?'; 4096], "broken header (checksum)"),
        (
            "size wraps",
            tar()
                .header(b"f", b'0', 0, b"", (0, 0), i64::MAX as u64)
                .finish(),
            "unpacks to more than",
        ),
    ];
    for (name, layer, message) in cases {
        let error = build(std::slice::from_ref(&layer)).expect_err(name);
        assert!(words(&error).contains(message), "{name}: {}", words(&error));
        assert!(!words(&error).contains('\n'), "{name}");
    }
    let base = tar().file("a", 0o644, b"x").finish();
    for name in ["a/b", "a/b/c"] {
        let layers = [base.clone(), tar().hardlink(name, "a").finish()];
        let error = build(&layers).expect_err(name);
        let message = "hard link to \"a\", which is a directory";
        assert!(words(&error).contains(message), "{name}: {}", words(&error));
    }
}

#[test]
fn absolute_names_and_link_targets_are_below_the_root() {
    let layer = Tarball::new()
        .dir("/", 0o711)
        .file("/ko-app/app", 0o755, b"app")
        .hardlink("/second", "/ko-app/app")
        .symlink("/link", "/ko-app/app");
    let upper = Tarball::new()
        .file("/ko-app/new", 0o644, b"new")
        .file("/.wh.link", 0, b"");
    let files = read(&build(&[layer.finish(), upper.finish()]).unwrap());
    assert_eq!(files[&b""[..]].mode, 0o040_711);
    let app = &files[&b"ko-app/app"[..]];
    assert_eq!((app.data.as_slice(), app.links), (&b"app"[..], 2));
    assert_eq!(files[&b"second"[..]].nid, app.nid);
    assert_eq!(files[&b"ko-app/new"[..]].data, b"new");
    assert!(!files.contains_key(&b"link"[..]));
}

#[test]
fn limits_hold_over_all_layers_together() {
    let layer = |name: &str| Tarball::new().file(name, 0o644, &[7; 60_000]).finish();
    let layers = [layer("a"), layer("b")];
    let limits = Limits {
        unpacked_bytes: 100_000,
        ..Limits::default()
    };
    assert!(matches!(
        build_with(&layers, &limits),
        Err(LayerError::Unpacked { limit: 100_000 })
    ));
    let limits = Limits {
        entries: 1,
        ..Limits::default()
    };
    assert!(matches!(
        build_with(&layers, &limits),
        Err(LayerError::Entries { limit: 1 })
    ));
    let limits = Limits {
        devices: false,
        ..Limits::default()
    };
    let device = Tarball::new().device("d", b'3', 1, 3).finish();
    assert!(matches!(
        build_with(&[device], &limits),
        Err(LayerError::Entry { .. })
    ));
    let sparse = Tarball::new()
        .pax("GNU.sparse.size", b"99999999999999999")
        .pax("GNU.sparse.map", b"0,1")
        .file("bomb", 0o644, b"x")
        .finish();
    assert!(matches!(build(&[sparse]), Err(LayerError::Unpacked { .. })));
}

#[test]
fn metadata_that_is_kept_in_memory_is_bounded_in_sum() {
    let attributes = |name: &str| {
        let value = [b'x'; 30_000];
        let layer = Tarball::new().pax("SCHILY.xattr.user.a", &value);
        layer.file(name, 0o644, b"").finish()
    };
    let deep = Tarball::new().file(&format!("{}f", "d/".repeat(150)), 0o644, b"");
    let mut wide = Tarball::new();
    for top in 0..6 {
        let parts = format!("{}/", "d".repeat(250)).repeat(15);
        wide = wide.file(&format!("{top}/{parts}f"), 0o644, b"");
    }
    let limits = Limits {
        metadata_bytes: 70_000,
        ..Limits::default()
    };
    let cases = [
        (
            "attributes",
            vec![attributes("a"), attributes("a"), attributes("a")],
        ),
        ("directories that are implied", vec![deep.finish()]),
        ("directories with long names", vec![wide.finish()]),
    ];
    for (name, layers) in cases {
        let built = build_with(&layers, &limits);
        let limit = 70_000;
        assert!(
            matches!(built, Err(LayerError::Metadata { limit: l }) if l == limit),
            "{name}"
        );
    }
    build_with(&[attributes("a"), attributes("b")], &limits).unwrap();
}

#[test]
fn a_gzip_bomb_ends_at_the_limit() {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    let zeros = vec![0; 1 << 20];
    encoder
        .write_all(
            &Tarball::new()
                .header(b"bomb", b'0', 0o644, b"", (0, 0), 64 << 20)
                .unfinished(),
        )
        .unwrap();
    for _ in 0..64 {
        encoder.write_all(&zeros).unwrap();
    }
    let packed = encoder.finish().unwrap();
    assert!(packed.len() < 100_000);
    let out = tempfile::tempfile().unwrap();
    let limits = Limits {
        unpacked_bytes: 1 << 20,
        ..Limits::default()
    };
    let mut unpacker = Unpacker::new(out, limits, Arc::default());
    let error = unpacker.layer(blob(&packed), Digest::of(b"")).unwrap_err();
    assert!(
        matches!(error, LayerError::Unpacked { limit: 1_048_576 }),
        "{error:?}"
    );
}

#[test]
fn a_cancelled_unpacking_ends() {
    let cancelled = Arc::new(AtomicBool::new(true));
    let mut unpacker = Unpacker::new(tempfile::tempfile().unwrap(), Limits::default(), cancelled);
    let layer = Tarball::new().file("f", 0o644, b"x").finish();
    assert!(matches!(
        unpacker.layer(blob(&layer), Digest::of(&layer)),
        Err(LayerError::Cancelled)
    ));
}
