//! Virtio over MMIO (§4.2): a 4 KiB window of registers per device and one interrupt line.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vmm_sys_util::eventfd::EventFd;

use super::status::{Status, Step};
use crate::GuestRam;
use crate::virtio::{Interrupt, Queue, QueueConfig, RateLimit, Resources, VirtioDevice, features};

/// Bytes of guest physical address space per device.
pub const WINDOW_SIZE: u64 = 0x1000;

/// "virt" (§4.2.2).
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// "PVSR"; any value will do, drivers only show it.
const VENDOR: u32 = 0x5253_5650;

/// Register offsets (§4.2.2, table 4.1).
mod reg {
    pub(super) const MAGIC_VALUE: u64 = 0x000;
    pub(super) const VERSION: u64 = 0x004;
    pub(super) const DEVICE_ID: u64 = 0x008;
    pub(super) const VENDOR_ID: u64 = 0x00c;
    pub(super) const DEVICE_FEATURES: u64 = 0x010;
    pub(super) const DEVICE_FEATURES_SEL: u64 = 0x014;
    pub(super) const DRIVER_FEATURES: u64 = 0x020;
    pub(super) const DRIVER_FEATURES_SEL: u64 = 0x024;
    pub(super) const QUEUE_SEL: u64 = 0x030;
    pub(super) const QUEUE_SIZE_MAX: u64 = 0x034;
    pub(super) const QUEUE_SIZE: u64 = 0x038;
    pub(super) const QUEUE_READY: u64 = 0x044;
    pub(super) const QUEUE_NOTIFY: u64 = 0x050;
    pub(super) const INTERRUPT_STATUS: u64 = 0x060;
    pub(super) const INTERRUPT_ACK: u64 = 0x064;
    pub(super) const STATUS: u64 = 0x070;
    pub(super) const QUEUE_DESC_LOW: u64 = 0x080;
    pub(super) const QUEUE_DESC_HIGH: u64 = 0x084;
    pub(super) const QUEUE_DRIVER_LOW: u64 = 0x090;
    pub(super) const QUEUE_DRIVER_HIGH: u64 = 0x094;
    pub(super) const QUEUE_DEVICE_LOW: u64 = 0x0a0;
    pub(super) const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
    pub(super) const SHM_LEN_LOW: u64 = 0x0b0;
    pub(super) const SHM_LEN_HIGH: u64 = 0x0b4;
    pub(super) const SHM_BASE_LOW: u64 = 0x0b8;
    pub(super) const SHM_BASE_HIGH: u64 = 0x0bc;
    pub(super) const CONFIG_GENERATION: u64 = 0x0fc;
    pub(super) const CONFIG: u64 = 0x100;
}

/// `InterruptStatus` bits (§4.2.2).
const INTERRUPT_USED_RING: u32 = 1;
const INTERRUPT_CONFIG: u32 = 2;

/// The interrupt of one device on this transport: a status register and a line.
///
/// It is shared by the threads of the device and of the vCPUs, without a lock, so that a driver
/// that reads the register never waits for the device.
#[derive(Debug)]
pub struct MmioInterrupt {
    line: EventFd,
    status: AtomicU32,
    generation: AtomicU32,
    needs_reset: AtomicBool,
}

impl MmioInterrupt {
    /// Writes to `line` raise the interrupt (an irqfd, as a rule).
    #[must_use]
    pub fn new(line: EventFd) -> Self {
        Self {
            line,
            status: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            needs_reset: AtomicBool::new(false),
        }
    }

    fn raise(&self, bits: u32) {
        self.status.fetch_or(bits, Ordering::SeqCst);
        // A write to an eventfd fails only when 2^64 - 2 interrupts were never taken.
        let _ = self.line.write(1);
    }

    fn reset(&self) {
        self.status.store(0, Ordering::SeqCst);
        self.needs_reset.store(false, Ordering::SeqCst);
    }
}

impl Interrupt for MmioInterrupt {
    fn signal_queue(&self, _queue: u16) {
        self.raise(INTERRUPT_USED_RING);
    }

    fn signal_config(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.raise(INTERRUPT_CONFIG);
    }

    fn signal_needs_reset(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
        self.signal_config();
    }
}

/// The registers of one device. Accesses come from vCPU threads, one at a time.
#[derive(Debug)]
pub struct MmioTransport {
    device: Arc<Mutex<dyn VirtioDevice>>,
    device_type: u32,
    /// Largest size of each queue.
    max_sizes: Vec<u16>,
    offered: u64,
    mem: GuestRam,
    irq: Arc<MmioInterrupt>,
    /// One per queue: written by a notification, and once when the device starts.
    kicks: Vec<EventFd>,
    status: Status,
    acked: u64,
    device_features_sel: u32,
    driver_features_sel: u32,
    queue_sel: u32,
    queues: Vec<QueueConfig>,
    complaints: RateLimit,
}

impl MmioTransport {
    /// Puts `device` behind registers. `kicks` has one eventfd per queue of the device; the
    /// owner waits on clones of them and calls [`VirtioDevice::on_queue`].
    #[must_use]
    pub fn new(
        device: Arc<Mutex<dyn VirtioDevice>>,
        mem: GuestRam,
        irq: Arc<MmioInterrupt>,
        kicks: Vec<EventFd>,
    ) -> Self {
        let (device_type, max_sizes, offered) = {
            let device = lock(&device);
            let offered = device.features() | features::RING;
            (
                device.device_type() as u32,
                device.queue_sizes().to_vec(),
                offered,
            )
        };
        let mut transport = Self {
            device,
            device_type,
            max_sizes,
            offered,
            mem,
            irq,
            kicks,
            status: Status::default(),
            acked: 0,
            device_features_sel: 0,
            driver_features_sel: 0,
            queue_sel: 0,
            queues: Vec::new(),
            complaints: RateLimit::new(Duration::from_secs(10)),
        };
        transport.reset_registers();
        transport
    }

    /// The driver reads `data.len()` bytes at `offset` of the window. Registers answer to
    /// aligned 32-bit reads only; anything else reads as zero.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        if let Some(offset) = offset.checked_sub(reg::CONFIG) {
            lock(&self.device).read_config(offset, data);
            return;
        }
        match <&mut [u8; 4]>::try_from(&mut *data) {
            Ok(word) if offset.is_multiple_of(4) => {
                *word = self.read_register(offset).to_le_bytes();
            }
            _ => data.fill(0),
        }
    }

    /// The driver writes `data` at `offset` of the window. Registers take aligned 32-bit
    /// writes only; anything else is ignored.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(offset) = offset.checked_sub(reg::CONFIG) {
            lock(&self.device).write_config(offset, data);
            return;
        }
        match <[u8; 4]>::try_from(data) {
            Ok(word) if offset.is_multiple_of(4) => {
                self.write_register(offset, u32::from_le_bytes(word));
            }
            _ => self.complain("access of the wrong width or alignment", offset),
        }
    }

    /// The device status field as the driver would read it.
    #[must_use]
    pub fn status(&self) -> u8 {
        let needs_reset = self.irq.needs_reset.load(Ordering::SeqCst);
        self.status.bits()
            | if needs_reset {
                Status::DEVICE_NEEDS_RESET
            } else {
                0
            }
    }

    /// The device behind the registers.
    #[must_use]
    pub fn device(&self) -> &Arc<Mutex<dyn VirtioDevice>> {
        &self.device
    }

    fn read_register(&mut self, offset: u64) -> u32 {
        match offset {
            reg::MAGIC_VALUE => MAGIC,
            reg::VERSION => VERSION,
            reg::DEVICE_ID => self.device_type,
            reg::VENDOR_ID => VENDOR,
            reg::DEVICE_FEATURES => half(self.offered, self.device_features_sel),
            reg::QUEUE_SIZE_MAX => usize::try_from(self.queue_sel)
                .ok()
                .and_then(|i| self.max_sizes.get(i))
                .map_or(0, |max| u32::from(*max)),
            reg::QUEUE_READY => self.selected().map_or(0, |queue| u32::from(queue.ready)),
            reg::INTERRUPT_STATUS => self.irq.status.load(Ordering::SeqCst),
            reg::STATUS => u32::from(self.status()),
            // §4.2.2: no shared memory region has length and base -1.
            reg::SHM_LEN_LOW | reg::SHM_LEN_HIGH | reg::SHM_BASE_LOW | reg::SHM_BASE_HIGH => {
                u32::MAX
            }
            reg::CONFIG_GENERATION => self.irq.generation.load(Ordering::SeqCst),
            _ => {
                self.complain("read of a register that is none", offset);
                0
            }
        }
    }

    fn write_register(&mut self, offset: u64, value: u32) {
        match offset {
            reg::DEVICE_FEATURES_SEL => self.device_features_sel = value,
            reg::DRIVER_FEATURES_SEL => self.driver_features_sel = value,
            reg::DRIVER_FEATURES if self.status.negotiating() => {
                set_half(&mut self.acked, self.driver_features_sel, value);
            }
            reg::QUEUE_SEL => self.queue_sel = value,
            reg::QUEUE_NOTIFY => self.notify(value),
            reg::INTERRUPT_ACK => {
                self.irq.status.fetch_and(!value, Ordering::SeqCst);
            }
            reg::STATUS => match u8::try_from(value) {
                Ok(value) => self.write_status(value),
                Err(_) => self.complain("status of more than 8 bits", offset),
            },
            reg::QUEUE_READY => match self.selected_if_configuring() {
                Some(queue) => queue.ready = value == 1,
                None => self.complain("queue enabled at the wrong time", offset),
            },
            _ => self.write_queue_register(offset, value),
        }
    }

    fn write_queue_register(&mut self, offset: u64, value: u32) {
        let Some(queue) = self.selected_if_configuring().filter(|queue| !queue.ready) else {
            self.complain("register written at the wrong time, or none", offset);
            return;
        };
        match offset {
            reg::QUEUE_SIZE => queue.size = value,
            reg::QUEUE_DESC_LOW => set_half(&mut queue.desc_table, 0, value),
            reg::QUEUE_DESC_HIGH => set_half(&mut queue.desc_table, 1, value),
            reg::QUEUE_DRIVER_LOW => set_half(&mut queue.avail_ring, 0, value),
            reg::QUEUE_DRIVER_HIGH => set_half(&mut queue.avail_ring, 1, value),
            reg::QUEUE_DEVICE_LOW => set_half(&mut queue.used_ring, 0, value),
            reg::QUEUE_DEVICE_HIGH => set_half(&mut queue.used_ring, 1, value),
            _ => self.complain("write of a register that is none", offset),
        }
    }

    fn write_status(&mut self, value: u8) {
        match self.status.step(value) {
            Step::Reset => {
                {
                    let mut device = lock(&self.device);
                    device.stop();
                    device.reset();
                }
                self.reset_registers();
            }
            Step::Fail => {
                lock(&self.device).stop();
                self.status = self.status.with_failed();
            }
            Step::Stay => {}
            Step::Advance(next) => self.status = next,
            // §3.1.1: FEATURES_OK stays clear when the device cannot work with the features.
            Step::Features(next)
                if self.acked & !self.offered == 0 && self.acked & features::VERSION_1 != 0 =>
            {
                self.status = next;
            }
            Step::Features(_) => self.complain("features that were not offered", reg::STATUS),
            Step::Start(next) => {
                self.status = next;
                self.start();
            }
            Step::Illegal => self.complain("status bits out of order", reg::STATUS),
        }
    }

    fn start(&mut self) {
        let event_idx = self.acked & features::EVENT_IDX != 0;
        let mut queues = Vec::with_capacity(self.queues.len());
        for (index, (config, max)) in self.queues.iter().zip(&self.max_sizes).enumerate() {
            if !config.ready {
                queues.push(None);
                continue;
            }
            // A device has fewer queues than u16 can count: its indices come from a Vec of u16s.
            let index = u16::try_from(index).unwrap_or(u16::MAX);
            let irq: Arc<dyn Interrupt> = self.irq.clone();
            match Queue::new(index, *max, config, event_idx, self.mem.clone(), irq) {
                Ok(queue) => queues.push(Some(queue)),
                Err(error) => {
                    tracing::warn!(
                        device = self.device_type,
                        queue = index,
                        error = &error as &dyn std::error::Error,
                        "queue refused: the device needs a reset"
                    );
                    self.irq.signal_needs_reset();
                    return;
                }
            }
        }
        let irq: Arc<dyn Interrupt> = self.irq.clone();
        let resources = Resources {
            mem: self.mem.clone(),
            queues,
            irq,
            features: self.acked,
        };
        if let Err(error) = lock(&self.device).start(resources) {
            tracing::warn!(
                device = self.device_type,
                error = &error as &dyn std::error::Error,
                "start refused: the device needs a reset"
            );
            self.irq.signal_needs_reset();
            return;
        }
        // Chains may have been made available before DRIVER_OK: look at every queue once.
        for kick in &self.kicks {
            let _ = kick.write(1);
        }
    }

    /// A notification that no ioeventfd took. (KVM takes them all, as a rule.)
    fn notify(&mut self, queue: u32) {
        if !self.status.live() {
            self.complain("notification before DRIVER_OK", reg::QUEUE_NOTIFY);
            return;
        }
        match usize::try_from(queue)
            .ok()
            .and_then(|queue| self.kicks.get(queue))
        {
            Some(kick) => {
                let _ = kick.write(1);
            }
            None => self.complain("notification of a queue that is none", reg::QUEUE_NOTIFY),
        }
    }

    fn reset_registers(&mut self) {
        self.status = Status::default();
        self.acked = 0;
        self.device_features_sel = 0;
        self.driver_features_sel = 0;
        self.queue_sel = 0;
        self.queues = self
            .max_sizes
            .iter()
            .map(|max| QueueConfig {
                size: u32::from(*max),
                ..QueueConfig::default()
            })
            .collect();
        self.irq.reset();
    }

    fn selected(&self) -> Option<&QueueConfig> {
        self.queues.get(usize::try_from(self.queue_sel).ok()?)
    }

    fn selected_if_configuring(&mut self) -> Option<&mut QueueConfig> {
        if !self.status.configuring_queues() || self.status.failed() {
            return None;
        }
        self.queues.get_mut(usize::try_from(self.queue_sel).ok()?)
    }

    fn complain(&mut self, what: &'static str, offset: u64) {
        if let Some(suppressed) = self.complaints.permit() {
            tracing::warn!(
                device = self.device_type,
                offset,
                suppressed,
                "driver: {what}"
            );
        }
    }
}

/// A device that panicked left nothing half done that a reset would not mend.
fn lock(device: &Mutex<dyn VirtioDevice>) -> MutexGuard<'_, dyn VirtioDevice + 'static> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The low (0) or high (1) half; other selectors select nothing (§4.2.2).
fn half(value: u64, select: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => 0,
    }
}

fn set_half(value: &mut u64, select: u32, half: u32) {
    match select {
        0 => *value = (*value & 0xffff_ffff_0000_0000) | u64::from(half),
        1 => *value = (*value & 0xffff_ffff) | (u64::from(half) << 32),
        _ => {}
    }
}

#[cfg(test)]
#[path = "mmio_tests.rs"]
mod tests;
