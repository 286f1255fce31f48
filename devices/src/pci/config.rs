//! The configuration space of a function (§6.1): 256 bytes, and which of their bits a guest may
//! write.

use crate::restore::RestoreError;

/// Bytes of configuration space.
const SIZE: usize = 256;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const CACHE_LINE_SIZE: usize = 0x0c;
const LATENCY_TIMER: usize = 0x0d;
const BAR0: usize = 0x10;
const SUBSYSTEM: usize = 0x2c;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
/// After the header.
const FIRST_CAPABILITY: usize = 0x40;

/// The function responds at its memory BARs (§6.2.2).
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// The function may access memory (§6.2.2). It is stored, but has no effect.
pub const COMMAND_BUS_MASTER: u16 = 1 << 2;
/// The bits of the command register that a guest may set: memory, bus master, parity and system
/// errors, no INTx.
const COMMAND_WRITABLE: u16 = COMMAND_MEMORY | COMMAND_BUS_MASTER | 1 << 6 | 1 << 8 | 1 << 10;
/// There is a list of capabilities (§6.2.3).
const STATUS_CAPABILITIES: u16 = 1 << 4;

/// The identity of a function (§6.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciIds {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Subsystem vendor ID and subsystem ID.
    pub subsystem: (u16, u16),
    /// Revision ID.
    pub revision: u8,
    /// Base class, sub-class and programming interface.
    pub class: [u8; 3],
}

/// A header of type 0 with capabilities.
#[derive(Clone, Debug)]
pub struct PciConfig {
    bytes: [u8; SIZE],
    /// The bits that a guest may write.
    writable: [u8; SIZE],
    /// The offset of the next capability.
    free: usize,
    /// The offset of the byte that links to the next capability.
    link: usize,
}

impl PciConfig {
    /// Creates a function without BARs and capabilities.
    #[must_use]
    pub fn new(ids: PciIds) -> Self {
        let mut config = Self {
            bytes: [0; SIZE],
            writable: [0; SIZE],
            free: FIRST_CAPABILITY,
            link: CAPABILITIES,
        };
        config.put(0, &ids.vendor.to_le_bytes());
        config.put(2, &ids.device.to_le_bytes());
        let [base, sub, interface] = ids.class;
        config.put(8, &[ids.revision, interface, sub, base]);
        config.put(SUBSYSTEM, &ids.subsystem.0.to_le_bytes());
        config.put(SUBSYSTEM.saturating_add(2), &ids.subsystem.1.to_le_bytes());
        config.permit(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        // Scratch registers: they have a meaning only for the guest.
        for register in [CACHE_LINE_SIZE, LATENCY_TIMER, INTERRUPT_LINE] {
            config.permit(register, &[0xff]);
        }
        config
    }

    /// Adds BAR 0: 32 bits, of memory that is not prefetchable (§6.2.5.1). A guest determines its
    /// size from the bits that it cannot write.
    ///
    /// # Panics
    /// If `size` is not a power of two, or less than 16.
    #[must_use]
    pub fn bar0(mut self, size: u32) -> Self {
        assert!(size.is_power_of_two() && size >= 16, "BARs are aligned");
        self.permit(BAR0, &size.wrapping_neg().to_le_bytes());
        self
    }

    /// Adds a capability (§6.7) whose `body` follows its ID and link, with the bits that a guest
    /// may write. Returns its offset; `None` if there is no room left.
    #[must_use]
    pub fn add_capability(&mut self, id: u8, body: &[u8], writable: &[u8]) -> Option<u8> {
        let at = self.free;
        let start = u8::try_from(at).ok()?;
        let body_at = at.checked_add(2)?;
        let end = body_at
            .checked_add(body.len())?
            .checked_next_multiple_of(4)?;
        if end > SIZE || writable.len() > body.len() {
            return None;
        }
        self.put(at, &[id, 0]);
        self.put(body_at, body);
        self.permit(body_at, writable);
        self.put(self.link, &[start]);
        self.put(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        self.link = at.checked_add(1)?;
        self.free = end;
        Some(start)
    }

    /// Sets the address of BAR 0, as firmware does.
    pub fn set_bar0(&mut self, address: u32) {
        self.write(BAR0 as u64, &address.to_le_bytes());
    }

    /// The address of BAR 0, whether the guest enabled it or not.
    #[must_use]
    pub fn bar0_address(&self) -> u32 {
        self.u32(BAR0) & !0xf
    }

    /// Whether the guest enabled memory BARs.
    #[must_use]
    pub fn memory_enabled(&self) -> bool {
        self.u16(COMMAND) & COMMAND_MEMORY != 0
    }

    /// Reads at `offset`; bytes beyond the end read as ones.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|start| self.bytes.get(start..))
            .unwrap_or(&[]);
        for (to, from) in data.iter_mut().zip(rest) {
            *to = *from;
        }
    }

    /// Writes at `offset` for the guest: bits that it may not write stay unchanged.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let Ok(start) = usize::try_from(offset) else {
            return;
        };
        let bytes = self.bytes.iter_mut().zip(&self.writable).skip(start);
        for ((to, mask), from) in bytes.zip(data) {
            *to = (*to & !mask) | (from & mask);
        }
    }

    /// The 16-bit register at `offset`.
    #[must_use]
    pub fn u16(&self, offset: usize) -> u16 {
        let bytes = self.bytes.get(offset..).and_then(|b| b.first_chunk());
        bytes.copied().map_or(0, u16::from_le_bytes)
    }

    /// The 32-bit register at `offset`.
    #[must_use]
    pub fn u32(&self, offset: usize) -> u32 {
        let bytes = self.bytes.get(offset..).and_then(|b| b.first_chunk());
        bytes.copied().map_or(0, u32::from_le_bytes)
    }

    /// All bytes, for a snapshot.
    #[must_use]
    pub fn save(&self) -> Vec<u8> {
        self.bytes.to_vec()
    }

    /// Restores what a guest wrote; `saved` is not trusted.
    ///
    /// # Errors
    /// If it belongs to another function.
    pub fn restore(&mut self, saved: &[u8]) -> Result<(), RestoreError> {
        let all = self.bytes.iter().zip(&self.writable).zip(saved);
        let same = all.fold(true, |same, ((own, mask), saved)| {
            same && own & !mask == saved & !mask
        });
        if saved.len() != SIZE || !same {
            return Err(RestoreError::Invalid {
                what: "PCI configuration space of another device",
            });
        }
        self.write(0, saved);
        Ok(())
    }

    fn put(&mut self, at: usize, data: &[u8]) {
        for (to, from) in self.bytes.iter_mut().skip(at).zip(data) {
            *to = *from;
        }
    }

    fn permit(&mut self, at: usize, mask: &[u8]) {
        for (to, from) in self.writable.iter_mut().skip(at).zip(mask) {
            *to = *from;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn config() -> PciConfig {
        PciConfig::new(PciIds {
            vendor: 0x1af4,
            device: 0x1042,
            subsystem: (0x1af4, 0x40),
            revision: 1,
            class: [1, 0x80, 0],
        })
        .bar0(0x4000)
    }

    #[test]
    fn a_guest_finds_a_bars_size_by_writing_ones() {
        let mut config = config();
        config.set_bar0(0xc000_4000);
        config.write(0x10, &[0xff; 4]);
        assert_eq!(config.u32(0x10), 0xffff_c000);
        config.write(0x10, &0xdead_beefu32.to_le_bytes());
        assert_eq!(config.bar0_address(), 0xdead_8000);
        // The other BARs do not exist.
        config.write(0x14, &[0xff; 24]);
        assert_eq!((config.u32(0x14), config.u32(0x24)), (0, 0));
    }

    #[test]
    fn a_guest_sets_the_bits_of_the_command_register_that_have_a_meaning() {
        let mut config = config();
        assert_eq!(config.u16(4), 0);
        config.write(4, &[0xff; 2]);
        // Memory, bus master, parity errors, system errors, no INTx (PCI 3.0 §6.2.2).
        assert_eq!(config.u16(4), 1 << 1 | 1 << 2 | 1 << 6 | 1 << 8 | 1 << 10);
        config.write(4, &[0xfb, 0]);
        assert_eq!(config.u16(4), 1 << 1 | 1 << 6);
    }

    #[test]
    fn capabilities_are_linked_aligned_and_end() {
        let mut config = config();
        assert_eq!(config.u16(0x06) & 0x10, 0);
        assert_eq!(config.add_capability(0x11, &[1; 9], &[0, 0xc0]), Some(0x40));
        assert_eq!(config.add_capability(9, &[2; 14], &[]), Some(0x4c));
        assert_eq!((config.u32(0x34), config.u32(0x40)), (0x40, 0x0101_4c11));
        assert_eq!(config.u32(0x4c), 0x0202_0009);
        assert_ne!(config.u16(0x06) & 0x10, 0);
        config.write(0x42, &[0xff; 2]);
        assert_eq!(config.u16(0x42), 0xc101);
        assert_eq!(config.add_capability(9, &[0; 200], &[]), None);
        assert_eq!(config.add_capability(9, &[0; 300], &[]), None);
        assert_eq!(
            config.u32(0x4c),
            0x0202_0009,
            "what does not fit is not linked"
        );
    }

    #[test]
    fn only_a_space_of_the_same_device_is_restored() {
        let mut old = config();
        old.write(4, &[0xff; 2]);
        old.set_bar0(0xe000_0000);
        let mut new = config();
        new.restore(&old.save()).unwrap();
        assert!(new.memory_enabled());
        assert_eq!(new.bar0_address(), 0xe000_0000);
        for at in [0, 3, 8, 0x10, 0x2c, 0x34, 0x80] {
            let mut other = old.save();
            other[at] ^= 1;
            assert!(config().restore(&other).is_err(), "{at:#x}");
        }
        assert!(config().restore(&old.save()[..255]).is_err());
        assert!(config().restore(&[old.save(), vec![0]].concat()).is_err());
    }

    proptest! {
        /// After any writes, with any width, the identity of the function is unchanged.
        #[test]
        fn accesses_anywhere_leave_read_only_bits(
            writes in prop::collection::vec((any::<u64>(), prop::collection::vec(any::<u8>(), 0..12)), 0..40),
        ) {
            let mut config = config();
            let before = config.clone();
            for (offset, data) in writes {
                for offset in [offset, offset % 300] {
                    config.write(offset, &data);
                    let mut back = vec![0; data.len()];
                    config.read(offset, &mut back);
                }
            }
            for at in 0..SIZE {
                let mask = !config.writable[at];
                prop_assert_eq!(config.bytes[at] & mask, before.bytes[at] & mask);
            }
            prop_assert_eq!(config.bar0_address() % 0x4000, 0);
        }
    }
}
