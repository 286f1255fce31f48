use super::*;
use crate::testing::{
    CountingInterrupt, DriverQueue, F_INDIRECT, F_NEXT, F_WRITE, counter, memory, start, stop,
};
use proptest::prelude::*;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;
use vm_memory::{Address, Bytes, GuestAddress};

const BUF: u64 = 0x4_0000;
const MIB: u64 = 1 << 20;

/// A file of this length, opened for reading.
fn file(len: u64) -> File {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(len).unwrap();
    File::open(file.path()).unwrap()
}

struct Rig {
    mem: GuestRam,
    driver: DriverQueue,
    device: PmemDevice,
    irq: Arc<CountingInterrupt>,
}

fn rig() -> Rig {
    let mem = memory(1 << 20);
    let driver = DriverQueue::new(&mem, 0x1_0000, 64);
    let irq = Arc::new(CountingInterrupt::default());
    let mut device = PmemDevice::from_file(file(5000)).unwrap();
    start(&mut device, &[&driver], &irq, 0);
    Rig {
        mem,
        driver,
        device,
        irq,
    }
}

impl Rig {
    /// Sends a request of this type; returns the result.
    fn ask(&mut self, kind: u32) -> i32 {
        self.mem.write_obj(kind, GuestAddress(BUF)).unwrap();
        let answer = GuestAddress(BUF + 0x1000);
        self.mem.write_slice(&[0xee; 8], answer).unwrap();
        self.driver.add(&[(BUF, 4)], &[(BUF + 0x1000, 4)]);
        assert_eq!(self.device.on_queue(0).unwrap(), Progress::Idle);
        assert_eq!(self.driver.take_used().unwrap().len, 4);
        let beyond: u32 = self.mem.read_obj(GuestAddress(BUF + 0x1004)).unwrap();
        assert_eq!(beyond, 0xeeee_eeee);
        self.mem.read_obj(answer).unwrap()
    }
}

#[test]
fn a_flush_succeeds_and_other_requests_fail() {
    let mut rig = rig();
    assert_eq!(rig.ask(0), 0);
    assert_eq!(rig.irq.queue.load(SeqCst), 1);
    for kind in [1, 2, 0x100, u32::MAX] {
        assert_eq!(rig.ask(kind), -1, "{kind}");
    }
    assert_eq!(rig.ask(0), 0);
    assert_eq!(counter(&rig.device, "flushes"), 2);
    assert_eq!(counter(&rig.device, "refused_requests"), 4);
}

#[test]
fn a_request_in_pieces_is_one() {
    let mut rig = rig();
    rig.mem.write_obj(0u32, GuestAddress(BUF)).unwrap();
    let pieces = [(BUF, 1), (BUF + 1, 0), (BUF + 1, 3)];
    rig.driver
        .add(&pieces, &[(BUF + 0x1000, 3), (BUF + 0x2000, 100)]);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    assert_eq!(rig.driver.take_used().unwrap().len, 4);
    assert_eq!(counter(&rig.device, "flushes"), 1);
}

#[test]
fn half_a_request_and_no_room_for_its_answer_are_faults() {
    let (request, room) = ((BUF, 4), (BUF + 0x1000, 4));
    let bad: [[&[(u64, u32)]; 2]; 4] = [
        [&[(BUF, 3)], &[room]],
        [&[], &[room]],
        [&[request], &[(BUF + 0x1000, 3)]],
        [&[request], &[]],
    ];
    for [readable, writable] in bad {
        let mut rig = rig();
        rig.driver.add(readable, writable);
        let fault = rig.device.on_queue(0).unwrap_err();
        assert!(matches!(fault, Fault::Guest(_)), "{fault:?}");
        assert!(rig.driver.take_used().is_none());
        assert_eq!(stop(&mut rig.device).len(), 1);
    }
}

#[test]
fn a_flood_of_requests_leaves_the_event_loop_its_turn() {
    let mut rig = rig();
    // One table for all: the request and its answer among 1022 empty buffers.
    let table = BUF + 0x4000;
    for index in 0..1024u64 {
        let (addr, len, write) = match index {
            0 => (BUF, 4u32, 0),
            1023 => (BUF + 0x1000, 4, F_WRITE),
            _ => (BUF, 0, 0),
        };
        let next = if index < 1023 { F_NEXT } else { 0 };
        let at = GuestAddress(table + index * 16);
        let flags = u32::from(next | write) | (u32::try_from(index).unwrap() + 1) << 16;
        rig.mem.write_obj(addr, at).unwrap();
        rig.mem
            .write_obj([len, flags], at.unchecked_add(8))
            .unwrap();
    }
    for head in 0..18 {
        rig.driver.descriptor(head, table, 1024 * 16, F_INDIRECT, 0);
        rig.driver.make_available(head);
    }
    let mut calls = 1;
    while rig.device.on_queue(0).unwrap() == Progress::More {
        calls += 1;
    }
    assert_eq!(calls, 5, "64 KiB each, and 256 KiB a turn");
    assert_eq!(counter(&rig.device, "flushes"), 18);
}

#[test]
fn the_device_is_as_the_specification_says() {
    let mut device = PmemDevice::from_file(file(5 * MIB)).unwrap();
    device.place(1 << 32);
    let info = device.info();
    assert_eq!(
        (info.device_type.number(), info.device_type.name()),
        (27, "pmem")
    );
    assert_eq!((info.features, info.queue_sizes.len()), (0, 1));
    let mut bytes = [0; 24];
    info.config.read(0, &mut bytes);
    let words: Vec<u64> = bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|word| u64::from_le_bytes(*word))
        .collect();
    assert_eq!(words, [1 << 32, 6 * MIB, 0]);
    assert!(!info.config.take_changed());
    info.config.driver_write(0, &[9; 16]);
    info.config.read(0, &mut bytes);
    assert_eq!(
        bytes[..8],
        (1u64 << 32).to_le_bytes(),
        "the driver's to read"
    );
    assert_eq!((device.file_len(), device.region().len), (5 * MIB, 6 * MIB));
    assert_eq!(device.file().metadata().unwrap().len(), 5 * MIB);
}

#[test]
fn what_the_guest_may_not_write_is_counted() {
    let device = PmemDevice::from_file(file(1)).unwrap();
    device.refusals().one();
    assert_eq!(counter(&device, "refused_writes"), 1);
}

#[test]
fn files_that_are_no_images_or_may_be_written_are_refused() {
    let error = |file: File| PmemDevice::from_file(file).unwrap_err();
    assert!(matches!(error(file(0)), PmemError::Length { len: 0 }));
    let dir = File::open("/").unwrap();
    assert!(matches!(error(dir), PmemError::NotAFile));
    let (read, _write) = std::io::pipe().unwrap();
    let pipe = File::from(OwnedFd::from(read));
    assert!(matches!(error(pipe), PmemError::NotAFile));
    let mut writable = tempfile::tempfile().unwrap();
    writable.write_all(b"image").unwrap();
    assert!(matches!(error(writable), PmemError::Writable));
    let missing = PmemDevice::open("/nowhere/at/all").unwrap_err();
    assert!(missing.to_string().contains("/nowhere/at/all"), "{missing}");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, b"image").unwrap();
    assert_eq!(PmemDevice::open(&path).unwrap().file_len(), 5);
}

#[test]
fn a_clone_has_it_where_it_was_and_of_the_same_length() {
    let mut device = PmemDevice::from_file(file(5 * MIB)).unwrap();
    device.place(1 << 32);
    let saved = device.save();
    let restored = |len, saved: &SavedDevice| {
        let mut device = PmemDevice::from_file(file(len)).unwrap();
        let result = device.restore(saved);
        result.map(|()| device.region()).map_err(|e| e.to_string())
    };
    assert_eq!(restored(5 * MIB, &saved), Ok(device.region()));
    for len in [5 * MIB - 1, 5 * MIB + 1, 4096] {
        let error = restored(len, &saved).unwrap_err();
        assert!(error.contains("another length"), "{error}");
    }
    let at = |start: u64| SavedDevice {
        bytes: [start.to_le_bytes(), (5 * MIB).to_le_bytes()].concat(),
        version: 1,
    };
    for start in [1, 4096, MIB, !(2 * MIB - 1)] {
        let error = restored(5 * MIB, &at(start)).unwrap_err();
        assert!(error.contains("where none can be"), "{error}");
    }
    for cut in 0..16 {
        let mut short = saved.clone();
        short.bytes.truncate(cut);
        assert!(restored(5 * MIB, &short).is_err(), "{cut} bytes");
    }
    assert!(restored(5 * MIB, &SavedDevice::default()).is_err());
}

#[test]
fn queues_that_run_or_do_not_exist_are_refused() {
    let mut rig = rig();
    let mut start = |index| {
        let queue = rig.driver.device_queue(index, rig.irq.clone());
        rig.device.start_queue(queue).unwrap_err()
    };
    assert!(matches!(start(0), StartError::Running { index: 0 }));
    assert!(matches!(start(1), StartError::NoSuchQueue { index: 1 }));
    assert!(rig.device.stop_queue(1).is_none());
    assert_eq!(stop(&mut rig.device).len(), 1);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
}

proptest! {
    #[test]
    fn regions_hold_their_file_and_less_than_a_unit_of_zeroes(len in 1u64..(1 << 40)) {
        let device = PmemDevice::from_file(file(len)).unwrap();
        let region = device.region();
        prop_assert!(region.len.is_multiple_of(PMEM_ALIGNMENT));
        prop_assert!(region.len >= len && region.len - len < PMEM_ALIGNMENT);
    }

    #[test]
    fn each_request_is_answered_by_its_type(kinds in prop::collection::vec(0u32..3, 1..30)) {
        let mut rig = rig();
        for kind in &kinds {
            let expected = if *kind == 0 { 0 } else { -1 };
            prop_assert_eq!(rig.ask(*kind), expected);
        }
        let flushes = kinds.iter().filter(|kind| **kind == 0).count() as u64;
        prop_assert_eq!(counter(&rig.device, "flushes"), flushes);
    }
}
