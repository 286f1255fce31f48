//! MSI-X (§6.8.2): a table of messages, each of which can be masked, and a bit for each that is
//! pending while masked.

use std::fmt::Debug;

use crate::restore::RestoreError;

/// The capability's ID (§6.8.2.1).
pub const MSIX_CAPABILITY: u8 = 0x11;
/// Bytes of the capability after ID and link.
pub const MSIX_CAPABILITY_LEN: usize = 10;
/// The maximum number of vectors of a function: their pending bits fit one word.
pub const MAX_VECTORS: u16 = 64;
/// No vector: nothing is sent (virtio 1.3 §4.1.4.3).
pub const NO_VECTOR: u16 = 0xffff;

/// Bits of message control (§6.8.2.3).
const ENABLE: u16 = 1 << 15;
const MASK_ALL: u16 = 1 << 14;
/// The bit of vector control that a guest may write (§6.8.2.9).
const MASKED: u32 = 1;

/// Bytes of a table entry.
const ENTRY_LEN: u64 = 16;
/// Words of a table entry: message address, low and high, message data, vector control.
type Entry = [u32; 4];

/// Delivers message signaled interrupts. Called from any thread; never waits for the guest.
pub trait MessageInterrupt: Debug + Send + Sync {
    /// Writes `data` to `address`, as the function would on its bus.
    fn send(&self, address: u64, data: u32);
}

/// The state, for a snapshot. Message control is in configuration space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedMsix {
    /// The table.
    pub table: Vec<[u32; 4]>,
    /// A bit for each vector that waits to be unmasked.
    pub pending: u64,
}

/// The vectors of one function.
#[derive(Debug)]
pub struct Msix {
    table: Vec<Entry>,
    pending: u64,
    enabled: bool,
    masked: bool,
    messages: Box<dyn MessageInterrupt>,
}

impl Msix {
    /// Creates `vectors` vectors, at most [`MAX_VECTORS`], that are masked and disabled.
    #[must_use]
    pub fn new(vectors: u16, messages: impl MessageInterrupt + 'static) -> Self {
        let vectors = vectors.clamp(1, MAX_VECTORS);
        Self {
            table: vec![[0, 0, 0, MASKED]; vectors.into()],
            pending: 0,
            enabled: false,
            masked: false,
            messages: Box::new(messages),
        }
    }

    /// Number of vectors.
    #[must_use]
    pub fn vectors(&self) -> u16 {
        u16::try_from(self.table.len()).unwrap_or(MAX_VECTORS)
    }

    /// Returns the body of the capability, for table and pending bits at these offsets of BAR 0,
    /// with the bits that a guest may write.
    #[must_use]
    pub fn capability(
        &self,
        table: u32,
        pending: u32,
    ) -> ([u8; MSIX_CAPABILITY_LEN], [u8; MSIX_CAPABILITY_LEN]) {
        let [size_low, size_high] = self.vectors().saturating_sub(1).to_le_bytes();
        let [a, b, c, d] = table.to_le_bytes();
        let [e, f, g, h] = pending.to_le_bytes();
        let [_, control] = (ENABLE | MASK_ALL).to_le_bytes();
        (
            [size_low, size_high, a, b, c, d, e, f, g, h],
            [0, control, 0, 0, 0, 0, 0, 0, 0, 0],
        )
    }

    /// Sets message control; pending messages that are now unmasked are sent.
    pub fn set_control(&mut self, control: u16) {
        self.enabled = control & ENABLE != 0;
        self.masked = control & MASK_ALL != 0;
        self.deliver();
    }

    /// Whether the guest uses MSI-X.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Interrupts the guest with `vector`, now or when it is unmasked. An unknown vector is
    /// ignored.
    pub fn signal(&mut self, vector: u16) {
        let Some([low, high, data, control]) = self.table.get(usize::from(vector)) else {
            return;
        };
        if !self.enabled {
            return;
        }
        if self.masked || control & MASKED != 0 {
            self.pending |= bit(vector.into());
            return;
        }
        self.messages.send(address(*low, *high), *data);
    }

    /// Sends pending messages that are no longer masked.
    fn deliver(&mut self) {
        if !self.enabled || self.masked || self.pending == 0 {
            return;
        }
        for (vector, [low, high, data, control]) in self.table.iter().enumerate() {
            let bit = bit(vector);
            if self.pending & bit != 0 && control & MASKED == 0 {
                self.pending &= !bit;
                self.messages.send(address(*low, *high), *data);
            }
        }
    }

    /// Clears the pending bits.
    pub fn clear_pending(&mut self) {
        self.pending = 0;
    }

    /// Reads the table for the guest. It supports aligned accesses of 4 and 8 bytes (§6.8.2);
    /// others read as zero.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if !is_aligned(offset, data.len()) {
            return;
        }
        let (words, _) = data.as_chunks_mut::<4>();
        for (at, word) in [offset, offset.saturating_add(4)].into_iter().zip(words) {
            let (entry, field) = split(at);
            let entry = self.table.get(entry);
            if let Some(value) = entry.and_then(|entry| entry.get(field)) {
                *word = value.to_le_bytes();
            }
        }
    }

    /// Writes the table for the guest. Pending messages that this unmasks are sent.
    pub fn write_table(&mut self, offset: u64, data: &[u8]) {
        if !is_aligned(offset, data.len()) {
            return;
        }
        let (words, _) = data.as_chunks::<4>();
        for (at, word) in [offset, offset.saturating_add(4)].into_iter().zip(words) {
            let (entry, field) = split(at);
            let value = u32::from_le_bytes(*word);
            let entry = self.table.get_mut(entry);
            if let Some(to) = entry.and_then(|entry| entry.get_mut(field)) {
                // §6.8.2.9: the other bits of vector control are reserved.
                *to = if field == 3 { value & MASKED } else { value };
            }
        }
        self.deliver();
    }

    /// Reads the pending bits for the guest (§6.8.2.10). They cannot be written.
    pub fn read_pending(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if !is_aligned(offset, data.len()) {
            return;
        }
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        for (to, from) in data
            .iter_mut()
            .zip(self.pending.to_le_bytes().iter().skip(skip))
        {
            *to = *from;
        }
    }

    /// Returns the state, for a snapshot.
    #[must_use]
    pub fn save(&self) -> SavedMsix {
        SavedMsix {
            table: self.table.clone(),
            pending: self.pending,
        }
    }

    /// Checks whether `saved`, which is not trusted, can be a state of this function.
    ///
    /// # Errors
    /// If it cannot.
    pub fn check(&self, saved: &SavedMsix) -> Result<(), RestoreError> {
        let last = self.table.len().saturating_sub(1);
        // All bits up to that of the last vector.
        let known = bit(last).wrapping_sub(1) | bit(last);
        let reserved = saved
            .table
            .iter()
            .any(|[.., control]| control & !MASKED != 0);
        if saved.table.len() != self.table.len() || reserved || saved.pending & !known != 0 {
            return Err(RestoreError::Invalid {
                what: "an MSI-X table of another device",
            });
        }
        Ok(())
    }

    /// Restores a state that passed [`Self::check`]. Nothing is sent before [`Self::set_control`].
    pub fn restore(&mut self, saved: &SavedMsix) {
        self.table.clone_from(&saved.table);
        self.pending = saved.pending;
    }
}

fn bit(vector: usize) -> u64 {
    u32::try_from(vector)
        .ok()
        .and_then(|vector| 1u64.checked_shl(vector))
        .unwrap_or(0)
}

fn address(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn is_aligned(offset: u64, len: usize) -> bool {
    matches!(len, 4 | 8) && offset.is_multiple_of(len as u64)
}

/// Returns the index of the entry at an offset of the table, and of the word in it.
fn split(offset: u64) -> (usize, usize) {
    let entry = usize::try_from(offset / ENTRY_LEN).unwrap_or(usize::MAX);
    let field = usize::try_from((offset % ENTRY_LEN) / 4).unwrap_or(usize::MAX);
    (entry, field)
}

#[cfg(test)]
#[path = "msix_tests.rs"]
mod tests;
