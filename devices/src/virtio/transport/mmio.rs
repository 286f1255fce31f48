//! Virtio over MMIO (§4.2): a 4 KiB window of registers per device and one interrupt line.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::core::{SavedTransport, TransportCore, TransportInterrupt, TransportParts};
use super::half::{half, set_half};
use crate::virtio::{Interrupt, InterruptLine, QueueState, RestoreError};

/// Bytes of guest physical address space per device.
pub const WINDOW_SIZE: u64 = 0x1000;

/// "virt" (§4.2.2).
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// "PVSR"; any value works, drivers only display it.
const VENDOR: u32 = 0x5253_5650;

/// Offset of the register `QueueNotify` (§4.2.2): a VMM lets KVM handle writes to it (ioeventfd).
pub const QUEUE_NOTIFY: u64 = 0x050;

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
    pub(super) const QUEUE_NOTIFY: u64 = super::QUEUE_NOTIFY;
    pub(super) const INTERRUPT_STATUS: u64 = 0x060;
    pub(super) const INTERRUPT_ACK: u64 = 0x064;
    pub(super) const STATUS: u64 = 0x070;
    pub(super) const QUEUE_DESC_LOW: u64 = 0x080;
    pub(super) const QUEUE_DESC_HIGH: u64 = 0x084;
    pub(super) const QUEUE_DRIVER_LOW: u64 = 0x090;
    pub(super) const QUEUE_DRIVER_HIGH: u64 = 0x094;
    pub(super) const QUEUE_DEVICE_LOW: u64 = 0x0a0;
    pub(super) const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
    pub(super) const SHM_SEL: u64 = 0x0ac;
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
/// It is shared by the threads of the device and of the vCPUs without a lock: the device never
/// waits for a vCPU. A vCPU that reads the register waits for another vCPU's access to the same
/// device, and so possibly for a reset of it, up to [`RESET_TIMEOUT`](super::RESET_TIMEOUT).
#[derive(Debug)]
pub struct MmioInterrupt {
    line: Box<dyn InterruptLine>,
    status: AtomicU32,
    needs_reset: AtomicBool,
}

impl MmioInterrupt {
    /// Creates an interrupt on `line`.
    #[must_use]
    pub fn new(line: impl InterruptLine + 'static) -> Self {
        Self {
            line: Box::new(line),
            status: AtomicU32::new(0),
            needs_reset: AtomicBool::new(false),
        }
    }

    fn raise(&self, bits: u32) {
        self.status.fetch_or(bits, Ordering::SeqCst);
        self.line.raise();
    }

    /// Clears the events that the driver has handled. For the others there is another edge, as if
    /// the line had stayed up (§4.2.3.4): a driver may handle one cause at a time.
    fn acknowledge(&self, bits: u32) {
        let before = self.status.fetch_and(!bits, Ordering::SeqCst);
        if before & !bits != 0 {
            self.line.raise();
        }
    }
}

impl TransportInterrupt for MmioInterrupt {
    fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::SeqCst)
    }

    fn restore_needs_reset(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
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
        self.raise(INTERRUPT_CONFIG);
    }

    fn signal_needs_reset(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
        self.signal_config();
    }
}

/// The state of this transport, for a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedMmio {
    /// The part that all transports share.
    pub transport: SavedTransport,
    /// `InterruptStatus`.
    pub interrupt_status: u32,
    /// `DeviceFeaturesSel`.
    pub device_features_sel: u32,
    /// `DriverFeaturesSel`.
    pub driver_features_sel: u32,
    /// `QueueSel`.
    pub queue_sel: u32,
}

/// The registers of one device. Accesses come from vCPU threads, one at a time; none waits for the
/// device's work except for a reset, and then no longer than
/// [`RESET_TIMEOUT`](super::RESET_TIMEOUT).
#[derive(Debug)]
pub struct MmioTransport {
    core: TransportCore,
    irq: Arc<MmioInterrupt>,
    device_features_sel: u32,
    driver_features_sel: u32,
    queue_sel: u32,
}

impl MmioTransport {
    /// Creates the registers of a device.
    #[must_use]
    pub fn new(parts: TransportParts, irq: Arc<MmioInterrupt>) -> Self {
        Self {
            core: TransportCore::new(parts, irq.clone()),
            irq,
            device_features_sel: 0,
            driver_features_sel: 0,
            queue_sel: 0,
        }
    }

    /// Reads `data.len()` bytes at `offset` of the window for the driver. Registers answer to
    /// aligned 32-bit reads only; anything else reads as zero.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        if let Some(offset) = offset.checked_sub(reg::CONFIG) {
            self.core.info().config.read(offset, data);
            return;
        }
        match <&mut [u8; 4]>::try_from(&mut *data) {
            Ok(word) if offset.is_multiple_of(4) => {
                *word = self.read_register(offset).to_le_bytes();
            }
            _ => data.fill(0),
        }
    }

    /// Writes `data` at `offset` of the window for the driver. Registers take aligned 32-bit writes
    /// only; anything else is ignored.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(offset) = offset.checked_sub(reg::CONFIG) {
            self.core.info().config.driver_write(offset, data);
            return;
        }
        match <[u8; 4]>::try_from(data) {
            Ok(word) if offset.is_multiple_of(4) => {
                self.write_register(offset, u32::from_le_bytes(word));
            }
            _ => self.log_guest_error("access of the wrong width or alignment", offset),
        }
    }

    /// The device status field as the driver would read it.
    #[must_use]
    pub fn status(&mut self) -> u8 {
        self.core.status()
    }

    /// Returns the registers of a paused device.
    #[must_use]
    pub fn save(&mut self) -> SavedMmio {
        SavedMmio {
            transport: self.core.save(),
            interrupt_status: self.irq.status.load(Ordering::SeqCst),
            device_features_sel: self.device_features_sel,
            driver_features_sel: self.driver_features_sel,
            queue_sel: self.queue_sel,
        }
    }

    /// Restores registers, which are not trusted, before any driver has touched the device. The
    /// queues in `running` continue from their positions, and an interrupt that the driver has yet
    /// to acknowledge is raised again: the interrupt controller must have been restored before.
    ///
    /// # Errors
    /// If the state cannot be one of this device. Then nothing has changed.
    pub fn restore(
        &mut self,
        saved: &SavedMmio,
        running: &[(u16, QueueState)],
    ) -> Result<(), RestoreError> {
        let interrupts = INTERRUPT_USED_RING | INTERRUPT_CONFIG;
        if saved.interrupt_status & !interrupts != 0 {
            return Err(RestoreError::Invalid {
                what: "unknown interrupts",
            });
        }
        self.core.restore(&saved.transport, running)?;
        self.irq
            .status
            .store(saved.interrupt_status, Ordering::SeqCst);
        self.device_features_sel = saved.device_features_sel;
        self.driver_features_sel = saved.driver_features_sel;
        self.queue_sel = saved.queue_sel;
        if saved.interrupt_status != 0 {
            // The interrupt may have been in flight when the state was saved. The driver's handler
            // looks at the register, and a spurious interrupt is harmless.
            self.irq.line.raise();
        }
        Ok(())
    }

    fn read_register(&mut self, offset: u64) -> u32 {
        self.core.poll_stop();
        let core = &self.core;
        match offset {
            reg::MAGIC_VALUE => MAGIC,
            reg::VERSION => VERSION,
            reg::DEVICE_ID => core.info().device_type.number(),
            reg::VENDOR_ID => VENDOR,
            reg::DEVICE_FEATURES => half(core.offered(), self.device_features_sel),
            reg::QUEUE_SIZE_MAX => u32::from(core.queue_max(self.queue_sel)),
            reg::QUEUE_READY => core
                .queue(self.queue_sel)
                .map_or(0, |queue| u32::from(queue.ready)),
            reg::INTERRUPT_STATUS => self.irq.status.load(Ordering::SeqCst),
            reg::STATUS => u32::from(self.status()),
            // §4.2.2: a missing shared memory region has length and base -1.
            reg::SHM_LEN_LOW | reg::SHM_LEN_HIGH | reg::SHM_BASE_LOW | reg::SHM_BASE_HIGH => {
                u32::MAX
            }
            reg::CONFIG_GENERATION => core.info().config.generation(),
            _ => {
                self.log_guest_error("read of an unknown register", offset);
                0
            }
        }
    }

    fn write_register(&mut self, offset: u64, value: u32) {
        match offset {
            reg::DEVICE_FEATURES_SEL => self.device_features_sel = value,
            reg::DRIVER_FEATURES_SEL => self.driver_features_sel = value,
            reg::DRIVER_FEATURES => match self.core.acked_mut() {
                Some(acked) => set_half(acked, self.driver_features_sel, value),
                None => self.log_guest_error("features written at the wrong time", offset),
            },
            reg::QUEUE_SEL => self.queue_sel = value,
            reg::QUEUE_NOTIFY => self.core.notify(value),
            reg::INTERRUPT_ACK => self.irq.acknowledge(value),
            reg::STATUS => match u8::try_from(value) {
                Ok(value) => self.write_status(value),
                Err(_) => self.log_guest_error("status of more than 8 bits", offset),
            },
            reg::QUEUE_READY => match self.core.queue_mut(self.queue_sel) {
                Some(queue) => queue.ready = value == 1,
                // §4.2.2.2: the driver reads it back until it is 0.
                None if value == 0 => self.core.stop_queue(self.queue_sel),
                None => self.log_guest_error("queue enabled at the wrong time", offset),
            },
            // No device has shared memory, whichever region is selected.
            reg::SHM_SEL => {}
            _ => self.write_queue_register(offset, value),
        }
    }

    fn write_status(&mut self, value: u8) {
        self.core.write_status(value);
        if value == 0 {
            self.device_features_sel = 0;
            self.driver_features_sel = 0;
            self.queue_sel = 0;
        }
    }

    fn write_queue_register(&mut self, offset: u64, value: u32) {
        let queue = self.core.queue_mut(self.queue_sel);
        let Some(queue) = queue.filter(|queue| !queue.ready) else {
            self.log_guest_error("register unknown, or written at the wrong time", offset);
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
            _ => self.log_guest_error("write of an unknown register", offset),
        }
    }

    fn log_guest_error(&mut self, what: &'static str, offset: u64) {
        self.core.log_guest_error(what, Some(offset));
    }
}

#[cfg(test)]
#[path = "mmio_tests/mod.rs"]
mod tests;
