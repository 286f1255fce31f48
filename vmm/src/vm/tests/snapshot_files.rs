//! Snapshots in files that the owner has opened.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::{Guest, VmBuilder, VmError, in_time};
use crate::memory::PageMap;
use crate::vm::{Action, State, TakeSnapshotError, Vm};
use crate::{Snapshot, SnapshotError, SnapshotFormatError, layout};

/// An empty state file and an empty memory file.
fn files() -> [File; 2] {
    [(); 2].map(|()| tempfile::tempfile().unwrap())
}

fn open(files: &[File; 2]) -> Result<Snapshot, SnapshotError> {
    let [state, memory] = files.each_ref().map(|file| {
        // From the beginning: the position is shared.
        let file = file.try_clone().unwrap();
        std::io::Seek::rewind(&mut &file).unwrap();
        file
    });
    Snapshot::from_files(state, memory)
}

fn generation_id(vm: &Vm) -> [u8; 16] {
    let mut id = [0; 16];
    assert_eq!(vm.read_memory(layout::GENERATION_ID, &mut id), id.len());
    id
}

/// A file that cannot become longer, as on a disk that is full.
fn full() -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("full", flags).unwrap();
    fcntl_add_seals(&file, SealFlags::GROW).unwrap();
    file.into()
}

#[test]
fn a_guest_goes_on_from_files_as_itself_or_as_a_copy() {
    let guest = Guest::start(|vm| {
        let vm = vm.page_map(&PageMap::open().unwrap());
        VmBuilder::generation_id(vm)
    });
    guest.write(0x4000, 7);
    let files = files();
    let [state, memory] = &files;
    let error = guest.vm.snapshot_to(state, memory).unwrap_err();
    assert!(
        matches!(
            error,
            TakeSnapshotError::State(VmError::IllegalState {
                action: Action::Snapshot,
                state: State::Running
            })
        ),
        "{error}"
    );
    assert!(!Snapshot::is_finished(state).unwrap());
    guest.pause();
    guest.vm.snapshot_to(state, memory).unwrap();
    assert!(Snapshot::is_finished(state).unwrap());
    let snapshot = open(&files).unwrap();
    let own = generation_id(&guest.vm);
    let same = Guest::restore(&snapshot, super::RestoreBuilder::same_machine);
    assert_eq!((same.read(0x4000), generation_id(&same.vm)), (7, own));
    same.write(0x4000, 8);
    let copy = Guest::restore(&snapshot, |vm| vm);
    assert_eq!(copy.read(0x4000), 7);
    assert_ne!(generation_id(&copy.vm), own);
    // The original goes on as well.
    guest.vm.resume().unwrap();
    guest.runs_on();
    // What is in the files is not written over.
    guest.pause();
    let error = guest.vm.snapshot_to(state, memory).unwrap_err();
    assert!(error.to_string().contains("state"), "{error}");
    open(&files).unwrap();
}

#[test]
fn a_file_that_takes_no_more_leaves_both_empty_and_the_guest_as_it_was() {
    let guest = Guest::start(|vm| vm);
    for number in 0..2 {
        guest.pause();
        let mut files = files();
        files[number] = full();
        let [state, memory] = &files;
        let error = guest.vm.snapshot_to(state, memory).unwrap_err();
        assert!(
            matches!(error, TakeSnapshotError::Snapshot(_)),
            "{number}: {error}"
        );
        for file in &files {
            assert_eq!(file.metadata().unwrap().len(), 0, "{number}");
        }
        assert!(!Snapshot::is_finished(state).unwrap());
        guest.vm.resume().unwrap();
        guest.runs_on();
    }
}

#[test]
fn a_state_without_its_beginning_does_not_count_and_a_damaged_one_is_refused() {
    let guest = Guest::start(|vm| vm);
    guest.pause();
    let files = files();
    let [state, memory] = &files;
    guest.vm.snapshot_to(state, memory).unwrap();
    let mut whole = vec![0; state.metadata().unwrap().len() as usize];
    state.read_exact_at(&mut whole, 0).unwrap();
    // A writer that was killed had not written the header, or nothing at all.
    let mut cut = tempfile::tempfile().unwrap();
    assert!(!Snapshot::is_finished(&cut).unwrap());
    cut.write_all(&[0; 28]).unwrap();
    cut.write_all(&whole[28..]).unwrap();
    assert!(!Snapshot::is_finished(&cut).unwrap());
    // Each byte is covered by a checksum, and each record by the length.
    for at in (0..whole.len()).step_by(509) {
        state.write_all_at(&[!whole[at]], at as u64).unwrap();
        let error = open(&files).unwrap_err();
        assert!(
            matches!(error, SnapshotError::Format { .. }),
            "{at}: {error}"
        );
        state.write_all_at(&whole[at..=at], at as u64).unwrap();
    }
    state.set_len(whole.len() as u64 - 1).unwrap();
    let error = open(&files).unwrap_err();
    assert!(
        matches!(
            error,
            SnapshotError::Format {
                source: SnapshotFormatError::Length { .. },
                ..
            }
        ),
        "{error}"
    );
    state.set_len(0).unwrap();
    state.write_all_at(&whole, 0).unwrap();
    memory.set_len(4096).unwrap();
    assert!(open(&files).is_err());
}

#[test]
fn a_guest_that_ends_meanwhile_leaves_no_snapshot() {
    let guest = Guest::start(|vm| vm);
    guest.pause();
    guest.vm.stop().unwrap();
    let vm = guest.vm.clone();
    let [state, memory] = files();
    let seen = state.try_clone().unwrap();
    let error = in_time("snapshot", move || vm.snapshot_to(&state, &memory)).unwrap_err();
    assert!(error.to_string().contains("stopped"), "{error}");
    assert!(!Snapshot::is_finished(&seen).unwrap());
}
