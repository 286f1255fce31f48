//! Virtio over PCI (§4.1): a PCI function with one BAR, and MSI-X.
//!
//! * `layout.rs` defines the layout of the BAR, and the capabilities that describe it to the
//!   driver.
//! * `common.rs` is the common configuration structure, a register map over `TransportCore`.
//! * `interrupt.rs` is the device's interrupt: which vector each queue has.
//!
//! A device is modern only: there is no legacy interface, and no INTx. A driver that cannot use
//! MSI-X gets no interrupts.

mod common;
mod interrupt;
mod layout;

use std::sync::Arc;

use super::core::{SavedTransport, TransportCore, TransportInterrupt, TransportParts};
use crate::pci::{PciConfig, SavedMsix};
use crate::virtio::{QueueState, RestoreError};
use common::{Selectors, can_be_size};
use layout::{Access, BarRegion, Capabilities};

pub use interrupt::PciInterrupt;
pub use layout::{BAR_SIZE, COMMON, DEVICE, ISR, MSIX_TABLE, NOTIFY, NOTIFY_MULTIPLIER, PENDING};

/// The low byte of the PCI status register, and its bit for a pending interrupt.
const STATUS: u64 = 0x06;
const STATUS_INTERRUPT: u8 = 1 << 3;

/// The state of this transport, for a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedPci {
    /// The part that all transports share.
    pub transport: SavedTransport,
    /// Configuration space, with BAR 0 and MSI-X's message control.
    pub config: Vec<u8>,
    /// The MSI-X table.
    pub msix: SavedMsix,
    /// `config_msix_vector`.
    pub config_vector: u16,
    /// `queue_msix_vector` of each queue.
    pub queue_vectors: Vec<u16>,
    /// ISR status.
    pub isr: u8,
    /// `device_feature_select`, `driver_feature_select` and `queue_select`.
    pub selectors: (u32, u32, u16),
}

/// The configuration space and the BAR of one device. Accesses come from vCPU threads, one at a
/// time; none waits for the device's work except for a reset, and then no longer than
/// [`RESET_TIMEOUT`](super::RESET_TIMEOUT).
#[derive(Debug)]
pub struct PciTransport {
    core: TransportCore,
    irq: Arc<PciInterrupt>,
    config: PciConfig,
    at: Capabilities,
    select: Selectors,
}

/// An access to the BAR through configuration space.
#[derive(Clone, Copy, Debug)]
struct BarAccess {
    /// The offset of its data in configuration space.
    data: u64,
    bar_offset: u64,
    len: usize,
}

impl PciTransport {
    /// Creates the configuration space and the BAR of a device. `irq` has as many queues as the
    /// device.
    #[must_use]
    pub fn new(parts: TransportParts, irq: Arc<PciInterrupt>) -> Self {
        let (config, at) = layout::configuration(&parts.info, &irq);
        Self {
            core: TransportCore::new(parts, irq.clone()),
            irq,
            config,
            at,
            select: Selectors::default(),
        }
    }

    /// Sets the address of the BAR, as firmware does. The driver enables it, and may move it.
    pub fn set_bar(&mut self, address: u32) {
        self.config.set_bar0(address);
    }

    /// The address of the BAR, enabled or not.
    #[must_use]
    pub fn bar(&self) -> u64 {
        self.config.bar0_address().into()
    }

    /// The address at which the device responds to accesses of [`BAR_SIZE`] bytes, if the driver
    /// enabled that.
    #[must_use]
    pub fn window(&self) -> Option<u64> {
        self.config.memory_enabled().then(|| self.bar())
    }

    /// The device status field as the driver would read it.
    #[must_use]
    pub fn status(&mut self) -> u8 {
        self.core.status()
    }

    /// Reads configuration space for the driver.
    pub fn read_config(&mut self, offset: u64, data: &mut [u8]) {
        if let Some(access) = self.bar_access(offset, data.len()) {
            let mut bytes = [0; 4];
            if let Some(bytes) = bytes.get_mut(..access.len) {
                self.read_bar(access.bar_offset, bytes);
                self.config.write(access.data, bytes);
            }
        }
        self.config.read(offset, data);
        for (at, byte) in (offset..).zip(data.iter_mut()) {
            if at == STATUS && self.irq.shows_interrupt() {
                *byte |= STATUS_INTERRUPT;
            }
        }
    }

    /// Writes configuration space for the driver. [`Self::window`] may differ afterwards.
    pub fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.config.write(offset, data);
        self.irq.set_control(self.config.u16(self.at.msix_control));
        if let Some(access) = self.bar_access(offset, data.len()) {
            let mut bytes = [0; 4];
            if let Some(bytes) = bytes.get_mut(..access.len) {
                self.config.read(access.data, bytes);
                self.write_bar(access.bar_offset, bytes);
            }
        }
    }

    /// Translates an access to any part of `pci_cfg_data` to the access to the BAR that it stands
    /// for (§4.1.4.9.1): to the range that the driver wrote into that capability before, whatever
    /// the width of this access.
    fn bar_access(&self, offset: u64, len: usize) -> Option<BarAccess> {
        let access = self.at.access?;
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        let is_behind = offset >= access.data.saturating_add(Access::DATA_LEN);
        if is_behind || offset.saturating_add(len) <= access.data {
            return None;
        }
        let mut bar = [0];
        self.config.read(access.bar, &mut bar);
        let length = self.config.u32(access.length);
        let bar_offset = self.config.u32(access.offset);
        let valid = bar == [0] && matches!(length, 1 | 2 | 4) && bar_offset.is_multiple_of(length);
        valid.then_some(BarAccess {
            data: access.data,
            bar_offset: bar_offset.into(),
            len: usize::try_from(length).ok()?,
        })
    }

    /// Reads `data.len()` bytes at `offset` of the BAR for the driver. Offsets without a register,
    /// and accesses of the wrong width, read as zeroes.
    pub fn read_bar(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match layout::room(offset) {
            BarRegion::Common(at) => self.read_common(at, data),
            BarRegion::Isr => {
                if let [byte] = data {
                    *byte = self.irq.take_isr();
                }
            }
            BarRegion::Device(at) => self.core.info().config.read(at, data),
            BarRegion::Notify(_) | BarRegion::Nothing => {}
            BarRegion::Table(at) => self.irq.msix(|msix| msix.read_table(at, data)),
            BarRegion::Pending(at) => self.irq.msix(|msix| msix.read_pending(at, data)),
        }
    }

    /// Writes `data` at `offset` of the BAR for the driver.
    pub fn write_bar(&mut self, offset: u64, data: &[u8]) {
        match layout::room(offset) {
            BarRegion::Common(at) => self.write_common(at, data),
            BarRegion::Device(at) => self.core.info().config.driver_write(at, data),
            // §4.1.5.2: the address determines the queue; the value is redundant.
            BarRegion::Notify(queue) => self.core.notify(queue),
            BarRegion::Table(at) => self.irq.msix(|msix| msix.write_table(at, data)),
            BarRegion::Isr | BarRegion::Pending(_) | BarRegion::Nothing => {
                self.log_guest_error("write where nothing takes it", offset);
            }
        }
    }

    /// Returns the registers of a paused device.
    #[must_use]
    pub fn save(&mut self) -> SavedPci {
        let vectors = self.irq.vectors();
        SavedPci {
            transport: self.core.save(),
            config: self.config.save(),
            msix: self.irq.msix(|msix| msix.save()),
            config_vector: vectors.config,
            queue_vectors: vectors.queues,
            isr: self.irq.isr(),
            selectors: self.select.save(),
        }
    }

    /// Restores registers, which are not trusted, before any driver has touched the device. The
    /// queues in `running` continue from their positions. [`Self::window`] may differ afterwards.
    ///
    /// # Errors
    /// If the state cannot be one of this device. Then nothing in the device's behavior has
    /// changed.
    pub fn restore(
        &mut self,
        saved: &SavedPci,
        running: &[(u16, QueueState)],
    ) -> Result<(), RestoreError> {
        let mut config = self.config.clone();
        config.restore(&saved.config)?;
        self.irq.check(saved)?;
        let sizes = &self.core.info().queue_sizes;
        let mut queues = saved.transport.queues.iter().zip(sizes);
        if !queues.all(|(queue, max)| can_be_size(queue.size, *max)) {
            return Err(RestoreError::Invalid {
                what: "a queue size that no driver can have set",
            });
        }
        self.core.restore(&saved.transport, running)?;
        self.config = config;
        self.select = Selectors::restored(saved.selectors);
        self.irq.restore(saved);
        self.irq.set_control(self.config.u16(self.at.msix_control));
        if saved.transport.needs_reset {
            self.irq.restore_needs_reset();
        }
        Ok(())
    }

    fn log_guest_error(&mut self, what: &'static str, offset: u64) {
        self.core.log_guest_error(what, Some(offset));
    }
}

#[cfg(test)]
mod tests;
