//! A store on a disk that has no room left at all: what is removed makes some.

mod support;

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;
use std::process::Command;

use podvisor_images::{Error, Prune, Store};
use support::image::{Layer, Packing};
use support::{Faulty, Reply, Tarball, TestImage, options};
use tempfile::TempDir;

/// A file system of a few MiB; unmounted when dropped.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn new(options: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]);
        assert!(mount.arg(dir.path()).status().unwrap().success());
        Self(dir)
    }

    /// Leaves not one block free.
    fn fill(&self) {
        let mut filler = File::create(self.0.path().join("filler")).unwrap();
        let full = loop {
            if let Err(error) = filler.write_all(&[0; 4096]) {
                break error;
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    }

    fn store(&self) -> Store {
        Store::open(self.0.path().join("store")).unwrap()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount")
            .args(["-l"])
            .arg(self.0.path())
            .status();
    }
}

/// Writes an image of a file with these contents to a directory.
fn write_image(to: &Path, contents: &[u8]) {
    let tar = Tarball::new().file("name", 0o644, contents).finish();
    TestImage::new(vec![Layer::new(&tar, Packing::Plain)]).write_layout(to, "x");
}

fn load(store: &Store, name: &str) -> podvisor_images::Result<()> {
    let dir = tempfile::tempdir().unwrap();
    write_image(dir.path(), name.as_bytes());
    store.load(dir.path(), Some(name), &options()).map(drop)
}

/// Each removal finds a disk that is full again.
#[test]
fn images_are_removed_from_a_disk_that_is_full() {
    let disk = SmallDisk::new("size=8m");
    let store = disk.store();
    let names: Vec<String> = (0..10).map(|number| format!("image-{number}")).collect();
    for name in &names {
        load(&store, name).unwrap();
    }
    disk.fill();
    let refused = load(&store, "more").unwrap_err();
    assert!(matches!(refused, Error::DiskFull { .. }), "{refused}");
    let (last, others) = names.split_last().unwrap();
    for name in others {
        disk.fill();
        let removed = store.remove(name).unwrap();
        assert!(removed.bytes > 0, "{name}");
    }
    disk.fill();
    assert_eq!(store.list().unwrap().len(), 1);
    let pruned = store.prune(&Prune::default().tagged()).unwrap();
    assert_eq!(pruned.len(), 1, "{last}");
    fs::remove_file(disk.0.path().join("filler")).unwrap();
    load(&store, "more").unwrap();
    assert_eq!(store.list().unwrap().len(), 1);
}

#[tokio::test]
async fn a_disk_image_is_removed_from_a_disk_that_is_full() {
    let disk = SmallDisk::new("size=8m");
    let store = disk.store();
    let bytes = vec![7; 64 << 10];
    let server = Faulty::serve(TestImage::small(), move |_| {
        Some(Reply::new(200, &bytes[..]))
    });
    let url = format!("http://{}/disk.raw", server.host);
    let options = options();
    let pulled = store.pull_disk(&url, None, &options).await.unwrap();
    disk.fill();
    let removed = store.remove(&url).unwrap();
    assert_eq!(removed.image, Some(pulled.id()));
    assert!(removed.bytes >= 64 << 10, "{removed:?}");
    assert!(store.disks().unwrap().is_empty());
}

/// What removes no file needs room itself, and says so; nothing is lost.
#[test]
fn a_name_that_finds_no_room_to_be_removed_stays() {
    let disk = SmallDisk::new("size=8m");
    let store = disk.store();
    load(&store, "image:1").unwrap();
    store.tag("image:1", "image:2").unwrap();
    disk.fill();
    for _ in 0..2 {
        match store.remove("image:1") {
            Err(Error::DiskFull { .. }) => assert!(store.resolve("image:1").is_ok()),
            other => panic!("{other:?}"),
        }
    }
    assert!(store.resolve("image:2").unwrap().rootfs().exists());
    fs::remove_file(disk.0.path().join("filler")).unwrap();
    store.remove("image:1").unwrap();
    store.resolve("image:2").unwrap();
}
