//! A network card whose rings the host's kernel serves, with a driver in this test: it needs no
//! guest, but a host with `vhost_net`.

mod support;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use podvisor_vmm::devices::GuestRam;
use podvisor_vmm::devices::net::{NetDeviceError, VhostError};
use podvisor_vmm::devices::testing::{
    CountingInterrupt, DriverQueue, backend_readable, counter, memory, stop,
};
use podvisor_vmm::devices::virtio::{
    Fault, Progress, Queue, QueueState, Rate, VirtioDevice, features,
};
use podvisor_vmm::{LinkState, NetDevice};
use support::PATIENCE;
use support::tap::{tap, vhost};
use vm_memory::{Bytes, GuestAddress};

const RX: u16 = 0;
const TX: u16 = 1;
/// `VIRTIO_NET_F_GUEST_CSUM` and `VIRTIO_NET_F_MRG_RXBUF`, without the event index.
const FEATURES: u64 = features::VERSION_1 | features::INDIRECT_DESC | 1 << 1 | 1 << 15;
const HEADER: usize = 12;
/// The driver's send and receive buffers: 2 KiB for each descriptor.
const SENT: u64 = 0x10_0000;
const RECEIVED: u64 = 0x20_0000;
const BUFFER: u32 = 2048;

struct Rig {
    mem: GuestRam,
    drivers: [DriverQueue; 2],
    /// The number of buffers given to the device.
    given: u64,
    irq: Arc<CountingInterrupt>,
    device: NetDevice,
    kicks: Vec<vmm_sys_util::eventfd::EventFd>,
}

impl Rig {
    fn new(device: NetDevice) -> Self {
        let mem = memory(8 << 20);
        let mut rig = Self {
            drivers: [0x1_0000, 0x2_0000].map(|base| DriverQueue::new(&mem, base, 64)),
            mem,
            given: 0,
            irq: Arc::default(),
            device,
            kicks: Vec::new(),
        };
        rig.start();
        rig
    }

    /// Starts the queues, as a driver does after a reset.
    fn start(&mut self) {
        self.drivers = [0x1_0000, 0x2_0000].map(|base| DriverQueue::new(&self.mem, base, 64));
        self.given = 0;
        self.device.negotiated(FEATURES);
        let queues = [RX, TX]
            .map(|index| self.drivers[usize::from(index)].device_queue(index, self.irq.clone()));
        self.go_on(queues.into());
        for _ in 0..8 {
            self.give();
        }
    }

    fn go_on(&mut self, queues: Vec<Queue>) {
        self.kicks.clear();
        for queue in queues {
            self.kicks.push(queue.kick().try_clone().unwrap());
            self.device.start_queue(queue).unwrap();
        }
        for index in [RX, TX] {
            self.look_at(index);
        }
    }

    /// Serves a queue as the event loop does, if it watches the queue's notifications.
    fn look_at(&mut self, index: u16) {
        if self.device.watches(index) {
            while self.device.on_queue(index).unwrap() == Progress::More {}
        }
    }

    fn notify(&mut self, index: u16) {
        self.kicks[usize::from(index)].write(1).unwrap();
        self.look_at(index);
    }

    /// Gives the device a buffer.
    fn give(&mut self) {
        let at = RECEIVED + self.given % 64 * u64::from(BUFFER);
        self.given += 1;
        self.drivers[0].add(&[], &[(at, BUFFER)]);
        self.notify(RX);
    }

    /// Asks the host for its address.
    fn ask(&mut self) {
        let mut frame = vec![0; HEADER];
        // A broadcast from the driver; ARP, Ethernet and IPv4, a request.
        frame.extend([0xff; 6]);
        frame.extend([2, 0, 0, 0, 0, 9, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend([2, 0, 0, 0, 0, 9, 10, 9, 0, 2, 0, 0, 0, 0, 0, 0, 10, 9, 0, 1]);
        let len = u32::try_from(frame.len()).unwrap();
        self.mem.write_slice(&frame, GuestAddress(SENT)).unwrap();
        self.drivers[1].add(&[(SENT, len)], &[]);
        self.notify(TX);
    }

    /// Returns whether an answer has arrived; other frames are ignored.
    fn is_answered(&mut self) -> bool {
        while backend_readable(&self.device) {
            assert_eq!(self.device.on_backend().unwrap(), Progress::Idle);
        }
        while let Some(used) = self.drivers[0].take_used() {
            let at = RECEIVED + u64::from(used.id) * u64::from(BUFFER);
            let mut frame = [0; HEADER + 22];
            self.mem.read_slice(&mut frame, GuestAddress(at)).unwrap();
            self.give();
            if frame[HEADER + 12..] == [8, 6, 0, 1, 8, 0, 6, 4, 0, 2] {
                return true;
            }
        }
        false
    }

    fn answered(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while !self.is_answered() {
            assert!(Instant::now() < deadline, "no answer");
        }
    }

    fn interrupts(&self) -> u64 {
        self.irq.queue.load(Ordering::SeqCst)
    }
}

fn card(tap: &File) -> NetDevice {
    NetDevice::vhost(tap.try_clone().unwrap().into(), vhost()).unwrap()
}

/// The receive queue's position depends on what else the host sends.
fn positions(queues: &[Queue], asked: u16) {
    let [receive, transmit] = [0, 1].map(|place: usize| queues[place].state());
    assert_eq!(receive.next_avail, receive.next_used);
    let expected = QueueState {
        next_avail: asked,
        next_used: asked,
    };
    assert_eq!(transmit, expected);
}

#[test]
fn guest_rings_are_served_by_the_kernel_and_given_back_where_they_are() {
    let tap = tap();
    let mut rig = Rig::new(card(&tap));
    assert!(!rig.device.watches(RX) && !rig.device.watches(TX) && rig.device.watches(2));
    for _ in 0..3 {
        rig.ask();
        rig.answered();
    }
    assert!(rig.interrupts() > 0);
    assert_eq!(counter(&rig.device, "rx_frames"), 0);

    let queues = stop(&mut rig.device);
    positions(&queues, 3);
    // Chains that are made available now are not served, and nothing is written.
    let before = rig.interrupts();
    rig.ask();
    std::thread::sleep(Duration::from_millis(50));
    assert!(!rig.is_answered() && rig.drivers[1].take_used().is_some());
    assert_eq!(rig.interrupts(), before);
    // They are not lost.
    rig.go_on(queues);
    rig.answered();
    rig.ask();
    rig.answered();

    // The device itself continues where the kernel was, and vice versa.
    for own in [true, false, true] {
        let queues = stop(&mut rig.device);
        let fd: OwnedFd = tap.try_clone().unwrap().into();
        let next = match own {
            true => NetDevice::tap(fd).unwrap(),
            false => card(&tap),
        };
        rig.device = next;
        rig.device.negotiated(FEATURES);
        rig.go_on(queues);
        for _ in 0..3 {
            rig.ask();
            rig.answered();
        }
    }
    positions(&stop(&mut rig.device), 14);
}

#[test]
fn guest_rings_that_the_kernel_cannot_use_are_a_fault_until_a_reset() {
    let tap = tap();
    let mut rig = Rig::new(card(&tap));
    rig.ask();
    rig.answered();
    let bad: [fn(&mut Rig); 5] = [
        // A head outside of the table.
        |rig| rig.drivers[1].make_available(64),
        // More than the ring holds.
        |rig| rig.drivers[1].set_avail_idx(40_000),
        // An address without memory.
        |rig| {
            rig.drivers[1].add(&[(1 << 40, 100)], &[]);
        },
        // A cycle.
        |rig| {
            for descriptor in 0..64 {
                rig.drivers[1].descriptor(descriptor, SENT, 100, 1, descriptor);
            }
            rig.drivers[1].make_available(7);
        },
        // Received frames have nowhere to go.
        |rig| {
            for descriptor in 0..64 {
                rig.drivers[0].descriptor(descriptor, 1 << 40, BUFFER, 2, 0);
            }
            rig.ask();
        },
    ];
    for (number, bad) in bad.iter().enumerate() {
        bad(&mut rig);
        rig.notify(RX);
        rig.notify(TX);
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < deadline, "no fault of {number}");
            if !backend_readable(&rig.device) {
                continue;
            }
            match rig.device.on_backend() {
                Ok(_) => {}
                Err(Fault::Guest(_)) => break,
                Err(other) => panic!("{number}: {other}"),
            }
        }
        // As after any fault.
        assert_eq!(stop(&mut rig.device).len(), 2);
        assert!(!backend_readable(&rig.device), "{number} is told once");
        rig.device.reset();
        rig.start();
        rig.ask();
        rig.answered();
    }
}

#[test]
fn guest_frames_wait_while_the_link_is_down_and_a_rate_is_kept_by_the_device() {
    let tap = tap();
    let mut rig = Rig::new(card(&tap));
    rig.ask();
    rig.answered();
    rig.device.set_link(LinkState::Down);
    rig.ask();
    std::thread::sleep(Duration::from_millis(50));
    assert!(!rig.is_answered());
    // Queues that are started meanwhile wait, too.
    let queues = stop(&mut rig.device);
    positions(&queues, 1);
    rig.go_on(queues);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!rig.is_answered());
    rig.device.set_link(LinkState::Up);
    rig.answered();
    drop(rig);

    let rate = Rate {
        per_second: 1000,
        burst: 1000,
    };
    let device = card(&tap).limit_receive(None, Some(rate));
    let mut rig = Rig::new(device);
    assert!(rig.device.watches(RX) && rig.device.watches(TX));
    rig.ask();
    rig.answered();
    assert!(counter(&rig.device, "rx_frames") > 0);
}

#[test]
fn guest_cards_have_a_vhost_each_and_of_networks() {
    let tap = tap();
    let own = || -> OwnedFd { tap.try_clone().unwrap().into() };
    let first = vhost();
    let second = first.try_clone().unwrap();
    let _card = NetDevice::vhost(own(), first).unwrap();
    let error = NetDevice::vhost(own(), second).unwrap_err();
    assert!(
        matches!(error, NetDeviceError::Vhost(VhostError::Owner(_))),
        "{error}"
    );
    let error = NetDevice::vhost(own(), own()).unwrap_err();
    assert!(
        matches!(error, NetDeviceError::Vhost(VhostError::NotVhost(_))),
        "{error}"
    );
    let vsock = File::options()
        .read(true)
        .write(true)
        .open("/dev/vhost-vsock");
    let vsock = vsock.expect("the module `vhost_vsock`").into();
    let error = NetDevice::vhost(own(), vsock).unwrap_err();
    assert!(
        matches!(error, NetDeviceError::Vhost(VhostError::Features { .. })),
        "{error}"
    );
}
