//! What the owner of a VM does with it from outside while its guest runs, and what drivers notice.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicUsize;

use podvisor_devices::blk::{BlockDevice, FileDisk, UringDisk};
use podvisor_devices::console::ConsoleDevice;
use podvisor_devices::net::{LinkState, MemoryNic, NetDevice};
use podvisor_devices::rng::RngDevice;
use podvisor_devices::vsock::VsockDevice;

use super::devices::{BUFFER, RINGS, bytes};
use super::*;
use crate::vm::{HandleError, PlugError, State};
use crate::{SnapshotError, VmExit};

/// Registers: the interrupt status, its acknowledgement, configuration space.
const STATUS: u64 = 0x60;
const ACK: u64 = 0x64;
const CONFIG: u64 = 0x100;
/// The bit of the interrupt status for a change of the configuration.
const CHANGED: u32 = 2;

impl TestDevice<'_> {
    /// Waits for the interrupt that reports a change of the configuration.
    fn hears_of_a_change(self) {
        wait_for("the interrupt", || self.read(STATUS) & CHANGED != 0);
        self.write(ACK, CHANGED);
    }
}

#[test]
fn memory_is_read_as_far_as_there_is_some_while_the_guest_runs_and_afterwards() {
    let guest = Guest::start(|vm| vm);
    guest.write(0x30_0000, 0x0403_0201);
    let end = 32 << 20;
    guest.write(end - 4, 0x0807_0605);
    let look = |address| {
        let mut buffer = [9; 8];
        (guest.vm.read_memory(address, &mut buffer), buffer)
    };
    let seen = || {
        assert_eq!(look(0x30_0000), (8, [1, 2, 3, 4, 0, 0, 0, 0]));
        assert_eq!(look(end - 4), (4, [5, 6, 7, 8, 9, 9, 9, 9]));
        for nowhere in [end, layout::VIRTIO_MMIO_START, u64::MAX] {
            assert_eq!(look(nowhere), (0, [9; 8]), "{nowhere:x}");
        }
    };
    seen();
    guest.order(Order::Out8, 0x64, 0xfe);
    assert_eq!(guest.vm.wait().unwrap(), VmExit::Reset);
    seen();
}

#[test]
fn drivers_hear_of_links_balloons_and_terminals_that_change() {
    let (nic, _wire) = MemoryNic::pair();
    let card = NetDevice::over(vec![Box::new(nic)]).unwrap();
    let console = ConsoleDevice::new(Box::new(std::io::sink()));
    let guest = Guest::start(|vm| vm.net(card).balloon().console(console));
    let [net, balloon, console] = [0, 1, 2].map(|number| guest.device(number));
    for (number, device) in (0..).zip([net, balloon, console]) {
        device.start_queue(0, RINGS + 0x1_0000 * number);
    }

    let link = || net.read(CONFIG + 4) >> 16 & 1;
    let card = guest.vm.net("net0").unwrap();
    for (state, up) in [(LinkState::Down, 0), (LinkState::Up, 1)] {
        card.set_link(state).unwrap();
        net.hears_of_a_change();
        assert_eq!(link(), up, "{state:?}");
    }

    let handle = guest.vm.balloon().unwrap();
    handle.set_target(MemorySize::mib(3)).unwrap();
    balloon.hears_of_a_change();
    assert_eq!(balloon.read(CONFIG), 3 << 8, "pages");
    balloon.write(CONFIG + 4, 2 << 8);
    assert_eq!(handle.actual().unwrap(), MemorySize::mib(2));
    // The driver does not support statistics.
    let patience = Duration::from_millis(1);
    let stats = handle.stats(patience);
    assert!(
        matches!(stats, Err(HandleError::NoDriver { .. })),
        "{stats:?}"
    );

    guest.vm.console().unwrap().resize(132, 43).unwrap();
    console.hears_of_a_change();
    assert_eq!(console.read(CONFIG), 43 << 16 | 132);
}

#[test]
fn a_driver_answers_what_the_owner_asks_of_its_memory() {
    let most = MemorySize::mib(128);
    let guest = Guest::start(|vm| vm.hotplug_memory(most).balloon());
    let handle = guest.vm.balloon().unwrap();
    // VIRTIO_BALLOON_F_STATS_VQ: two queues, and statistics.
    let places = [0, 1, 2].map(|index| (index, RINGS + 0x1_0000 * u64::from(index)));
    let mut queues = guest.device(0).start_queues(1 << 1, &places);
    let report = |queue: &mut DriverQueue, free: u64| {
        guest.mem.write_obj(4u16, GuestAddress(BUFFER)).unwrap();
        guest.mem.write_obj(free, GuestAddress(BUFFER + 2)).unwrap();
        queue.add(&[(BUFFER, 10)], &[]);
        guest.device(0).write(0x50, 2);
    };
    // When the first one comes back, the device has the second: the question is not before it.
    report(&mut queues[2], 5 << 20);
    report(&mut queues[2], 5 << 20);
    wait_for("the older report", || queues[2].take_used().is_some());
    let asked = std::thread::spawn(move || handle.stats(PATIENCE));
    wait_for("the question", || queues[2].take_used().is_some());
    report(&mut queues[2], 7 << 20);
    let stats = asked.join().unwrap().unwrap();
    assert_eq!((stats.free, stats.total), (Some(7 << 20), None));

    // No driver plugs any memory in: the time passes, and nothing is there.
    let memory = guest.vm.hotplug_memory().unwrap();
    let wanted = MemorySize::mib(6);
    let there = memory.request_and_wait(wanted, Duration::from_millis(1));
    assert_eq!(there.unwrap(), MemorySize::bytes(0));
    let requested = memory.run(|device| device.requested()).unwrap();
    assert_eq!(requested, wanted.as_bytes());
}

#[test]
fn programs_of_guest_and_host_reach_each_other_by_the_socket_device() {
    let guest = Guest::start(|vm| vm.vsock(VsockDevice::in_process(3).unwrap()));
    let handle = guest.vm.vsock().unwrap();
    let places = [0, 1, 2].map(|index| (index, RINGS + 0x1_0000 * u64::from(index)));
    let mut queues = guest.device(0).start_queues(0, &places);
    let (received, sent) = (BUFFER + 0x1000, BUFFER);
    let receive = |what: &str, queues: &mut [DriverQueue]| {
        queues[0].add(&[], &[(received, 4096)]);
        guest.device(0).write(0x50, 0);
        wait_for(what, || queues[0].take_used().is_some());
        let header = bytes(&guest, received, 44);
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        // Ports of host and guest, and the operation.
        (word(16), word(20), header[30])
    };
    // From port 1 of the guest to port 77 of the host: a request for a stream.
    let (connected, streams) = mpsc::channel();
    handle
        .listen(77, move |stream| connected.send(stream).unwrap())
        .unwrap();
    let words = [3u32, 0, 2, 0, 1, 77, 0, 1 | 1 << 16, 0, 0x1_0000, 0];
    guest.mem.write_obj(words, GuestAddress(sent)).unwrap();
    queues[1].add(&[(sent, 44)], &[]);
    guest.device(0).write(0x50, 1);
    assert_eq!(receive("the response", &mut queues), (77, 1, 2));
    streams.recv_timeout(PATIENCE).unwrap();
    // The other way round.
    let _stream = handle.connect(1024).unwrap();
    let (_, port, operation) = receive("the request", &mut queues);
    assert_eq!((port, operation), (1024, 1));
}

#[test]
fn devices_of_a_vm_that_does_not_run_are_not_asked() {
    let vsock = VsockDevice::in_process(3).unwrap();
    let disk = BlockDevice::from_file(tempfile::tempfile().unwrap()).unwrap();
    let vm = tiny(OBEY).vsock(vsock).block(disk).build().unwrap();
    let vsock = vm.vsock().unwrap();
    let refused = |state| {
        let listening = vsock.listen(1024, drop);
        assert!(
            matches!(listening, Err(HandleError::NotRunning { .. })),
            "{listening:?}"
        );
        let disk = FileDisk::new(tempfile::tempfile().unwrap()).unwrap();
        let error = vm.insert_disk("blk0", Box::new(disk), "").unwrap_err();
        let PlugError::State(VmError::IllegalState { state: of, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(of, state);
    };
    refused(State::Created);
    vm.stop().unwrap();
    refused(State::Stopped);
}

#[test]
fn a_device_that_is_not_there_is_named_with_those_that_are() {
    let guest = Guest::start(|vm| vm.rng().balloon());
    let missing = [
        guest.vm.block("blk1").unwrap_err(),
        guest.vm.console().unwrap_err(),
        guest.vm.device::<RngDevice>("balloon0").unwrap_err(),
    ];
    let there = "it has rng0, balloon0";
    assert_eq!(
        missing.map(|error| error.to_string()),
        [
            format!("this VM has no block device named \"blk1\": {there}"),
            format!("this VM has no console: {there}"),
            format!("this VM has no device of this type named \"balloon0\": {there}"),
        ]
    );
}

#[test]
fn a_panic_of_what_is_done_with_a_device_is_the_callers() {
    let guest = Guest::start(VmBuilder::rng);
    let rng = guest.vm.device::<RngDevice>("rng0").unwrap();
    let run = || rng.run::<()>(|_| panic!("as the test wants it"));
    let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"as the test wants it"));
    assert_eq!(rng.run(|_| 7).unwrap(), 7);
    assert_eq!(guest.vm.state(), State::Running);
}

#[test]
fn a_driver_hears_that_connections_are_gone() {
    let guest = Guest::start(|vm| vm.vsock(VsockDevice::in_process(3).unwrap()));
    let mut event = guest.device(0).start_queue(2, RINGS);
    event.add(&[], &[(BUFFER, 4)]);
    guest
        .mem
        .write_slice(&[9; 4], GuestAddress(BUFFER))
        .unwrap();
    guest.vm.vsock().unwrap().reset_transport().unwrap();
    wait_for("the event", || event.take_used().is_some());
    assert_eq!(bytes(&guest, BUFFER, 4), [0; 4], "transport reset");
}

#[test]
fn input_waits_in_the_serial_port_until_the_guest_has_read_it() {
    let guest = Guest::start(|vm| vm.serial(std::io::sink()));
    let drained = Arc::new(AtomicUsize::new(0));
    let count = drained.clone();
    guest.vm.on_serial_drained(move || {
        count.fetch_add(1, Ordering::SeqCst);
    });
    assert_eq!(guest.vm.serial_input(&[b'x'; 100]), Some(64));
    assert_eq!(guest.vm.serial_input(b"y"), Some(0));
    for _ in 0..64 {
        assert_eq!(drained.load(Ordering::SeqCst), 0);
        assert_eq!(guest.input(0x3f8), b'x');
    }
    assert_eq!(drained.load(Ordering::SeqCst), 1);
    assert_eq!(guest.vm.serial_input(b"z"), Some(1));
    assert_eq!(guest.input(0x3f8), b'z');
    assert_eq!(Guest::start(|vm| vm).vm.serial_input(b"x"), None);
}

#[test]
fn a_disk_that_is_inserted_during_a_pause_serves_nothing_before_its_end() {
    let guest = Guest::start(|vm| vm.block(BlockDevice::spare()));
    let mut queue = guest.device(0).start(RINGS);
    let (header, status) = (BUFFER + 0x10_0000, BUFFER + 0x11_0000);
    guest
        .mem
        .write_slice(&[0; 16], GuestAddress(header))
        .unwrap();
    guest.pause();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[7; 8 * 512]).unwrap();
    let disk = Box::new(FileDisk::new(file).unwrap());
    guest.vm.insert_disk("blk0", disk, "").unwrap();
    queue.add(&[(header, 16)], &[(BUFFER, 512), (status, 1)]);
    guest.vm.block("blk0").unwrap().run(|_| ()).unwrap();
    assert!(queue.take_used().is_none());
    guest.vm.resume().unwrap();
    wait_for("the request's end", || queue.take_used().is_some());
    assert_eq!(bytes(&guest, BUFFER, 512), [7; 512]);
    guest.pause();
    guest.vm.resume().unwrap();
}

#[test]
fn a_disk_that_the_kernel_serves_takes_the_place_of_another_such_one() {
    let guest = Guest::start(|vm| vm.block(BlockDevice::spare()));
    let block = guest.device(0);
    let mut queue = block.start(RINGS);
    let (header, status) = (BUFFER + 0x10_0000, BUFFER + 0x11_0000);
    let zeroes = [0; 16];
    guest
        .mem
        .write_slice(&zeroes, GuestAddress(header))
        .unwrap();
    for byte in 1..6u8 {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[byte; 8 * 512]).unwrap();
        let disk = Box::new(UringDisk::new(file).unwrap());
        // Also while nothing is served.
        let is_paused = byte % 2 == 0;
        if is_paused {
            guest.pause();
        }
        guest.vm.insert_disk("blk0", disk, "").unwrap();
        if is_paused {
            guest.vm.resume().unwrap();
        }
        for _ in 0..3 {
            queue.add(&[(header, 16)], &[(BUFFER, 512), (status, 1)]);
            block.write(0x50, 0);
            wait_for("the request's end", || queue.take_used().is_some());
            assert_eq!(bytes(&guest, BUFFER, 512), [byte; 512]);
        }
    }
    assert!(guest.vm.faults().is_empty());
}

#[test]
fn who_is_told_that_all_input_is_read_may_type_more() {
    let guest = Guest::start(|vm| vm.serial(std::io::sink()));
    let vm = Arc::downgrade(&guest.vm);
    guest.vm.on_serial_drained(move || {
        if let Some(vm) = vm.upgrade() {
            vm.serial_input(b"b");
        }
    });
    guest.vm.serial_input(b"a");
    let read = [(); 3].map(|()| guest.input(0x3f8));
    assert_eq!(read, *b"abb");
}

#[test]
fn the_working_set_is_what_a_guest_wrote_since_it_was_restored() {
    let (_dir, place) = place();
    let guest = Guest::start(|vm| vm);
    guest.write(0x40_0000, 1);
    let error = guest.vm.working_set().unwrap_err();
    assert!(matches!(error, SnapshotError::NoBase), "{error}");
    guest.pause();
    guest.vm.snapshot(&place).unwrap();
    let snapshot = || Snapshot::open(&place).unwrap();

    let clone = Guest::restore(&snapshot(), |vm| vm);
    clone.write(0x40_0000, 2);
    clone.read(0x50_0000);
    let set = clone.vm.working_set().unwrap();
    let has = |address: u64| set.pages().iter().any(|pages| pages.contains(&address));
    assert!(has(ORDERS) && has(0x40_0000));
    assert!(!has(0x50_0000), "it was read only");
    assert!(set.bytes() < 1 << 20);

    // The next one has it from the start, without having written anything.
    Snapshot::set_working_set(&place, set.clone()).unwrap();
    let vm = snapshot().builder().build().unwrap();
    let own = vm.working_set().unwrap();
    let expected = set
        .pages()
        .iter()
        .flat_map(|pages| pages.clone().step_by(0x1000));
    let is_own = |page: u64| own.pages().iter().any(|pages| pages.contains(&page));
    assert!(expected.into_iter().all(is_own), "{own:?}");
    let clone = Guest::restore(&snapshot(), |vm| vm);
    assert_eq!(
        clone.read(0x40_0000),
        1,
        "what was saved, not what was written"
    );
}
