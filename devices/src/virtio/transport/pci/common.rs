//! The common configuration structure (§4.1.4.3) as registers over the transport core.

use super::PciTransport;
use crate::virtio::QueueConfig;
use crate::virtio::transport::half::{half, set_half};

/// Offsets.
mod reg {
    pub(super) const DEVICE_FEATURE_SELECT: u64 = 0x00;
    pub(super) const DEVICE_FEATURE: u64 = 0x04;
    pub(super) const DRIVER_FEATURE_SELECT: u64 = 0x08;
    pub(super) const DRIVER_FEATURE: u64 = 0x0c;
    pub(super) const CONFIG_MSIX_VECTOR: u64 = 0x10;
    pub(super) const NUM_QUEUES: u64 = 0x12;
    pub(super) const DEVICE_STATUS: u64 = 0x14;
    pub(super) const CONFIG_GENERATION: u64 = 0x15;
    pub(super) const QUEUE_SELECT: u64 = 0x16;
    pub(super) const QUEUE_SIZE: u64 = 0x18;
    pub(super) const QUEUE_MSIX_VECTOR: u64 = 0x1a;
    pub(super) const QUEUE_ENABLE: u64 = 0x1c;
    pub(super) const QUEUE_NOTIFY_OFF: u64 = 0x1e;
    pub(super) const QUEUE_DESC: u64 = 0x20;
    pub(super) const QUEUE_DEVICE_END: u64 = 0x38;
}

/// The driver's selections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Selectors {
    device_features: u32,
    driver_features: u32,
    queue: u16,
}

impl Selectors {
    pub(super) fn save(self) -> (u32, u32, u16) {
        (self.device_features, self.driver_features, self.queue)
    }

    pub(super) fn restored((device_features, driver_features, queue): (u32, u32, u16)) -> Self {
        Self {
            device_features,
            driver_features,
            queue,
        }
    }
}

/// §4.1.3.1: a driver accesses each field with its own width, and 64-bit ones also in halves.
fn width(offset: u64) -> Option<u64> {
    match offset {
        reg::DEVICE_STATUS | reg::CONFIG_GENERATION => Some(1),
        0..=0x0f => offset.is_multiple_of(4).then_some(4),
        reg::CONFIG_MSIX_VECTOR..reg::QUEUE_DESC => offset.is_multiple_of(2).then_some(2),
        reg::QUEUE_DESC..reg::QUEUE_DEVICE_END => offset.is_multiple_of(4).then_some(4),
        _ => None,
    }
}

impl PciTransport {
    pub(super) fn read_common(&mut self, offset: u64, data: &mut [u8]) {
        if let Some(parts) = self.parts(offset, data.len()) {
            for ((at, width), part) in parts.zip(data.chunks_mut(4)) {
                let value = self.read_register(at).to_le_bytes();
                for (to, from) in part.iter_mut().zip(value).take(width) {
                    *to = from;
                }
            }
        }
    }

    pub(super) fn write_common(&mut self, offset: u64, data: &[u8]) {
        if let Some(parts) = self.parts(offset, data.len()) {
            for ((at, _), part) in parts.zip(data.chunks(4)) {
                let mut value = [0; 4];
                for (to, from) in value.iter_mut().zip(part) {
                    *to = *from;
                }
                self.write_register(at, u32::from_le_bytes(value));
            }
        }
    }

    /// Returns the registers that an access of `len` bytes covers, with their widths.
    fn parts(
        &mut self,
        offset: u64,
        len: usize,
    ) -> Option<impl Iterator<Item = (u64, usize)> + use<>> {
        let wide = len == 8
            && offset.is_multiple_of(8)
            && (reg::QUEUE_DESC..reg::QUEUE_DEVICE_END).contains(&offset);
        if !wide && width(offset) != u64::try_from(len).ok() {
            self.log_guest_error("access of the wrong width or alignment", offset);
            return None;
        }
        let second = wide.then(|| (offset.saturating_add(4), 4));
        Some([(offset, len.min(4))].into_iter().chain(second))
    }

    fn read_register(&mut self, offset: u64) -> u32 {
        let core = &self.core;
        let queue = core.queue(self.select.queue.into());
        match offset {
            reg::DEVICE_FEATURE_SELECT => self.select.device_features,
            reg::DEVICE_FEATURE => half(core.offered(), self.select.device_features),
            reg::DRIVER_FEATURE_SELECT => self.select.driver_features,
            reg::DRIVER_FEATURE => half(core.acked(), self.select.driver_features),
            reg::CONFIG_MSIX_VECTOR => self.irq.config_vector().into(),
            reg::NUM_QUEUES => u32::try_from(core.info().queue_sizes.len()).unwrap_or(u32::MAX),
            reg::DEVICE_STATUS => self.core.status().into(),
            // Only its low byte fits.
            reg::CONFIG_GENERATION => core.info().config.generation(),
            reg::QUEUE_SELECT => self.select.queue.into(),
            reg::QUEUE_SIZE => queue.map_or(0, |queue| queue.size),
            reg::QUEUE_MSIX_VECTOR => self.irq.queue_vector(self.select.queue).into(),
            reg::QUEUE_ENABLE => queue.map_or(0, |queue| queue.ready.into()),
            reg::QUEUE_NOTIFY_OFF => queue.map_or(0, |_| self.select.queue.into()),
            _ => queue.map_or(0, |queue| {
                let (address, part) = address(offset);
                half(address.of(queue), part)
            }),
        }
    }

    fn write_register(&mut self, offset: u64, value: u32) {
        // The widths of the registers were checked before.
        let [low, high, ..] = value.to_le_bytes();
        let value16 = u16::from_le_bytes([low, high]);
        match offset {
            reg::DEVICE_FEATURE_SELECT => self.select.device_features = value,
            reg::DRIVER_FEATURE_SELECT => self.select.driver_features = value,
            reg::DRIVER_FEATURE => match self.core.acked_mut() {
                Some(acked) => set_half(acked, self.select.driver_features, value),
                None => self.log_guest_error("features written at the wrong time", offset),
            },
            reg::CONFIG_MSIX_VECTOR => self.irq.set_config_vector(value16),
            reg::DEVICE_STATUS => {
                self.core.write_status(low);
                if low == 0 {
                    self.select = Selectors::default();
                }
            }
            reg::QUEUE_SELECT => self.select.queue = value16,
            reg::QUEUE_MSIX_VECTOR => self.irq.set_queue_vector(self.select.queue, value16),
            _ => self.write_queue_register(offset, value),
        }
    }

    fn write_queue_register(&mut self, offset: u64, value: u32) {
        let max = self.core.queue_max(self.select.queue.into());
        let queue = self.core.queue_mut(self.select.queue.into());
        let Some(queue) = queue.filter(|queue| !queue.ready) else {
            self.log_guest_error("register written at the wrong time, or of no queue", offset);
            return;
        };
        match offset {
            reg::QUEUE_SIZE if can_be_size(value, max) => queue.size = value,
            reg::QUEUE_SIZE => self.log_guest_error("queue size that cannot be", offset),
            // §4.1.4.3.2: a driver writes nothing but 1.
            reg::QUEUE_ENABLE => queue.ready = value == 1,
            reg::QUEUE_DESC..reg::QUEUE_DEVICE_END => {
                let (address, part) = address(offset);
                set_half(address.of_mut(queue), part, value);
            }
            _ => self.log_guest_error("write of a register that is read-only", offset),
        }
    }
}

/// Whether a driver may set this size of a queue (§4.1.4.3.2).
pub(super) fn can_be_size(size: u32, max: u16) -> bool {
    size.is_power_of_two() && size <= u32::from(max)
}

/// The three addresses of a queue.
#[derive(Clone, Copy, Debug)]
enum Address {
    Desc,
    Driver,
    Device,
}

impl Address {
    fn of(self, queue: &QueueConfig) -> u64 {
        match self {
            Self::Desc => queue.desc_table,
            Self::Driver => queue.avail_ring,
            Self::Device => queue.used_ring,
        }
    }

    fn of_mut(self, queue: &mut QueueConfig) -> &mut u64 {
        match self {
            Self::Desc => &mut queue.desc_table,
            Self::Driver => &mut queue.avail_ring,
            Self::Device => &mut queue.used_ring,
        }
    }
}

/// Returns the address at this offset, and which half of it.
fn address(offset: u64) -> (Address, u32) {
    let address = match offset {
        0..0x28 => Address::Desc,
        0x28..0x30 => Address::Driver,
        _ => Address::Device,
    };
    (address, u32::from(!offset.is_multiple_of(8)))
}
