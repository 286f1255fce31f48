//! Configuration space (§2.5): shared by transport and worker, never locked over I/O.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{RestoreError, SavedConfig};

/// The bytes of a device's configuration space and its generation counter.
///
/// Transports read it on vCPU threads. A device changes it with [`Self::update`]; its
/// [`super::Worker`] then interrupts the driver.
#[derive(Debug)]
pub struct ConfigSpace {
    content: Mutex<Content>,
    writable: Option<Range<usize>>,
    changed: AtomicBool,
}

#[derive(Debug)]
struct Content {
    bytes: Vec<u8>,
    generation: u32,
    /// The driver has read the generation since it changed.
    told: bool,
}

impl Content {
    /// Starts a new generation, since the bytes differ from those that a driver has seen. A
    /// generation that was never read need not change again: so a driver that reads only eight bits
    /// of it never meets the same value twice.
    fn changes(&mut self) {
        if std::mem::take(&mut self.told) {
            self.generation = self.generation.wrapping_add(1);
        }
    }
}

impl ConfigSpace {
    /// Creates a space of these bytes, read-only for the driver.
    #[must_use]
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self {
            content: Mutex::new(Content {
                bytes: bytes.into(),
                generation: 0,
                told: true,
            }),
            writable: None,
            changed: AtomicBool::new(false),
        }
    }

    /// Lets the driver write the bytes of `range`, as far as they exist.
    #[must_use]
    pub fn writable(mut self, range: Range<usize>) -> Self {
        self.writable = Some(range);
        self
    }

    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().bytes.len()
    }

    /// Whether the device type has no configuration space.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads `data.len()` bytes at `offset`; bytes beyond the end, at any `offset`, read as zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let content = self.lock();
        data.fill(0);
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|start| content.bytes.get(start..))
            .unwrap_or(&[]);
        for (to, from) in data.iter_mut().zip(rest) {
            *to = *from;
        }
    }

    /// Writes `data` at `offset` for the driver. Bytes that it may not write stay unchanged.
    pub fn driver_write(&self, offset: u64, data: &[u8]) {
        let (Some(writable), Ok(start)) = (&self.writable, usize::try_from(offset)) else {
            return;
        };
        let bytes = &mut self.lock().bytes;
        for (at, from) in (start..usize::MAX).zip(data) {
            if let Some(to) = bytes.get_mut(at).filter(|_| writable.contains(&at)) {
                *to = *from;
            }
        }
    }

    /// Changes the bytes at `offset` for the device, as far as they exist. The driver is
    /// interrupted (§2.3) if they differ.
    pub fn update(&self, offset: usize, data: &[u8]) {
        if self.update_quietly(offset, data) {
            self.changed.store(true, Ordering::SeqCst);
        }
    }

    /// As [`Self::update`], for changes that the driver knows already or does not wait for: it is
    /// not interrupted. Returns whether the bytes differ.
    pub fn update_quietly(&self, offset: usize, data: &[u8]) -> bool {
        let mut content = self.lock();
        let mut differs = false;
        for (to, from) in content.bytes.iter_mut().skip(offset).zip(data) {
            differs |= *to != *from;
            *to = *from;
        }
        if differs {
            // §2.5.1: the generation changes whenever the space may be read inconsistently.
            content.changes();
        }
        differs
    }

    /// The configuration generation (§2.5.1): the same before and after a series of reads if the
    /// values read are consistent.
    #[must_use]
    pub fn generation(&self) -> u32 {
        let mut content = self.lock();
        content.told = true;
        content.generation
    }

    /// Returns what the driver has seen, for a snapshot.
    #[must_use]
    pub fn save(&self) -> SavedConfig {
        let content = self.lock();
        SavedConfig {
            generation: content.generation,
            bytes: content.bytes.clone(),
        }
    }

    /// Continues with a driver that has seen `saved`, which is not trusted: the bytes that the
    /// driver wrote are kept, and it is notified of those that differ in this device.
    ///
    /// # Errors
    /// If the space of this device has a different size.
    pub fn restore(&self, saved: &SavedConfig) -> Result<(), RestoreError> {
        let content = &mut *self.lock();
        if content.bytes.len() != saved.bytes.len() {
            return Err(RestoreError::Invalid {
                what: "configuration space of another size",
            });
        }
        let mut differs = false;
        for (at, (to, from)) in content.bytes.iter_mut().zip(&saved.bytes).enumerate() {
            if self
                .writable
                .as_ref()
                .is_some_and(|range| range.contains(&at))
            {
                *to = *from;
            }
            differs |= *to != *from;
        }
        content.generation = saved.generation;
        content.told = true;
        if differs {
            content.changes();
        }
        self.changed.store(differs, Ordering::SeqCst);
        Ok(())
    }

    /// Whether the driver must be notified of a change; clears that flag.
    pub(crate) fn take_changed(&self) -> bool {
        self.changed.load(Ordering::Relaxed) && self.changed.swap(false, Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_beyond_the_end_are_zero() {
        let config = ConfigSpace::new([1, 2, 3, 4]);
        let mut data = [9; 4];
        config.read(2, &mut data);
        assert_eq!(data, [3, 4, 0, 0]);
        data = [9; 4];
        config.read(u64::MAX, &mut data);
        assert_eq!(data, [0; 4]);
        config.read(4, &mut []);
        let mut wide = [9; 9];
        config.read(0, &mut wide);
        assert_eq!(wide, [1, 2, 3, 4, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_driver_writes_only_what_it_may() {
        let config = ConfigSpace::new([0; 4]).writable(1..3);
        config.driver_write(0, &[7; 9]);
        config.driver_write(u64::MAX, &[7; 9]);
        let mut data = [9; 4];
        config.read(0, &mut data);
        assert_eq!(data, [0, 7, 7, 0]);
        ConfigSpace::new([0; 4]).driver_write(0, &[7]);
    }

    #[test]
    fn a_restored_driver_keeps_what_it_wrote_and_hears_of_what_differs() {
        let old = ConfigSpace::new([1, 2, 3]).writable(2..3);
        old.update(0, &[5]);
        old.driver_write(2, &[9]);
        let saved = old.save();
        let same = ConfigSpace::new([5, 2, 3]).writable(2..3);
        same.restore(&saved).unwrap();
        assert_eq!((same.save(), same.take_changed()), (saved.clone(), false));
        let other = ConfigSpace::new([7, 2, 3]).writable(2..3);
        other.restore(&saved).unwrap();
        assert_eq!(other.save().bytes, [7, 2, 9]);
        assert!(other.generation() != saved.generation && other.take_changed());
        assert!(ConfigSpace::new([5, 2]).restore(&saved).is_err());
    }

    #[test]
    fn a_driver_that_looks_again_never_meets_the_generation_that_it_had_read() {
        let config = ConfigSpace::new([0, 0]);
        let before = config.generation();
        for round in 0..256u16 {
            config.update(0, &round.wrapping_add(1).to_le_bytes());
        }
        assert_ne!(config.generation() & 0xff, before & 0xff);
        let (saved, before) = (config.save(), config.generation());
        config.restore(&saved).unwrap();
        config.update(0, &[9, 9]);
        assert_ne!(config.generation(), before);
    }

    #[test]
    fn only_a_difference_is_a_change() {
        let config = ConfigSpace::new([1, 2]);
        assert!(!config.is_empty() && ConfigSpace::new([]).is_empty());
        config.update(1, &[2, 3]);
        assert!((config.generation(), config.take_changed()) == (0, false));
        config.update(0, &[3]);
        assert!((config.generation(), config.take_changed()) == (1, true));
        assert!(!config.take_changed());
    }
}
