//! Devices behind their transport, with well-behaved and hostile drivers.

use std::collections::BTreeMap;
use std::os::unix::net::UnixListener;

use podvisor_devices::blk::{BlockDevice, FileDisk};
use podvisor_devices::rng::RngDevice;
use podvisor_devices::virtio::{
    ConfigSpace, Counter, DeviceInfo, DeviceType, Fault, Progress, Queue, ReadCounters, StartError,
    VirtioDevice,
};
use podvisor_devices::vsock::VsockDevice;

use super::*;
use crate::vm::{HandleError, PoisonCause, Seccomp, State, VmError};

pub(super) const RINGS: u64 = 0x40_0000;
pub(super) const BUFFER: u64 = 0x60_0000;

pub(super) fn bytes(guest: &Guest, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    guest.mem.read_slice(&mut bytes, GuestAddress(at)).unwrap();
    bytes
}

/// Makes the entropy device fill `len` bytes.
pub(super) fn fill(device: impl Notify, queue: &mut DriverQueue, len: u32) {
    queue.add(&[], &[(BUFFER, len)]);
    device.notify();
    let mut used = None;
    wait_for("random bytes", || {
        used = queue.take_used();
        used.is_some()
    });
    assert_eq!(used.unwrap().len, len);
}

#[test]
fn a_driver_finds_starts_and_uses_a_device() {
    let guest = Guest::start(VmBuilder::rng);
    let rng = guest.device(0);
    assert_eq!(rng.read(0), u32::from_le_bytes(*b"virt"));
    assert_eq!((rng.read(4), rng.read(8)), (2, 4));
    let mut queue = rng.start(RINGS);
    assert_eq!(rng.status(), 15);
    fill(rng, &mut queue, 64);
    assert_ne!(bytes(&guest, BUFFER, 16), [0; 16]);
    wait_for("the interrupt", || rng.read(0x60) & 1 != 0);
    rng.write(0x64, 1);
    assert_eq!(rng.read(0x60), 0);
    assert_eq!(guest.counter("rng0", "random_bytes"), 64);
    assert_eq!(guest.device(1).read(0), u32::MAX, "no second device");
}

#[test]
fn notifications_do_not_leave_the_guest_for_one_queue_and_for_several() {
    let vsock = VsockDevice::in_process(3).unwrap();
    let guest = Guest::start(|vm| vm.rng().vsock(vsock).rng());
    for (number, queues) in [(0, 1), (1, 3), (2, 1)] {
        let device = guest.device(number);
        device.start(RINGS + number * 0x10_0000);
        let exits = guest.counter("vcpu", "mmio_exits");
        for queue in 0..queues {
            device.write(0x50, queue);
        }
        assert_eq!(guest.counter("vcpu", "mmio_exits"), exits, "{number}");
        device.write(0x50, 99);
        let more = guest.counter("vcpu", "mmio_exits") - exits;
        assert_eq!(more, u64::from(queues > 1), "no such queue");
    }
}

#[test]
fn chains_that_were_there_before_driver_ok_are_served() {
    let guest = Guest::start(VmBuilder::rng);
    let rng = guest.device(0);
    rng.start(RINGS);
    rng.write(0x70, 0);
    // The same again, with a chain in the ring before DRIVER_OK is set.
    let mut queue = DriverQueue::new(&guest.mem, RINGS, 16);
    queue.add(&[], &[(BUFFER, 8)]);
    let config = queue.config();
    for (register, value) in [
        (0x70, 1),
        (0x70, 3),
        (0x24, 1),
        (0x20, 1),
        (0x70, 11),
        (0x38, config.size),
        (0x80, config.desc_table as u32),
        (0x90, config.avail_ring as u32),
        (0xa0, config.used_ring as u32),
        (0x44, 1),
        (0x70, 15),
    ] {
        rng.write(register, value);
    }
    wait_for("the chain", || queue.take_used().is_some());
}

#[test]
fn a_hostile_driver_parks_its_device_alone_and_a_reset_mends_it() {
    let guest = Guest::start(|vm| vm.rng().rng());
    let (one, two) = (guest.device(0), guest.device(1));
    let mut healthy = two.start(RINGS + 0x10_0000);
    type Attack = fn(&mut DriverQueue);
    let attacks: [Attack; 4] = [
        |queue| queue.make_available(99),
        |queue| queue.set_avail_idx(1000),
        |queue| {
            queue.add(&[], &[(1 << 40, 64)]);
        },
        |queue| {
            queue.descriptor(0, BUFFER, 8, 1, 0);
            queue.make_available(0);
        },
    ];
    for (number, attack) in (1u64..).zip(attacks) {
        let mut queue = one.start(RINGS);
        attack(&mut queue);
        one.notify();
        wait_for("a request for a reset", || one.status() & 64 != 0);
        fill(two, &mut healthy, 32);
        let faults = ["rng0", "rng1"].map(|rng| guest.counter(rng, "faults"));
        assert_eq!(faults, [number, 0]);
        let mut queue = one.start(RINGS);
        assert_eq!(one.status(), 15);
        fill(one, &mut queue, 32);
    }
    assert!(guest.vm.faults().is_empty(), "no fault of the host's");
}

#[test]
fn queues_that_cannot_be_are_refused_and_registers_take_any_access() {
    let guest = Guest::start(VmBuilder::rng);
    let rng = guest.device(0);
    for (size, rings) in [(0, RINGS), (3, RINGS), (1 << 20, RINGS), (16, 0xffff_0000)] {
        rng.write(0x70, 0);
        for (register, value) in [
            (0x70, 1),
            (0x70, 3),
            (0x24, 1),
            (0x20, 1),
            (0x70, 11),
            (0x38, size),
            (0x80, rings as u32),
            (0x90, rings as u32 + 0x1000),
            (0xa0, rings as u32 + 0x2000),
            (0x44, 1),
            (0x70, 15),
        ] {
            rng.write(register, value);
        }
        assert_eq!(rng.status(), 15 | 64, "{size} {rings:#x}");
    }
    for offset in (0..0x1000).step_by(0x34) {
        rng.write(offset, u32::MAX);
        rng.read(offset);
    }
    let mut queue = rng.start(RINGS);
    fill(rng, &mut queue, 8);
}

#[test]
fn nothing_touches_memory_while_paused_and_all_goes_on_afterwards() {
    let guest = Guest::start(VmBuilder::rng);
    let rng = guest.device(0);
    let mut queue = rng.start(RINGS);
    for round in 0..30u32 {
        for _ in 0..8 {
            queue.add(&[], &[(BUFFER, 0x1_0000)]);
        }
        // The device is working, or about to, when the pause comes.
        guest.order(Order::Write32, rng.window + 0x50, 0);
        guest.pause();
        let before = bytes(&guest, RINGS, 0x30_0000);
        for _ in 0..3 {
            assert!(bytes(&guest, RINGS, 0x30_0000) == before, "round {round}");
        }
        guest.vm.resume().unwrap();
        let mut count = 0;
        wait_for("all chains", || {
            count += u32::from(queue.take_used().is_some());
            count == 8
        });
        wait_for("an order's end", || guest.obeyed());
    }
    assert_eq!(guest.counter("rng0", "requests"), 240);
}

#[test]
fn a_disk_under_load_stands_still_in_a_hundred_pauses_and_loses_nothing() {
    const LEN: u64 = 256 << 10;
    let mut file = tempfile::tempfile().unwrap();
    let content: Vec<u8> = (0..4 * LEN / 8).flat_map(u64::to_le_bytes).collect();
    file.write_all(&content).unwrap();
    let disk = FileDisk::new(file).unwrap();
    let guest = Guest::start(|vm| vm.block(BlockDevice::new(Box::new(disk))));
    let block = guest.device(0);
    let mut queue = block.start(RINGS);
    let (headers, data, status) = (BUFFER - 0x1000, BUFFER, BUFFER - 0x2000);
    let memory = || {
        let len = usize::try_from(LEN).unwrap() + 0x2000;
        (bytes(&guest, RINGS, 0x1_0000), bytes(&guest, status, len))
    };
    for round in 0..100u32 {
        // Another part of the disk each time, so that the data differs.
        let sector = u64::from(round % 4) * LEN / 512;
        guest.mem.write_obj(0u32, GuestAddress(headers)).unwrap();
        guest
            .mem
            .write_obj(sector, GuestAddress(headers + 8))
            .unwrap();
        for _ in 0..5 {
            queue.add(&[(headers, 16)], &[(data, LEN as u32), (status, 1)]);
        }
        block.notify();
        guest.pause();
        let before = memory();
        assert!(memory() == before, "round {round}");
        guest.vm.resume().unwrap();
        let mut count = 0;
        wait_for("all requests", || {
            count += u32::from(queue.take_used().is_some());
            count == 5
        });
        let start = usize::try_from(sector * 512).unwrap();
        let expected = &content[start..start + LEN as usize];
        assert!(
            bytes(&guest, data, LEN as usize) == expected,
            "round {round}"
        );
    }
    assert_eq!(guest.counter("blk0", "reads"), 500);
}

/// Makes a block device execute a request of this kind on one sector of data.
pub(super) fn request(device: impl Notify, queue: &mut DriverQueue, kind: u32, len: u32) -> u8 {
    let mem = &device.guest().mem;
    let (header, status) = (BUFFER + 0x1000, BUFFER + 0x2000);
    mem.write_obj(kind, GuestAddress(header)).unwrap();
    mem.write_obj(0u64, GuestAddress(header + 8)).unwrap();
    mem.write_obj(0xffu8, GuestAddress(status)).unwrap();
    queue.add(&[(header, 16)], &[(BUFFER, len), (status, 1)]);
    device.notify();
    wait_for("the request's end", || queue.take_used().is_some());
    mem.read_obj(GuestAddress(status)).unwrap()
}

#[test]
fn a_spare_slot_gets_a_disk_and_the_driver_is_told() {
    let guest = Guest::start(|vm| vm.block(BlockDevice::spare()));
    let slot = guest.device(0);
    let mut queue = slot.start(RINGS);
    assert_eq!((slot.read(0x100), slot.read(0x104)), (1, 0), "one sector");
    assert_eq!(request(slot, &mut queue, 0, 512), 0);
    assert_eq!(bytes(&guest, BUFFER, 4), [0; 4]);
    slot.write(0x64, 3);

    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[7; 8 * 512]).unwrap();
    let handle = guest.vm.block("blk0").unwrap();
    let generation = slot.read(0xfc);
    let disk = FileDisk::new(file.try_clone().unwrap()).unwrap();
    handle.replace_disk(Box::new(disk), "image-1").unwrap();
    wait_for("the interrupt", || slot.read(0x60) & 2 != 0);
    slot.write(0x64, 3);
    assert_ne!(slot.read(0xfc), generation);
    assert_eq!(slot.read(0x100), 8);
    assert_eq!(request(slot, &mut queue, 0, 512), 0);
    assert_eq!(bytes(&guest, BUFFER, 4), [7; 4]);
    assert_eq!(request(slot, &mut queue, 8, 20), 0);
    assert_eq!(&bytes(&guest, BUFFER, 8), b"image-1\0");

    file.set_len(20 * 512).unwrap();
    guest.pause();
    handle.resize().unwrap();
    guest.vm.resume().unwrap();
    wait_for("the interrupt", || slot.read(0x60) & 2 != 0);
    assert_eq!(slot.read(0x100), 20);

    assert!(matches!(
        guest.vm.block("blk1"),
        Err(HandleError::NoSuchDevice { .. })
    ));
    guest.vm.stop().unwrap();
    assert!(matches!(
        handle.resize(),
        Err(HandleError::NotRunning { .. })
    ));
    assert_eq!(handle.counters()[0].name, "begun");
}

#[derive(Debug)]
struct NoCounters;
impl ReadCounters for NoCounters {
    fn read(&self) -> Vec<Counter> {
        Vec::new()
    }
}

/// A device with one queue, without configuration and counters.
pub(super) fn one_queue() -> DeviceInfo {
    DeviceInfo {
        device_type: DeviceType::Entropy,
        queue_sizes: vec![16],
        features: 0,
        config: Arc::new(ConfigSpace::new([])),
        counters: Arc::new(NoCounters),
    }
}

/// A device that panics when it is notified.
#[derive(Debug)]
struct Panics(Option<Queue>);

impl VirtioDevice for Panics {
    fn info(&self) -> DeviceInfo {
        one_queue()
    }
    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        self.0 = Some(queue);
        Ok(())
    }
    fn stop_queue(&mut self, _: u16) -> Option<Queue> {
        self.0.take()
    }
    fn on_queue(&mut self, _: u16) -> Result<Progress, Fault> {
        panic!("as the test wants it")
    }
}

#[test]
fn a_panic_of_an_event_loop_is_reported_as_its_own() {
    let guest = Guest::start(|vm| vm.device(Panics(None)));
    // The last write starts the device, which ends the VM.
    let vm = guest.vm.clone();
    let driver = std::thread::spawn(move || {
        guest.device(0).start(RINGS);
    });
    let waited = vm.clone();
    let error = in_time("wait", move || waited.wait()).unwrap_err();
    let VmError::Poisoned(poison) = error else {
        panic!("{error}")
    };
    assert!(
        matches!(&poison.cause, PoisonCause::Panic { thread } if thread == "vm-io"),
        "{poison}"
    );
    assert_eq!((poison.vcpu, vm.state()), (None, State::Poisoned));
    // Its last order may or may not have been executed.
    let _ = driver.join();
}

/// A device whose host side fails at each notification.
#[derive(Debug)]
struct Fails {
    queue: Option<Queue>,
    times: i32,
}

impl VirtioDevice for Fails {
    fn info(&self) -> DeviceInfo {
        one_queue()
    }
    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        self.queue = Some(queue);
        Ok(())
    }
    fn stop_queue(&mut self, _: u16) -> Option<Queue> {
        self.queue.take()
    }
    fn on_queue(&mut self, _: u16) -> Result<Progress, Fault> {
        self.times += 1;
        let error = std::io::Error::from_raw_os_error(self.times);
        Err(Fault::host("as the test wants it", error))
    }
}

#[test]
fn the_owner_is_told_of_the_last_faults_of_the_host_and_which_device_has_them() {
    let failing = || Fails {
        queue: None,
        times: 0,
    };
    let guest = Guest::start(|vm| vm.rng().device(failing()).device(failing()));
    let fail = |number: u64| {
        let device = guest.device(number);
        // It is notified when it starts, too.
        device.start(RINGS + number * 0x10_0000);
        wait_for("a request for a reset", || device.status() & 64 != 0);
    };
    let faults = || {
        let faults = guest.vm.faults();
        let told = |fault: &crate::DeviceFault| match &*fault.fault {
            Fault::Host(host) => (fault.device.clone(), host.source.raw_os_error().unwrap()),
            other => panic!("{other}"),
        };
        faults.iter().map(told).collect::<Vec<_>>()
    };
    let named = |number: u64, times| (format!("rng{number}"), times);
    fail(1);
    fail(2);
    fail(1);
    assert_eq!(faults(), [named(1, 1), named(2, 1), named(1, 2)]);
    assert_eq!(guest.counter("rng1", "faults"), 2);
    for _ in 3..=66 {
        fail(1);
    }
    let last: Vec<_> = (3..=66).map(|times| named(1, times)).collect();
    assert_eq!(faults(), last, "64 of them");
    let mut queue = guest.device(0).start(RINGS);
    fill(guest.device(0), &mut queue, 8);
}

#[test]
fn eventfds_of_queues_neither_block_nor_reach_other_programs() {
    use rustix::fs::{OFlags, fcntl_getfl};
    use rustix::io::{FdFlags, fcntl_getfd};
    use std::os::fd::{AsRawFd, BorrowedFd};

    let kicks = crate::vm::hardware::transport::kicks(3).unwrap();
    assert_eq!(kicks.len(), 3);
    for kick in &kicks {
        // SAFETY: the eventfd lives longer.
        #[allow(unsafe_code)]
        let fd = unsafe { BorrowedFd::borrow_raw(kick.as_raw_fd()) };
        assert!(fcntl_getfl(fd).unwrap().contains(OFlags::NONBLOCK));
        assert!(fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC));
    }
}

#[test]
fn an_event_loop_that_hears_of_no_event_any_more_ends_its_vm() {
    use podvisor_seccomp::{Otherwise, Verdict, apply, compile};

    let guest = Guest::start(|vm| vm.rng().seccomp(Seccomp::Off));
    let mut calls: BTreeMap<i64, Verdict> = (0..450).map(|call| (call, Verdict::Allow)).collect();
    for wait in [libc::SYS_epoll_wait, libc::SYS_epoll_pwait] {
        calls.insert(wait, Verdict::Fail(1));
    }
    let filter = compile(&calls, Otherwise::Fail(1));
    let rng = guest.vm.device::<RngDevice>("rng0").unwrap();
    rng.run(move |_| apply(&filter).unwrap()).unwrap();
    let waited = guest.vm.clone();
    let error = in_time("wait", move || waited.wait()).unwrap_err();
    let VmError::Poisoned(poison) = error else {
        panic!("{error}")
    };
    let cause = &poison.cause;
    assert!(
        matches!(cause, PoisonCause::EventLoop { thread, .. } if thread == "vm-io"),
        "{poison}"
    );
}

#[test]
fn a_confined_socket_device_reaches_programs_by_their_paths_and_removes_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vsock");
    let program = UnixListener::bind(dir.path().join("vsock_77")).unwrap();
    let device = VsockDevice::unix_mux(3, &path).unwrap();
    // A device of another thread, which has fewer system calls.
    let guest = Guest::start(|vm| vm.rng().vsock(device));
    let vsock = guest.device(1);
    let places = [0, 1, 2].map(|index| (index, RINGS + 0x1_0000 * u64::from(index)));
    let mut queues = vsock.start_queues(0, &places);
    queues[0].add(&[], &[(BUFFER + 0x1000, 4096)]);
    // From port 1 of the guest to port 77 of the host: a request for a stream.
    let words = [3u32, 0, 2, 0, 1, 77, 0, 1 | 1 << 16, 0, 0x1_0000, 0];
    guest.mem.write_obj(words, GuestAddress(BUFFER)).unwrap();
    queues[1].add(&[(BUFFER, 44)], &[]);
    vsock.write(0x50, 1);
    program.accept().unwrap();
    wait_for("the answer", || queues[0].take_used().is_some());
    let mut operation = [0; 2];
    let at = GuestAddress(BUFFER + 0x1000 + 30);
    guest.mem.read_slice(&mut operation, at).unwrap();
    assert_eq!(operation, [2, 0], "a response");
    assert!(path.exists());
    drop(queues);
    drop(guest);
    wait_for("the end of the socket", || !path.exists());
}
