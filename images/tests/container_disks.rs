//! Disk images out of OCI images: KubeVirt's containerDisk.

mod support;

use podvisor_images::Digest;
use support::disk::{content, qcow2, raw};
use support::image::{Layer, Packing};
use support::{Tarball, TestImage, TestStore, explain, options};

/// Loads an image of one layer from an OCI layout directory.
fn load(test: &TestStore, name: &str, tar: Tarball) -> podvisor_images::Image {
    let image = TestImage::new(vec![Layer::new(&tar.finish(), Packing::Gzip)]);
    let dir = tempfile::tempdir().unwrap();
    image.write_layout(dir.path(), "x");
    test.store
        .load(dir.path(), Some(name), &options())
        .unwrap()
        .remove(0)
        .image
}

#[test]
fn a_container_disk_is_recognised_and_goes_with_its_image() {
    let raw = raw();
    let test = TestStore::new();
    for (name, bytes) in [
        ("fedora.qcow2", qcow2(&raw, &["-c"])),
        ("disk.img", raw.clone()),
        ("Whatever", qcow2(&raw, &[])),
    ] {
        let tar = Tarball::new()
            .dir("disk", 0o555)
            .file(&format!("disk/{name}"), 0o440, &bytes);
        let image = load(&test, "vm", tar);
        assert_eq!(image.disk(), Some(Digest::of(&bytes)), "{name}");
        let disk = test.store.container_disk("vm").unwrap();
        assert!(content(&disk) == raw, "{name}");
        // The disk cannot be removed without its image.
        assert_eq!(
            test.store.remove(&disk.id().to_string()).unwrap().image,
            None
        );
        assert!(disk.path().exists());
        test.store.remove("vm").unwrap();
        assert!(!disk.path().exists() && test.store.disks().unwrap().is_empty());
    }
}

#[test]
fn an_image_with_other_files_than_one_in_its_disk_directory_has_no_disk() {
    let test = TestStore::new();
    let two = Tarball::new()
        .dir("disk", 0o755)
        .file("disk/a.img", 0o644, b"a")
        .file("disk/b.img", 0o644, b"b");
    assert_eq!(load(&test, "two", two).disk(), None);
    let message = explain(&test.store.container_disk("two").unwrap_err());
    assert!(
        message.contains("has 2 files in its directory /disk instead of one: a.img, b.img"),
        "{message}"
    );
    assert_eq!(
        load(
            &test,
            "none",
            Tarball::new().dir("disk", 0o755).file("etc", 0o644, b"")
        )
        .disk(),
        None
    );
    let message = explain(&test.store.container_disk("none").unwrap_err());
    assert!(
        message
            .contains("library/none:latest has no disk: there is no file in its directory /disk"),
        "{message}"
    );
    // An image with other content is not treated as a disk until that is requested.
    let program = Tarball::new()
        .dir("disk", 0o755)
        .file("disk/notes", 0o644, &[b'x'; 600])
        .file("init", 0o755, b"");
    assert_eq!(load(&test, "program", program).disk(), None);
    let disk = test.store.container_disk("program").unwrap();
    assert_eq!(content(&disk)[..600], [b'x'; 600]);
    // A damaged disk does not prevent pulling its image.
    let damaged = Tarball::new()
        .dir("disk", 0o755)
        .file("disk/x.qcow2", 0o644, b"QFI\xfb");
    assert_eq!(load(&test, "damaged", damaged).disk(), None);
    let message = explain(&test.store.container_disk("damaged").unwrap_err());
    assert!(
        message.contains(
            "x.qcow2 in image docker.io/library/damaged:latest is not a usable disk image"
        ),
        "{message}"
    );
}
