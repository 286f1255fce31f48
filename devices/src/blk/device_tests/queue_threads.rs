//! Queues with their own threads.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::*;
use crate::virtio::QueueThreads;
use rustix::event::{PollFd, PollFlags, Timespec};
use vmm_sys_util::eventfd::EventFd;

pub(super) const QUEUES: u16 = 4;
const PATIENCE: Duration = Duration::from_secs(60);

/// A device whose queues have threads, except the first one, and its driver.
pub(super) struct Rig {
    mem: GuestRam,
    drivers: Vec<DriverQueue>,
    kicks: Vec<EventFd>,
    irq: Arc<CountingInterrupt>,
    device: Option<BlockDevice>,
    known: QueueThreads,
    threads: Vec<JoinHandle<()>>,
}

impl Rig {
    fn over(device: BlockDevice) -> Self {
        Self::with_features(device, FLUSH)
    }

    pub(super) fn with_features(device: BlockDevice, features: u64) -> Self {
        let mem = memory(4 << 20);
        let at = |queue: u16| 0x10_0000 + u64::from(queue) * 0x1_0000;
        let mut rig = Self {
            drivers: (0..QUEUES)
                .map(|queue| DriverQueue::new(&mem, at(queue), 64))
                .collect(),
            mem,
            kicks: Vec::new(),
            irq: Arc::default(),
            device: Some(device.queues(QUEUES)),
            known: QueueThreads::default(),
            threads: Vec::new(),
        };
        rig.known = rig.device().queue_threads();
        for body in rig.known.bodies() {
            rig.threads.push(std::thread::spawn(move || body.run()));
        }
        rig.device().negotiated(features);
        for index in 0..QUEUES {
            let queue = rig.drivers[usize::from(index)].device_queue(index, rig.irq.clone());
            rig.kicks.push(queue.kick().try_clone().unwrap());
            rig.device().start_queue(queue).unwrap();
        }
        rig
    }

    fn device(&mut self) -> &mut BlockDevice {
        self.device.as_mut().unwrap()
    }

    fn status_at(queue: u16) -> u64 {
        0x1_0000 + u64::from(queue) * 0x1000 + 16
    }

    fn data_at(queue: u16) -> u64 {
        0x2_0000 + u64::from(queue) * 0x1000
    }

    /// Makes a request of one sector available.
    pub(super) fn add(&mut self, queue: u16, kind: u32, sector: u64) {
        let status = Self::status_at(queue);
        let header = status - 16;
        self.mem.write_obj(kind, GuestAddress(header)).unwrap();
        self.mem
            .write_obj(sector, GuestAddress(header + 8))
            .unwrap();
        self.mem.write_obj(0xffu8, GuestAddress(status)).unwrap();
        let data = (Self::data_at(queue), 512);
        let driver = &mut self.drivers[usize::from(queue)];
        match kind {
            1 => driver.add(&[(header, 16), data], &[(status, 1)]),
            _ => driver.add(&[(header, 16)], &[data, (status, 1)]),
        };
    }

    /// Does what the driver and the device's event loop do.
    pub(super) fn notify(&mut self, queue: u16) {
        self.kicks[usize::from(queue)].write(1).unwrap();
        if !self.known.serve(queue) {
            while self.device().on_queue(queue).unwrap() == Progress::More {}
        }
    }

    /// Does what the event loop does for each queue after it was started.
    fn look_at(&mut self, queue: u16) {
        if !self.known.wake(queue) {
            assert_eq!(self.device().on_queue(queue).unwrap(), Progress::Idle);
        }
    }

    /// Whether the event loop is to take a fault of a thread.
    fn is_alarmed(&self) -> bool {
        let alarm = self.known.alarm().unwrap();
        let mut fds = [PollFd::new(&alarm, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
    }

    /// Takes the fault as the worker does.
    fn fault(&self) -> Option<Fault> {
        self.known.is_raised().then(|| self.known.take_fault())?
    }

    /// Waits until a request of the queue is completed.
    pub(super) fn answered(&mut self, queue: u16) -> u8 {
        let deadline = Instant::now() + PATIENCE;
        while self.drivers[usize::from(queue)].take_used().is_none() {
            assert!(Instant::now() < deadline, "queue {queue} is not answered");
            if backend_readable(self.device()) {
                assert_eq!(self.device().on_backend().unwrap(), Progress::Idle);
            }
            std::thread::yield_now();
        }
        let status = GuestAddress(Self::status_at(queue));
        self.mem.read_obj(status).unwrap()
    }

    /// Makes half a header available, and waits until the event loop is to take the fault.
    fn break_queue(&mut self, queue: u16) {
        self.drivers[usize::from(queue)].add(&[(0x1_0000, 8)], &[(0x1_0100, 1)]);
        self.notify(queue);
        let deadline = Instant::now() + PATIENCE;
        while !self.is_alarmed() {
            assert!(Instant::now() < deadline);
        }
    }

    fn read(&mut self, queue: u16, sector: u64) -> (u8, u8) {
        self.add(queue, 0, sector);
        self.notify(queue);
        let status = self.answered(queue);
        let first = GuestAddress(Self::data_at(queue));
        (status, self.mem.read_obj(first).unwrap())
    }

    /// Drops the device, and joins its threads.
    pub(super) fn end(mut self) {
        drop(self.device.take());
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
}

/// Blocks requests of closed queues.
#[derive(Debug, Default)]
struct Gate {
    /// Closed queues, and the requests that wait.
    state: Mutex<([bool; QUEUES as usize], usize)>,
    changed: Condvar,
}

impl Gate {
    fn close(&self, queue: u16) {
        self.state.lock().unwrap().0[usize::from(queue)] = true;
    }

    fn open(&self) {
        self.state.lock().unwrap().0 = Default::default();
        self.changed.notify_all();
    }

    fn pass(&self, queue: usize) {
        let mut state = self.state.lock().unwrap();
        while state.0[queue] {
            state.1 |= 1 << queue;
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap();
        }
        state.1 &= !(1 << queue);
    }

    /// Waits until a request of this queue is blocked.
    fn wait(&self, queue: u16) {
        let state = self.state.lock().unwrap();
        let has_come = |state: &mut ([bool; 4], usize)| state.1 & 1 << queue == 0;
        let waited = self.changed.wait_timeout_while(state, PATIENCE, has_come);
        assert!(!waited.unwrap().1.timed_out());
    }
}

/// A disk with as many sectors as its number, which reads as that number and blocks at a gate.
#[derive(Clone, Debug)]
struct Gated {
    number: u8,
    gate: Arc<Gate>,
    /// Whether it can be cloned.
    copies: bool,
    /// Exists as long as any of the clones.
    alive: Arc<()>,
}

impl Gated {
    fn new(number: u8) -> Self {
        Self {
            number,
            gate: Arc::default(),
            copies: true,
            alive: Arc::default(),
        }
    }
}

impl Disk for Gated {
    fn len(&self) -> u64 {
        u64::from(self.number) * 512
    }

    fn try_clone(&self) -> std::io::Result<Option<Box<dyn Disk>>> {
        Ok(self.copies.then(|| Box::new(self.clone()) as _))
    }

    fn submit(&mut self, _: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted {
        self.gate.pass(usize::from(token >> 8));
        if let Operation::Read { slices, .. } = operation {
            for slice in slices {
                slice.copy_from(&vec![self.number; slice.len()]);
            }
        }
        Submitted::Done(Ok(()))
    }
}

#[test]
fn a_queue_that_blocks_holds_up_no_other() {
    for blocked in [1, 3] {
        let disk = Gated::new(9);
        let gate = disk.gate.clone();
        let mut rig = Rig::over(BlockDevice::new(Box::new(disk)));
        assert_eq!(rig.threads.len(), 3);
        gate.close(blocked);
        rig.add(blocked, 0, 0);
        rig.notify(blocked);
        gate.wait(blocked);
        for _ in 0..3 {
            for queue in (0..QUEUES).filter(|queue| *queue != blocked) {
                assert_eq!(rig.read(queue, 1), (0, 9), "queue {queue}");
            }
        }
        assert!(rig.drivers[usize::from(blocked)].take_used().is_none());
        // The counters tell that one is not answered.
        assert_eq!(crate::testing::counter(rig.device(), "begun"), 10);
        assert_eq!(crate::testing::counter(rig.device(), "reads"), 9);
        // Meanwhile another queue is reset.
        let queue = rig.device().stop_queue(2 * (blocked % 2)).unwrap();
        rig.device().start_queue(queue).unwrap();
        gate.open();
        assert_eq!(rig.answered(blocked), 0);
        assert_eq!(crate::testing::counter(rig.device(), "reads"), 10);
        rig.end();
    }
}

#[test]
fn a_stop_waits_for_what_is_in_flight_and_keeps_what_came_after() {
    let disk = Gated::new(9);
    let gate = disk.gate.clone();
    let mut rig = Rig::over(BlockDevice::new(Box::new(disk)));
    gate.close(2);
    rig.add(2, 0, 0);
    rig.notify(2);
    gate.wait(2);
    let opener = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        gate.open();
    });
    let mut queues = stop(rig.device());
    assert_eq!(
        queues.iter().map(Queue::index).collect::<Vec<_>>(),
        [0, 1, 2, 3]
    );
    assert!(
        rig.drivers[2].take_used().is_some(),
        "it was answered before"
    );
    opener.join().unwrap();
    // New requests are not served, notified or not, until the queues run again.
    for queue in 0..QUEUES {
        rig.add(queue, 0, 0);
        rig.notify(queue);
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(
        rig.drivers
            .iter_mut()
            .all(|driver| driver.take_used().is_none())
    );
    for queue in queues.drain(..) {
        rig.device().start_queue(queue).unwrap();
    }
    for queue in 0..QUEUES {
        rig.look_at(queue);
        assert_eq!(rig.answered(queue), 0);
    }
    rig.end();
}

#[test]
fn all_engines_change_the_disk_with_nothing_in_flight() {
    let first = Gated::new(9);
    let (gate, alive) = (first.gate.clone(), Arc::downgrade(&first.alive));
    let mut rig = Rig::over(BlockDevice::new(Box::new(first)));
    gate.close(3);
    rig.add(3, 0, 0);
    rig.notify(3);
    gate.wait(3);
    let opener = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        gate.open();
    });
    rig.device().replace_disk(Box::new(Gated::new(5)), "second");
    assert!(
        alive.upgrade().is_none(),
        "nobody has the first one any more"
    );
    let first = GuestAddress(Rig::data_at(3));
    assert_eq!(
        (rig.answered(3), rig.mem.read_obj(first).unwrap()),
        (0, 9u8)
    );
    opener.join().unwrap();
    // One that cannot be cloned, which two queues use; and others that can.
    let mut alone = Gated::new(7);
    alone.copies = false;
    for disk in [Gated::new(5), alone, Gated::new(6)] {
        let number = disk.number;
        let gate = disk.gate.clone();
        rig.device().replace_disk(Box::new(disk), "next");
        for queue in 0..QUEUES {
            assert_eq!(rig.read(queue, u64::from(number) - 1), (0, number));
            assert_eq!(rig.read(queue, number.into()).0, 1, "beyond the end");
        }
        drop(gate);
    }
    rig.end();
}

#[test]
fn the_event_loop_waits_for_the_first_queue_alone() {
    let rig = Rig::over(BlockDevice::new(Box::new(Gated::new(4))));
    let watched: Vec<_> = (0..QUEUES).filter(|n| !rig.known.serve(*n)).collect();
    assert_eq!(watched, [0]);
    assert_eq!(rig.threads.len(), usize::from(QUEUES) - 1);
    rig.end();
}

#[test]
fn a_disk_that_is_there_once_has_one_engine() {
    let mut disk = Gated::new(4);
    disk.copies = false;
    let mut rig = Rig::over(BlockDevice::new(Box::new(disk)));
    assert!(rig.threads.is_empty() && !(0..QUEUES).any(|n| rig.known.serve(n)));
    for queue in 0..QUEUES {
        assert_eq!(rig.read(queue, 0), (0, 4));
    }
    rig.device()
        .replace_disk(Box::new(Gated::new(8)), "of which there are several");
    assert_eq!(rig.read(3, 7), (0, 8));
    rig.end();
}

#[test]
fn one_queue_needs_no_thread() {
    let mut device = disk_of_8_sectors();
    let known = device.queue_threads();
    assert!(known.bodies().is_empty() && known.alarm().is_none());
    assert!(device.backend().is_none());
}

#[test]
fn a_fault_of_a_queue_is_told_by_the_event_loop_once() {
    let mut rig = Rig::over(BlockDevice::new(Box::new(Gated::new(9))));
    rig.break_queue(1);
    assert!(matches!(rig.fault(), Some(Fault::Guest(_))));
    assert!(!rig.is_alarmed() && rig.fault().is_none());
    // It stays parked until its driver resets the device.
    rig.add(1, 0, 0);
    rig.notify(1);
    rig.look_at(1);
    std::thread::sleep(Duration::from_millis(20));
    assert!(rig.drivers[1].take_used().is_none());
    assert_eq!(stop(rig.device()).len(), usize::from(QUEUES));
    // The next driver's queue is served again, also after a fault that nobody has handled.
    for _ in 0..2 {
        let driver = DriverQueue::new(&rig.mem, 0x11_0000, 64);
        let queue = driver.device_queue(1, rig.irq.clone());
        rig.kicks[1] = queue.kick().try_clone().unwrap();
        rig.drivers[1] = driver;
        rig.device().start_queue(queue).unwrap();
        assert_eq!(rig.read(1, 0), (0, 9));
        rig.break_queue(1);
        assert!(rig.device().stop_queue(1).is_some());
        // And the alarm, by which the next round knows its own fault.
        assert!(rig.fault().is_some());
    }
    rig.end();
}

#[test]
fn a_fault_that_the_event_loop_has_not_seen_is_there_after_a_stop() {
    let mut rig = Rig::over(BlockDevice::new(Box::new(Gated::new(9))));
    rig.break_queue(2);
    assert_eq!(stop(rig.device()).len(), usize::from(QUEUES));
    assert!(matches!(rig.known.take_fault(), Some(Fault::Guest(_))));
    assert!(rig.known.take_fault().is_none());
    rig.end();
}

#[test]
#[allow(unsafe_code)] // replaces the file of a descriptor that has an owner
fn a_queue_whose_thread_has_exited_is_not_started_again() {
    let mut rig = Rig::over(BlockDevice::new(Box::new(Gated::new(9))));
    let epoll = rig.device().thread(1).unwrap().poller().as_raw_fd();
    // SAFETY: the descriptor is open as long as its queue thread exists.
    let epoll = unsafe { BorrowedFd::borrow_raw(epoll) };
    let kept = epoll.try_clone_to_owned().unwrap();
    let replace = |file: BorrowedFd<'_>| {
        // SAFETY: the number stays that of an open file, which the owner closes.
        let result = unsafe { libc::dup2(file.as_raw_fd(), epoll.as_raw_fd()) };
        assert_eq!(result, epoll.as_raw_fd());
    };
    // This one cannot be waited on.
    let null = std::fs::File::open("/dev/null").unwrap();
    replace(null.as_fd());
    rig.look_at(1);
    rig.threads.remove(0).join().unwrap();
    replace(kept.as_fd());
    assert!(matches!(rig.fault(), Some(Fault::Host(_))));

    assert_eq!(stop(rig.device()).len(), usize::from(QUEUES));
    for index in 1..3 {
        let driver = DriverQueue::new(&rig.mem, 0x10_0000 + u64::from(index) * 0x1_0000, 64);
        let queue = driver.device_queue(index, rig.irq.clone());
        rig.kicks[usize::from(index)] = queue.kick().try_clone().unwrap();
        rig.drivers[usize::from(index)] = driver;
        match (index, rig.device().start_queue(queue)) {
            (1, Err(StartError::Host { index: 1, .. })) | (2, Ok(())) => {}
            (_, result) => panic!("queue {index}: {result:?}"),
        }
    }
    assert_eq!(rig.read(2, 0), (0, 9));
    rig.end();
}

#[test]
fn a_rate_is_the_devices_and_not_each_queues() {
    let rate = Some(Rate {
        per_second: 4,
        burst: 6,
    });
    let begin = Instant::now();
    let device = BlockDevice::new(Box::new(Gated::new(9)));
    let mut rig = Rig::over(device.limit(None, rate).unwrap());
    for queue in (0..QUEUES).chain([1, 2]) {
        assert_eq!(rig.read(queue, 0), (0, 9));
    }
    for queue in 0..QUEUES {
        rig.add(queue, 0, 0);
        rig.notify(queue);
    }
    // Otherwise there may have been tokens for each of them.
    let came_at_once = begin.elapsed() < Duration::from_millis(200);
    std::thread::sleep(Duration::from_millis(100));
    let drivers = rig.drivers.iter_mut();
    let done = drivers.filter_map(DriverQueue::take_used).count();
    // On a machine that was stalled meanwhile, more may have completed.
    let quarters = begin.elapsed().as_millis() / 250;
    assert!(done as u128 <= quarters, "{done} in {quarters}/4 s");
    // The others are resumed by their timers.
    let deadline = Instant::now() + PATIENCE;
    let mut left = usize::from(QUEUES) - done;
    while left > 0 {
        assert!(Instant::now() < deadline);
        if backend_readable(rig.device()) {
            assert_eq!(rig.device().on_backend().unwrap(), Progress::Idle);
        }
        let drivers = rig.drivers.iter_mut();
        left -= drivers.filter_map(DriverQueue::take_used).count();
    }
    assert!(crate::testing::counter(rig.device(), "limited") > 0 || !came_at_once);
    rig.end();
}

#[test]
fn a_driver_that_refills_a_ring_does_not_keep_others_from_its_queue() {
    /// Makes a new request available for each that it gets.
    #[derive(Clone, Debug, Default)]
    struct Refilling(Arc<Mutex<Option<DriverQueue>>>);
    impl Disk for Refilling {
        fn len(&self) -> u64 {
            4096
        }
        fn try_clone(&self) -> std::io::Result<Option<Box<dyn Disk>>> {
            Ok(Some(Box::new(self.clone())))
        }
        fn submit(&mut self, _: &GuestRam, _: u16, _: Operation<'_, '_>) -> Submitted {
            if let Some(driver) = &mut *self.0.lock().unwrap() {
                let header = Rig::status_at(1) - 16;
                driver.add(&[(header, 16)], &[(Rig::status_at(1), 1)]);
            }
            Submitted::Done(Ok(()))
        }
    }
    let disk = Refilling::default();
    let mut rig = Rig::over(BlockDevice::new(Box::new(disk.clone())));
    rig.add(1, 4, 0);
    *disk.0.lock().unwrap() = Some(rig.drivers.remove(1));
    rig.kicks[1].write(1).unwrap();
    for _ in 0..20 {
        let queue = rig.device().stop_queue(1).unwrap();
        rig.device().start_queue(queue).unwrap();
        rig.device().replace_disk(Box::new(disk.clone()), "same");
    }
    rig.end();
}

#[test]
fn engines_of_the_kernel_serve_their_queues_and_the_file_is_closed_with_the_device() {
    for engine in [IoEngine::Sync, IoEngine::Uring] {
        let file = tempfile_of(64 * 512);
        let mut device = BlockDevice::from_file_with(file.try_clone().unwrap(), engine).unwrap();
        device.check().unwrap();
        let mut rig = Rig::over(device);
        for round in 0..10u8 {
            for queue in 0..QUEUES {
                let data = GuestAddress(Rig::data_at(queue));
                rig.mem.write_slice(&[round + 1; 512], data).unwrap();
                rig.add(queue, 1, queue.into());
                rig.notify(queue);
            }
            for queue in 0..QUEUES {
                assert_eq!(rig.answered(queue), 0);
            }
            for queue in 0..QUEUES {
                let sector = u64::from((queue + 1) % QUEUES);
                assert_eq!(rig.read(queue, sector), (0, round + 1));
            }
        }
        assert_eq!(rig.irq.needs_reset.load(SeqCst), 0);
        file.set_len(65 * 512).unwrap();
        assert_eq!(rig.read(3, 64).0, 1);
        rig.device().resize().unwrap();
        assert_eq!(rig.read(3, 64), (0, 0));
        for index in 0..QUEUES {
            rig.add(index, 0, 1);
            rig.notify(index);
        }
        // Each is completed once, before or after.
        for queue in stop(rig.device()) {
            rig.device().start_queue(queue).unwrap();
        }
        for queue in 0..QUEUES {
            rig.look_at(queue);
            assert_eq!(rig.answered(queue), 0);
        }
        assert_eq!(stop(rig.device()).len(), 4);
        let mut drivers = rig.drivers.iter_mut();
        assert!(drivers.all(|driver| driver.take_used().is_none()));
        rig.end();
    }
}
