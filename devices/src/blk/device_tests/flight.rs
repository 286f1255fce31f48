//! Requests that take their time.

use super::*;

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
