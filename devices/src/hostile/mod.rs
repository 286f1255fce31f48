//! Drivers that violate the specification, tested on each queue of each device, through both
//! transports. docs/devices.md maps each fault to its test here or next to the device.
//!
//! * `subjects.rs` has the devices, and a valid chain for each of their queues.
//! * `driver.rs` is the driver's side of either transport.
//! * `rings.rs` breaks descriptors and rings, `registers.rs` the values in the transport's
//!   registers; `kept.rs` has chains that a device keeps, `memory.rs` chains of gigabytes.

mod driver;
mod kept;
mod memory;
mod registers;
mod rings;
mod subjects;

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::GuestRam;
use crate::testing::{DirectLink, DriverQueue, memory};
use crate::virtio::{Progress, QueueConfig};
use driver::{Driver, On, reg};
use subjects::{Sound, Subject, subjects};

const MEMORY: u64 = 16 << 20;
const DATA: u64 = 0x10_0000;
const ROOM: u64 = 0x20_0000;
const QUEUE: u16 = 16;

const NEEDS_RESET: u32 = 64;
const DRIVER_OK: u32 = 15;

/// A device with its transport and its driver.
struct Rig {
    subject: Subject,
    mem: GuestRam,
    driver: Driver,
    worker: DirectLink,
    kicks: Vec<Arc<EventFd>>,
    drivers: Vec<DriverQueue>,
}

impl Rig {
    fn new(mut subject: Subject) -> Self {
        let mem = memory(usize::try_from(MEMORY).unwrap());
        let device = subject.device.take().unwrap();
        let eventfd = || EventFd::new(EFD_NONBLOCK).unwrap();
        let info = device.info();
        let kicks: Vec<_> = info.queue_sizes.iter().map(|_| eventfd().into()).collect();
        let (driver, worker) = Driver::new(subject.on, device, &mem, &kicks);
        Self {
            subject,
            mem,
            driver,
            worker,
            kicks,
            drivers: Vec::new(),
        }
    }

    /// A driver that has done everything right so far.
    fn started(subject: Subject) -> Self {
        let mut rig = Self::new(subject);
        rig.restart();
        rig
    }

    fn write(&mut self, register: u64, value: u32) {
        self.driver.set(register, value);
    }

    fn read(&mut self, register: u64) -> u32 {
        self.driver.get(register)
    }

    fn status(&mut self) -> u32 {
        self.read(reg::STATUS)
    }

    /// Goes from a reset to `FEATURES_OK`, accepting all offered features.
    fn negotiate(&mut self) {
        self.write(reg::STATUS, 0);
        assert_eq!(self.status(), 0, "{}", self.subject.name);
        self.write(reg::STATUS, 1);
        self.write(reg::STATUS, 3);
        for half in [0, 1] {
            self.write(reg::FEATURES_SEL, half);
            let offered = self.read(reg::FEATURES);
            self.write(reg::DRIVER_FEATURES_SEL, half);
            // Without event indices, so that every notification is taken.
            let refused = if half == 0 { 1 << 29 } else { 0 };
            self.write(reg::DRIVER_FEATURES, offered & !refused);
        }
        self.write(reg::STATUS, 11);
        assert_eq!(self.status(), 11, "{}", self.subject.name);
    }

    fn set_queue(&mut self, index: u32, config: &QueueConfig) {
        self.write(reg::QUEUE_SEL, index);
        self.write(reg::QUEUE_SIZE, config.size);
        for (register, address) in [
            (reg::DESC, config.desc_table),
            (reg::DRIVER, config.avail_ring),
            (reg::DEVICE, config.used_ring),
        ] {
            self.write(register, u32::try_from(address & 0xffff_ffff).unwrap());
            self.write(register + 4, u32::try_from(address >> 32).unwrap());
        }
        self.write(reg::QUEUE_READY, 1);
    }

    /// Lays out new rings, without anything available.
    fn lay_rings(&mut self) {
        let count = u64::try_from(self.kicks.len()).unwrap();
        self.drivers = (1..=count)
            .map(|n| DriverQueue::new(&self.mem, n << 16, QUEUE))
            .collect();
    }

    /// Resets the device and starts it with empty rings.
    fn restart(&mut self) {
        self.negotiate();
        self.lay_rings();
        for index in 0..self.drivers.len() {
            let config = self.drivers[index].config();
            self.set_queue(u32::try_from(index).unwrap(), &config);
        }
        self.write(reg::STATUS, DRIVER_OK);
        assert_eq!(self.status(), DRIVER_OK, "{}", self.subject.name);
    }

    /// Notifies a queue, and lets the device work until nothing is left to do.
    fn notify(&mut self, queue: u16) {
        self.write(reg::QUEUE_NOTIFY, queue.into());
        let Some(kick) = self.kicks.get(usize::from(queue)) else {
            return;
        };
        if kick.read().is_ok() {
            self.work(|worker| worker.on_queue(queue).unwrap());
        }
    }

    fn work(&mut self, mut turn: impl FnMut(&mut crate::virtio::Worker) -> Progress) {
        for _ in 0..1000 {
            if self.worker.with(&mut turn) == Progress::Idle {
                return;
            }
        }
        panic!("{} spins", self.subject.name);
    }

    /// Makes the device look at a queue, as it would during normal work.
    fn poke(&mut self, queue: u16) {
        self.notify(queue);
        if let Some(arrive) = self.subject.arrivals.get(&queue).copied() {
            arrive(self);
            self.work(|worker| worker.on_backend().unwrap());
        }
    }

    /// The queues that [`Self::poke`] has a valid chain for.
    fn queues(&self) -> Vec<u16> {
        self.subject.sound.keys().copied().collect()
    }

    /// Makes a valid chain available.
    fn add_sound(&mut self, queue: u16) {
        let Sound { readable, room } = self.subject.sound[&queue].clone();
        self.mem.write_slice(&readable, GuestAddress(DATA)).unwrap();
        let len = u32::try_from(readable.len()).unwrap();
        let readable: &[_] = if len == 0 { &[] } else { &[(DATA, len)] };
        let writable: &[_] = if room == 0 { &[] } else { &[(ROOM, room)] };
        self.drivers[usize::from(queue)].add(readable, writable);
    }

    /// Checks that every queue takes a valid chain and returns it.
    fn works(&mut self) {
        for queue in self.queues() {
            let stands = self.subject.standing == Some(queue);
            if !stands || self.drivers[usize::from(queue)].outstanding() == 0 {
                self.add_sound(queue);
            }
            self.poke(queue);
            let used = self.drivers[usize::from(queue)].take_used();
            assert!(used.is_some(), "{} {queue}", self.subject.name);
            if stands {
                self.add_sound(queue);
                self.notify(queue);
            }
        }
        assert_eq!(self.status(), DRIVER_OK, "{}", self.subject.name);
    }
}

/// Checks that `attack` on a queue is a fault of each device, from which it recovers after a reset.
fn parks(attack: impl Fn(&mut Rig, u16)) {
    for_each_queue(|rig, queue| {
        attack(rig, queue);
        rig.poke(queue);
        let name = rig.subject.name;
        assert_eq!(rig.status(), DRIVER_OK | NEEDS_RESET, "{name} {queue}");
        // The device does nothing until the driver resets it.
        rig.poke(queue);
        assert_eq!(rig.status(), DRIVER_OK | NEEDS_RESET, "{name} {queue}");
        rig.restart();
        rig.works();
    });
}

/// Checks that each device still works after `attack`.
fn survives(attack: impl Fn(&mut Rig)) {
    for subject in subjects() {
        let mut rig = Rig::started(subject);
        attack(&mut rig);
        rig.works();
    }
}

fn for_each_queue(test: impl Fn(&mut Rig, u16)) {
    for n in 0..subjects().len() {
        let subject = || subjects().swap_remove(n);
        for queue in Rig::new(subject()).queues() {
            test(&mut Rig::started(subject()), queue);
        }
    }
}
