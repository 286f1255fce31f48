//! Snapshots of devices on PCI with manipulated records.

use std::fs;

use podvisor_devices::blk::BlockDevice;

use super::*;
use crate::snapshot::testing::{RecordKind, decode, encode};
use crate::vm::BuildError;

#[test]
fn damage_behind_a_mended_checksum_is_an_error_or_a_vm_that_ends_well() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("snapshot");
    fn devices<S>(vm: VmBuilder<S>) -> VmBuilder<S> {
        vm.block(BlockDevice::spare()).rng()
    }
    let guest = on_pci(devices);
    let block = guest.function(1);
    block.set_vector(1, 0x61, true);
    block.set_msix(MSIX_ON);
    block.start(RINGS, 1);
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let path = place.join("state");
    let records = decode(&fs::read(&path).unwrap()).unwrap();
    let mut ran = 0;
    for (number, record) in records.iter().enumerate() {
        if !matches!(record.kind, RecordKind::Pci | RecordKind::Function) {
            continue;
        }
        for at in 0..record.bytes.len() {
            // All read-only bytes of configuration space are refused alike.
            if at > 120 && at % 5 != number % 5 {
                continue;
            }
            let mut records = records.clone();
            records[number].bytes[at] ^= 1 << (at % 8);
            fs::write(&path, encode(&records)).unwrap();
            let Ok(snapshot) = Snapshot::open(&place) else {
                continue;
            };
            let vm = match devices(snapshot.builder()).build() {
                Ok(vm) => Arc::new(vm),
                Err(BuildError::Config(_) | BuildError::Snapshot(_)) => continue,
                Err(error) => panic!("{error}"),
            };
            vm.start().unwrap();
            ran += 1;
            let stopped = vm.clone();
            in_time("stop", move || stopped.stop()).unwrap();
        }
    }
    assert!(ran > 10, "{ran} damaged snapshots were run");
}

#[test]
fn two_devices_in_one_place_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("snapshot");
    let guest = on_pci(|vm| vm.rng().rng());
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let path = place.join("state");
    let sound = decode(&fs::read(&path).unwrap()).unwrap();
    for slot in [0, 1, 32, 255] {
        let mut records = sound.clone();
        let second = records
            .iter_mut()
            .find(|record| record.id == "rng1" && record.kind == RecordKind::Function);
        second.unwrap().bytes[0] = slot;
        fs::write(&path, encode(&records)).unwrap();
        let builder = Snapshot::open(&place).unwrap().builder();
        let error = builder.rng().rng().build().map(|_| ()).unwrap_err();
        assert!(matches!(error, BuildError::Snapshot(_)), "{slot}: {error}");
    }
}
