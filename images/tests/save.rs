//! Saving images to files, which other tools and podvisor itself load again.

mod support;

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;

use podvisor_images::{ArchiveError, ArchiveFormat, Cancel, Digest, Error};
use support::image::{Layer, Packing};
use support::{Tarball, TestImage, TestStore, explain, options};

const NAME: &str = "example.org/app:v1";

/// A store with an image of that compression under [`NAME`].
fn store(packings: [Packing; 2]) -> (TestStore, TestImage) {
    let image = TestImage::packed(packings);
    let dir = tempfile::tempdir().unwrap();
    image.write_layout(dir.path(), NAME);
    let test = TestStore::new();
    test.store.load(dir.path(), None, &options()).unwrap();
    (test, image)
}

fn save(test: &TestStore, names: &[&str], format: ArchiveFormat, to: &Path) {
    let file = File::create(to).unwrap();
    test.store
        .save(names, format, file, &Cancel::default())
        .unwrap();
}

fn run(program: &str, arguments: &[&str]) -> String {
    let out = Command::new(program).args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn a_saved_image_loads_again_as_the_same() {
    for format in [ArchiveFormat::Docker, ArchiveFormat::Oci] {
        for packing in [Packing::Plain, Packing::Gzip, Packing::Zstd] {
            let (test, image) = store([packing, packing]);
            let tar = test.dir.path().join("tmp/x.tar");
            save(&test, &[NAME], format, &tar);
            let other = TestStore::new();
            let loaded = other.store.load(&tar, None, &options()).unwrap();
            assert_eq!(loaded.len(), 1);
            assert_eq!(loaded[0].image.id(), image.id());
            assert_eq!(loaded[0].image.manifest_digest(), image.digest());
            assert_eq!(loaded[0].image.tags(), [NAME]);
            let again = other.dir.path().join("again.tar");
            save(&other, &[NAME], format, &again);
            assert!(std::fs::read(again).unwrap() == std::fs::read(&tar).unwrap());
        }
    }
}

#[test]
fn skopeo_reads_what_is_saved() {
    for packing in [Packing::Plain, Packing::Gzip, Packing::Zstd] {
        let (test, image) = store([packing, packing]);
        let path = |name: &str| test.dir.path().join(name).display().to_string();
        for (format, transport) in [
            (ArchiveFormat::Docker, "docker-archive"),
            (ArchiveFormat::Docker, "oci-archive"),
            (ArchiveFormat::Oci, "oci-archive"),
        ] {
            let tar = path("saved.tar");
            save(&test, &[NAME], format, Path::new(&tar));
            let from = format!("{transport}:{tar}:{NAME}");
            let config = run("skopeo", &["inspect", "--config", "--raw", &from]);
            assert_eq!(
                Digest::of(config.trim_end().as_bytes()),
                image.id(),
                "{from}"
            );
            let (directory, to) = (path("copy"), format!("dir:{}", path("copy")));
            run("skopeo", &["--insecure-policy", "copy", &from, &to]);
            let copied = run("skopeo", &["inspect", "--config", "--raw", &to]);
            assert_eq!(
                Digest::of(copied.trim_end().as_bytes()),
                image.id(),
                "{from}"
            );
            if transport == "oci-archive" {
                let manifest = run("skopeo", &["inspect", "--raw", &to]);
                assert_eq!(Digest::of(manifest.as_bytes()), image.digest(), "{from}");
            }
            std::fs::remove_dir_all(directory).unwrap();
        }
    }
}

#[test]
fn several_images_and_names_share_one_archive() {
    let (test, image) = store([Packing::Gzip, Packing::Gzip]);
    let layer = Layer::new(
        &Tarball::new().file("other", 0o644, b"x").finish(),
        Packing::Plain,
    );
    let other = TestImage::new(vec![layer]);
    let dir = tempfile::tempdir().unwrap();
    other.write_layout(dir.path(), "x");
    test.store
        .load(dir.path(), Some("other"), &options())
        .unwrap();
    test.store.tag(NAME, "second").unwrap();
    let tar = test.dir.path().join("x.tar");
    let id = other.id().to_string();
    for format in [ArchiveFormat::Docker, ArchiveFormat::Oci] {
        save(&test, &[NAME, &id[7..20], "second"], format, &tar);
        let listing = run("tar", &["tf", tar.to_str().unwrap()]);
        let blobs = listing.lines().filter(|name| name.len() > 64).count();
        assert_eq!(blobs, 4 + 3, "{listing}");
        let fresh = TestStore::new();
        let loaded = fresh.store.load(&tar, None, &options()).unwrap();
        assert_eq!(loaded.len(), 2);
        assert_eq!(loaded[0].image.id(), image.id());
        assert_eq!(
            loaded[0].image.tags(),
            ["docker.io/library/second:latest", NAME]
        );
        // Requested by id.
        assert_eq!(loaded[1].image.id(), other.id());
        assert_eq!(loaded[1].image.tags(), [""; 0]);
    }
}

#[test]
fn what_is_not_there_or_damaged_is_not_saved() {
    let (test, image) = store([Packing::Gzip, Packing::Gzip]);
    let mut out = Vec::new();
    let mut save = |name: &str| {
        out.clear();
        let format = ArchiveFormat::Docker;
        test.store
            .save(&[name], format, &mut out, &Cancel::default())
            .map_err(|error| (error, out.len()))
    };
    assert!(matches!(save("none"), Err((Error::NotFound { .. }, 0))));
    let digest = Digest::of(&image.layers[0].blob);
    let blob = test.dir.path().join("blobs/sha256").join(digest.hex());
    let mut bytes = std::fs::read(&blob).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&blob, &bytes).unwrap();
    assert!(matches!(save(NAME), Err((Error::Damaged { .. }, 1..))));
    bytes.pop();
    std::fs::write(&blob, &bytes).unwrap();
    assert!(matches!(save(NAME), Err((Error::Damaged { .. }, 0))));
    std::fs::remove_file(&blob).unwrap();
    assert!(matches!(save(NAME), Err((Error::Damaged { .. }, 0))));
}

/// Accepts some bytes and no more.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0 == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let taken = bytes.len().min(self.0);
        self.0 -= taken;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_archive_that_cannot_be_written_is_told_whenever_it_happens() {
    let (test, _) = store([Packing::Gzip, Packing::Gzip]);
    let mut whole = Vec::new();
    let format = ArchiveFormat::Docker;
    let cancel = Cancel::default();
    test.store
        .save(&[NAME], format, &mut whole, &cancel)
        .unwrap();
    assert_eq!(whole.len() % 512, 0);
    for room in (0..whole.len()).step_by(100) {
        let error = test
            .store
            .save(&[NAME], format, Full(room), &cancel)
            .unwrap_err();
        let is_write = matches!(error, Error::Archive(ArchiveError::Write { .. }));
        assert!(is_write, "{}", explain(&error));
    }
    cancel.cancel();
    let error = test.store.save(&[NAME], format, io::sink(), &cancel);
    assert!(matches!(error, Err(Error::Cancelled)));
}
