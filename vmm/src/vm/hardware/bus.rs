//! Dispatches the guest's MMIO and port accesses. Called on vCPU threads.
//!
//! Both address spaces are maps of ranges, which may change while vCPUs run.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use podvisor_devices::legacy::power::{self, PowerRequest};
use podvisor_devices::legacy::serial::{self, SerialPort};
use podvisor_devices::virtio::transport::MmioTransport;

/// A device that answers at a range of addresses. Offsets count from the range's start.
pub(crate) trait BusDevice: Debug + Send + Sync {
    /// The guest reads `data.len()` bytes.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// The guest writes `data`. `Some` if that requests the end of the VM.
    fn write(&self, offset: u64, data: &[u8]) -> Option<PowerRequest>;

    /// Whether an access to several ports that starts here and extends beyond the device is split
    /// into one access per port, instead of going to this device as a whole.
    fn has_byte_registers(&self) -> bool {
        false
    }
}

/// The range overlaps one that is in use, or has no end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the address range {start:#x}-{last:#x} is already in use")]
pub(crate) struct RangeTaken {
    start: u64,
    last: u64,
}

#[derive(Debug)]
struct Entry {
    start: u64,
    last: u64,
    device: Arc<dyn BusDevice>,
}

/// One address space.
#[derive(Debug, Default)]
pub(crate) struct AddressMap {
    /// Sorted, without overlaps.
    entries: RwLock<Vec<Entry>>,
}

impl AddressMap {
    /// Adds `device` at the `len` addresses from `start` on.
    pub(crate) fn insert(
        &self,
        start: u64,
        len: u64,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), RangeTaken> {
        let last = len.checked_sub(1).and_then(|rest| start.checked_add(rest));
        let Some(last) = last else {
            return Err(RangeTaken { start, last: start });
        };
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let at = entries.partition_point(|entry| entry.last < start);
        if entries.get(at).is_some_and(|entry| entry.start <= last) {
            return Err(RangeTaken { start, last });
        }
        entries.insert(
            at,
            Entry {
                start,
                last,
                device,
            },
        );
        Ok(())
    }

    /// Removes the device at `start`. Accesses that have started may still finish.
    pub(crate) fn remove(&self, start: u64) -> Option<Arc<dyn BusDevice>> {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let at = entries.binary_search_by_key(&start, |entry| entry.start);
        Some(entries.remove(at.ok()?).device)
    }

    /// Finds the device at `address`, for use outside of the map's lock.
    fn find(&self, address: u64) -> Option<(Arc<dyn BusDevice>, u64)> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let (entry, offset) = at(&entries, address)?;
        Some((entry.device.clone(), offset))
    }

    fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address) {
            Some((device, offset)) => device.read(offset, data),
            // As on a PC.
            None => data.fill(0xff),
        }
    }

    fn write(&self, address: u64, data: &[u8]) -> Option<PowerRequest> {
        let (device, offset) = self.find(address)?;
        device.write(offset, data)
    }

    /// As [`Self::find`], but only a device that answers at all of `len` ports.
    fn find_for_all(&self, port: u64, len: usize) -> Option<(Arc<dyn BusDevice>, u64)> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let (entry, offset) = at(&entries, port)?;
        let last = port.checked_add(len as u64)?.checked_sub(1)?;
        let is_its_own = last <= entry.last || !entry.device.has_byte_registers();
        is_its_own.then(|| (entry.device.clone(), offset))
    }

    /// Reads ports: by one access if one device has all of them, otherwise one by one.
    fn read_ports(&self, port: u64, data: &mut [u8]) {
        if data.len() <= 1 {
            return self.read(port, data);
        }
        match self.find_for_all(port, data.len()) {
            Some((device, offset)) => device.read(offset, data),
            None => {
                for (port, byte) in (port..).zip(data.chunks_mut(1)) {
                    self.read(port, byte);
                }
            }
        }
    }

    /// As [`Self::read_ports`].
    fn write_ports(&self, port: u64, data: &[u8]) -> Option<PowerRequest> {
        if data.len() <= 1 {
            return self.write(port, data);
        }
        match self.find_for_all(port, data.len()) {
            Some((device, offset)) => device.write(offset, data),
            None => (port..)
                .zip(data.chunks(1))
                .find_map(|(port, byte)| self.write(port, byte)),
        }
    }
}

/// Returns the entry that contains `address`, and the offset in it.
fn at(entries: &[Entry], address: u64) -> Option<(&Entry, u64)> {
    let at = entries.partition_point(|entry| entry.last < address);
    let entry = entries.get(at)?;
    let offset = address.checked_sub(entry.start)?;
    Some((entry, offset))
}

/// The address spaces of a VM.
#[derive(Debug, Default)]
pub(crate) struct Bus {
    pub(crate) mmio: Arc<AddressMap>,
    pub(crate) ports: AddressMap,
}

impl Bus {
    /// Creates a bus with the ports that exist without any device.
    pub(crate) fn new() -> Self {
        let bus = Self::default();
        for port in power::PORTS {
            // The map contains nothing but these.
            let _ = bus
                .ports
                .insert(u64::from(port), 1, Arc::new(PowerPort(port)));
        }
        bus
    }

    /// Reads that no device answers return all ones.
    pub(crate) fn mmio_read(&self, address: u64, data: &mut [u8]) {
        self.mmio.read(address, data);
    }

    pub(crate) fn mmio_write(&self, address: u64, data: &[u8]) {
        self.mmio.write(address, data);
    }

    /// Reads `width` bytes at a port, as many times as `data` has room for: a string instruction
    /// accesses one port many times.
    pub(crate) fn port_read(&self, port: u16, width: usize, data: &mut [u8]) {
        for access in data.chunks_mut(width.max(1)) {
            self.ports.read_ports(u64::from(port), access);
        }
    }

    /// Writes `data` to a port, `width` bytes at a time. `Some` if the guest requested the end of
    /// the VM; the rest is not written then.
    pub(crate) fn port_write(&self, port: u16, width: usize, data: &[u8]) -> Option<PowerRequest> {
        data.chunks(width.max(1))
            .find_map(|access| self.ports.write_ports(u64::from(port), access))
    }
}

/// One of [`power::PORTS`].
#[derive(Debug)]
struct PowerPort(u16);

impl BusDevice for PowerPort {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(power::read(self.0));
    }

    fn write(&self, _offset: u64, data: &[u8]) -> Option<PowerRequest> {
        power::request(self.0, *data.first()?)
    }

    fn has_byte_registers(&self) -> bool {
        true
    }
}

/// Registers are bytes: a wider access is one to each of the registers that follow.
impl BusDevice for Mutex<SerialPort> {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        for (register, byte) in serial_registers(offset).zip(data) {
            *byte = access(self, |port| port.read(register));
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<PowerRequest> {
        for (register, byte) in serial_registers(offset).zip(data) {
            access(self, |port| port.write(register, *byte));
        }
        None
    }

    fn has_byte_registers(&self) -> bool {
        true
    }
}

/// Does `work`, then calls the drained callback, outside of the port's lock, since the callback may
/// put more input into the port.
fn access<T>(port: &Mutex<SerialPort>, work: impl FnOnce(&mut SerialPort) -> T) -> T {
    let mut locked = lock(port);
    let result = work(&mut locked);
    let drained = locked.take_drained();
    drop(locked);
    if let Some(tell) = drained {
        tell();
    }
    result
}

/// Returns the serial port's registers from `offset` on.
fn serial_registers(offset: u64) -> impl Iterator<Item = u8> {
    (0u8..)
        .take(usize::from(serial::PORTS))
        .skip(usize::try_from(offset).unwrap_or(usize::MAX))
}

impl BusDevice for Mutex<MmioTransport> {
    fn read(&self, offset: u64, data: &mut [u8]) {
        lock(self).read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<PowerRequest> {
        lock(self).write(offset, data);
        None
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
        for address in [0, crate::layout::VIRTIO_MMIO_START, u64::MAX] {
            bus.mmio_read(address, &mut data);
            assert_eq!(data, [0xff; 8]);
            bus.mmio_write(address, &data);
        }
        bus.port_read(0x3fd, 1, &mut data[..1]);
        assert_eq!(data[0], 0xff);
        assert_eq!(bus.port_write(0x80, 1, &[1]), None);
    }

    #[test]
    fn the_power_ports_are_there_without_any_device() {
        let bus = Bus::new();
        let status = |port, width| {
            let mut status = [0xee; 4];
            bus.port_read(port, width, &mut status);
            status
        };
        for (port, value) in [(0x61, 0x20), (0x64, 0xfd), (0x70, 0), (0x71, 0)] {
            assert_eq!(status(port, 1), [value; 4], "as often as it is asked for");
        }
        assert_eq!(
            status(0x61, 4),
            [0x20, 0xff, 0xff, 0xfd],
            "two of the ports"
        );
        assert_eq!(status(0x64, 4), [0xfd, 0xff, 0xff, 0xff]);
        assert_eq!(status(0x63, 2), [0xff, 0xfd, 0xff, 0xfd]);
        assert_eq!(status(0x600, 1), [0xff; 4]);
        let write = |port, width, data: &[u8]| bus.port_write(port, width, data);
        assert_eq!(write(0x64, 1, &[0xfe]), Some(PowerRequest::Reset));
        assert_eq!(write(0x600, 1, &[0x34]), Some(PowerRequest::Shutdown));
        assert_eq!(write(0x64, 1, &[1, 0xfe]), Some(PowerRequest::Reset));
        assert_eq!(write(0x64, 2, &[1, 0xfe]), None, "another port's");
        assert_eq!(write(0x64, 2, &[0xfe, 1]), Some(PowerRequest::Reset));
        assert_eq!(write(0x63, 2, &[0, 0xfe]), Some(PowerRequest::Reset));
        assert_eq!(write(0x61, 4, &[0, 0, 0, 0xfe]), Some(PowerRequest::Reset));
        assert_eq!(write(0x5ff, 2, &[0, 0x34]), Some(PowerRequest::Shutdown));
        assert_eq!(write(0x63, 2, &[0xfe, 0]), None);
        for (port, data) in [(0x64, 0x20), (0x70, 0x0a), (0x71, 0xff), (0x61, 1)] {
            assert_eq!(write(port, 1, &[data]), None);
        }
        assert_eq!(status(0x64, 1), [0xfd; 4], "no command is answered");
        assert_eq!(status(0x71, 1), [0; 4], "nothing is kept");
        assert_eq!(write(0xffff, 4, &[0xfe; 4]), None);
    }

    /// Records the writes and their offsets.
    #[derive(Debug)]
    struct Noting {
        writes: Mutex<Vec<(u64, Vec<u8>)>>,
        has_byte_registers: bool,
    }

    impl BusDevice for Noting {
        fn read(&self, offset: u64, data: &mut [u8]) {
            // Encodes the offset and the width of the access.
            data.fill(u8::try_from(offset).unwrap() << 4 | u8::try_from(data.len()).unwrap());
        }
        fn write(&self, offset: u64, data: &[u8]) -> Option<PowerRequest> {
            lock(&self.writes).push((offset, data.to_vec()));
            None
        }
        fn has_byte_registers(&self) -> bool {
            self.has_byte_registers
        }
    }

    #[test]
    fn an_access_to_several_ports_reaches_whatever_is_at_each() {
        let bus = Bus::default();
        let put = |start, len, has_byte_registers| {
            let device = Arc::new(Noting {
                writes: Mutex::default(),
                has_byte_registers,
            });
            bus.ports.insert(start, len, device.clone()).unwrap();
            device
        };
        let (bytes, words) = (put(0x3f8, 8, true), put(0xcf8, 8, false));
        let read = |port, width| {
            let mut data = [0; 4];
            bus.port_read(port, width, &mut data[..width]);
            data
        };
        // In one access, if a device has all of the ports, or has no single ports.
        assert_eq!(read(0x3f8, 4), [0x04; 4]);
        assert_eq!(read(0xcf8, 4), [0x04; 4]);
        assert_eq!(read(0xcfe, 4), [0x64; 4]);
        // One by one: into a device, out of it, and into one that gets parts.
        assert_eq!(read(0x3f6, 4), [0xff, 0xff, 0x01, 0x11]);
        assert_eq!(read(0x3fe, 4), [0x61, 0x71, 0xff, 0xff]);
        assert_eq!(read(0xcf7, 2), [0xff, 0x01, 0, 0]);
        assert_eq!(read(0x100, 4), [0xff; 4]);

        for port in [0x3f7, 0x3f9, 0x3ff, 0xcf7, 0xcff] {
            assert_eq!(bus.port_write(port, 2, &[1, 2]), None);
        }
        let written = |device: &Noting| std::mem::take(&mut *lock(&device.writes));
        assert_eq!(
            written(&bytes),
            [(0, vec![2]), (1, vec![1, 2]), (7, vec![1])]
        );
        assert_eq!(written(&words), [(0, vec![2]), (7, vec![1, 2])]);
    }

    /// Answers with its number and the offset.
    #[derive(Debug)]
    struct Numbered(u8);
    impl BusDevice for Numbered {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.copy_from_slice(&[self.0, offset as u8]);
        }
        fn write(&self, _: u64, _: &[u8]) -> Option<PowerRequest> {
            None
        }
    }

    #[test]
    fn ranges_come_and_go_and_never_overlap() {
        let map = AddressMap::default();
        let put = |start, len, n| map.insert(start, len, Arc::new(Numbered(n)));
        assert_eq!(put(100, 10, 1), Ok(()));
        assert_eq!(put(u64::MAX, 1, 2), Ok(()));
        assert_eq!(put(110, 5, 3), Ok(()));
        assert_eq!(put(90, 10, 4), Ok(()));
        for (start, len) in [(95, 1), (80, 11), (109, 1), (114, 9), (0, u64::MAX), (5, 0)] {
            assert!(put(start, len, 9).is_err(), "{start} {len}");
        }
        assert!(put(u64::MAX, 2, 9).is_err());
        let at = |address| {
            let mut data = [0; 2];
            map.read(address, &mut data);
            data
        };
        assert_eq!((at(99), at(100), at(109)), ([4, 9], [1, 0], [1, 9]));
        assert_eq!(
            (at(110), at(115), at(u64::MAX)),
            ([3, 0], [255, 255], [2, 0])
        );
        assert!(map.remove(101).is_none());
        assert!(map.remove(100).is_some());
        assert_eq!((at(99), at(105), at(110)), ([4, 9], [255, 255], [3, 0]));
        assert_eq!(put(100, 10, 5), Ok(()));
        assert_eq!(at(105), [5, 5]);
    }
}
