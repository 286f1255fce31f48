//! Reads, writes and what else a driver asks for, one at a time.

use super::*;

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
