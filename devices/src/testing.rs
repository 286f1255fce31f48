//! A driver for tests and fuzz targets: lays out rings in memory, makes chains available, and
//! collects what the device gives back.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::missing_panics_doc
)]

use std::fs::File;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::virtio::transport::TransportInterrupt;
use crate::virtio::{
    Command, Interrupt, Queue, QueueConfig, QueueResources, QueueState, VirtioDevice, Worker,
    WorkerLink,
};
use crate::{GuestRam, WriteLog};

/// Descriptor flag: another descriptor follows (§2.7.5).
pub const F_NEXT: u16 = 1;
/// Descriptor flag: device-writable.
pub const F_WRITE: u16 = 2;
/// Descriptor flag: points to a table of descriptors.
pub const F_INDIRECT: u16 = 4;

/// Creates `len` bytes of guest memory at address 0.
#[must_use]
pub fn memory(len: usize) -> GuestRam {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), len)]).unwrap()
}

/// Creates guest memory from address 0, with one region for each of these lengths, adjacent to each
/// other.
#[must_use]
pub fn memory_in_pieces(lens: &[usize]) -> GuestRam {
    let mut at = 0;
    let ranges = lens.iter().map(|len| {
        let start = GuestAddress(at);
        at += *len as u64;
        (start, *len)
    });
    GuestMemoryMmap::from_ranges(&ranges.collect::<Vec<_>>()).unwrap()
}

/// Adds the first `len` bytes of `file`, or of zeroes, to `mem` at `at`, read-only.
#[must_use]
pub fn with_image(mem: &GuestRam, at: u64, len: usize, file: Option<Arc<File>>) -> GuestRam {
    let builder = MmapRegionBuilder::new(len).with_mmap_prot(libc::PROT_READ);
    let builder = match file {
        Some(file) => builder
            .with_mmap_flags(libc::MAP_SHARED)
            .with_file_offset(FileOffset::from_arc(file, 0)),
        None => builder.with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS),
    };
    let region = GuestRegionMmap::new(builder.build().unwrap(), GuestAddress(at)).unwrap();
    mem.insert_region(Arc::new(region)).unwrap()
}

/// An [`Interrupt`] that counts.
#[derive(Debug, Default)]
pub struct CountingInterrupt {
    /// Used Buffer Notifications, of all queues.
    pub queue: AtomicU64,
    /// Configuration Change Notifications.
    pub config: AtomicU64,
    /// Times that the device asked for a reset.
    pub needs_reset: AtomicU32,
}

impl Interrupt for CountingInterrupt {
    fn signal_queue(&self, _queue: u16) {
        self.queue.fetch_add(1, Ordering::SeqCst);
    }
    fn signal_config(&self) {
        self.config.fetch_add(1, Ordering::SeqCst);
    }
    fn signal_needs_reset(&self) {
        self.needs_reset.fetch_add(1, Ordering::SeqCst);
    }
}

impl TransportInterrupt for CountingInterrupt {
    fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::SeqCst) != 0
    }
    fn restore_needs_reset(&self) {
        self.needs_reset.store(1, Ordering::SeqCst);
    }
    fn reset(&self) {
        self.needs_reset.store(0, Ordering::SeqCst);
    }
}

/// One split virtqueue from the driver's side. Its rings take 64 KiB from `base` on.
#[derive(Debug)]
pub struct DriverQueue {
    mem: GuestRam,
    base: u64,
    size: u16,
    next_desc: u16,
    avail_idx: u16,
    used_idx: u16,
}

/// A chain that the device gave back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The chain's head.
    pub id: u32,
    /// Bytes written by the device.
    pub len: u32,
}

impl DriverQueue {
    /// Lays out the rings of `size` descriptors at `base` (64 KiB aligned, not 0).
    #[must_use]
    pub fn new(mem: &GuestRam, base: u64, size: u16) -> Self {
        assert!(size.is_power_of_two() && size <= 1024 && base != 0);
        mem.write_slice(&vec![0; 0x10000], GuestAddress(base))
            .unwrap();
        Self {
            mem: mem.clone(),
            base,
            size,
            next_desc: 0,
            avail_idx: 0,
            used_idx: 0,
        }
    }

    /// Continues both rings, which are empty, at this index.
    pub fn begin_at(&mut self, index: u16) {
        self.set_avail_idx(index);
        self.used_idx = index;
        self.mem
            .write_obj(index.to_le(), GuestAddress(self.base + 0xa002))
            .unwrap();
    }

    /// Returns the same driver's queue in a copy of its memory.
    #[must_use]
    pub fn clone_in(&self, mem: &GuestRam) -> Self {
        Self {
            mem: mem.clone(),
            ..*self
        }
    }

    /// Returns the values that the driver would write into the transport's registers.
    #[must_use]
    pub fn config(&self) -> QueueConfig {
        QueueConfig {
            size: u32::from(self.size),
            ready: true,
            desc_table: self.base,
            avail_ring: self.base + 0x8000,
            used_ring: self.base + 0xa000,
        }
    }

    /// Creates the device's side of this queue.
    #[must_use]
    pub fn device_queue(&self, index: u16, irq: Arc<dyn Interrupt>) -> Queue {
        let resources = queue_resources(&self.mem, irq);
        Queue::new(index, self.size, &self.config(), resources).unwrap()
    }

    /// Writes one descriptor.
    pub fn descriptor(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let at = GuestAddress(self.base + u64::from(index) * 16);
        let mut raw = [0; 16];
        raw[..8].copy_from_slice(&addr.to_le_bytes());
        raw[8..12].copy_from_slice(&len.to_le_bytes());
        raw[12..14].copy_from_slice(&flags.to_le_bytes());
        raw[14..].copy_from_slice(&next.to_le_bytes());
        self.mem.write_slice(&raw, at).unwrap();
    }

    /// Makes each descriptor a chain of `count` empty ones, in an indirect table at `table`.
    pub fn indirect_empties(&self, table: u64, count: u16) {
        for n in 0..count {
            let next = n + 1;
            let flags = if next == count { 0 } else { F_NEXT };
            let raw = u128::from(flags) << 96 | u128::from(next) << 112;
            let at = GuestAddress(table + u64::from(n) * 16);
            self.mem.write_slice(&raw.to_le_bytes(), at).unwrap();
        }
        for head in 0..self.size {
            self.descriptor(head, table, u32::from(count) * 16, F_INDIRECT, 0);
        }
    }

    /// Makes a head available, valid or not.
    pub fn make_available(&mut self, head: u16) {
        let slot = u64::from(self.avail_idx % self.size);
        let avail = self.base + 0x8000;
        self.mem
            .write_obj(head.to_le(), GuestAddress(avail + 4 + 2 * slot))
            .unwrap();
        self.set_avail_idx(self.avail_idx.wrapping_add(1));
    }

    /// Sets the available index, valid or not.
    pub fn set_avail_idx(&mut self, idx: u16) {
        self.avail_idx = idx;
        self.mem
            .write_obj(idx.to_le(), GuestAddress(self.base + 0x8002))
            .unwrap();
    }

    /// Builds and makes available a chain of `(address, length)` buffers; returns its head.
    pub fn add(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> u16 {
        let head = self.next_desc;
        let all: Vec<_> = readable
            .iter()
            .map(|b| (*b, 0))
            .chain(writable.iter().map(|b| (*b, F_WRITE)))
            .collect();
        for (i, ((addr, len), flags)) in all.iter().enumerate() {
            let next = (self.next_desc + 1) % self.size;
            let last = i + 1 == all.len();
            let flags = flags | if last { 0 } else { F_NEXT };
            self.descriptor(self.next_desc, *addr, *len, flags, next);
            self.next_desc = next;
        }
        self.make_available(head);
        head
    }

    /// How many chains were made available for which [`Self::take_used`] has not returned anything.
    #[must_use]
    pub fn outstanding(&self) -> u16 {
        self.avail_idx.wrapping_sub(self.used_idx)
    }

    /// Returns the next chain that the device gave back.
    pub fn take_used(&mut self) -> Option<Used> {
        let used = self.base + 0xa000;
        let idx: u16 = self
            .mem
            .load(GuestAddress(used + 2), Ordering::Acquire)
            .unwrap();
        if u16::from_le(idx) == self.used_idx {
            return None;
        }
        let at = used + 4 + 8 * u64::from(self.used_idx % self.size);
        self.used_idx = self.used_idx.wrapping_add(1);
        let id: u32 = self.mem.read_obj(GuestAddress(at)).unwrap();
        let len: u32 = self.mem.read_obj(GuestAddress(at + 4)).unwrap();
        Some(Used {
            id: u32::from_le(id),
            len: u32::from_le(len),
        })
    }
}

/// Whether an event loop that waits on the device's backend would be woken now.
#[must_use]
pub fn backend_readable(device: &dyn VirtioDevice) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let Some(backend) = device.backend() else {
        return false;
    };
    let none = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::from_borrowed_fd(backend, PollFlags::IN)];
    loop {
        match poll(&mut fds, Some(&none)) {
            // The fuzzer has a timer.
            Err(rustix::io::Errno::INTR) => {}
            ready => return ready.unwrap() == 1,
        }
    }
}

/// Creates the resources of a new queue.
#[must_use]
pub fn queue_resources(mem: &GuestRam, irq: Arc<dyn Interrupt>) -> QueueResources {
    QueueResources {
        mem: mem.clone(),
        irq,
        kick: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()),
        event_idx: false,
        indirect_desc: true,
        state: QueueState::default(),
        writes: WriteLog::default(),
    }
}

/// Negotiates `features` and starts these queues of a device, the first one with index 0.
pub fn start(
    device: &mut dyn VirtioDevice,
    queues: &[&DriverQueue],
    irq: &Arc<CountingInterrupt>,
    features: u64,
) {
    device.negotiated(features);
    for (index, queue) in (0u16..).zip(queues) {
        let queue = queue.device_queue(index, irq.clone());
        device.start_queue(queue).unwrap();
    }
}

/// Stops all queues of a device and returns those that ran.
pub fn stop(device: &mut dyn VirtioDevice) -> Vec<Queue> {
    let count = u16::try_from(device.info().queue_sizes.len()).unwrap();
    (0..count)
        .filter_map(|index| device.stop_queue(index))
        .collect()
}

/// Returns the value of a device's counter.
#[must_use]
pub fn counter(device: &dyn VirtioDevice, name: &str) -> u64 {
    let counters = device.info().counters.read();
    counters.iter().find(|c| c.name == name).unwrap().value
}

/// A worker whose commands are carried out immediately, on the thread that sends them.
#[derive(Clone, Debug)]
pub struct DirectLink(pub Arc<Mutex<Worker>>);

impl DirectLink {
    /// Creates a worker for `device`.
    #[must_use]
    pub fn new(device: Box<dyn VirtioDevice>, irq: Arc<dyn Interrupt>) -> Self {
        let worker = Worker::new("test0".to_owned(), device, irq);
        Self(Arc::new(Mutex::new(worker)))
    }

    /// Runs `work` with the worker.
    pub fn with<R>(&self, work: impl FnOnce(&mut Worker) -> R) -> R {
        work(&mut self.0.lock().unwrap())
    }
}

impl WorkerLink for DirectLink {
    fn send(&self, command: Command) {
        self.with(command);
    }
}
