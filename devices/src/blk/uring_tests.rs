use super::*;
use crate::blk::BlockDevice;
use crate::testing::{CountingInterrupt, DriverQueue, backend_readable, memory, start, stop};
use crate::virtio::{Fault, Progress, VirtioDevice};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

const SECTORS: u64 = 4096;
const HEADERS: u64 = 0x4_0000;
const DATA: u64 = 0x10_0000;

struct Rig {
    mem: GuestRam,
    driver: DriverQueue,
    device: BlockDevice,
    file: File,
}

/// A disk whose sectors start with their numbers.
fn rig() -> Rig {
    rig_over(|file| UringDisk::new(file).expect("io_uring on this machine"))
}

fn rig_over(open: impl FnOnce(File) -> UringDisk) -> Rig {
    let mut file = tempfile::tempfile().unwrap();
    let content: Vec<u8> = (0..SECTORS)
        .flat_map(|n| {
            let mut sector = n.to_le_bytes().to_vec();
            sector.resize(512, 0xaa);
            sector
        })
        .collect();
    file.write_all(&content).unwrap();
    let disk = open(file.try_clone().unwrap());
    let mut device = BlockDevice::new(Box::new(disk));
    let mem = memory(8 << 20);
    let driver = DriverQueue::new(&mem, 0x1_0000, 256);
    let irq = Arc::new(CountingInterrupt::default());
    start(&mut device, &[&driver], &irq, 0);
    Rig {
        mem,
        driver,
        device,
        file,
    }
}

impl Rig {
    /// Makes a request available, with its own memory.
    fn add(&mut self, place: u64, kind: u32, sector: u64, len: u32) {
        let header = HEADERS + place * 32;
        self.mem.write_obj(kind, GuestAddress(header)).unwrap();
        self.mem
            .write_obj(sector, GuestAddress(header + 8))
            .unwrap();
        self.mem
            .write_obj(0xffu8, GuestAddress(header + 16))
            .unwrap();
        let data = DATA + place * 0x1_0000;
        // In two pieces, so that lists are used.
        let halves = [(data, len / 2), (data + u64::from(len / 2), len - len / 2)];
        let status = (header + 16, 1);
        if kind == 1 {
            self.driver
                .add(&[(header, 16), halves[0], halves[1]], &[status]);
        } else {
            self.driver
                .add(&[(header, 16)], &[halves[0], halves[1], status]);
        }
    }

    fn status(&self, place: u64) -> u8 {
        self.mem
            .read_obj(GuestAddress(HEADERS + place * 32 + 16))
            .unwrap()
    }

    /// Runs the event loop until `count` requests have completed.
    fn run(&mut self, count: usize) {
        let mut back = 0;
        while self.device.on_queue(0).unwrap() == Progress::More {}
        loop {
            back += std::iter::from_fn(|| self.driver.take_used()).count();
            if back == count {
                return;
            }
            if backend_readable(&self.device) {
                while self.device.on_backend().unwrap() == Progress::More {}
            }
        }
    }
}

#[test]
fn many_requests_of_one_turn_are_carried_out_whole() {
    let mut rig = rig();
    for round in 0..20u64 {
        for place in 0..32 {
            rig.add(
                place,
                0,
                (round * 131 + place * 7) % (SECTORS - 128),
                0x1_0000,
            );
        }
        rig.run(32);
        for place in 0..32 {
            assert_eq!(rig.status(place), 0);
            let first = (round * 131 + place * 7) % (SECTORS - 128);
            for n in [0, 1, 63, 64, 127] {
                let at = GuestAddress(DATA + place * 0x1_0000 + n * 512);
                assert_eq!(rig.mem.read_obj::<u64>(at).unwrap(), first + n);
            }
        }
    }
}

#[test]
fn what_is_written_is_read_back_and_durable_after_a_flush() {
    let mut rig = rig();
    for place in 0..32u64 {
        let at = GuestAddress(DATA + place * 0x1_0000);
        rig.mem.write_slice(&[place as u8 + 1; 0x4000], at).unwrap();
        rig.add(place, 1, place * 32, 0x4000);
    }
    rig.add(40, 4, 0, 0);
    rig.run(33);
    assert!((0..32).all(|place| rig.status(place) == 0));
    let mut bytes = [0; 0x4000];
    for place in 0..32u64 {
        rig.file.read_exact_at(&mut bytes, place * 0x4000).unwrap();
        assert!(bytes.iter().all(|byte| *byte == place as u8 + 1));
    }
}

#[test]
fn a_long_request_is_one_request() {
    let mut rig = rig();
    rig.add(0, 0, 0, 0x10_0000 + 0x4_0000);
    rig.run(1);
    assert_eq!(rig.status(0), 0);
    let at = |n: u64| rig.mem.read_obj::<u64>(GuestAddress(DATA + n * 512));
    assert_eq!((at(0).unwrap(), at(2559).unwrap()), (0, 2559));
}

#[test]
fn nothing_is_in_flight_after_a_stop() {
    let mut rig = rig();
    for place in 0..32 {
        rig.add(place, 0, place * 16, 0x1_0000);
    }
    let _ = rig.device.on_queue(0).unwrap();
    let queues = stop(&mut rig.device);
    let taken = queues[0].state().next_avail;
    assert_eq!(taken, queues[0].state().next_used);
    assert_eq!(
        std::iter::from_fn(|| rig.driver.take_used()).count(),
        usize::from(taken)
    );
}

#[test]
fn a_file_that_became_shorter_is_an_io_error() {
    let mut rig = rig();
    rig.file.set_len(512 * 10).unwrap();
    rig.add(0, 0, 8, 512 * 4);
    rig.add(1, 0, 100, 512);
    rig.add(2, 0, 8, 1024);
    rig.run(3);
    assert_eq!([0, 1, 2].map(|place| rig.status(place)), [1, 1, 0]);
}

#[test]
fn ranges_are_discarded_and_filled_with_zeroes() {
    let mut rig = rig();
    for (place, kind, sector) in [(0, 11, 8u64), (1, 13, 16)] {
        let range = [
            sector.to_le_bytes().to_vec(),
            8u32.to_le_bytes().to_vec(),
            0u32.to_le_bytes().to_vec(),
        ]
        .concat();
        let header = HEADERS + place * 32;
        rig.mem.write_obj(kind, GuestAddress(header)).unwrap();
        let data = DATA + place * 0x1_0000;
        rig.mem.write_slice(&range, GuestAddress(data)).unwrap();
        rig.driver
            .add(&[(header, 16), (data, 16)], &[(header + 16, 1)]);
    }
    rig.run(2);
    assert_eq!([0, 1].map(|place| rig.status(place)), [0, 0]);
    let mut bytes = [1; 512 * 16];
    rig.file.read_exact_at(&mut bytes, 512 * 8).unwrap();
    assert_eq!(bytes, [0; 512 * 16]);
    rig.file.read_exact_at(&mut bytes, 512 * 24).unwrap();
    assert_eq!(bytes[..8], 24u64.to_le_bytes());
}

#[test]
fn a_request_that_stopped_half_way_goes_on_where_it_was() {
    let mut slot = Slot {
        kind: RequestKind::Read,
        offset: 1000,
        left: 30,
        pieces: [(0x100, 10), (0x200, 10), (0x300, 10)]
            .map(|(at, len)| Segment { at, len })
            .to_vec(),
        next: 0,
        retries: 0,
    };
    slot.advance(4);
    assert_eq!(
        (slot.next, slot.pieces[0].at, slot.pieces[0].len),
        (0, 0x104, 6)
    );
    slot.advance(16);
    assert_eq!((slot.next, slot.offset, slot.left), (2, 1020, 10));
    slot.advance(10);
    assert_eq!((slot.next, slot.left), (3, 0));
}

/// A disk whose requests the kernel never starts: its ring is not enabled.
fn disabled(file: File) -> UringDisk {
    let ring = restricted_ring(&file).unwrap();
    UringDisk::over(FileDisk::new(file).unwrap(), ring)
}

#[test]
fn requests_that_the_kernel_does_not_begin_fail_and_the_thread_works_on_later_ones() {
    let mut rig = rig_over(disabled);
    for place in 0..3 {
        rig.add(place, 0, place, 1024);
    }
    assert!(matches!(rig.device.on_queue(0), Err(Fault::Host(_))));
    let queue = stop(&mut rig.device).remove(0);
    assert!(rig.device.is_quiet());
    let state = queue.state();
    assert_eq!((state.next_avail, state.next_used), (3, 3));
    assert_eq!([0, 1, 2].map(|place| rig.status(place)), [1, 1, 1]);
    assert_eq!(std::iter::from_fn(|| rig.driver.take_used()).count(), 3);
    rig.device.start_queue(queue).unwrap();
    // With the same descriptors again, and with others.
    for place in 0..40 {
        rig.add(place, 0, place, 1024);
    }
    rig.run(40);
    for place in 0..40u64 {
        let at = GuestAddress(DATA + place * 0x1_0000);
        assert_eq!(rig.status(place), 0);
        assert_eq!(rig.mem.read_obj::<u64>(at).unwrap(), place);
    }
}

#[test]
fn more_requests_than_the_ring_has_places_fail_one_by_one() {
    let mem = memory(1 << 20);
    let slices = [mem.get_slice(GuestAddress(0), 512).unwrap()];
    let mut disk = disabled(tempfile::tempfile().unwrap());
    let mut failed: Vec<u16> = Vec::new();
    let count = u16::try_from(BATCH).unwrap() + 2;
    for token in 0..count {
        let read = Operation::Read {
            offset: 0,
            slices: &slices,
        };
        if let Submitted::Done(result) = disk.submit(&mem, token, read) {
            assert!(result.is_err());
            failed.push(token);
        }
    }
    disk.commit().unwrap();
    disk.wait().unwrap();
    while let Some(Completion { token, result }) = disk.completed() {
        assert!(result.is_err());
        failed.push(token);
    }
    failed.sort_unstable();
    assert!(failed.into_iter().eq(0..count));
    assert_eq!(disk.in_flight, 0);
}

/// A disk of one sector, with a request that is not completed yet; its token is 7.
fn with_request(mem: &GuestRam, kind: RequestKind) -> UringDisk {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&[5; 512], 0).unwrap();
    let mut disk = UringDisk::new(file).unwrap();
    let slices = [mem.get_slice(GuestAddress(0), 512).unwrap()];
    let (offset, len) = (0, 512);
    let operation = match kind {
        RequestKind::WriteZeroes { unmap } => Operation::WriteZeroes { offset, len, unmap },
        _ => Operation::Read {
            offset,
            slices: &slices,
        },
    };
    let Submitted::Queued = disk.submit(mem, 7, operation) else {
        panic!("it is not queued")
    };
    disk
}

#[test]
fn a_request_that_cannot_be_begun_again_and_again_is_an_error() {
    for errno in [libc::EAGAIN, libc::EINTR] {
        let mut disk = with_request(&memory(1 << 20), RequestKind::Read);
        for _ in 0..RETRIES {
            assert!(disk.complete(7, -errno).is_none());
        }
        let error = disk.complete(7, -errno).expect("an end").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(errno));
    }
}

#[test]
fn zeroes_that_the_kernel_does_not_support_are_written() {
    for unmap in [false, true] {
        let mut disk = with_request(&memory(1 << 20), RequestKind::WriteZeroes { unmap });
        let result = disk.complete(7, -libc::EOPNOTSUPP);
        assert!(matches!(result, Some(Ok(()))), "{result:?}");
        let mut bytes = [1; 512];
        disk.disk.file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [0; 512]);
    }
}

#[test]
fn a_descriptor_that_does_not_wait_is_made_one_that_does() {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    let file = tempfile::tempfile().unwrap();
    fcntl_setfl(&file, OFlags::NONBLOCK | OFlags::APPEND).unwrap();
    let _disk = UringDisk::new(file.try_clone().unwrap()).unwrap();
    let flags = fcntl_getfl(&file).unwrap();
    assert_eq!(flags & (OFlags::NONBLOCK | OFlags::APPEND), OFlags::APPEND);
}

#[test]
fn a_ring_does_nothing_but_requests_on_its_file() {
    let mut disk = UringDisk::new(tempfile::tempfile().unwrap()).unwrap();
    let path = c"/dev/null".as_ptr();
    let socket = types::Fd(disk.disk.file.as_raw_fd());
    let other = [
        opcode::Nop::new().build(),
        opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path).build(),
        opcode::Connect::new(socket, std::ptr::null(), 0).build(),
        opcode::Fsync::new(socket).build(),
        opcode::Read::new(FILE, std::ptr::null_mut(), 0).build(),
    ];
    for entry in other {
        // SAFETY: the path is static, and there are no other pointers.
        unsafe { disk.ring.submission().push(&entry) }.unwrap();
        disk.ring.submit_and_wait(1).unwrap();
        let answer = disk.ring.completion().next().unwrap();
        assert_eq!(answer.result(), -libc::EACCES);
    }
    let files = disk.ring.submitter().unregister_files();
    assert_eq!(files.unwrap_err().raw_os_error(), Some(libc::EACCES));
    let fsync = opcode::Fsync::new(FILE).build();
    // SAFETY: there are no pointers.
    unsafe { disk.ring.submission().push(&fsync) }.unwrap();
    disk.ring.submit_and_wait(1).unwrap();
    assert_eq!(disk.ring.completion().next().unwrap().result(), 0);
}

#[test]
fn several_queues_share_a_disk_and_stop_one_by_one() {
    let file = tempfile::tempfile().unwrap();
    for n in 0..64u8 {
        file.write_all_at(&[n; 512], u64::from(n) * 512).unwrap();
    }
    for disk in [
        Box::new(UringDisk::new(file.try_clone().unwrap()).unwrap()) as Box<dyn Disk>,
        Box::new(crate::blk::FileDisk::new(file.try_clone().unwrap()).unwrap()),
    ] {
        let mut device = BlockDevice::new(disk).queues(4);
        let info = device.info();
        assert_eq!(info.queue_sizes, [256; 4]);
        assert_ne!(info.features & 1 << 12, 0);
        let mut count = [0; 2];
        info.config.read(34, &mut count);
        assert_eq!(count, [4, 0]);
        let mem = memory(8 << 20);
        let mut drivers: Vec<_> = (1..=4)
            .map(|n| DriverQueue::new(&mem, n << 16, 16))
            .collect();
        let irq = Arc::new(CountingInterrupt::default());
        start(&mut device, &drivers.iter().collect::<Vec<_>>(), &irq, 0);
        for round in 0..50u64 {
            for (n, driver) in (0u64..).zip(&mut drivers) {
                // Each queue uses the same head.
                let header = 0x10_0000 + n * 0x1000;
                let sector = (round + n * 16) % 64;
                mem.write_obj(sector, GuestAddress(header + 8)).unwrap();
                driver.add(
                    &[(header, 16)],
                    &[(header + 0x100, 512), (header + 0x400, 1)],
                );
            }
            for queue in 0..4 {
                while device.on_queue(queue).unwrap() == Progress::More {}
            }
            let mut back = [false; 4];
            while back != [true; 4] {
                if backend_readable(&device) {
                    while device.on_backend().unwrap() == Progress::More {}
                }
                for (back, driver) in back.iter_mut().zip(&mut drivers) {
                    *back |= driver.take_used().is_some();
                }
            }
            for n in 0..4u64 {
                let at = GuestAddress(0x10_0000 + n * 0x1000 + 0x100);
                let byte: u8 = mem.read_obj(at).unwrap();
                assert_eq!(u64::from(byte), (round + n * 16) % 64);
            }
        }
        let two = device.stop_queue(2).unwrap();
        assert!(device.stop_queue(2).is_none());
        assert_eq!(device.on_queue(2).unwrap(), Progress::Idle);
        device.start_queue(two).unwrap();
        assert_eq!(stop(&mut device).len(), 4);
    }
}
