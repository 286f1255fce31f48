//! Disks of one host, which move with the memory.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use podvisor_cri::machine::{OverlayFormat, create_grown_overlay};
use podvisor_vmm::Qcow2Disk;
use podvisor_vmm::devices::blk::{read_disk, write_disk};
use tempfile::TempDir;

use super::*;

/// Disks of one host: an overlay of an image, cloud-init's, and an empty one.
struct LocalDisks {
    dir: TempDir,
}

const IMAGE: usize = 1 << 20;

impl LocalDisks {
    fn new(seed: &[u8]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("image"), vec![3; IMAGE]).unwrap();
        let base = File::open(dir.path().join("image")).unwrap();
        let overlay = File::create_new(dir.path().join("overlay")).unwrap();
        create_grown_overlay(&base, Path::new("image"), &overlay, 0).unwrap();
        fs::write(dir.path().join("seed"), seed).unwrap();
        let empty = File::create_new(dir.path().join("empty")).unwrap();
        empty.set_len(8 << 20).unwrap();
        Self { dir }
    }

    fn file(&self, name: &str) -> File {
        let path = self.dir.path().join(name);
        File::options().read(true).write(true).open(path).unwrap()
    }

    fn disks(&self, image: &str) -> Vec<MachineDisk> {
        let root = DiskContents::Overlay {
            base: self.file("image"),
            overlay: self.file("overlay"),
            format: OverlayFormat::Qcow2,
        };
        let raw = |name: &str, is_read_only| DiskContents::Raw {
            file: self.file(name),
            is_read_only,
        };
        let disk = |serial: &str, contents, name: &str| MachineDisk {
            contents,
            serial: serial.to_owned(),
            moves: DiskMove::Copied(name.to_owned()),
        };
        vec![
            disk("root", root, image),
            disk("seed", raw("seed", true), "made"),
            disk("empty", raw("empty", false), "empty"),
        ]
    }

    fn write(&self, name: &str, offset: u64, bytes: &[u8]) {
        self.file(name).write_all_at(bytes, offset).unwrap();
    }

    /// Writes to the overlay as a guest does.
    fn write_root(&self, offset: u64, bytes: &[u8]) {
        let disk = Qcow2Disk::open(self.file("image"), self.file("overlay"));
        let mut disk = disk.unwrap();
        write_disk(&mut disk, offset, &mut bytes.to_vec()).unwrap();
    }

    fn root(&self) -> Vec<u8> {
        let disk = Qcow2Disk::open(self.file("image"), self.file("overlay"));
        let mut bytes = vec![0; IMAGE];
        read_disk(&mut disk.unwrap(), 0, &mut bytes).unwrap();
        bytes
    }
}

#[tokio::test]
async fn disks_of_one_host_move_with_the_memory() {
    let here = LocalDisks::new(&[1; 4096]);
    here.write_root(3 << 16, &[7; 512]);
    here.write("empty", 5 << 20, &[9; 4096]);
    // What was made of other documents there.
    let there = LocalDisks::new(&[2; 512]);
    let mut source = Side::new(|pod| BootMachine {
        disks: here.disks("sha256:1"),
        ..machine(pod)
    })
    .await;
    source.counts('A').await;
    let mut target = Side::new(|pod| BootMachine {
        disks: there.disks("sha256:1"),
        ..incoming(pod, LONG)
    })
    .await;
    let (one, other) = UnixStream::pair().unwrap();
    target.receive(other).await;
    source.send(one).await;
    assert_eq!(source.ended().await, (0, None));
    target.until(MigrationState::Done).await;
    target.counts('B').await;
    target.powers_off().await;
    let mut expected = vec![3; IMAGE];
    expected[3 << 16..][..512].fill(7);
    assert!(there.root() == expected);
    assert_eq!(fs::read(there.dir.path().join("seed")).unwrap(), [1; 4096]);
    let mut piece = [0; 8192];
    there
        .file("empty")
        .read_exact_at(&mut piece, 5 << 20)
        .unwrap();
    assert!(piece[..4096] == [9; 4096] && piece[4096..] == [0; 4096]);
}

#[tokio::test]
async fn a_machine_whose_image_differs_there_stays_with_the_reason() {
    let here = LocalDisks::new(&[1; 512]);
    let there = LocalDisks::new(&[1; 512]);
    let mut source = Side::new(|pod| BootMachine {
        disks: here.disks("sha256:1"),
        ..machine(pod)
    })
    .await;
    let target = Side::new(|pod| BootMachine {
        disks: there.disks("sha256:2"),
        ..incoming(pod, LONG)
    })
    .await;
    let (one, other) = UnixStream::pair().unwrap();
    target.receive(other).await;
    source.send(one).await;
    let failed = source.until(MigrationState::Failed).await;
    assert!(failed.reason.contains("sha256:2"), "{failed:?}");
    assert_eq!(target.ended().await.0, 1);
    source.counts('A').await;
    source.powers_off().await;
}
