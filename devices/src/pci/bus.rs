//! The bus, with configuration mechanism 1 (§3.2.2.3.2).

use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::config::{PciConfig, PciIds};

/// The port `CONFIG_ADDRESS`; `CONFIG_DATA` is at the 4 ports after its own 4.
pub const ADDRESS_PORT: u16 = 0xcf8;
/// Number of ports.
pub const PORTS: u16 = 8;
/// Device numbers of the bus.
pub const SLOTS: u8 = 32;

/// The offset of `CONFIG_DATA`.
const DATA: u64 = 4;
/// Bits of `CONFIG_ADDRESS`: enable, bus, device, function, register.
const ENABLE: u32 = 1 << 31;
const ADDRESS_BITS: u32 = 0x80ff_fffc;

/// The address of a device on the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// The device number, below [`SLOTS`].
    pub slot: u8,
}

/// In the form of Linux's directory names in `/sys/bus/pci/devices`: `0000:00:01.0`.
impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0000:00:{:02x}.0", self.slot)
    }
}

/// A function as the bus sees it. Called on vCPU threads.
pub trait PciFunction: Debug + Send + Sync {
    /// Reads 1, 2 or 4 bytes of configuration space for the guest, which do not cross a multiple of
    /// 4.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes such bytes for the guest.
    fn write_config(&self, offset: u64, data: &[u8]);
}

/// The slot does not exist, or is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no free PCI slot {slot:#x}")]
pub struct PciBusError {
    slot: u8,
}

/// Bus 0, the only bus.
#[derive(Debug)]
pub struct PciBus {
    slots: RwLock<[Option<Arc<dyn PciFunction>>; SLOTS as usize]>,
    /// `CONFIG_ADDRESS`.
    address: AtomicU32,
}

impl PciBus {
    /// Creates a bus with a generic host bridge in slot 0, which guests use to find it.
    #[must_use]
    pub fn new() -> Self {
        Self::with_bridge(HostBridge::generic())
    }

    /// Creates a bus with this host bridge in slot 0.
    #[must_use]
    pub fn with_bridge(bridge: HostBridge) -> Self {
        let mut slots = [const { None }; SLOTS as usize];
        if let Some(first) = slots.first_mut() {
            let bridge: Arc<dyn PciFunction> = Arc::new(bridge);
            *first = Some(bridge);
        }
        Self {
            slots: RwLock::new(slots),
            address: AtomicU32::new(0),
        }
    }

    /// Returns the first slot without a function.
    #[must_use]
    pub fn free_slot(&self) -> Option<u8> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let free = slots.iter().position(Option::is_none)?;
        u8::try_from(free).ok()
    }

    /// Puts a function into a slot.
    ///
    /// # Errors
    /// If the slot is not free.
    pub fn insert(&self, slot: u8, function: Arc<dyn PciFunction>) -> Result<(), PciBusError> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        match slots.get_mut(usize::from(slot)) {
            Some(place @ None) => {
                *place = Some(function);
                Ok(())
            }
            _ => Err(PciBusError { slot }),
        }
    }

    /// Removes the function from a slot. Accesses that have started may still complete.
    pub fn remove(&self, slot: u8) -> Option<Arc<dyn PciFunction>> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        slots.get_mut(usize::from(slot))?.take()
    }

    /// Reads from the ports for the guest, at `offset` from [`ADDRESS_PORT`]. Reads without a
    /// target return ones.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if offset == 0 {
            // Smaller accesses go to the bus, which has no device there.
            if let Ok(word) = <&mut [u8; 4]>::try_from(data) {
                *word = self.config_address().to_le_bytes();
            }
            return;
        }
        if let Some((function, register)) = self.target(offset, data.len()) {
            function.read_config(register, data);
        }
    }

    /// Writes to the ports for the guest.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if offset == 0 {
            if let Ok(word) = <[u8; 4]>::try_from(data) {
                self.set_config_address(u32::from_le_bytes(word));
            }
            return;
        }
        if let Some((function, register)) = self.target(offset, data.len()) {
            function.write_config(register, data);
        }
    }

    /// `CONFIG_ADDRESS`, also for a snapshot.
    #[must_use]
    pub fn config_address(&self) -> u32 {
        self.address.load(Ordering::SeqCst)
    }

    /// Sets `CONFIG_ADDRESS`; reserved bits are cleared.
    pub fn set_config_address(&self, address: u32) {
        self.address.store(address & ADDRESS_BITS, Ordering::SeqCst);
    }

    /// Returns the function and register that `len` bytes of `CONFIG_DATA` access.
    fn target(&self, offset: u64, len: usize) -> Option<(Arc<dyn PciFunction>, u64)> {
        let byte = offset.checked_sub(DATA)?;
        let end = byte.checked_add(u64::try_from(len).ok()?)?;
        if !matches!(len, 1 | 2 | 4) || end > 4 {
            return None;
        }
        let address = self.config_address();
        let [register, device_function, bus, _] = address.to_le_bytes();
        let (slot, function) = (device_function >> 3, device_function & 7);
        if address & ENABLE == 0 || bus != 0 || function != 0 {
            return None;
        }
        // The slot's lock is not held during the access.
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let function = slots.get(usize::from(slot))?.clone()?;
        Some((function, u64::from(register).checked_add(byte)?))
    }
}

impl Default for PciBus {
    fn default() -> Self {
        Self::new()
    }
}

/// The device in slot 0: a bridge from the processors to the bus, without its own registers.
#[derive(Debug)]
pub struct HostBridge(PciConfig);

impl HostBridge {
    /// Red Hat's generic host bridge, which operating systems do not treat specially.
    #[must_use]
    pub fn generic() -> Self {
        Self::of(0x1b36, 0x0008)
    }

    /// The host bridge by which EDK2's CloudHv platform tells the machine that it was built for.
    #[must_use]
    pub fn cloud_hypervisor() -> Self {
        Self::of(0x8086, 0x0d57)
    }

    fn of(vendor: u16, device: u16) -> Self {
        Self(PciConfig::new(PciIds {
            vendor,
            device,
            subsystem: (0, 0),
            revision: 0,
            class: [6, 0, 0],
        }))
    }
}

impl PciFunction for HostBridge {
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.0.read(offset, data);
    }

    fn write_config(&self, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Records the accesses.
    #[derive(Debug, Default)]
    struct Recorder(Mutex<Vec<(u64, Vec<u8>)>>);

    impl PciFunction for Recorder {
        fn read_config(&self, offset: u64, data: &mut [u8]) {
            data.fill(u8::try_from(offset).unwrap());
        }
        fn write_config(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    fn select(bus: &PciBus, address: u32) {
        bus.write(0, &address.to_le_bytes());
    }

    fn read(bus: &PciBus, address: u32) -> u32 {
        select(bus, address);
        let mut data = [0; 4];
        bus.read(4, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn a_guest_finds_the_bus_and_its_bridge() {
        let bus = PciBus::new();
        // As Linux probes for mechanism 1.
        bus.write(3, &[1]);
        select(&bus, ENABLE);
        let mut back = [0; 4];
        bus.read(0, &mut back);
        assert_eq!(u32::from_le_bytes(back), ENABLE);
        assert_eq!(read(&bus, ENABLE), 0x0008_1b36);
        assert_eq!(read(&bus, ENABLE | 8) >> 16, 0x0600, "a host bridge");
        for slot in 1..32 {
            assert_eq!(read(&bus, ENABLE | slot << 11), u32::MAX, "{slot}");
        }
        let bus = PciBus::with_bridge(HostBridge::cloud_hypervisor());
        assert_eq!(read(&bus, ENABLE), 0x0d57_8086);
        assert_eq!(read(&bus, ENABLE | 8) >> 16, 0x0600, "a host bridge, too");
    }

    #[test]
    fn accesses_reach_the_function_that_is_selected_and_no_other() {
        let bus = PciBus::new();
        let function = Arc::new(Recorder::default());
        assert_eq!(bus.free_slot(), Some(1));
        bus.insert(31, function.clone()).unwrap();
        assert!(bus.insert(31, function.clone()).is_err());
        assert!(bus.insert(32, function.clone()).is_err());
        let at = ENABLE | 31 << 11 | 0x48;
        assert_eq!(read(&bus, at), 0x4848_4848);
        let mut byte = [0];
        bus.read(7, &mut byte);
        assert_eq!(byte, [0x4b]);
        bus.write(6, &[1, 2]);
        assert_eq!(*function.0.lock().unwrap(), [(0x4a, vec![1, 2])]);
        // Not enabled, another bus, another function.
        for address in [at & !ENABLE, at | 1 << 16, at | 1 << 8] {
            assert_eq!(read(&bus, address), u32::MAX, "{address:#x}");
            bus.write(4, &[9; 4]);
        }
        assert_eq!(function.0.lock().unwrap().len(), 1);
        assert!(bus.remove(31).is_some() && bus.remove(31).is_none() && bus.remove(200).is_none());
        assert_eq!(read(&bus, at), u32::MAX);
    }

    #[test]
    fn accesses_of_odd_widths_and_places_see_ones_and_change_nothing() {
        let bus = PciBus::new();
        let function = Arc::new(Recorder::default());
        bus.insert(1, function.clone()).unwrap();
        select(&bus, ENABLE | 1 << 11);
        for offset in [0, 1, 2, 3, 4, 5, 6, 7, 8, u64::MAX, u64::MAX - 3] {
            for len in [0, 1, 2, 3, 4, 5, 8, 16] {
                let sound = (offset == 0 && len == 4)
                    || (matches!(len, 1 | 2 | 4)
                        && (4..8).contains(&offset)
                        && offset + len as u64 <= 8);
                if sound {
                    continue;
                }
                let mut data = vec![0xee; len];
                bus.read(offset, &mut data);
                assert_eq!(data, vec![0xff; len], "{offset} {len}");
                bus.write(offset, &vec![0xee; len]);
            }
        }
        assert_eq!(bus.config_address(), ENABLE | 1 << 11);
        assert!(function.0.lock().unwrap().is_empty());
        select(&bus, u32::MAX);
        assert_eq!(bus.config_address(), 0x80ff_fffc);
    }

    #[test]
    fn addresses_are_written_as_linux_names_them() {
        assert_eq!(PciAddress { slot: 31 }.to_string(), "0000:00:1f.0");
    }
}
