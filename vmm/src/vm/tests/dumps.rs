//! Memory that is written for debuggers.

use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use podvisor_devices::mem::MemDevice;
use podvisor_devices::virtio::VirtioDevice as _;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::*;
use crate::dump::testing::{notes, segments, u64_at};
use crate::vm::{Action, DumpError, DumpProgress, State};

fn go_on(_: DumpProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// The first bytes of a dump, of more than which its head is not.
fn beginning(dump: &File) -> Vec<u8> {
    let mut bytes = vec![0; 8192];
    dump.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Where a physical address is in a dump.
fn offset(dump: &File, address: u64) -> u64 {
    let segments = segments(&beginning(dump));
    let found = segments
        .into_iter()
        .find(|(kind, _, start, len)| *kind == 1 && (*start..start + len).contains(&address));
    let (_, offset, start, _) = found.unwrap();
    offset + (address - start)
}

fn word(dump: &File, address: u64) -> u32 {
    let mut word = [0; 4];
    dump.read_exact_at(&mut word, offset(dump, address))
        .unwrap();
    u32::from_le_bytes(word)
}

#[test]
fn a_dump_has_memory_at_its_addresses_and_registers_of_all_vcpus() {
    let guest = Guest::start(|vm| vm.vcpus(2));
    guest.write(0x30_0000, 0x1234_5678);
    let file = tempfile::tempfile().unwrap();
    let error = guest.vm.dump_to(&file, go_on).unwrap_err();
    assert!(
        matches!(
            error,
            DumpError::State(VmError::IllegalState {
                action: Action::Dump,
                state: State::Running
            })
        ),
        "{error}"
    );
    guest.pause();
    let mut last = None;
    guest
        .vm
        .dump_to(&file, |progress| {
            assert!(last.is_none_or(|last| last <= progress.done));
            last = Some(progress.done);
            assert_eq!(progress.total, 32 << 20);
            // It does not count as a dump before it is one.
            let mut magic = [1; 4];
            file.read_exact_at(&mut magic, 0).unwrap();
            assert_eq!(magic, [0; 4]);
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(last, Some(32 << 20));
    assert_eq!(guest.vm.state(), State::Paused);
    let head = beginning(&file);
    let segments = segments(&head);
    assert_eq!(segments.len(), 2);
    assert_eq!((segments[1].2, segments[1].3), (0, 32 << 20));
    assert_eq!(word(&file, 0x30_0000), 0x1234_5678);
    assert_eq!(word(&file, 0x30_1000), 0);
    // The guest polls for orders in its first instructions.
    let notes = notes(&head[segments[0].1 as usize..][..segments[0].3 as usize]);
    let rip = u64_at(&notes[0].2, 112 + 16 * 8);
    assert!((LOAD..LOAD + 4096).contains(&rip), "{rip:#x}");
    assert_eq!(notes.len(), 4);
    let blocks = file.metadata().unwrap().blocks();
    assert!(blocks * 512 < 4 << 20, "{blocks}: zeroes are holes");
    // What is in a file is not written over.
    let error = guest.vm.dump_to(&file, go_on).unwrap_err();
    assert!(matches!(error, DumpError::NotEmpty), "{error}");
    assert_eq!(word(&file, 0x30_0000), 0x1234_5678);
    guest.vm.resume().unwrap();
    guest.runs_on();
}

#[test]
fn a_dump_of_a_clone_has_what_its_snapshot_has_and_what_it_wrote() {
    let (_dir, place) = place();
    let guest = Guest::start(|vm| vm);
    guest.write(0x30_0000, 7);
    guest.write(0x40_0000, 8);
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = Snapshot::open(&place).unwrap();
    let clone = Guest::restore(&snapshot, |vm| vm);
    clone.write(0x40_0000, 9);
    clone.pause();
    let file = tempfile::tempfile().unwrap();
    clone.vm.dump_to(&file, go_on).unwrap();
    assert_eq!((word(&file, 0x30_0000), word(&file, 0x40_0000)), (7, 9));
}

#[test]
fn a_dump_has_plugged_memory_and_no_more() {
    let guest = Guest::start(|vm| vm.hotplug_memory(MemorySize::mib(128)));
    let region = GuestAddress(1 << 32);
    guest.mem.write_obj(7u32, region).unwrap();
    let dump = || {
        guest.pause();
        let file = tempfile::tempfile().unwrap();
        guest.vm.dump_to(&file, go_on).unwrap();
        guest.vm.resume().unwrap();
        file
    };
    assert_eq!(segments(&beginning(&dump())).len(), 2);
    let memory = guest.vm.hotplug_memory().unwrap();
    memory.request(MemorySize::mib(5)).unwrap();
    // As a driver would: the first block.
    let plug = |device: &mut MemDevice| {
        let mut saved = device.save();
        saved.bytes[16] = 1;
        device.restore(&saved)
    };
    memory.run(plug).unwrap().unwrap();
    let file = dump();
    let segments = segments(&beginning(&file));
    assert_eq!((segments[2].2, segments[2].3), (1 << 32, 2 << 20));
    assert_eq!(word(&file, 1 << 32), 7);
    assert_eq!(file.metadata().unwrap().len(), segments[2].1 + (2 << 20));
}

#[test]
fn nothing_is_left_of_a_dump_that_fails() {
    let guest = Guest::start(|vm| vm);
    guest.pause();
    let is_empty = |file: &File| file.metadata().unwrap().len() == 0;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let full = memfd_create("full", flags).unwrap();
    fcntl_add_seals(&full, SealFlags::GROW).unwrap();
    let full = File::from(full);
    let error = guest.vm.dump_to(&full, go_on).unwrap_err();
    assert!(matches!(error, DumpError::Memory(_)), "{error}");
    assert!(is_empty(&full));

    let file = tempfile::tempfile().unwrap();
    let error = guest.vm.dump_to(&file, |_| ControlFlow::Break(()));
    let error = error.unwrap_err();
    assert!(matches!(error, DumpError::Cancelled), "{error}");
    assert!(is_empty(&file));

    // Who cannot wait lets the guest go on.
    let mut is_resumed = false;
    let error = guest.vm.dump_to(&file, |_| {
        if !is_resumed {
            guest.vm.resume().unwrap();
            guest.runs_on();
            guest.pause();
        }
        is_resumed = true;
        ControlFlow::Continue(())
    });
    let error = error.unwrap_err();
    assert!(matches!(error, DumpError::Resumed), "{error}");
    assert!(is_empty(&file));

    let error = guest.vm.dump_to(&file, |_| {
        let vm = Arc::clone(&guest.vm);
        in_time("a stop", move || vm.stop()).unwrap();
        ControlFlow::Continue(())
    });
    let error = error.unwrap_err();
    assert!(matches!(error, DumpError::State(_)), "{error}");
    assert!(is_empty(&file));
    drop(guest);
    let nowhere = File::open("/").unwrap();
    let guest = Guest::start(|vm| vm);
    guest.pause();
    let error = guest.vm.dump_to(&nowhere, go_on).unwrap_err();
    assert!(matches!(error, DumpError::NotEmpty), "{error}");
}
