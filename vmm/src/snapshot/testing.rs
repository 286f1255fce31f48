//! Handmade state files, for tests of damage and the body of a fuzz target.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use podvisor_devices::pci::SavedMsix;
use podvisor_devices::virtio::transport::{SavedMmio, SavedPci, SavedTransport};
use podvisor_devices::virtio::{QueueConfig, QueueState, SavedConfig, SavedDevice};

use super::chips::ChipState;
use super::device::{DeviceState, SavedRegisters};
use super::format::{Reader, Record, SnapshotFormatError};
use super::state::{Base, MachineState};
use super::vcpu::VcpuState;
use super::working_set::WorkingSet;
use crate::memory::{MemoryShape, MemorySize};
use crate::transport::Transport;

pub(crate) use super::format::{RecordKind, decode, encode};

/// The state that a VM with two vCPUs and two devices would write, with KVM's structures all zero.
pub(crate) fn sample(on: Transport) -> MachineState {
    let transport = SavedTransport {
        status: 15,
        needs_reset: false,
        features: 1 << 32,
        queues: vec![QueueConfig::default(); 2],
    };
    let registers = match on {
        Transport::Mmio => SavedRegisters::Mmio(SavedMmio {
            transport,
            interrupt_status: 1,
            device_features_sel: 0,
            driver_features_sel: 1,
            queue_sel: 0,
        }),
        Transport::Pci => {
            let pci = SavedPci {
                transport,
                config: vec![5; 256],
                msix: SavedMsix {
                    table: vec![[0, 1, 2, 3]; 3],
                    pending: 2,
                },
                config_vector: 0,
                queue_vectors: vec![1, 0xffff],
                isr: 1,
                selectors: (0, 1, 2),
            };
            SavedRegisters::Pci(1, pci)
        }
    };
    let zeroes = [0; 16 << 10];
    let vcpu = || VcpuState::decode(&mut Reader::new(&zeroes)).expect("zeroes are a vCPU");
    let mut chips = vec![0; 3 * 520 + 200];
    // The chips are numbered.
    chips[520] = 1;
    chips[1040] = 2;
    let device = |name: &str| DeviceState {
        name: name.to_owned(),
        registers: registers.clone(),
        queues: vec![(0, QueueState::default())],
        config: SavedConfig {
            generation: 3,
            bytes: vec![7; 8],
        },
        own: SavedDevice {
            version: 1,
            bytes: vec![1, 2, 3],
        },
    };
    MachineState {
        identity: [9; 16],
        memory: MemoryShape::fixed(MemorySize::mib(32)),
        base: Some(Base {
            path: "/full".into(),
            identity: [8; 16],
            ranges: vec![0..0x1000, 0x3000..0x5000],
        }),
        cpuid: CpuId::from_entries(&[kvm_cpuid_entry2::default(); 3]).expect("three leaves"),
        vcpus: vec![vcpu(), vcpu()],
        max_vcpus: 4,
        chips: ChipState::decode(&mut Reader::new(&chips)).expect("three chips"),
        serial: Some(SavedDevice::default()),
        events: Some(SavedDevice {
            version: 1,
            bytes: vec![3, 1],
        }),
        firmware: Some(SavedDevice::default()),
        pci: (on == Transport::Pci).then_some(0x8000_0804),
        devices: vec![device("blk0"), device("rng0")],
        working_set: Some(WorkingSet::new(vec![0x1000..0x2000, 0x8000..0xa000])),
    }
}

/// Takes `data` as a state file, and as edits of one whose checksums are corrected. Writing the
/// decoded state again must give the same state.
pub fn fuzz_state(data: &[u8]) {
    if let Ok(records) = decode(data) {
        read(records);
    }
    let on = match data.first() {
        Some(first) if first % 2 == 1 => Transport::Pci,
        _ => Transport::Mmio,
    };
    let mut records = sample(on).to_records();
    for edit in data.chunks_exact(5) {
        let [which, at_high, at_low, what, value] = *edit else {
            continue;
        };
        let number = usize::from(which) % records.len();
        let at = usize::from(at_high) << 8 | usize::from(at_low);
        let Record { bytes, version, .. } = &mut records[number];
        match what % 8 {
            0 => bytes.truncate(at),
            1 => bytes.push(value),
            2 => *version = u32::from(value),
            3 => {
                records.remove(number);
                if records.is_empty() {
                    return;
                }
            }
            4 => records[number].kind = RecordKind::Transport,
            5 => records[number].kind = RecordKind::Function,
            _ => {
                let len = bytes.len().max(1);
                if let Some(byte) = bytes.get_mut(at % len) {
                    *byte = value;
                }
            }
        }
    }
    match decode(&encode(&records)) {
        Ok(read_back) => {
            assert!(
                read_back == records,
                "records are read as they were written"
            );
            read(records);
        }
        // Two records with the same kind and name, by an edit.
        Err(error) => assert!(
            matches!(error, SnapshotFormatError::Invalid { .. }),
            "{error}"
        ),
    }
}

fn read(records: Vec<Record>) {
    if let Ok(state) = MachineState::from_records(records) {
        let written = state.to_records();
        let again = MachineState::from_records(written.clone()).map(|state| state.to_records());
        assert!(
            again.as_ref() == Ok(&written),
            "a state is read as it was written"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::GuestMemory;
    use crate::snapshot::{Snapshot, SnapshotError};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_file_is_read_as_it_was_written_or_refused(
            data in proptest::collection::vec(any::<u8>(), 0..60)
        ) {
            fuzz_state(&data);
        }
    }

    #[test]
    fn a_state_is_read_as_it_was_written() {
        for on in [Transport::Mmio, Transport::Pci] {
            let records = sample(on).to_records();
            let again = MachineState::from_records(decode(&encode(&records)).unwrap()).unwrap();
            assert!(again.to_records() == records);
            assert_eq!(again.devices, sample(on).devices);
            assert_eq!(again.base, sample(on).base);
            assert_eq!(again.working_set, sample(on).working_set);
            assert_eq!((again.identity, again.vcpus.len()), ([9; 16], 2));
            assert_eq!((again.pci, again.transport()), (sample(on).pci, on));
        }
    }

    #[test]
    fn time_that_passes_moves_the_clock_on_and_changes_nothing_else() {
        let chips = |state: &MachineState| {
            let mut records = state.to_records().into_iter();
            let record = records.find(|record| record.kind == RecordKind::Chips);
            record.expect("a machine has chips").bytes
        };
        let mut state = sample(Transport::Pci);
        let before = chips(&state);
        state.advance(std::time::Duration::from_nanos(7));
        let after = chips(&state);
        // The clock comes last.
        let (clock, rest) = (after.len() - 8, before.len() - 8);
        assert_eq!(after[..clock], before[..rest]);
        assert_eq!(after[clock..], 7u64.to_le_bytes());
    }

    /// Written before there were events: whoever changes a record's layout adds a version to those
    /// that are read, and leaves this file as it is.
    #[test]
    fn a_state_of_an_older_version_of_this_library_is_read() {
        let stored = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/src/snapshot/testing/state-before-events"
        );
        let stored = std::fs::read(stored).unwrap();
        let old = MachineState::from_records(decode(&stored).unwrap()).unwrap();
        let today = sample(Transport::Pci);
        assert_eq!((old.devices, old.base), (today.devices, today.base));
        assert_eq!((old.identity, old.memory), (today.identity, today.memory));
        assert_eq!((old.vcpus.len(), old.max_vcpus), (2, 4));
        assert_eq!((old.pci, old.serial), (today.pci, today.serial));
        assert_eq!(old.working_set, today.working_set);
        assert_eq!((old.events, old.firmware), (None, None));
    }

    #[test]
    fn a_record_that_belongs_to_nothing_is_named() {
        let records = sample(Transport::Mmio).to_records();
        let surplus = |kind, id: &str| {
            let mut more = records.clone();
            more.push(Record {
                kind,
                id: id.to_owned(),
                version: 1,
                bytes: Vec::new(),
            });
            MachineState::from_records(more).unwrap_err().to_string()
        };
        for (kind, id) in [
            (RecordKind::Vcpu, "2"),
            (RecordKind::Device, "blk9"),
            (RecordKind::Function, "blk9"),
            (RecordKind::Chips, "more"),
        ] {
            let error = surplus(kind, id);
            assert!(error.contains(id) && error.contains("nothing"), "{error}");
        }
    }

    #[test]
    fn every_record_is_needed_and_none_is_one_too_many() {
        for on in [Transport::Mmio, Transport::Pci] {
            let records = sample(on).to_records();
            for number in 0..records.len() {
                let mut fewer = records.clone();
                let gone = fewer.remove(number);
                // A VM may have no serial port, no register of events and no firmware, and its
                // working set need not be known.
                let is_extra = ["serial", "events", "firmware"].contains(&&*gone.id);
                let optional = is_extra || gone.kind == RecordKind::WorkingSet;
                let read = MachineState::from_records(fewer);
                assert_eq!(read.is_ok(), optional, "{:?} {}", gone.kind, gone.id);
            }
        }
        let records = sample(Transport::Mmio).to_records();
        let mut more = records.clone();
        more.push(Record {
            id: "2".to_owned(),
            ..records[2].clone()
        });
        assert!(MachineState::from_records(more).is_err());
    }

    #[test]
    fn what_is_expected_of_a_larger_machine_leaves_a_snapshot_as_it_can_be_opened() {
        let dir = tempfile::tempdir().unwrap();
        let mut state = sample(Transport::Mmio);
        (state.base, state.working_set) = (None, None);
        let memory = std::fs::File::create(dir.path().join("memory")).unwrap();
        memory.set_len(state.memory.total().as_bytes()).unwrap();
        std::fs::write(dir.path().join("state"), encode(&state.to_records())).unwrap();
        let end = state.memory.boot.as_bytes();
        let set = vec![0..4096, end - 4096..end + 4096, 2 * end..2 * end + 4096];
        Snapshot::set_working_set(dir.path(), WorkingSet::new(set)).unwrap();
        let snapshot = Snapshot::open(dir.path()).unwrap();
        let set = snapshot.state().working_set.as_ref().unwrap();
        assert_eq!(set.pages(), [0..4096, end - 4096..end]);
    }

    #[test]
    fn a_state_that_could_not_be_opened_is_not_written() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("snapshot");
        let mut state = sample(Transport::Mmio);
        let memory = GuestMemory::anonymous(state.memory).unwrap();
        let write = |state: &MachineState| {
            crate::snapshot::write(&dir, state.clone(), &memory, 0, None, || Ok(()))
        };
        state.devices[0].own.bytes = vec![1; 65 << 20];
        let error = write(&state).unwrap_err();
        assert!(
            matches!(error, SnapshotError::StateTooLong { .. }),
            "{error}"
        );
        assert_eq!(parent.path().read_dir().unwrap().count(), 0);
        state.devices[0].own.bytes = vec![1; 63 << 20];
        write(&state).unwrap();
        Snapshot::open(&dir).unwrap();
    }

    #[test]
    fn a_vcpu_has_no_more_msrs_than_kvm_knows_and_each_once() {
        let read = |numbers: &[u32]| {
            let mut records = sample(Transport::Mmio).to_records();
            let of_vcpu = |record: &&mut Record| record.kind == RecordKind::Vcpu;
            let vcpu = records.iter_mut().find(of_vcpu).unwrap();
            let mut bytes = vcpu.bytes[..4].to_vec();
            bytes.extend(u32::try_from(numbers.len()).unwrap().to_le_bytes());
            for number in numbers {
                bytes.extend(number.to_le_bytes());
                bytes.extend(7u64.to_le_bytes());
            }
            bytes.extend(&vcpu.bytes[8..]);
            vcpu.bytes = bytes;
            MachineState::from_records(records).is_ok()
        };
        assert!(read(&[0x10, 0x174, 0x1b]));
        assert!(!read(&[0x10, 0x174, 0x10]));
        let many: Vec<u32> = (0..100_000).collect();
        assert!(!read(&many));
        assert!(read(&many[..500]));
    }

    #[test]
    fn a_device_has_no_more_running_queues_than_queues() {
        for on in [Transport::Mmio, Transport::Pci] {
            let read = |queues: Vec<(u16, QueueState)>| {
                let mut state = sample(on);
                state.devices[1].queues = queues;
                MachineState::from_records(state.to_records()).is_ok()
            };
            let queue = |index| (index, QueueState::default());
            assert!(read(vec![queue(0), queue(1)]));
            assert!(!read(vec![queue(0), queue(1), queue(2)]));
        }
    }

    #[test]
    fn ranges_of_a_difference_lie_in_memory_in_order() {
        let base = |ranges: Vec<std::ops::Range<u64>>| {
            let mut state = sample(Transport::Mmio);
            state.base = Some(Base {
                ranges,
                ..state.base.take().unwrap()
            });
            MachineState::from_records(state.to_records()).is_ok()
        };
        let end = 32 << 20;
        assert!(base(vec![0..5, 5..end]));
        assert!(!base(vec![0..5, 4..end]));
        assert!(!base(vec![0..5, 5..end + 1]));
        assert!(!base(vec![0..5, 9..9]));
    }
}
