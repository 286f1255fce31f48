//! A driver that executes any program, however absurd.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arbitrary::{Arbitrary, Unstructured};
use podvisor_devices::GuestRam;
use podvisor_devices::testing::{
    CountingInterrupt, DriverQueue, backend_readable, memory, start, stop,
};
use podvisor_devices::virtio::{Fault, Progress, QueueConfig, VirtioDevice};
use vm_memory::{Bytes, GuestAddress};

/// The size of guest memory.
pub const MEMORY: u64 = 1 << 20;
/// Where buffers usually lie; rings are below.
pub const BUFFERS: u64 = 0x8_0000;
/// The size of that area.
pub const BUFFERS_LEN: u64 = MEMORY - BUFFERS;
/// Descriptors per queue.
pub const QUEUE_SIZE: u16 = 16;

/// The maximum number of steps of a program; the rest is ignored.
const MAX_STEPS: usize = 200;
/// The number of calls after which a device that always has more to do counts as spinning.
pub(crate) const MAX_CALLS: usize = 10_000;

/// An address of a buffer.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Addr {
    /// In the area for buffers, in units of 16 bytes.
    Buffer(u16),
    /// Anywhere near guest memory: in rings, or at its end.
    Memory(u32),
    /// Anywhere.
    Any(u64),
}

impl Addr {
    /// Returns the address as the driver writes it.
    #[must_use]
    pub fn get(self) -> u64 {
        match self {
            Self::Buffer(n) => BUFFERS + u64::from(n) * 16 % BUFFERS_LEN,
            Self::Memory(n) => u64::from(n) % (MEMORY + 0x1000),
            Self::Any(n) => n,
        }
    }
}

/// A length of a buffer.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Len {
    /// Up to 255 bytes.
    Short(u8),
    /// Up to 64 KiB.
    Medium(u16),
    /// Anything.
    Any(u32),
}

impl Len {
    /// Returns the length as the driver writes it.
    #[must_use]
    pub fn get(self) -> u32 {
        match self {
            Self::Short(n) => n.into(),
            Self::Medium(n) => n.into(),
            Self::Any(n) => n,
        }
    }
}

/// The steps that any driver may do with any queue.
#[derive(Arbitrary, Clone, Debug)]
pub enum Step {
    /// Makes a valid chain of these buffers available.
    Chain {
        /// Which queue.
        queue: u8,
        /// The device-readable buffers.
        readable: Vec<(Addr, Len)>,
        /// The device-writable buffers.
        writable: Vec<(Addr, Len)>,
    },
    /// As [`Self::Chain`], with one readable buffer that holds these bytes.
    Message {
        /// Which queue.
        queue: u8,
        /// The device-readable part.
        bytes: Vec<u8>,
        /// The device-writable buffers.
        writable: Vec<(Addr, Len)>,
    },
    /// Fills a descriptor.
    Descriptor {
        /// Which queue.
        queue: u8,
        /// The descriptor's index.
        index: u8,
        /// The address.
        addr: Addr,
        /// The length.
        len: Len,
        /// `NEXT`, `WRITE`, `INDIRECT` and others.
        flags: u8,
        /// Its successor.
        next: u16,
    },
    /// Makes a head available.
    Available {
        /// Which queue.
        queue: u8,
        /// The head.
        head: u16,
    },
    /// Sets the available index.
    AvailableIndex {
        /// Which queue.
        queue: u8,
        /// The index.
        index: u16,
    },
    /// Writes any bytes to any address.
    Write {
        /// The address.
        addr: Addr,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Notifies a queue.
    Notify(u8),
    /// Reads configuration space.
    ReadConfig(u64, u8),
    /// Writes configuration space.
    WriteConfig(u64, Vec<u8>),
    /// Stops the device and starts it again with the same queues.
    Pause,
    /// Resets the device and starts it with new queues.
    Reset,
}

/// Guest memory and the rings in it.
#[derive(Debug)]
pub(crate) struct Rings {
    pub(crate) mem: GuestRam,
    queues: Vec<DriverQueue>,
    message_at: u64,
}

impl Rings {
    pub(crate) fn new(mem: GuestRam, queues: usize) -> Self {
        let mut rings = Self {
            mem,
            queues: Vec::new(),
            message_at: 0,
        };
        rings.make(queues);
        rings
    }

    /// Creates empty rings.
    fn make(&mut self, queues: usize) {
        self.queues = (1..=queues as u64)
            .map(|n| DriverQueue::new(&self.mem, n * 0x1_0000, QUEUE_SIZE))
            .collect();
    }

    pub(crate) fn renew(&mut self) {
        self.make(self.queues.len());
    }

    pub(crate) fn configs(&self) -> Vec<QueueConfig> {
        self.queues.iter().map(DriverQueue::config).collect()
    }

    fn queue(&mut self, index: u8) -> &mut DriverQueue {
        let index = usize::from(index) % self.queues.len();
        &mut self.queues[index]
    }

    fn place(&mut self, bytes: &[u8]) -> (u64, u32) {
        let len = bytes.len().min(4096);
        let addr = BUFFERS + self.message_at;
        self.message_at = (self.message_at + 4096) % (BUFFERS_LEN / 2);
        self.mem
            .write_slice(&bytes[..len], GuestAddress(addr))
            .expect("in memory");
        (addr, u32::try_from(len).expect("short"))
    }

    fn chain(&mut self, queue: u8, readable: &[(u64, u32)], writable: &[(u64, u32)]) {
        let most = usize::from(QUEUE_SIZE);
        let readable = &readable[..readable.len().min(most)];
        let writable = &writable[..writable.len().min(most - readable.len())];
        self.queue(queue).add(readable, writable);
    }

    /// Takes the buffers that the device has returned.
    pub(crate) fn take_used(&mut self) {
        for queue in &mut self.queues {
            // The used index may have been overwritten by the program.
            for used in std::iter::from_fn(|| queue.take_used()).take(usize::from(u16::MAX)) {
                std::hint::black_box(used);
            }
        }
    }

    /// Does a step that affects only memory; returns others.
    pub(crate) fn step(&mut self, step: Step) -> Option<Step> {
        match step {
            Step::Chain {
                queue,
                readable,
                writable,
            } => {
                let (readable, writable) = (buffers(&readable), buffers(&writable));
                self.chain(queue, &readable, &writable);
            }
            Step::Message {
                queue,
                bytes,
                writable,
            } => {
                let message = self.place(&bytes);
                self.chain(queue, &[message], &buffers(&writable));
            }
            Step::Descriptor {
                queue,
                index,
                addr,
                len,
                flags,
                next,
            } => {
                let index = u16::from(index) % QUEUE_SIZE;
                self.queue(queue)
                    .descriptor(index, addr.get(), len.get(), flags.into(), next);
            }
            Step::Available { queue, head } => self.queue(queue).make_available(head),
            Step::AvailableIndex { queue, index } => self.queue(queue).set_avail_idx(index),
            Step::Write { addr, bytes } => {
                // Beyond guest memory there is nothing to write to, or nothing writable.
                let addr = addr.get();
                let room = usize::try_from(MEMORY.saturating_sub(addr)).expect("small");
                let bytes = &bytes[..bytes.len().min(room)];
                let _ = self.mem.write_slice(bytes, GuestAddress(addr));
            }
            other => return Some(other),
        }
        None
    }
}

/// A device with a driver.
#[derive(Debug)]
pub struct Bench<D> {
    /// The device.
    pub device: D,
    rings: Rings,
    irq: Arc<CountingInterrupt>,
}

impl<D: VirtioDevice> Bench<D> {
    /// Starts `device`.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn new(device: D) -> Self {
        let mem = memory(usize::try_from(MEMORY).expect("small"));
        Self::in_memory(device, mem)
    }

    /// Starts `device` in a guest's memory, of which [`MEMORY`] bytes from 0 on are writable.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn in_memory(device: D, mem: GuestRam) -> Self {
        let queues = device.info().queue_sizes.len();
        let mut bench = Self {
            rings: Rings::new(mem, queues),
            device,
            irq: Arc::default(),
        };
        bench.start();
        bench
    }

    fn start(&mut self) {
        self.rings.renew();
        let queues: Vec<_> = self.rings.queues.iter().collect();
        let features = self.device.info().features;
        start(&mut self.device, &queues, &self.irq, features);
    }

    fn stop(&mut self) {
        let stopped = stop(&mut self.device);
        assert_eq!(stopped.len(), self.rings.queues.len());
        assert!(stop(&mut self.device).is_empty());
    }

    /// Parks a device after a fault, as its owner would, and resets it, as its driver would.
    fn park_after_fault(&mut self, result: Result<Progress, Fault>) -> Progress {
        match result {
            Ok(progress) => progress,
            Err(Fault::Guest(_)) => {
                self.stop();
                assert_eq!(self.device.on_queue(0).expect("nothing"), Progress::Idle);
                self.device.reset();
                self.start();
                Progress::Idle
            }
            Err(fault @ Fault::Host(_)) => panic!("the guest made the host fail: {fault:?}"),
        }
    }

    /// Notifies queue `index` and lets the device work until it is idle.
    ///
    /// # Panics
    /// If it never is.
    pub fn notify(&mut self, index: u16) {
        for _ in 0..MAX_CALLS {
            let result = self.device.on_queue(index);
            if self.park_after_fault(result) == Progress::Idle {
                return;
            }
        }
        panic!("queue {index} spins");
    }

    /// Lets the device work on its host side until it is idle.
    ///
    /// # Panics
    /// If it never is.
    pub fn backend(&mut self) {
        for _ in 0..MAX_CALLS {
            if !backend_readable(&self.device) {
                return;
            }
            let result = self.device.on_backend();
            let _ = self.park_after_fault(result);
        }
        panic!("the backend spins");
    }

    /// Stores bytes in the buffer area, and returns their descriptor.
    pub fn place(&mut self, bytes: &[u8]) -> (u64, u32) {
        self.rings.place(bytes)
    }

    /// Makes a chain available.
    pub fn chain(&mut self, queue: u8, readable: &[(u64, u32)], writable: &[(u64, u32)]) {
        self.rings.chain(queue, readable, writable);
    }

    /// Takes the buffers that the device has returned.
    ///
    /// # Panics
    /// If it has returned buffers that it cannot have.
    pub fn take_used(&mut self) {
        self.rings.take_used();
    }

    /// Does one step.
    pub fn step(&mut self, step: Step) {
        if let Some(step) = self.rings.step(step) {
            self.drive(step);
        }
        self.take_used();
    }

    fn drive(&mut self, step: Step) {
        match step {
            Step::Notify(queue) => self.notify(queue.into()),
            Step::ReadConfig(offset, len) => {
                let config = self.device.info().config;
                config.read(offset, &mut vec![0; usize::from(len)]);
            }
            Step::WriteConfig(offset, bytes) => {
                self.device.info().config.driver_write(offset, &bytes);
            }
            Step::Pause => {
                for queue in stop(&mut self.device) {
                    let started = self.device.start_queue(queue);
                    started.expect("a queue that starts again");
                }
            }
            Step::Reset => {
                self.stop();
                self.device.reset();
                self.start();
            }
            // The other steps are already done.
            _ => {}
        }
    }
}

/// Converts buffers to descriptors, as a driver writes them.
#[must_use]
pub fn buffers(buffers: &[(Addr, Len)]) -> Vec<(u64, u32)> {
    buffers
        .iter()
        .map(|(addr, len)| (addr.get(), len.get()))
        .collect()
}

/// Decodes the steps of a program until its bytes run out.
pub fn steps<'a, S: Arbitrary<'a>>(data: &'a [u8]) -> impl Iterator<Item = S> {
    let mut bytes = Unstructured::new(data);
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        S::arbitrary(&mut bytes).ok()
    })
    .take(MAX_STEPS)
}

/// Returns a number that is unique in this process.
#[must_use]
pub fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Runs a program that consists only of [`Step`]s, and finishes the work that is left.
pub fn run(device: impl VirtioDevice, data: &[u8]) {
    let mut bench = Bench::new(device);
    for step in steps(data) {
        bench.step(step);
    }
    finish(bench);
}

/// Lets the device finish its work, and stops it.
pub fn finish<D: VirtioDevice>(mut bench: Bench<D>) -> D {
    for queue in 0..bench.rings.queues.len() {
        bench.notify(u16::try_from(queue).expect("few queues"));
    }
    bench.backend();
    std::hint::black_box(bench.device.info().counters.read());
    bench.stop();
    bench.device
}
