use super::*;
use crate::GuestRam;
use crate::blk::overlay::create_qcow2;
use crate::blk::{Completion, FileDisk, Operation, Submitted};
use crate::testing::{
    CountingInterrupt, DriverQueue, backend_readable, memory, memory_in_pieces, start, stop,
};
use crate::virtio::Counter;
use proptest::prelude::*;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use vm_memory::{Bytes, GuestAddress, VolatileSlice};

mod begun;
mod blocks;
mod durable;
mod files;
mod log;
mod queue_threads;
mod rates;
mod turns;

const HEADER: u64 = 0x40000;
const DATA: u64 = 0x50000;
const STATUS: u64 = 0x90000;

struct Rig {
    mem: GuestRam,
    driver: DriverQueue,
    device: BlockDevice,
    irq: Arc<CountingInterrupt>,
}

/// `VIRTIO_BLK_F_FLUSH`.
const FLUSH: u64 = 1 << 9;

impl Rig {
    fn over(device: BlockDevice) -> Self {
        Self::with_features(device, FLUSH)
    }

    fn with_features(device: BlockDevice, features: u64) -> Self {
        Self::in_memory(memory(1 << 20), device, features)
    }

    fn in_memory(mem: GuestRam, mut device: BlockDevice, features: u64) -> Self {
        let driver = DriverQueue::new(&mem, 0x10000, 16);
        let irq = Arc::new(CountingInterrupt::default());
        start(&mut device, &[&driver], &irq, features);
        Self {
            mem,
            driver,
            device,
            irq,
        }
    }

    /// A disk of 8 sectors, each filled with its number.
    fn new() -> Self {
        Self::over(disk_of_8_sectors())
    }

    fn header(&self, kind: u32, sector: u64) {
        self.mem.write_obj(kind, GuestAddress(HEADER)).unwrap();
        self.mem
            .write_obj(sector, GuestAddress(HEADER + 8))
            .unwrap();
        self.mem.write_obj(0xffu8, GuestAddress(STATUS)).unwrap();
    }

    fn status(&self) -> u8 {
        self.mem.read_obj(GuestAddress(STATUS)).unwrap()
    }

    fn read(&mut self, sector: u64, len: u32) -> u8 {
        self.header(0, sector);
        self.driver
            .add(&[(HEADER, 16)], &[(DATA, len), (STATUS, 1)]);
        assert_eq!(self.device.on_queue(0).unwrap(), Progress::Idle);
        self.status()
    }

    fn write(&mut self, sector: u64, len: u32) -> u8 {
        self.header(1, sector);
        self.driver
            .add(&[(HEADER, 16), (DATA, len)], &[(STATUS, 1)]);
        assert_eq!(self.device.on_queue(0).unwrap(), Progress::Idle);
        self.status()
    }
}

fn disk_of_8_sectors() -> BlockDevice {
    let mut file = tempfile::tempfile().unwrap();
    for n in 0..8u8 {
        file.write_all(&[n; 512]).unwrap();
    }
    BlockDevice::new(Box::new(FileDisk::new(file).unwrap()))
}

#[test]
fn a_read_fills_the_buffer_and_counts_what_was_written() {
    let mut rig = Rig::new();
    assert_eq!(rig.read(3, 1024), 0);
    let used = rig.driver.take_used().unwrap();
    assert_eq!(used.len, 1025);
    let at = |n| rig.mem.read_obj::<u8>(GuestAddress(DATA + n)).unwrap();
    assert_eq!((at(0), at(511), at(512), at(1023)), (3, 3, 4, 4));
    assert_eq!(rig.irq.queue.load(SeqCst), 1);
}

#[test]
fn the_length_that_was_written_ends_before_what_was_not() {
    let mut rig = Rig::new();
    assert_eq!((rig.read(0, 512), rig.read(8, 512)), (0, 1));
    assert_eq!(rig.write(0, 512), 0);
    // 20 bytes of serial number, with exactly enough room and with more.
    for room in [20, 100] {
        rig.header(8, 0);
        rig.driver
            .add(&[(HEADER, 16)], &[(DATA, room), (STATUS, 1)]);
        assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    }
    let used = std::iter::from_fn(|| rig.driver.take_used()).map(|used| used.len);
    assert_eq!(used.collect::<Vec<_>>(), [513, 0, 1, 21, 20]);
}

#[test]
fn a_write_lands_on_the_disk() {
    let mut rig = Rig::new();
    rig.mem
        .write_slice(&[0xab; 512], GuestAddress(DATA))
        .unwrap();
    assert_eq!(rig.write(7, 512), 0);
    rig.mem.write_slice(&[0; 512], GuestAddress(DATA)).unwrap();
    assert_eq!(rig.read(7, 512), 0);
    assert_eq!(
        rig.mem.read_obj::<u8>(GuestAddress(DATA + 511)).unwrap(),
        0xab
    );
    let counters = rig.device.info().counters.read();
    assert!(counters.contains(&Counter {
        name: "write_bytes",
        value: 512
    }));
}

#[test]
fn data_across_regions_of_memory_are_read_and_written() {
    let mem = memory_in_pieces(&[DATA as usize + 256, 0x10_0000]);
    let mut rig = Rig::in_memory(mem, disk_of_8_sectors(), FLUSH);
    assert_eq!((rig.read(3, 512), rig.write(5, 512)), (0, 0));
    rig.mem.write_slice(&[0; 512], GuestAddress(DATA)).unwrap();
    assert_eq!(rig.read(5, 512), 0);
    let mut bytes = [0; 512];
    rig.mem.read_slice(&mut bytes, GuestAddress(DATA)).unwrap();
    assert_eq!(bytes, [3; 512]);
}

#[test]
fn requests_beyond_the_disk_or_of_odd_length_are_io_errors() {
    let mut rig = Rig::new();
    for (sector, len) in [
        (8, 512),
        (7, 1024),
        (u64::MAX, 512),
        (u64::MAX / 512, 512),
        (0, 100),
    ] {
        assert_eq!(rig.read(sector, len), 1, "read {sector} {len}");
        assert_eq!(rig.write(sector, len), 1, "write {sector} {len}");
    }
}

#[test]
fn a_spare_disk_has_a_short_queue_which_its_requests_fit_into() {
    for (device, queue) in [(BlockDevice::spare(), 64), (disk_of_8_sectors(), 256)] {
        let info = device.info();
        assert_eq!(info.queue_sizes, [queue]);
        let mut seg_max = [0; 4];
        info.config.read(12, &mut seg_max);
        // In addition, a request has a header and a status.
        assert_eq!(u32::from_le_bytes(seg_max), u32::from(queue) - 2);
    }
}

#[test]
fn a_read_only_disk_says_so_and_refuses_writes() {
    let mut rig = Rig::over(disk_of_8_sectors().read_only());
    assert_ne!(rig.device.info().features & (1 << 5), 0);
    assert_eq!(rig.write(0, 512), 1);
    assert_eq!(rig.read(0, 512), 0);
    assert_eq!(rig.mem.read_obj::<u8>(GuestAddress(DATA)).unwrap(), 0);
}

#[test]
fn a_driver_is_told_of_the_blocks_of_its_disk() {
    /// Bytes of the physical block, minimum and optimal request, and alignment of discards.
    fn told(device: &BlockDevice) -> [u32; 4] {
        let info = device.info();
        assert_ne!(info.features & (1 << 10), 0);
        let mut bytes = [0; 60];
        info.config.read(0, &mut bytes);
        let long = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let minimum = u16::from_le_bytes([bytes[26], bytes[27]]);
        assert_eq!(bytes[25], 0, "the first block is aligned");
        [
            512 << bytes[24],
            u32::from(minimum) * 512,
            long(28) * 512,
            long(44) * 512,
        ]
    }
    let file = || {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        file
    };
    for io in [IoEngine::Sync, IoEngine::Uring] {
        let device = BlockDevice::from_file_with(file(), io).unwrap();
        assert_eq!(told(&device.queues(2)), [4096, 4096, 0, 4096]);
    }
    let overlay = file();
    overlay.set_len(0).unwrap();
    let base = file();
    create_qcow2(&base, Path::new("base"), &overlay).unwrap();
    let device = BlockDevice::overlay(base, overlay, OverlayFormat::Qcow2).unwrap();
    assert_eq!(told(&device), [4096, 4096, 64 << 10, 4096]);
    assert_eq!(told(&BlockDevice::spare()), [512, 512, 0, 512]);
}

#[test]
fn the_serial_number_is_cut_to_20_bytes() {
    let mut rig = Rig::over(disk_of_8_sectors().serial("0123456789012345678901234"));
    rig.header(8, 0);
    rig.driver.add(&[(HEADER, 16)], &[(DATA, 32), (STATUS, 1)]);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    let mut id = [0; 21];
    rig.mem.read_slice(&mut id, GuestAddress(DATA)).unwrap();
    assert_eq!(&id, b"01234567890123456789\0");
    assert_eq!(rig.status(), 0);
}

#[test]
fn flush_and_unknown_requests() {
    let mut rig = Rig::new();
    for (kind, status) in [(4, 0), (14, 2), (u32::MAX, 2)] {
        rig.header(kind, 0);
        rig.driver.add(&[(HEADER, 16)], &[(STATUS, 1)]);
        assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
        assert_eq!(rig.status(), status);
    }
}

impl Rig {
    /// A request with one range.
    fn range(&mut self, kind: u32, sector: u64, count: u32, flags: u32) -> u8 {
        self.header(kind, 0);
        let at = GuestAddress(DATA);
        self.mem.write_obj(sector, at).unwrap();
        self.mem
            .write_slice(
                &[count.to_le_bytes(), flags.to_le_bytes()].concat(),
                GuestAddress(DATA + 8),
            )
            .unwrap();
        self.driver.add(&[(HEADER, 16), (DATA, 16)], &[(STATUS, 1)]);
        assert_eq!(self.device.on_queue(0).unwrap(), Progress::Idle);
        self.status()
    }

    fn first_byte(&mut self, sector: u64) -> u8 {
        assert_eq!(self.read(sector, 512), 0);
        self.mem.read_obj(GuestAddress(DATA)).unwrap()
    }
}

const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

#[test]
fn ranges_are_discarded_and_filled_with_zeroes() {
    let mut rig = Rig::new();
    for (kind, sector, flags) in [(WRITE_ZEROES, 1, 0), (WRITE_ZEROES, 4, 1), (DISCARD, 6, 0)] {
        assert_eq!(rig.range(kind, sector, 2, flags), 0, "{kind} {sector}");
        assert_eq!(rig.first_byte(sector), 0);
        assert_eq!(rig.first_byte(sector + 1), 0);
    }
    assert_eq!(rig.first_byte(3), 3, "what lies between is left alone");
    assert_eq!(rig.range(WRITE_ZEROES, 3, 0, 0), 0, "nothing is nothing");
    assert_eq!(rig.first_byte(3), 3);
    let count = |name| crate::testing::counter(&rig.device, name);
    assert_eq!(
        (count("discard_bytes"), count("zeroed_bytes")),
        (1024, 2048)
    );
}

#[test]
fn ranges_beyond_the_disk_or_with_unknown_flags_are_refused() {
    let mut rig = Rig::new();
    for kind in [DISCARD, WRITE_ZEROES] {
        for (sector, count) in [
            (8, 1),
            (7, 2),
            (0, u32::MAX),
            (u64::MAX, 1),
            (u64::MAX / 512, 1),
            (u64::MAX - 1, 2),
        ] {
            assert_eq!(
                rig.range(kind, sector, count, 0),
                1,
                "{kind} {sector} {count}"
            );
        }
        assert_eq!(rig.range(kind, 0, 1, 2), 2);
        assert_eq!(rig.range(kind, 0, 1, u32::MAX), 2);
        // Another length than that of a range; several of which one has an unknown flag; more.
        for (len, flags, status) in [
            (0, 2, 1),
            (15, 2, 1),
            (17, 2, 1),
            (31, 2, 1),
            (32, 0, 1),
            (32, 2, 2),
            (16 << 12, 0, 1),
            (16 << 12, 2, 2),
        ] {
            rig.header(kind, 0);
            let ranges = vec![0u8; 16 << 12];
            rig.mem.write_slice(&ranges, GuestAddress(DATA)).unwrap();
            let at = GuestAddress(DATA + 16 + 12);
            rig.mem.write_obj(flags, at).unwrap();
            rig.driver.add(&[(HEADER, 16), (DATA, len)], &[(STATUS, 1)]);
            assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
            assert_eq!(rig.status(), status, "{kind} {len} {flags}");
        }
    }
    assert_eq!(rig.range(DISCARD, 0, 1, 1), 2, "only zeroes may unmap");
    assert_eq!((rig.first_byte(1), rig.first_byte(7)), (1, 7));
    let mut rig = Rig::over(disk_of_8_sectors().read_only());
    for kind in [DISCARD, WRITE_ZEROES] {
        for (sector, flags) in [(1, 0), (1, 2), (u64::MAX, 0)] {
            assert_eq!(rig.range(kind, sector, 1, flags), 2, "it is not offered");
        }
    }
    assert_eq!(rig.first_byte(1), 1);
}

#[test]
fn more_zeroes_than_the_configuration_allows_are_refused() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(4 << 30).unwrap();
    let mut rig = Rig::over(BlockDevice::new(Box::new(FileDisk::new(file).unwrap())));
    let mut config = [0; 60];
    rig.device.info().config.read(0, &mut config);
    let limit = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    for (kind, limit) in [(DISCARD, limit(36)), (WRITE_ZEROES, limit(48))] {
        assert_eq!(rig.range(kind, 0, limit, 0), 0);
        assert_eq!(rig.range(kind, 0, limit + 1, 0), 1);
    }
}

#[test]
fn an_operation_that_the_host_does_not_have_is_unsupported() {
    #[derive(Debug)]
    struct Plain;
    impl Disk for Plain {
        fn len(&self) -> u64 {
            1 << 20
        }
        fn submit(&mut self, _: &GuestRam, _: u16, _: Operation<'_, '_>) -> Submitted {
            Submitted::Done(Err(std::io::Error::from_raw_os_error(libc::EOPNOTSUPP)))
        }
    }
    let mut rig = Rig::over(BlockDevice::new(Box::new(Plain)));
    assert_eq!(rig.range(DISCARD, 0, 1, 0), 2);
}

#[test]
fn a_request_without_status_byte_or_whole_header_is_a_guest_fault() {
    let mut rig = Rig::new();
    rig.header(0, 0);
    rig.driver.add(&[(HEADER, 16)], &[]);
    assert!(matches!(rig.device.on_queue(0), Err(Fault::Guest(_))));
    let mut rig = Rig::new();
    rig.driver.add(&[(HEADER, 15)], &[(STATUS, 1)]);
    assert!(matches!(rig.device.on_queue(0), Err(Fault::Guest(_))));
    assert_eq!(
        stop(&mut rig.device).len(),
        1,
        "a faulted device still stops"
    );
}

#[test]
fn a_driver_that_refills_the_ring_does_not_keep_the_loop() {
    #[derive(Debug)]
    struct Refilling(std::sync::Mutex<DriverQueue>);
    impl Disk for Refilling {
        fn len(&self) -> u64 {
            4096
        }
        fn submit(&mut self, _: &GuestRam, _: u16, _: Operation<'_, '_>) -> Submitted {
            self.0.lock().unwrap().add(&[(HEADER, 16)], &[(STATUS, 1)]);
            Submitted::Done(Ok(()))
        }
    }
    let mem = memory(1 << 20);
    mem.write_obj(4u32, GuestAddress(HEADER)).unwrap();
    let mut driver = DriverQueue::new(&mem, 0x10000, 16);
    let irq = Arc::new(CountingInterrupt::default());
    let queue = driver.device_queue(0, irq);
    driver.add(&[(HEADER, 16)], &[(STATUS, 1)]);
    let mut device = BlockDevice::new(Box::new(Refilling(std::sync::Mutex::new(driver))));
    device.start_queue(queue).unwrap();
    assert_eq!(device.on_queue(0).unwrap(), Progress::More);
}

/// A disk whose requests complete when it is ready, or waited for.
#[derive(Debug, Default)]
struct Later {
    tokens: Vec<u16>,
    ready: Arc<std::sync::atomic::AtomicBool>,
}
impl Disk for Later {
    fn len(&self) -> u64 {
        1 << 20
    }
    fn submit(&mut self, _: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted {
        if let Operation::Read { slices, .. } = operation {
            slices
                .iter()
                .for_each(|s: &VolatileSlice<'_>| s.copy_from(&vec![5u8; s.len()]));
        }
        self.tokens.push(token);
        Submitted::Queued
    }
    fn completed(&mut self) -> Option<Completion> {
        let token = self
            .ready
            .load(SeqCst)
            .then(|| self.tokens.pop())
            .flatten()?;
        let result = Ok(());
        Some(Completion { token, result })
    }
    fn wait(&mut self) -> std::io::Result<()> {
        self.ready.store(true, SeqCst);
        Ok(())
    }
}

#[test]
fn requests_in_flight_finish_by_the_backend_and_before_a_stop() {
    let disk = Later::default();
    let ready = disk.ready.clone();
    let mut rig = Rig::over(BlockDevice::new(Box::new(disk)));
    assert_eq!(rig.read(0, 512), 0xff, "not finished yet");
    assert!(rig.driver.take_used().is_none());
    ready.store(true, SeqCst);
    assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
    assert_eq!(
        (rig.status(), rig.driver.take_used().unwrap().len),
        (0, 513)
    );

    ready.store(false, SeqCst);
    assert_eq!(rig.read(0, 512), 0xff);
    assert_eq!(stop(&mut rig.device).len(), 1);
    assert_eq!(rig.status(), 0);
    assert_eq!(
        stop(&mut rig.device).len(),
        0,
        "a stopped device holds nothing"
    );
}

#[test]
fn a_head_made_available_again_while_its_request_is_in_flight_is_a_fault() {
    let mut rig = Rig::over(BlockDevice::new(Box::new(Later::default())));
    assert_eq!(rig.read(0, 512), 0xff);
    rig.driver.make_available(0);
    assert!(matches!(rig.device.on_queue(0), Err(Fault::Guest(_))));
    assert_eq!(
        stop(&mut rig.device).len(),
        1,
        "what is in flight ends first"
    );
    assert_eq!(rig.status(), 0);
}

#[test]
fn a_header_and_descriptors_that_change_in_flight_change_nothing() {
    let disk = Later::default();
    let ready = disk.ready.clone();
    let mut rig = Rig::over(BlockDevice::new(Box::new(disk)));
    assert_eq!(rig.read(0, 512), 0xff);
    // A write of everything, elsewhere, from memory that does not exist.
    rig.header(1, u64::MAX);
    for descriptor in 0..3 {
        rig.driver.descriptor(descriptor, u64::MAX, u32::MAX, 1, 0);
    }
    ready.store(true, SeqCst);
    assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
    assert_eq!(rig.driver.take_used().unwrap().len, 513);
    assert_eq!(
        (rig.status(), rig.mem.read_obj(GuestAddress(DATA)).unwrap()),
        (0, 5u8)
    );
}

/// A disk that counts how often it was settled.
#[derive(Clone, Debug, Default)]
struct Settled(Arc<std::sync::atomic::AtomicUsize>);

impl Disk for Settled {
    fn len(&self) -> u64 {
        4096
    }

    fn submit(&mut self, _: &GuestRam, _token: u16, _: Operation<'_, '_>) -> Submitted {
        Submitted::Done(Ok(()))
    }

    fn settle(&mut self) -> std::io::Result<()> {
        self.0.fetch_add(1, SeqCst);
        Ok(())
    }
}

#[test]
fn a_disk_is_settled_when_its_queue_stops_and_when_another_takes_its_place() {
    let disk = Settled::default();
    let mut rig = Rig::over(BlockDevice::new(Box::new(disk.clone())));
    assert_eq!((rig.write(0, 512), disk.0.load(SeqCst)), (0, 0));
    let mut queues = stop(&mut rig.device);
    assert_eq!(disk.0.load(SeqCst), 1);
    rig.device.start_queue(queues.remove(0)).unwrap();
    rig.device
        .replace_disk(Box::new(Settled::default()), "next");
    assert_eq!(disk.0.load(SeqCst), 2);
}

/// A disk that records the lengths of its requests.
#[derive(Clone, Debug, Default)]
struct Noting(Arc<std::sync::Mutex<Vec<(u64, usize)>>>);
impl Disk for Noting {
    fn len(&self) -> u64 {
        64 << 20
    }
    fn submit(&mut self, _: &GuestRam, _: u16, operation: Operation<'_, '_>) -> Submitted {
        if let Operation::Read { offset, slices } | Operation::Write { offset, slices } = operation
        {
            let len = slices.iter().map(VolatileSlice::len).sum();
            self.0.lock().unwrap().push((offset, len));
        }
        Submitted::Done(Ok(()))
    }
}

/// A rig with a request of 5.5 MiB, from sector 2 on, of overlapping pieces of memory.
fn long_request(disk: Noting) -> Rig {
    long_request_of(BlockDevice::new(Box::new(disk)))
}

fn long_request_of(device: BlockDevice) -> Rig {
    let mut rig = Rig::over(device);
    rig.header(0, 2);
    let piece = (DATA, 0x8_0000);
    let mut writable = vec![piece; 11];
    writable.push((STATUS, 1));
    rig.driver.add(&[(HEADER, 16)], &writable);
    rig
}

#[test]
fn a_long_request_is_carried_out_in_pieces_with_turns_between() {
    let disk = Noting::default();
    let mut rig = long_request(disk.clone());
    for _ in 0..5 {
        assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
        assert!(rig.driver.take_used().is_none());
    }
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    assert_eq!(rig.driver.take_used().unwrap().len, 11 * 0x8_0000 + 1);
    let mib = 1 << 20;
    let mut expected: Vec<_> = (0..5).map(|n| (1024 + n * mib, mib as usize)).collect();
    expected.push((1024 + 5 * mib, 0x8_0000));
    assert_eq!(*disk.0.lock().unwrap(), expected);
}

#[test]
fn a_request_of_which_a_part_is_done_starts_over_after_a_stop() {
    let disk = Noting::default();
    let mut rig = long_request(disk.clone());
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
    let mut queues = stop(&mut rig.device);
    assert_eq!(queues[0].state().next_avail, 0, "as if it were not taken");
    disk.0.lock().unwrap().clear();
    rig.device.start_queue(queues.remove(0)).unwrap();
    while rig.device.on_queue(0).unwrap() == Progress::More {}
    assert_eq!(rig.driver.take_used().unwrap().len, 11 * 0x8_0000 + 1);
    assert_eq!(disk.0.lock().unwrap().len(), 6);
    assert!(rig.driver.take_used().is_none());
}

#[test]
fn flushes_cost_more_than_their_bytes() {
    /// A disk that takes no time, which would end a turn too.
    #[derive(Debug)]
    struct Instant;
    impl Disk for Instant {
        fn len(&self) -> u64 {
            4096
        }
        fn submit(&mut self, _: &GuestRam, _: u16, _: Operation<'_, '_>) -> Submitted {
            Submitted::Done(Ok(()))
        }
    }
    let mut rig = Rig::over(BlockDevice::new(Box::new(Instant)));
    rig.header(4, 0);
    for _ in 0..6 {
        rig.driver.add(&[(HEADER, 16)], &[(STATUS, 1)]);
    }
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    assert_eq!(std::iter::from_fn(|| rig.driver.take_used()).count(), 6);
}

#[test]
fn another_disk_takes_the_place_of_the_first_between_two_requests() {
    let mut rig = Rig::new();
    assert_eq!(rig.read(3, 512), 0);
    let config = rig.device.info().config;
    let generation = config.generation();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[9; 2 * 512]).unwrap();
    let disk = FileDisk::new(file.try_clone().unwrap()).unwrap();
    rig.device.replace_disk(Box::new(disk), "second");
    let capacity = || {
        let mut bytes = [0; 8];
        config.read(0, &mut bytes);
        u64::from_le_bytes(bytes)
    };
    assert_eq!((capacity(), config.generation()), (2, generation + 1));
    assert_eq!((rig.read(3, 512), rig.read(1, 512)), (1, 0));
    assert_eq!(rig.mem.read_obj::<u8>(GuestAddress(DATA)).unwrap(), 9);
    file.set_len(5 * 512).unwrap();
    assert_eq!(capacity(), 2);
    rig.device.resize().unwrap();
    assert_eq!((capacity(), rig.read(3, 512)), (5, 0));
}

proptest! {
    /// With any header, the request is completed once and the disk keeps its size.
    #[test]
    fn any_header_is_answered(kind in 0u32..16, sector: u64, len in 0u32..5000, write: bool) {
        let mut rig = Rig::new();
        rig.header(kind, sector);
        let data = [(DATA, len)];
        if write {
            rig.driver.add(&[(HEADER, 16), data[0]], &[(STATUS, 1)]);
        } else {
            rig.driver.add(&[(HEADER, 16)], &[data[0], (STATUS, 1)]);
        }
        prop_assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
        prop_assert!(rig.status() <= 2);
        prop_assert!(rig.driver.take_used().is_some());
        prop_assert!(rig.driver.take_used().is_none());
    }
}

fn tempfile_of(len: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(len).unwrap();
    file
}
