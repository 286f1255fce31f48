//! Where the guest's MMIO and port accesses go. Called on vCPU threads.

use std::sync::{Mutex, MutexGuard, PoisonError};

use podvisor_devices::legacy::power::{self, PowerRequest};
use podvisor_devices::legacy::serial::{self, SerialPort};
use podvisor_devices::virtio::transport::{MmioTransport, WINDOW_SIZE};

use crate::layout;

/// The devices that answer to addresses. Windows of virtio-mmio devices follow each other, so
/// that an address is looked up by a division.
#[derive(Debug, Default)]
pub(crate) struct Bus {
    pub(crate) mmio: Vec<Mutex<MmioTransport>>,
    pub(crate) serial: Option<Mutex<SerialPort>>,
}

impl Bus {
    /// Reads that no device answers see all ones, as on a PC.
    pub(crate) fn mmio_read(&self, address: u64, data: &mut [u8]) {
        match self.find(address) {
            Some((device, offset)) => lock(device).read(offset, data),
            None => data.fill(0xff),
        }
    }

    pub(crate) fn mmio_write(&self, address: u64, data: &[u8]) {
        if let Some((device, offset)) = self.find(address) {
            lock(device).write(offset, data);
        }
    }

    pub(crate) fn port_read(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        // `data` can be several one-byte accesses of a string instruction: all alike here.
        for byte in data {
            if port == power::I8042_COMMAND_PORT {
                // An idle controller: Linux waits for that before it pulses the reset line.
                *byte = 0;
            } else if let Some((uart, offset)) = self.serial_register(port) {
                *byte = lock(uart).read(offset);
            }
        }
    }

    /// `Some` when the guest asked for the end of the VM.
    pub(crate) fn port_write(&self, port: u16, data: &[u8]) -> Option<PowerRequest> {
        for byte in data {
            if let Some((uart, offset)) = self.serial_register(port) {
                lock(uart).write(offset, *byte);
            } else if let Some(request) = power::request(port, *byte) {
                return Some(request);
            }
        }
        None
    }

    fn find(&self, address: u64) -> Option<(&Mutex<MmioTransport>, u64)> {
        let relative = address.checked_sub(layout::VIRTIO_MMIO_START)?;
        let index = usize::try_from(relative / WINDOW_SIZE).ok()?;
        Some((self.mmio.get(index)?, relative % WINDOW_SIZE))
    }

    fn serial_register(&self, port: u16) -> Option<(&Mutex<SerialPort>, u8)> {
        let offset = port
            .checked_sub(serial::PORT)
            .filter(|offset| *offset < serial::PORTS)?;
        Some((self.serial.as_ref()?, u8::try_from(offset).ok()?))
    }
}

/// A device whose thread panicked still has consistent registers.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_without_a_device_read_as_ones_and_swallow_writes() {
        let bus = Bus::default();
        let mut data = [0; 8];
        for address in [0, layout::VIRTIO_MMIO_START, u64::MAX] {
            bus.mmio_read(address, &mut data);
            assert_eq!(data, [0xff; 8]);
            bus.mmio_write(address, &data);
        }
        bus.port_read(0x3fd, &mut data[..1]);
        assert_eq!(data[0], 0xff);
        assert_eq!(bus.port_write(0x80, &[1]), None);
    }

    #[test]
    fn the_power_ports_are_there_without_any_device() {
        let bus = Bus::default();
        let mut status = [0xff];
        bus.port_read(0x64, &mut status);
        assert_eq!(status, [0]);
        assert_eq!(bus.port_write(0x64, &[0xfe]), Some(PowerRequest::Reset));
        assert_eq!(bus.port_write(0x600, &[0x34]), Some(PowerRequest::Shutdown));
    }
}
