//! A disk that blocks delays only its own guest's requests.

use std::sync::atomic::AtomicBool;
use std::sync::{Condvar, Mutex};

use podvisor_devices::blk::{BlockDevice, Disk, Operation, Submitted};
use podvisor_devices::pci::NO_VECTOR;

use super::devices::fill;
use super::pci::on_pci;
use super::*;
use crate::vm::{HandleError, PlugError, State, VmExit};

const RINGS: u64 = 0x40_0000;
const BUFFER: u64 = 0x60_0000;
/// Long enough for a device that does not block, most of the time.
const MOMENT: Duration = Duration::from_millis(100);

/// Blocks a disk's requests until it is opened.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    open: bool,
    waiting: usize,
    done: usize,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.waiting += 1;
        self.changed.notify_all();
        state = self.changed.wait_while(state, |state| !state.open).unwrap();
        state.waiting -= 1;
    }

    fn open(&self) {
        self.state.lock().unwrap().open = true;
        self.changed.notify_all();
    }

    fn wait(&self, what: &str, mut reached: impl FnMut(&GateState) -> bool) {
        let state = self.state.lock().unwrap();
        let waited = self
            .changed
            .wait_timeout_while(state, PATIENCE, |state| !reached(state));
        assert!(!waited.unwrap().1.timed_out(), "{what} does not come");
    }
}

/// A disk of ones behind a gate.
#[derive(Debug)]
struct GatedDisk(Arc<Gate>);

impl Disk for GatedDisk {
    fn len(&self) -> u64 {
        1 << 20
    }
    fn submit(&mut self, _: &GuestRam, _: u16, operation: Operation<'_, '_>) -> Submitted {
        self.0.pass();
        if let Operation::Read { slices, .. } = operation {
            for slice in slices {
                slice.copy_from(&vec![1u8; slice.len()]);
            }
        }
        self.0.state.lock().unwrap().done += 1;
        self.0.changed.notify_all();
        Submitted::Done(Ok(()))
    }
}

/// How the VM gets the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disks {
    /// It was added when the VM was built.
    BuiltIn,
    /// It was inserted into a spare slot whose queue was running.
    Inserted,
}

const BOTH: [Disks; 2] = [Disks::BuiltIn, Disks::Inserted];

/// A guest with such a disk, which processes a request, and an entropy device.
fn blocked(disks: Disks) -> (Guest, Arc<Gate>, DriverQueue) {
    let gate = Arc::new(Gate::default());
    let disk = Box::new(GatedDisk(gate.clone()));
    let (guest, mut queue) = match disks {
        Disks::BuiltIn => {
            let guest = Guest::start(|vm| vm.block(BlockDevice::new(disk)).rng());
            let queue = guest.device(0).start(RINGS);
            (guest, queue)
        }
        Disks::Inserted => {
            let guest = Guest::start(|vm| vm.block(BlockDevice::spare()).rng());
            let queue = guest.device(0).start(RINGS);
            guest.vm.insert_disk("blk0", disk, "gated").unwrap();
            (guest, queue)
        }
    };
    add_request(&guest, &mut queue);
    guest.device(0).notify();
    gate.wait("the request", |state| state.waiting == 1);
    (guest, gate, queue)
}

/// Makes a request for the first sector available.
fn add_request(guest: &Guest, queue: &mut DriverQueue) {
    let header = BUFFER + 0x1000;
    guest.mem.write_obj(0u32, GuestAddress(header)).unwrap();
    guest.mem.write_obj(0u64, GuestAddress(header + 8)).unwrap();
    add_read(queue);
}

/// Makes a request available whose header was written.
fn add_read(queue: &mut DriverQueue) {
    let (header, status) = (BUFFER + 0x1000, BUFFER + 0x2000);
    queue.add(&[(header, 16)], &[(BUFFER, 512), (status, 1)]);
}

/// A disk of ones that can be copied; the second queue's requests are behind a gate.
#[derive(Debug)]
struct HalfGated(Arc<Gate>);

impl Disk for HalfGated {
    fn len(&self) -> u64 {
        1 << 20
    }
    fn try_clone(&self) -> std::io::Result<Option<Box<dyn Disk>>> {
        Ok(Some(Box::new(Self(self.0.clone()))))
    }
    fn submit(&mut self, mem: &GuestRam, token: u16, operation: Operation<'_, '_>) -> Submitted {
        if token >> 8 == 1 {
            return GatedDisk(self.0.clone()).submit(mem, token, operation);
        }
        Submitted::Done(Ok(()))
    }
}

/// `VIRTIO_BLK_F_MQ`.
const MQ: u32 = 1 << 12;

/// A guest with three queues of such a disk, of which the second one processes a request.
fn one_queue_blocked() -> (Guest, Arc<Gate>, Vec<DriverQueue>) {
    let gate = Arc::new(Gate::default());
    let disk = BlockDevice::new(Box::new(HalfGated(gate.clone())));
    let guest = Guest::start(|vm| vm.block(disk.queues(3)).rng());
    let places = [0, 1, 2].map(|index| (index, RINGS + 0x1_0000 * u64::from(index)));
    let mut queues = guest.device(0).start_queues(MQ, &places);
    request(&guest, &mut queues, 1);
    gate.wait("the request", |state| state.waiting == 1);
    (guest, gate, queues)
}

fn request(guest: &Guest, queues: &mut [DriverQueue], queue: u32) {
    add_request(guest, &mut queues[queue as usize]);
    guest.device(0).write(0x50, queue);
}

fn others_go_on(guest: &Guest, queues: &mut [DriverQueue]) {
    for queue in [0, 2, 0, 2] {
        request(guest, queues, queue);
        wait_for("a request of another queue", || {
            queues[queue as usize].take_used().is_some()
        });
    }
}

#[test]
fn a_queue_that_blocks_holds_up_no_other_queue_of_its_disk() {
    let (guest, gate, mut queues) = one_queue_blocked();
    others_go_on(&guest, &mut queues);
    let vm = guest.vm.clone();
    let error = in_time("pause", move || vm.pause()).unwrap_err();
    assert!(matches!(&error, VmError::Busy { .. }), "{error}");
    guest.runs_on();
    // With more time than the request takes, a pause waits for it.
    let (vm, opener) = (guest.vm.clone(), gate.clone());
    let paused = std::thread::spawn(move || vm.pause_within(Duration::MAX));
    std::thread::sleep(Duration::from_millis(1000));
    assert!(!paused.is_finished());
    opener.open();
    in_time("pause", move || paused.join().unwrap()).unwrap();
    guest.vm.resume().unwrap();
    wait_for("the request's end", || queues[1].take_used().is_some());
    others_go_on(&guest, &mut queues);
    for _ in 0..3 {
        guest.pause();
        // Made available while no thread serves, and without a notification.
        for queue in &mut queues {
            queue.add(
                &[(BUFFER + 0x1000, 16)],
                &[(BUFFER, 512), (BUFFER + 0x2000, 1)],
            );
        }
        assert!(queues.iter_mut().all(|queue| queue.take_used().is_none()));
        guest.vm.resume().unwrap();
        for queue in &mut queues {
            wait_for("what waited", || queue.take_used().is_some());
        }
    }
    assert!(guest.vm.faults().is_empty());
}

#[test]
fn a_fault_of_one_queue_parks_its_disk_until_a_reset() {
    let (guest, gate, mut queues) = one_queue_blocked();
    gate.open();
    wait_for("the request's end", || queues[1].take_used().is_some());
    // Half a header.
    queues[2].add(&[(BUFFER, 8)], &[(BUFFER + 0x2000, 1)]);
    let block = guest.device(0);
    block.write(0x50, 2);
    wait_for("DEVICE_NEEDS_RESET", || block.status() & 64 != 0);
    let places = [0, 1, 2].map(|index| (index, RINGS + 0x1_0000 * u64::from(index)));
    let mut queues = block.start_queues(MQ, &places);
    assert_eq!(block.status(), 15);
    others_go_on(&guest, &mut queues);
    guest.pause();
    guest.vm.resume().unwrap();
    others_go_on(&guest, &mut queues);
}

#[test]
fn a_stop_abandons_the_request_of_one_queue() {
    let (guest, gate, _queues) = one_queue_blocked();
    let vm = guest.vm.clone();
    in_time("stop", move || vm.stop()).unwrap();
    assert_eq!(guest.vm.wait().unwrap(), VmExit::Stopped);
    drop(guest);
    gate.open();
    gate.wait("the abandoned request's end", |state| state.done == 1);
    // The disk has been dropped everywhere.
    wait_for("the end of its threads", || Arc::strong_count(&gate) == 1);
}

#[test]
fn registers_counters_and_other_devices_answer_meanwhile() {
    for disks in BOTH {
        let (guest, gate, mut queue) = blocked(disks);
        let block = guest.device(0);
        assert_eq!((block.read(0x100), block.status()), (2048, 15));
        assert_eq!(guest.counter("blk0", "reads"), 0);
        let rng = guest.device(1);
        let mut other = rng.start(RINGS + 0x10_0000);
        other.add(&[], &[(BUFFER + 0x8000, 32)]);
        rng.notify();
        wait_for("random bytes", || other.take_used().is_some());
        gate.open();
        wait_for("the request's end", || queue.take_used().is_some());
        assert_eq!(guest.counter("blk0", "reads"), 1);
    }
}

#[test]
fn a_slot_that_was_plugged_in_gets_its_own_thread_with_its_disk() {
    let guest = on_pci(VmBuilder::rng);
    let name = guest.vm.plug(BlockDevice::spare()).unwrap().name;
    let (rng, slot) = (guest.function(1), guest.function(2));
    let mut queue = slot.start(RINGS, NO_VECTOR);
    let gate = Arc::new(Gate::default());
    let disk = Box::new(GatedDisk(gate.clone()));
    guest.vm.insert_disk(&name, disk, "gated").unwrap();
    add_request(&guest, &mut queue);
    slot.notify();
    gate.wait("the request", |state| state.waiting == 1);
    let mut other = rng.start(RINGS + 0x10_0000, NO_VECTOR);
    fill(rng, &mut other, 8);
    gate.open();
    wait_for("the request's end", || queue.take_used().is_some());
}

#[test]
fn a_pause_fails_and_the_vm_runs_on() {
    for disks in BOTH {
        let (guest, gate, mut queue) = blocked(disks);
        let vm = guest.vm.clone();
        let error = in_time("pause", move || vm.pause()).unwrap_err();
        assert!(matches!(&error, VmError::Busy { .. }), "{error}");
        assert_eq!(guest.vm.state(), State::Running);
        guest.runs_on();
        gate.open();
        wait_for("the request's end", || queue.take_used().is_some());
        guest.pause();
        guest.vm.resume().unwrap();
        guest.runs_on();
    }
}

#[test]
fn a_disk_that_was_unplugged_holds_up_pauses_for_as_long_as_it_works() {
    for disks in BOTH {
        let gate = Arc::new(Gate::default());
        let disk = Box::new(GatedDisk(gate.clone()));
        let (built_in, inserted) = match disks {
            Disks::BuiltIn => (BlockDevice::new(disk), None),
            Disks::Inserted => (BlockDevice::spare(), Some(disk)),
        };
        let guest = on_pci(|vm| vm.rng().block(built_in));
        let block = guest.function(2);
        let mut queue = block.start(RINGS, NO_VECTOR);
        if let Some(disk) = inserted {
            guest.vm.insert_disk("blk0", disk, "gated").unwrap();
        }
        add_request(&guest, &mut queue);
        block.notify();
        gate.wait("the request", |state| state.waiting == 1);
        let vm = guest.vm.clone();
        let unplug = std::thread::spawn(move || vm.unplug("blk0"));
        wait_for("the device's end", || guest.vm.block("blk0").is_err());
        for what in ["while it is waited for", "and afterwards"] {
            let vm = guest.vm.clone();
            let error = in_time("pause", move || vm.pause()).expect_err(what);
            assert!(matches!(&error, VmError::Busy { .. }), "{error} {what}");
            wait_for("the end of the unplug", || unplug.is_finished());
        }
        let error = in_time("unplug", || unplug.join().unwrap()).unwrap_err();
        let busy = matches!(&error, PlugError::Device(HandleError::Busy { .. }));
        assert!(busy, "{error}");
        gate.open();
        guest.pause();
        assert_eq!(gate.state.lock().unwrap().done, 1);
        guest.vm.resume().unwrap();
        guest.runs_on();
    }
}

#[test]
fn a_call_that_a_blocked_device_has_not_begun_is_cancelled() {
    for disks in BOTH {
        let (guest, gate, _queue) = blocked(disks);
        let block = guest.vm.block("blk0").unwrap();
        let (ran, kept) = (Arc::new(AtomicBool::new(false)), Arc::new(()));
        let work = {
            let (ran, kept) = (ran.clone(), kept.clone());
            move |_: &mut BlockDevice| {
                let _kept = kept;
                ran.store(true, Ordering::SeqCst);
            }
        };
        let error = block.run_within(MOMENT, work).unwrap_err();
        assert!(matches!(&error, HandleError::Busy { .. }), "{error}");
        // What it would have given the device is free again, such as a locked disk.
        assert_eq!(Arc::strong_count(&kept), 1);
        gate.open();
        // Calls are carried out in their order.
        block.run(|_| ()).unwrap();
        assert!(!ran.load(Ordering::SeqCst), "{disks:?}");
    }
}

#[test]
fn a_call_that_blocks_its_device_is_reported_as_unfinished_and_ends_later() {
    let guest = Guest::start(|vm| vm.block(BlockDevice::spare()));
    let block = guest.vm.block("blk0").unwrap();
    let gate = Arc::new(Gate::default());
    wait_for("a call that begins in time", || {
        let behind = gate.clone();
        let work = move |_: &mut BlockDevice| {
            behind.pass();
            behind.state.lock().unwrap().done += 1;
        };
        match block.run_within(MOMENT, work).unwrap_err() {
            HandleError::Unfinished { device } => device == "blk0",
            HandleError::Busy { .. } => false,
            other => panic!("{other}"),
        }
    });
    gate.open();
    block.run(|_| ()).unwrap();
    assert_eq!(gate.state.lock().unwrap().done, 1);
}

/// A slow disk whose driver makes a request available for each one that the disk is given.
#[derive(Debug, Default)]
struct Refilled(Arc<Mutex<Option<DriverQueue>>>);

impl Disk for Refilled {
    fn len(&self) -> u64 {
        1 << 20
    }
    fn submit(&mut self, _: &GuestRam, _: u16, _: Operation<'_, '_>) -> Submitted {
        std::thread::sleep(std::time::Duration::from_millis(5));
        if let Some(queue) = &mut *self.0.lock().unwrap() {
            add_read(queue);
        }
        Submitted::Done(Ok(()))
    }
}

#[test]
fn a_pause_does_not_wait_for_all_requests_of_a_slow_disk() {
    for is_spare in [false, true] {
        let disk = Refilled::default();
        let driver = disk.0.clone();
        let guest = Guest::start(|vm| match is_spare {
            false => vm.block(BlockDevice::new(Box::new(disk))),
            true => vm.block(BlockDevice::spare()),
        });
        let mut queue = guest.device(0).start(RINGS);
        if is_spare {
            let disk = Box::new(Refilled(driver.clone()));
            guest.vm.insert_disk("blk0", disk, "").unwrap();
        }
        add_request(&guest, &mut queue);
        *driver.lock().unwrap() = Some(queue);
        guest.device(0).notify();
        for _ in 0..3 {
            let reads = || guest.counter("blk0", "reads");
            let before = reads();
            wait_for("requests", || reads() > before + 2);
            guest.pause();
            let served = reads() - before;
            assert!(served < 300, "a turn of 1 MiB would serve {served}");
            guest.vm.resume().unwrap();
        }
    }
}

/// A disk that does not report when a request is done.
#[derive(Debug)]
struct Deaf;

impl Disk for Deaf {
    fn len(&self) -> u64 {
        1 << 20
    }
    fn submit(&mut self, _: &GuestRam, _: u16, _: Operation<'_, '_>) -> Submitted {
        Submitted::Queued
    }
    fn wait(&mut self) -> std::io::Result<()> {
        Err(std::io::ErrorKind::BrokenPipe.into())
    }
}

#[test]
fn a_disk_that_cannot_be_waited_for_is_never_paused() {
    for is_spare in [false, true] {
        let disk = match is_spare {
            false => BlockDevice::new(Box::new(Deaf)),
            true => BlockDevice::spare(),
        };
        let guest = Guest::start(|vm| vm.block(disk).rng());
        let mut queue = guest.device(0).start(RINGS);
        if is_spare {
            guest.vm.insert_disk("blk0", Box::new(Deaf), "").unwrap();
        }
        add_request(&guest, &mut queue);
        guest.device(0).notify();
        wait_for("the request", || match guest.vm.pause() {
            Ok(()) => {
                guest.vm.resume().unwrap();
                false
            }
            Err(error) => {
                assert!(matches!(&error, VmError::Busy { .. }), "{error}");
                true
            }
        });
        let error = guest.vm.pause().unwrap_err();
        assert!(matches!(&error, VmError::Busy { what } if what == "vm-blk0"));
        guest.runs_on();
        let rng = guest.device(1);
        let mut other = rng.start(RINGS + 0x10_0000);
        fill(rng, &mut other, 8);
    }
}

#[test]
fn a_reset_by_the_driver_is_over_when_the_request_is() {
    for disks in BOTH {
        let (guest, gate, _queue) = blocked(disks);
        let block = guest.device(0);
        block.write(0x70, 0);
        assert_ne!(block.status(), 0, "the disk still writes into its memory");
        guest.runs_on();
        gate.open();
        wait_for("the end of the reset", || block.status() == 0);
        block.start(RINGS);
        assert_eq!(block.status(), 15);
    }
}

#[test]
fn a_stop_abandons_the_request_whose_memory_stays() {
    for disks in BOTH {
        let (guest, gate, _queue) = blocked(disks);
        let vm = guest.vm.clone();
        assert!(vm.abandoned().is_empty());
        in_time("stop", move || vm.stop()).unwrap();
        assert_eq!(guest.vm.abandoned(), ["vm-blk0"]);
        assert_eq!(guest.vm.wait().unwrap(), VmExit::Stopped);
        assert_eq!(guest.vm.abandoned(), ["vm-blk0"]);
        assert_eq!(gate.state.lock().unwrap().done, 0);
        // Only the disk's thread still holds the guest's memory.
        drop(guest);
        gate.open();
        gate.wait("the abandoned request's end", |state| state.done == 1);
    }
}

#[test]
fn an_abandoned_thread_is_named_until_it_ends() {
    for disks in BOTH {
        let (guest, gate, _queue) = blocked(disks);
        let vm = guest.vm.clone();
        in_time("stop", move || vm.stop()).unwrap();
        assert_eq!(guest.vm.abandoned(), ["vm-blk0"]);
        gate.open();
        wait_for("the thread's end", || guest.vm.abandoned().is_empty());
    }
}

#[test]
fn an_abandoned_thread_is_waited_for() {
    for disks in BOTH {
        let (guest, gate, _queue) = blocked(disks);
        let vm = guest.vm.clone();
        in_time("stop", move || vm.stop()).unwrap();
        let vm = guest.vm.clone();
        let waiting = std::thread::spawn(move || vm.wait_abandoned());
        assert_eq!(gate.state.lock().unwrap().done, 0);
        assert!(!waiting.is_finished());
        gate.open();
        in_time("the wait", move || waiting.join()).unwrap();
        assert_eq!(gate.state.lock().unwrap().done, 1);
        assert!(guest.vm.abandoned().is_empty());
    }
}

#[test]
fn another_vm_goes_on() {
    for disks in BOTH {
        let (guest, gate, _queue) = blocked(disks);
        let other = Guest::start(VmBuilder::rng);
        other.runs_on();
        other.pause();
        other.vm.resume().unwrap();
        other.device(0).start(RINGS);
        let vm = other.vm.clone();
        in_time("stop", move || vm.stop()).unwrap();
        guest.runs_on();
        gate.open();
    }
}

#[test]
fn a_slot_takes_one_disk_after_the_other_and_is_paused_with_all_others() {
    let guest = Guest::start(|vm| vm.block(BlockDevice::spare()).rng());
    let mut queue = guest.device(0).start(RINGS);
    let (header, status) = (BUFFER + 0x1000, BUFFER + 0x2000);
    guest.mem.write_obj(0u32, GuestAddress(header)).unwrap();
    guest.mem.write_obj(0u64, GuestAddress(header + 8)).unwrap();
    for is_paused in [true, false, true] {
        let gate = Arc::new(Gate::default());
        gate.open();
        if is_paused {
            guest.pause();
        }
        let disk = Box::new(GatedDisk(gate.clone()));
        guest.vm.insert_disk("blk0", disk, "gated").unwrap();
        queue.add(&[(header, 16)], &[(BUFFER, 512), (status, 1)]);
        if is_paused {
            assert_eq!(gate.state.lock().unwrap().done, 0);
            // What was made available meanwhile is served without a notification.
            guest.vm.resume().unwrap();
        } else {
            guest.device(0).notify();
        }
        wait_for("the request's end", || queue.take_used().is_some());
        assert_eq!(gate.state.lock().unwrap().done, 1);
    }
    guest.vm.stop().unwrap();
    let disk = Box::new(GatedDisk(Arc::default()));
    assert!(guest.vm.insert_disk("blk0", disk, "").is_err());
}
