//! Started requests on a disk that handles many at the same time, and what a stop waits for.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

use super::*;
use crate::blk::engine::MAX_UNFINISHED;
use crate::blk::flight::CHUNK_SIZE;

const MIB: usize = 1 << 20;

/// A disk that completes one piece after the other, when it is told to or waited for.
#[derive(Clone, Debug, Default)]
struct Slow(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Token and length of the started pieces.
    queued: VecDeque<(u16, usize)>,
    /// The number of these that are done.
    ready: usize,
    /// Bytes that were done.
    done: usize,
}

impl Slow {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

impl Disk for Slow {
    fn len(&self) -> u64 {
        1 << 30
    }
    fn submit(&mut self, _: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted {
        let len = match operation {
            Operation::Read { slices, .. } => slices.iter().map(VolatileSlice::len).sum(),
            _ => 0,
        };
        self.state().queued.push_back((token, len));
        Submitted::Queued
    }
    fn completed(&mut self) -> Option<Completion> {
        let mut state = self.state();
        state.ready = state.ready.checked_sub(1)?;
        let (token, len) = state.queued.pop_front()?;
        state.done += len;
        let result = Ok(());
        Some(Completion { token, result })
    }
    fn wait(&mut self) -> std::io::Result<()> {
        self.state().ready = 1;
        Ok(())
    }
}

/// Runs the event loop until the device only waits for its disk.
fn turns(device: &mut BlockDevice) {
    let mut progress = device.on_queue(0).unwrap();
    while progress == Progress::More {
        progress = device.on_queue(0).unwrap();
    }
}

/// Completes one piece of the disk, and runs the event loop.
fn one_piece(device: &mut BlockDevice, disk: &Slow) {
    let count = disk.state().queued.len();
    disk.state().ready = count.min(1);
    if device.on_backend().unwrap() == Progress::More {
        turns(device);
    }
}

/// Creates this number of requests of so many MiB, all using the same memory.
fn requests(count: usize, mib: usize) -> (Rig, Slow) {
    let disk = Slow::default();
    let device = BlockDevice::new(Box::new(disk.clone()));
    let mem = memory(2 * MIB);
    let driver = DriverQueue::new(&mem, 0x10000, 256);
    let irq = Arc::new(CountingInterrupt::default());
    let mut rig = Rig {
        mem,
        driver,
        device,
        irq,
    };
    let irq = rig.irq.clone();
    start(&mut rig.device, &[&rig.driver], &irq, FLUSH);
    rig.header(0, 0);
    // One indirect table for all of them.
    const TABLE: u64 = 0x2_0000;
    let data = std::iter::repeat_n((0x10_0000u64, MIB as u32, 2u16), mib);
    let all = [(HEADER, 16, 0)].into_iter().chain(data);
    let entries = mib + 2;
    for (n, (at, len, flags)) in all.chain([(STATUS, 1, 2)]).enumerate() {
        let flags = flags | u16::from(n + 1 < entries);
        let next = u16::try_from(n + 1).unwrap();
        let entry = GuestAddress(TABLE + 16 * n as u64);
        rig.mem.write_obj(at, entry).unwrap();
        rig.mem.write_obj(len, GuestAddress(entry.0 + 8)).unwrap();
        rig.mem
            .write_obj([flags, next], GuestAddress(entry.0 + 12))
            .unwrap();
    }
    for head in 0..u16::try_from(count).unwrap() {
        let len = u32::try_from(16 * entries).unwrap();
        rig.driver.descriptor(head, TABLE, len, 4, 0);
        rig.driver.make_available(head);
    }
    (rig, disk)
}

#[test]
fn a_stop_waits_for_a_bounded_number_of_bytes_whatever_was_asked_for() {
    for (count, mib) in [(32, 64), (200, 1), (256, 2), (1, 200)] {
        let (mut rig, disk) = requests(count, mib);
        turns(&mut rig.device);
        for _ in 0..10 {
            one_piece(&mut rig.device, &disk);
        }
        let before = disk.state().done;
        let queues = stop(&mut rig.device);
        let waited = disk.state().done - before;
        assert!(
            waited <= MAX_UNFINISHED + CHUNK_SIZE,
            "{waited} bytes of {count} x {mib} MiB"
        );
        assert!(disk.state().queued.is_empty());
        let state = queues[0].state();
        assert_eq!(state.next_avail, state.next_used, "nothing is in flight");
        // All of them are completed in the end, each once.
        for queue in queues {
            rig.device.start_queue(queue).unwrap();
        }
        turns(&mut rig.device);
        while !disk.state().queued.is_empty() {
            one_piece(&mut rig.device, &disk);
        }
        let used = std::iter::from_fn(|| rig.driver.take_used());
        let mut heads: Vec<_> = used.map(|used| used.id as usize).collect();
        heads.sort_unstable();
        assert!(heads.into_iter().eq(0..count), "{count} x {mib} MiB");
    }
}

#[test]
fn many_short_requests_are_in_flight_at_once() {
    let (mut rig, disk) = requests(16, 1);
    turns(&mut rig.device);
    assert_eq!(disk.state().queued.len(), 16);
}

/// A device with two queues that share its engine, and this number of requests of 2 MiB in each.
fn two_queues(requests: usize) -> (BlockDevice, [DriverQueue; 2], Slow) {
    let disk = Slow::default();
    let mut device = BlockDevice::new(Box::new(disk.clone())).queues(2);
    let mem = memory(4 * MIB);
    let mut drivers = [1, 2].map(|n| DriverQueue::new(&mem, n << 16, 64));
    let irq = Arc::new(CountingInterrupt::default());
    start(&mut device, &[&drivers[0], &drivers[1]], &irq, FLUSH);
    mem.write_obj([0u64; 2], GuestAddress(HEADER)).unwrap();
    let request = [(0x10_0000, 2 * MIB as u32), (STATUS, 1)];
    for driver in &mut drivers {
        for _ in 0..requests {
            driver.add(&[(HEADER, 16)], &request);
        }
    }
    (device, drivers, disk)
}

/// Serves a queue if it was kicked, and then the disk, until nothing is left to do.
fn serve_if_kicked(device: &mut BlockDevice, index: u16, disk: &Slow) {
    if device.server.queue(index).unwrap().kick().read().is_ok() {
        while device.on_queue(index).unwrap() == Progress::More {}
    }
    while !disk.state().queued.is_empty() {
        one_piece(device, disk);
    }
}

#[test]
fn a_queue_that_waits_for_room_goes_on_when_another_one_is_stopped() {
    let (mut device, mut drivers, disk) = two_queues(8);
    for queue in [0, 1] {
        while device.on_queue(queue).unwrap() == Progress::More {}
    }
    assert!(
        drivers
            .iter_mut()
            .all(|driver| driver.take_used().is_none())
    );
    let mut other = device.stop_queue(0).unwrap();
    assert!(disk.state().queued.is_empty(), "no completion follows");
    serve_if_kicked(&mut device, 1, &disk);
    let used = |driver: &mut DriverQueue| std::iter::from_fn(|| driver.take_used()).count();
    assert_eq!(used(&mut drivers[1]), 8);
    assert!(other.next().is_ok());
}

#[test]
fn a_request_that_is_half_done_goes_on_when_another_queue_is_stopped() {
    let (mut device, mut drivers, disk) = two_queues(1);
    // A piece of the other queue is done first, while the stop waits for the one of its queue.
    for queue in [1, 0] {
        while device.on_queue(queue).unwrap() == Progress::More {}
    }
    device.stop_queue(0).unwrap();
    assert!(disk.state().queued.is_empty(), "no completion follows");
    serve_if_kicked(&mut device, 1, &disk);
    assert!(drivers[1].take_used().is_some());
}

#[test]
fn a_piece_that_is_done_within_a_turn_leads_to_another_turn() {
    let (mut rig, disk) = requests(1, 2);
    turns(&mut rig.device);
    disk.state().ready = 1;
    // No completion is left that would report that the next piece may be started.
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
    assert!(disk.state().queued.is_empty());
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::Idle);
    assert_eq!(disk.state().queued.len(), 1);
}

#[test]
fn room_that_comes_back_within_a_turn_leads_to_another_turn() {
    let (mut rig, disk) = requests(17, 1);
    turns(&mut rig.device);
    assert_eq!(disk.state().queued.len(), 16);
    disk.state().ready = 1;
    assert_eq!(rig.device.on_queue(0).unwrap(), Progress::More);
    assert!(rig.driver.take_used().is_some());
    turns(&mut rig.device);
    assert_eq!(
        disk.state().queued.len(),
        16,
        "the last request has the room"
    );
}

/// A disk whose requests cannot be waited for, and complete too late.
#[derive(Clone, Debug, Default)]
struct Deaf(Arc<Mutex<Vec<u16>>>);

impl Disk for Deaf {
    fn len(&self) -> u64 {
        1 << 20
    }
    fn submit(&mut self, _: &GuestRam, token: u16, _: Operation<'_, '_>) -> Submitted {
        self.0.lock().unwrap().push(token);
        Submitted::Queued
    }
    fn completed(&mut self) -> Option<Completion> {
        // Only the event loop finds completions.
        let mut tokens = self.0.try_lock().ok()?;
        let token = tokens.pop().filter(|_| Arc::strong_count(&self.0) > 2)?;
        let result = Ok(());
        Some(Completion { token, result })
    }
    fn wait(&mut self) -> std::io::Result<()> {
        Err(std::io::ErrorKind::BrokenPipe.into())
    }
}

#[test]
fn a_disk_that_cannot_be_waited_for_is_not_quiet_and_is_used_no_more() {
    let disk = Deaf::default();
    let mut rig = Rig::over(BlockDevice::new(Box::new(disk.clone())));
    assert_eq!(rig.read(0, 512), 0xff);
    disk.0.lock().unwrap().clear();
    let queue = stop(&mut rig.device).remove(0);
    assert!(!rig.device.is_quiet());
    drop(queue);
    let queue = rig.driver.device_queue(0, rig.irq.clone());
    rig.device.start_queue(queue).unwrap();
    // The lost request is available again, with another one.
    assert_eq!(rig.read(0, 512), 1);
    assert_eq!(std::iter::from_fn(|| rig.driver.take_used()).count(), 2);
    assert!(disk.0.lock().unwrap().is_empty());
    // Its completions of old requests are ignored.
    let _late = disk.clone();
    disk.0.lock().unwrap().extend(0..4);
    assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
    assert!(rig.driver.take_used().is_none());
    rig.device.replace_disk(Box::new(Noting::default()), "");
    assert!(rig.device.is_quiet());
    assert_eq!(rig.read(0, 512), 0);
}
