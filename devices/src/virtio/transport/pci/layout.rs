//! The layout of the BAR, and the capabilities that describe it (§4.1.4).

use super::interrupt::PciInterrupt;
use crate::pci::{MSIX_CAPABILITY, PciConfig, PciIds};
use crate::virtio::{DeviceInfo, DeviceType};

/// Bytes of the BAR.
pub const BAR_SIZE: u32 = 0x4000;
/// Common configuration (§4.1.4.3).
pub const COMMON: u64 = 0;
const COMMON_LEN: u32 = 0x38;
/// ISR status (§4.1.4.5).
pub const ISR: u64 = 0x100;
/// Device-specific configuration (§4.1.4.6).
pub const DEVICE: u64 = 0x200;
/// Notifications (§4.1.4.4), in their own pages: an address for each queue.
pub const NOTIFY: u64 = 0x1000;
/// Bytes from one queue's address to the next.
pub const NOTIFY_MULTIPLIER: u32 = 4;
/// The MSI-X table.
pub const MSIX_TABLE: u64 = 0x2000;
/// The pending bits of MSI-X.
pub const PENDING: u64 = 0x3000;

/// The structure that an offset of the BAR belongs to, with the offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BarRegion {
    Common(u64),
    Isr,
    Device(u64),
    /// The queue's index.
    Notify(u32),
    Table(u64),
    Pending(u64),
    Nothing,
}

pub(super) fn room(offset: u64) -> BarRegion {
    let from = |start: u64| offset.saturating_sub(start);
    match offset {
        0..ISR => BarRegion::Common(offset),
        ISR => BarRegion::Isr,
        DEVICE..NOTIFY => BarRegion::Device(from(DEVICE)),
        NOTIFY..MSIX_TABLE => {
            let queue = from(NOTIFY).checked_div(NOTIFY_MULTIPLIER.into());
            BarRegion::Notify(
                queue
                    .and_then(|queue| queue.try_into().ok())
                    .unwrap_or(u32::MAX),
            )
        }
        MSIX_TABLE..PENDING => BarRegion::Table(from(MSIX_TABLE)),
        PENDING.. if offset < u64::from(BAR_SIZE) => BarRegion::Pending(from(PENDING)),
        _ => BarRegion::Nothing,
    }
}

/// The offsets of registers of configuration space that have an effect.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capabilities {
    /// MSI-X's message control.
    pub(super) msix_control: usize,
    pub(super) access: Option<Access>,
}

/// The capability that reaches the BAR through configuration space (§4.1.4.9).
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub(super) bar: u64,
    pub(super) offset: usize,
    pub(super) length: usize,
    /// `pci_cfg_data`.
    pub(super) data: u64,
}

impl Access {
    /// Bytes of `pci_cfg_data`.
    pub(super) const DATA_LEN: u64 = 4;
}

/// Vendor-specific, as all virtio capabilities are.
const VENDOR_CAPABILITY: u8 = 9;
/// `cfg_type` (§4.1.4).
const COMMON_CFG: u8 = 1;
const NOTIFY_CFG: u8 = 2;
const ISR_CFG: u8 = 3;
const DEVICE_CFG: u8 = 4;
const PCI_CFG: u8 = 5;

/// The configuration space of a device.
pub(super) fn configuration(info: &DeviceInfo, irq: &PciInterrupt) -> (PciConfig, Capabilities) {
    let mut config = PciConfig::new(ids(info.device_type)).bar0(BAR_SIZE);
    let at = |offset: u64| u32::try_from(offset).unwrap_or(u32::MAX);
    // They take 0x68 of the 0xc0 bytes that are available for capabilities.
    let (body, writable) = irq.msix(|msix| msix.capability(at(MSIX_TABLE), at(PENDING)));
    let msix = config.add_capability(MSIX_CAPABILITY, &body, &writable);

    let mut add = |kind: u8, offset: u64, length: u32, more: &[u8], writable: &[u8]| {
        let len = u8::try_from(more.len())
            .unwrap_or(u8::MAX)
            .saturating_add(16);
        // cap_len, cfg_type, BAR 0, no ID, padding (§4.1.4).
        let mut body = vec![len, kind, 0, 0, 0, 0];
        body.extend(at(offset).to_le_bytes());
        body.extend(length.to_le_bytes());
        body.extend(more);
        config.add_capability(VENDOR_CAPABILITY, &body, writable)
    };
    let _ = add(COMMON_CFG, COMMON, COMMON_LEN, &[], &[]);
    let notify = at(MSIX_TABLE.saturating_sub(NOTIFY));
    let multiplier = NOTIFY_MULTIPLIER.to_le_bytes();
    let _ = add(NOTIFY_CFG, NOTIFY, notify, &multiplier, &[]);
    let _ = add(ISR_CFG, ISR, 1, &[], &[]);
    if let Ok(length @ 1..) = u32::try_from(info.config.len()) {
        let room = at(NOTIFY.saturating_sub(DEVICE));
        let _ = add(DEVICE_CFG, DEVICE, length.min(room), &[], &[]);
    }
    // The driver writes BAR, offset, length and data; each access to the data becomes one to the
    // BAR.
    let mut writable = [0xff; 18];
    for (byte, mask) in writable.iter_mut().enumerate() {
        if matches!(byte, 0 | 1 | 3..=5) {
            *mask = 0;
        }
    }
    let access = add(PCI_CFG, 0, 0, &[0; 4], &writable);
    let capabilities = Capabilities {
        msix_control: usize::from(msix.unwrap_or_default()).saturating_add(2),
        access: access.map(|start| {
            let at = |offset| usize::from(start).saturating_add(offset);
            Access {
                bar: u64::from(start).saturating_add(4),
                offset: at(8),
                length: at(12),
                data: u64::from(start).saturating_add(16),
            }
        }),
    };
    (config, capabilities)
}

/// The IDs of a device without a transitional interface (§4.1.2.1).
fn ids(device_type: DeviceType) -> PciIds {
    const VENDOR: u16 = 0x1af4;
    let number = u16::try_from(device_type.number()).unwrap_or_default();
    PciIds {
        vendor: VENDOR,
        device: number.saturating_add(0x1040),
        // At least 0x40 (§4.1.2.1).
        subsystem: (VENDOR, number.saturating_add(0x1040)),
        revision: 1,
        class: match device_type {
            DeviceType::Net => [2, 0, 0],
            DeviceType::Block | DeviceType::FileSystem => [1, 0x80, 0],
            DeviceType::Console => [7, 0x80, 0],
            _ => [0xff, 0, 0],
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_the_numbers_of_the_specification_and_a_class_that_fits() {
        for (device, number, class) in [
            (DeviceType::Net, 0x1041, [2, 0, 0]),
            (DeviceType::Block, 0x1042, [1, 0x80, 0]),
            (DeviceType::Console, 0x1043, [7, 0x80, 0]),
            (DeviceType::Entropy, 0x1044, [0xff, 0, 0]),
            (DeviceType::Balloon, 0x1045, [0xff, 0, 0]),
            (DeviceType::Vsock, 0x1053, [0xff, 0, 0]),
            (DeviceType::Mem, 0x1058, [0xff, 0, 0]),
            (DeviceType::FileSystem, 0x105a, [1, 0x80, 0]),
            (DeviceType::Pmem, 0x105b, [0xff, 0, 0]),
            (DeviceType::Other(41), 0x1069, [0xff, 0, 0]),
        ] {
            let expected = PciIds {
                vendor: 0x1af4,
                device: number,
                subsystem: (0x1af4, number),
                revision: 1,
                class,
            };
            assert_eq!(ids(device), expected, "{device:?}");
        }
    }
}
