use std::sync::Mutex;

use super::super::memory::{MemoryNic, MemoryWire};
use super::*;
use crate::net::feature::{CTRL_GUEST_OFFLOADS, CTRL_RX, GUEST_CSUM, GUEST_TSO4, MRG_RXBUF, MTU};
use crate::net::{LinkState, NetDevice, ReceiveFilter};
use crate::testing::{CountingInterrupt, DriverQueue, backend_readable, counter, memory, stop};
use crate::virtio::{Progress, Rate, VirtioDevice};
use std::sync::atomic::Ordering::SeqCst;
use vm_memory::{Bytes, GuestMemoryMmap};

#[path = "vhost_kernel_tests.rs"]
mod kernel;

const RX: u16 = 0;
const TX: u16 = 1;
const CONTROL: u16 = 2;
/// Including features that do not concern the rings.
const FEATURES: u64 = features::VERSION_1 | MRG_RXBUF | GUEST_CSUM | 1 << 16 | 1 << 17;

/// The requests to the kernel, and its answers.
#[derive(Debug, Default)]
struct Told {
    /// Features and the bytes of the memory.
    begun: Vec<(u64, u64)>,
    /// Rings that are served, with the position that they started from, and their eventfds.
    served: [Option<(u16, EventFd, EventFd)>; RINGS],
    /// The positions at which the kernel leaves them.
    positions: [u16; RINGS],
    fails: bool,
}

/// A fake kernel that records its requests.
#[derive(Clone, Debug, Default)]
struct Fake(Arc<Mutex<Told>>);

impl Fake {
    fn with<R>(&self, work: impl FnOnce(&mut Told) -> R) -> R {
        work(&mut self.0.lock().unwrap())
    }

    fn serves(&self) -> [bool; RINGS] {
        self.with(|told| [0, 1].map(|number: usize| told.served[number].is_some()))
    }

    fn interrupt(&self, number: usize) {
        self.with(|told| told.served[number].as_ref().unwrap().1.write(1).unwrap());
    }

    fn error(&self, number: usize) {
        self.with(|told| told.served[number].as_ref().unwrap().2.write(1).unwrap());
    }
}

impl Rings for Fake {
    fn begin(&mut self, features: u64, queue: &Queue) -> io::Result<()> {
        let bytes = queue.memory().iter().map(GuestMemoryRegion::len).sum();
        self.with(|told| told.begun.push((features, bytes)));
        Ok(())
    }

    fn serve(&self, number: usize, ring: &Ring, queue: &Queue, tap: RawFd) -> io::Result<()> {
        assert!(tap >= 0);
        self.with(|told| {
            if told.fails {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            assert!(told.served[number].is_none());
            let from = queue.state().next_avail;
            let [call, error] = [&ring.call, &ring.error].map(|fd| fd.try_clone().unwrap());
            told.served[number] = Some((from, call, error));
            Ok(())
        })
    }

    fn leave(&self, number: usize) -> io::Result<u16> {
        self.with(|told| {
            assert!(told.served[number].take().is_some());
            Ok(told.positions[number])
        })
    }
}

struct Rig {
    kernel: Fake,
    device: NetDevice,
    wire: MemoryWire,
    mem: GuestRam,
    drivers: [DriverQueue; 3],
    irq: [Arc<CountingInterrupt>; 3],
}

impl Rig {
    fn new(make: impl FnOnce(NetDevice) -> NetDevice) -> Self {
        let kernel = Fake::default();
        let (nic, wire) = MemoryNic::pair();
        let vhost = Vhost::over(Box::new(kernel.clone())).unwrap();
        let device = NetDevice::new(Box::new(nic)).unwrap();
        let mem = memory(1 << 20);
        let mut rig = Self {
            kernel,
            device: make(device.served_by(vhost).unwrap()),
            wire,
            drivers: [1, 2, 3].map(|n| DriverQueue::new(&mem, n * 0x1_0000, 64)),
            mem,
            irq: [(); 3].map(|()| Arc::default()),
        };
        rig.device.negotiated(FEATURES);
        rig
    }

    fn started() -> Self {
        let mut rig = Self::new(|device| device);
        rig.start_all();
        rig
    }

    fn queue(&self, index: u16) -> Queue {
        let at = usize::from(index);
        self.drivers[at].device_queue(index, self.irq[at].clone())
    }

    fn start_all(&mut self) {
        for index in [RX, TX, CONTROL] {
            self.device.start_queue(self.queue(index)).unwrap();
        }
    }

    fn interrupts(&self) -> [u64; 3] {
        [0, 1, 2].map(|queue: usize| self.irq[queue].queue.load(SeqCst))
    }
}

#[test]
fn the_kernel_serves_the_rings_and_the_device_the_control_queue() {
    let mut rig = Rig::started();
    let watched = [RX, TX, CONTROL].map(|index| rig.device.watches(index));
    assert_eq!(watched, [false, false, true]);
    assert_eq!(rig.kernel.serves(), [true; 2]);
    let begun = rig.kernel.with(|told| told.begun.clone());
    assert_eq!(begun, [(features::VERSION_1 | MRG_RXBUF, 1 << 20)]);
    // The device does not handle frames.
    rig.wire.send(&[1; 60]);
    rig.drivers[0].add(&[], &[(0x8_0000, 2048)]);
    rig.drivers[1].add(&[(0x9_0000, 72)], &[]);
    assert!(!backend_readable(&rig.device));
    for index in [RX, TX] {
        assert_eq!(rig.device.on_queue(index).unwrap(), Progress::Idle);
    }
    assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
    assert!(rig.drivers[0].take_used().is_none() && rig.drivers[1].take_used().is_none());
    // Sets an address.
    let command = [1, 1, 2, 0, 0, 0, 0, 7];
    rig.mem
        .write_slice(&command, GuestAddress(0x8_0000))
        .unwrap();
    rig.drivers[2].add(&[(0x8_0000, 8)], &[(0x9_0000, 1)]);
    assert_eq!(rig.device.on_queue(CONTROL).unwrap(), Progress::Idle);
    assert!(rig.drivers[2].take_used().is_some());
    let twice = rig.device.start_queue(rig.queue(TX));
    assert!(matches!(twice, Err(StartError::Running { index: TX })));
}

#[test]
fn interrupts_are_passed_on_to_their_queue() {
    let mut rig = Rig::started();
    for (number, expected) in [(0, [1, 0, 0]), (1, [1, 1, 0]), (1, [1, 2, 0])] {
        assert!(!backend_readable(&rig.device));
        rig.kernel.interrupt(number);
        assert!(backend_readable(&rig.device));
        assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
        assert_eq!(rig.interrupts(), expected);
    }
    assert!(!backend_readable(&rig.device));
}

#[test]
fn queues_come_back_where_the_kernel_left_them_with_the_last_interrupt() {
    let mut rig = Rig::started();
    rig.kernel.with(|told| told.positions = [7, u16::MAX]);
    rig.kernel.interrupt(1);
    // This is too late for a fault.
    rig.kernel.error(0);
    let queues = stop(&mut rig.device);
    assert_eq!(rig.interrupts(), [0, 1, 0]);
    assert!(!backend_readable(&rig.device) && rig.kernel.serves() == [false; 2]);
    let states: Vec<_> = queues.iter().map(Queue::state).collect();
    let at = |position| QueueState {
        next_avail: position,
        next_used: position,
    };
    assert_eq!(states, [at(7), at(u16::MAX), at(0)]);
    assert!(stop(&mut rig.device).is_empty());
    for queue in queues {
        let _ = queue.kick().read();
        let kick = queue.kick().try_clone().unwrap();
        let index = queue.index();
        rig.device.start_queue(queue).unwrap();
        // The kernel looks at what was made available meanwhile.
        assert_eq!(kick.read().is_ok(), index != CONTROL);
    }
    rig.kernel.with(|told| {
        let from = told.served.iter().flatten().map(|(from, ..)| *from);
        assert_eq!(from.collect::<Vec<_>>(), [7, u16::MAX]);
        assert_eq!(told.begun.len(), 2, "once for both, each time");
    });
}

#[test]
fn a_ring_that_the_kernel_cannot_read_is_a_fault_once() {
    for number in [0, 1] {
        let mut rig = Rig::started();
        rig.kernel.error(number);
        assert!(matches!(rig.device.on_backend(), Err(Fault::Guest(_))));
        assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
        assert_eq!(stop(&mut rig.device).len(), 3);
        rig.device.reset();
        rig.device.negotiated(FEATURES);
        rig.start_all();
        assert_eq!(rig.kernel.serves(), [true; 2]);
    }
}

#[test]
fn rings_stand_still_while_the_link_is_down() {
    let mut rig = Rig::started();
    rig.kernel.with(|told| told.positions = [3, 4]);
    rig.device.set_link(LinkState::Down);
    assert_eq!(rig.kernel.serves(), [false; 2]);
    let queues = stop(&mut rig.device);
    assert_eq!([0, 1].map(|n: usize| queues[n].state().next_avail), [3, 4]);
    for queue in queues {
        rig.device.start_queue(queue).unwrap();
    }
    assert_eq!(rig.kernel.serves(), [false; 2]);
    rig.device.set_link(LinkState::Up);
    assert_eq!(rig.kernel.serves(), [true; 2]);
    assert!(rig.device.on_backend().is_ok());
}

#[test]
fn the_kernel_leaves_the_rings_of_a_device_that_goes() {
    let Rig { device, kernel, .. } = Rig::started();
    drop(device);
    assert_eq!(kernel.serves(), [false; 2]);
}

#[test]
fn a_kernel_that_refuses_is_told_to_the_driver_and_the_owner() {
    let mut rig = Rig::new(|device| device);
    rig.kernel.with(|told| told.fails = true);
    let refused = rig.device.start_queue(rig.queue(RX));
    assert!(matches!(refused, Err(StartError::Host { index: RX, .. })));
    assert!(rig.device.stop_queue(RX).is_none());
    rig.kernel.with(|told| told.fails = false);
    rig.start_all();
    rig.device.set_link(LinkState::Down);
    rig.kernel.with(|told| told.fails = true);
    rig.device.set_link(LinkState::Up);
    assert!(backend_readable(&rig.device));
    assert!(matches!(rig.device.on_backend(), Err(Fault::Host(_))));
    assert_eq!(stop(&mut rig.device).len(), 3);
}

#[test]
fn a_card_with_a_rate_serves_itself() {
    let rate = Some(Rate {
        per_second: 1 << 30,
        burst: 1 << 30,
    });
    let limits: [fn(NetDevice, Option<Rate>) -> NetDevice; 2] = [
        |device, rate| device.limit_receive(rate, None),
        |device, rate| device.limit_transmit(None, rate),
    ];
    for limit in limits {
        let mut rig = Rig::new(|device| limit(device, rate));
        rig.start_all();
        assert!(
            [RX, TX, CONTROL]
                .iter()
                .all(|index| rig.device.watches(*index))
        );
        assert_eq!(rig.kernel.serves(), [false; 2]);
        rig.drivers[0].add(&[], &[(0x8_0000, 2048)]);
        rig.wire.send(&[1; 60]);
        assert!(backend_readable(&rig.device));
        assert_eq!(rig.device.on_backend().unwrap(), Progress::Idle);
        assert!(rig.drivers[0].take_used().is_some());
        assert_eq!(counter(&rig.device, "rx_frames"), 1);
    }
}

#[test]
fn other_descriptors_are_refused_with_what_is_wanted() {
    let file = tempfile::tempfile().unwrap();
    let error = Vhost::new(file.into()).unwrap_err();
    assert!(matches!(error, VhostError::NotVhost(_)));
    assert!(error.to_string().contains("/dev/vhost-net"), "{error}");
}

#[test]
fn parts_of_rings_lie_in_one_piece_of_host_memory() {
    let ranges = [(GuestAddress(0), 0x8000), (GuestAddress(0x8000), 0x8000)];
    let kernel = Kernel {
        fd: tempfile::tempfile().unwrap().into(),
        ram: Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap()),
    };
    let is_valid = |desc_table_addr, avail_ring_addr, used_ring_addr| {
        kernel.is_valid(&VringConfigData {
            queue_max_size: 256,
            queue_size: 256,
            flags: 0,
            desc_table_addr,
            used_ring_addr,
            avail_ring_addr,
            log_addr: None,
        })
    };
    let used_len = 6 + 8 * 256;
    assert!(is_valid(0, 0x1000, 0x2000));
    assert!(is_valid(0x7000, 0x8000, 0x1_0000 - used_len), "to the ends");
    assert!(!is_valid(0x7010, 0x8000, 0x9000));
    assert!(!is_valid(0, 0x7f00, 0x9000));
    assert!(!is_valid(0, 0x1000, 0x7900));
    assert!(!is_valid(0, 0x1000, 0x1_0000 - used_len + 4));
    assert!(!is_valid(u64::MAX - 15, 0x1000, 0x2000));
}

#[test]
fn the_filter_of_the_driver_is_set_on_the_tap_that_the_kernel_reads() {
    let mut rig = Rig::new(|device| device);
    rig.device.negotiated(FEATURES | CTRL_RX);
    rig.start_all();
    // No longer promiscuous.
    let (command, ack) = (0x8_0000, 0x8_1000);
    rig.mem.write_slice(&[0; 3], GuestAddress(command)).unwrap();
    rig.drivers[2].add(&[(command, 3)], &[(ack, 1)]);
    assert_eq!(rig.device.on_queue(CONTROL).unwrap(), Progress::Idle);
    assert!(matches!(
        rig.wire.filters()[..],
        [ReceiveFilter::Only { .. }]
    ));
}

/// What the driver sends and receives, and its notifications of both queues.
const SENT: u64 = 0x9_0000;
const RECEIVED: u64 = 0x8_0000;

impl Rig {
    /// Starts the card of a driver with these features; returns its notifications.
    fn restart(&mut self, features: u64) -> [EventFd; 2] {
        stop(&mut self.device);
        self.device.reset();
        for driver in &mut self.drivers {
            *driver = DriverQueue::new(&self.mem, driver.config().desc_table, 64);
        }
        self.device.negotiated(features);
        let queues = [RX, TX, CONTROL].map(|index| self.queue(index));
        let kicks = [0, 1].map(|number: usize| queues[number].kick().try_clone().unwrap());
        for queue in queues {
            let index = queue.index();
            self.device.start_queue(queue).unwrap();
            assert_eq!(self.device.on_queue(index).unwrap(), Progress::Idle);
        }
        self.work();
        kicks
    }

    fn work(&mut self) {
        while backend_readable(&self.device) {
            assert_eq!(self.device.on_backend().unwrap(), Progress::Idle);
        }
    }

    /// Returns the header and the length of the next frame that the driver has.
    fn received(&mut self) -> Option<([u8; 12], usize)> {
        let used = self.drivers[0].take_used()?;
        let mut header = [0; 12];
        let at = GuestAddress(RECEIVED);
        self.mem.read_slice(&mut header, at).unwrap();
        Some((header, used.len as usize - header.len()))
    }

    fn set_offloads(&mut self, bits: u64) {
        let command = [&[5, 0][..], &bits.to_le_bytes()].concat();
        let (at, ack) = (0xa_0000, 0xa_1000);
        self.mem.write_slice(&command, GuestAddress(at)).unwrap();
        self.drivers[2].add(&[(at, 10)], &[(ack, 1)]);
        assert_eq!(self.device.on_queue(CONTROL).unwrap(), Progress::Idle);
        let done: u8 = self.mem.read_obj(GuestAddress(ack)).unwrap();
        assert!(done == 0 && self.drivers[2].take_used().is_some());
    }

    fn starts(&self) -> u64 {
        counter(&self.device, "vhost_starts")
    }
}

#[test]
fn a_driver_that_does_not_take_all_frames_of_the_kernel_is_served_by_the_device() {
    let mut rig = Rig::new(|device| device.mtu(1000));
    for (features, flags, longest) in [
        (FEATURES & !MRG_RXBUF, 2, 2000),
        (FEATURES & !GUEST_CSUM, 0, 2000),
        (FEATURES | MTU, 2, 1018),
    ] {
        let kicks = rig.restart(features);
        assert_eq!((rig.kernel.serves(), rig.starts()), ([false; 2], 0));
        // Each wakes the device: a frame, buffers for it, and what the driver sends.
        let marked = [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        rig.wire.send_with(marked, &[7; 60]);
        rig.work();
        rig.drivers[0].add(&[], &[(RECEIVED, 4096)]);
        kicks[0].write(1).unwrap();
        rig.work();
        let (header, len) = rig.received().unwrap();
        assert_eq!((header[0], header[10], len), (flags, 1, 60));
        for len in [longest, longest + 1] {
            rig.drivers[0].add(&[], &[(RECEIVED, 4096)]);
            rig.wire.send(&vec![7; len]);
            kicks[0].write(1).unwrap();
            rig.work();
        }
        assert_eq!(rig.received().unwrap().1, longest);
        assert_eq!(rig.received().is_none(), longest < 2000);
        rig.drivers[1].add(&[(SENT, 12 + 60)], &[]);
        kicks[1].write(1).unwrap();
        rig.work();
        assert_eq!(rig.wire.receive().unwrap().1.len(), 60);
        // Not after the queues have stopped.
        stop(&mut rig.device);
        for kick in kicks {
            kick.write(1).unwrap();
        }
        assert!(!backend_readable(&rig.device));
    }
    // The next driver takes them.
    rig.restart(FEATURES);
    assert_eq!((rig.kernel.serves(), rig.starts()), ([true; 2], 1));
    rig.wire.send(&[7; 60]);
    assert!(!backend_readable(&rig.device) && rig.wire.waiting() == 1);
}

#[test]
fn a_driver_that_wants_checksums_no_more_is_served_by_the_device_until_it_starts_again() {
    let mut rig = Rig::new(|device| device);
    let kicks = rig.restart(FEATURES | CTRL_GUEST_OFFLOADS);
    // The first chain of each was the kernel's.
    rig.kernel.with(|told| told.positions = [1, 1]);
    for at in [RECEIVED + 0x1000, RECEIVED] {
        rig.drivers[0].add(&[], &[(at, 4096)]);
    }
    for at in [SENT + 0x1000, SENT] {
        rig.drivers[1].add(&[(at, 12 + 60)], &[]);
    }
    for driver in &mut rig.drivers[..2] {
        let index = GuestAddress(driver.config().used_ring + 2);
        rig.mem.write_obj(1u16, index).unwrap();
        driver.take_used().unwrap();
    }
    rig.set_offloads(0);
    assert_eq!(rig.kernel.serves(), [false; 2]);
    rig.work();
    let marked = [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    rig.wire.send_with(marked, &[7; 60]);
    rig.work();
    assert_eq!(
        rig.received().unwrap(),
        ([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0], 60)
    );
    assert!(rig.wire.receive().is_some() && rig.wire.receive().is_none());
    rig.drivers[1].add(&[(SENT, 12 + 60)], &[]);
    kicks[1].write(1).unwrap();
    rig.work();
    assert!(rig.wire.receive().is_some());

    rig.set_offloads(GUEST_CSUM);
    assert_eq!((rig.kernel.serves(), rig.starts()), ([false; 2], 1));
    rig.restart(FEATURES | CTRL_GUEST_OFFLOADS);
    assert_eq!((rig.kernel.serves(), rig.starts()), ([true; 2], 2));
}

#[test]
fn frames_that_came_before_the_kernel_may_give_less_to_the_driver_are_dropped() {
    let mut rig = Rig::new(|device| device);
    let all = FEATURES | CTRL_GUEST_OFFLOADS | GUEST_TSO4;
    // Returns how many frames wait after `work`, of two more than before.
    let left = |rig: &mut Rig, work: &dyn Fn(&mut Rig)| {
        rig.wire.send(&[7; 60]);
        rig.wire.send(&[7; 2000]);
        work(rig);
        rig.wire.waiting()
    };
    rig.restart(all);
    let switch = |bits| move |rig: &mut Rig| rig.set_offloads(bits);
    assert_eq!(left(&mut rig, &switch(GUEST_CSUM)), 0);
    assert_eq!(rig.kernel.serves(), [true; 2]);
    let begun = rig.kernel.with(|told| told.begun.len());
    assert_eq!(begun, 2, "it had stopped meanwhile");
    assert_eq!(left(&mut rig, &switch(GUEST_CSUM | GUEST_TSO4)), 2);
    // A link that is down stays so.
    rig.device.set_link(LinkState::Down);
    assert_eq!(left(&mut rig, &switch(GUEST_CSUM)), 0);
    assert_eq!(rig.kernel.serves(), [false; 2]);
    rig.device.set_link(LinkState::Up);
    // The next driver may take less than the one before, or the same.
    for (features, count) in [(all, 2), (FEATURES, 0), (FEATURES, 2)] {
        let restart = move |rig: &mut Rig| drop(rig.restart(features));
        assert_eq!(left(&mut rig, &restart), count, "{features:#x}");
    }
    assert_eq!(counter(&rig.device, "rx_dropped"), 2 + 4 + 4);
}
