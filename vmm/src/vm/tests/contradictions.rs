//! Snapshots that contradict their host.

use super::*;
use crate::vm::{BuildError, ConfigError, ConfigErrors};
use crate::{SnapshotError, cpuid, kvm, memory};

/// A snapshot of a guest with two vCPUs, which may get a third one.
fn taken() -> (tempfile::TempDir, Snapshot) {
    let (dir, place) = place();
    let guest = Guest::start(|vm| vm.vcpus(2).max_vcpus(3));
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = Snapshot::open(&place).unwrap();
    (dir, snapshot)
}

fn mistakes(result: Result<impl Sized, BuildError>) -> Vec<ConfigError> {
    match result.map(drop) {
        Err(BuildError::Config(ConfigErrors(errors))) => errors,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_a_snapshot_needs_and_this_host_lacks_is_told() {
    let (_dir, mut snapshot) = taken();
    let check = |snapshot: &Snapshot, most| snapshot.builder().validate(most);
    let errors = |snapshot: &Snapshot, most| mistakes(check(snapshot, most));
    check(&snapshot, 3).unwrap();
    assert!(
        matches!(
            &*errors(&snapshot, 2),
            [ConfigError::Vcpus { vcpus: 3, max: 2 }]
        ),
        "all that it may get count"
    );
    let host = memory::host_memory();
    snapshot.state_mut().memory.boot = host;
    check(&snapshot, 3).unwrap();
    let more = MemorySize::bytes(host.as_bytes() + 0x1000);
    snapshot.state_mut().memory.boot = more;
    let errors = errors(&snapshot, 3);
    assert!(
        matches!(&*errors, [ConfigError::MoreMemoryThanHost { size, .. }] if *size == more),
        "{errors:?}"
    );
}

#[test]
fn what_lies_beyond_the_guests_physical_addresses_is_refused() {
    let refused = |built: Result<crate::Vm, BuildError>| match &*mistakes(built) {
        [ConfigError::AddressSpace { end, bits }] => (*end, *bits),
        errors => panic!("{errors:?}"),
    };
    let cpuid = cpuid::guest_cpuid(&kvm::open().unwrap(), 1, None).unwrap();
    for bits in [cpuid::physical_bits(&cpuid), 52] {
        let all = MemorySize::bytes(1 << bits);
        let end = all.as_bytes() + (1 << 32);
        assert_eq!(refused(tiny(OBEY).hotplug_memory(all).build()), (end, bits));
    }

    let (_dir, mut snapshot) = taken();
    let leaves = snapshot.state_mut().cpuid.as_mut_slice();
    let leaf = leaves.iter_mut().find(|leaf| leaf.function == 0x8000_0008);
    let sizes = &mut leaf.unwrap().eax;
    *sizes = *sizes & !0xff | 31;
    assert_eq!(refused(snapshot.builder().build()), (1 << 32, 31));
}

#[test]
fn a_processor_that_kvm_cannot_be_is_the_snapshots_fault() {
    let (_dir, mut snapshot) = taken();
    let leaves = snapshot.state_mut().cpuid.as_mut_slice();
    let leaf = leaves.iter_mut().find(|leaf| leaf.function == 0x8000_0008);
    // No processor has virtual addresses of 33 bits.
    let sizes = &mut leaf.unwrap().eax;
    *sizes = *sizes & !0xff00 | 33 << 8;
    let error = snapshot.builder().build().unwrap_err();
    assert!(
        matches!(error, BuildError::Snapshot(SnapshotError::Cpuid(_))),
        "{error}"
    );
}
