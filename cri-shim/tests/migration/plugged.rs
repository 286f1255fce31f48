//! Disks that were plugged into a machine that moves.

use std::fs;

use podvisor_cri::sandbox::Unplugged;
use tempfile::TempDir;

use super::*;

/// What was plugged in before and after the guest's last reboot has different places among the
/// devices, and is known to the other side by its serial number alone.
#[tokio::test]
async fn disks_that_were_plugged_in_move_if_the_other_side_has_them() {
    let mut source = Side::booted().await;
    let dir = TempDir::new().unwrap();
    let open = |name: &str| {
        let path = dir.path().join(name);
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let file = options.open(path).unwrap();
        if file.metadata().unwrap().len() == 0 {
            file.set_len(1 << 20).unwrap();
        }
        file
    };
    let plug = async |side: &Side, serial: &str| {
        let plugged = side.sandbox.plug_disk(ID, serial, open(serial), false);
        plugged.await.unwrap();
    };
    for serial in ["gone", "early"] {
        plug(&source, serial).await;
    }
    source.sandbox.reset_machine(ID).await.unwrap();
    says(&source.pod, ID, 2).await;
    plug(&source, "late").await;
    plug(&source, "last").await;
    let unplug = async |side: &Side, serial: &str| {
        let limit = Duration::from_millis(1);
        side.sandbox.unplug_disk(ID, serial, limit).await.unwrap()
    };
    assert_eq!(unplug(&source, "gone").await, Unplugged::Forced);
    source.counts('A').await;
    // One is missing there: nothing is sent, and the guest goes on.
    let target = Side::waiting(LONG).await;
    plug(&target, "early").await;
    let (one, other) = UnixStream::pair().unwrap();
    target.receive(other).await;
    source.send(one).await;
    let failed = source.until(MigrationState::Failed).await;
    for named in ["early", "late", "last"] {
        assert!(failed.reason.contains(named), "{failed:?}");
    }
    source.counts('B').await;
    drop(target);

    let mut target = Side::waiting(LONG).await;
    for serial in ["last", "other", "early", "late", "early"] {
        plug(&target, serial).await;
    }
    assert_eq!(unplug(&target, "other").await, Unplugged::Released);
    let (one, other) = UnixStream::pair().unwrap();
    target.receive(other).await;
    source.send(one).await;
    assert_eq!(source.ended().await, (0, None));
    target.until(MigrationState::Done).await;
    target.counts('C').await;
    // They are what they were: they grow, go, and stay when the guest reboots.
    for serial in ["early", "last"] {
        let grown = target.sandbox.grow_disk(ID, serial, 2 << 20).await;
        grown.unwrap();
        assert_eq!(len_of(&dir, serial), 2 << 20);
    }
    assert_eq!(unplug(&target, "late").await, Unplugged::Forced);
    target.sandbox.reset_machine(ID).await.unwrap();
    says(&target.pod, ID, 1).await;
    assert_eq!(unplug(&target, "early").await, Unplugged::Forced);
    assert_eq!(unplug(&target, "late").await, Unplugged::Released);
    target.powers_off().await;
    source.sandbox.shutdown(Duration::ZERO).await.unwrap();
}

fn len_of(dir: &TempDir, name: &str) -> u64 {
    fs::metadata(dir.path().join(name)).unwrap().len()
}
