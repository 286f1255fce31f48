//! What a firmware needs besides the devices of its guest: a clock to wait by, and the time of day.
//! A VM without firmware has neither, since its kernel has better ones.

use std::time::{Instant, SystemTime};

use super::cmos::{self, CmosClock};
use super::pm_timer::PmTimer;
use crate::virtio::{RestoreError, SavedDevice};

/// The port of the timer, where EDK2's CloudHv platform looks for it.
pub const TIMER_PORT: u16 = 0x608;
/// The number of its ports.
pub const TIMER_PORTS: u16 = 4;

const VERSION: u32 = 1;

/// The devices of a VM that boots by a firmware.
#[derive(Debug)]
pub struct FirmwareDevices {
    clock: CmosClock,
    timer: PmTimer,
    /// When the timer's clock began.
    began: Instant,
}

impl Default for FirmwareDevices {
    fn default() -> Self {
        Self {
            clock: CmosClock::default(),
            timer: PmTimer::default(),
            began: Instant::now(),
        }
    }
}

impl FirmwareDevices {
    /// Creates the devices in a saved state. The timer goes on, the time of day is the host's.
    ///
    /// # Errors
    /// [`RestoreError`] if no such devices have this state.
    pub fn restored(saved: &SavedDevice) -> Result<Self, RestoreError> {
        let bytes = saved.of_version(VERSION)?;
        let (clock, timer) = bytes
            .split_at_checked(cmos::SAVED)
            .ok_or(RestoreError::Invalid {
                what: "devices of a firmware that are cut off",
            })?;
        let timer = timer.try_into().map_err(|_| RestoreError::Invalid {
            what: "a timer that is not one word",
        })?;
        Ok(Self {
            clock: CmosClock::restore(clock)?,
            timer: PmTimer::starting_at(u32::from_le_bytes(timer)),
            began: Instant::now(),
        })
    }

    /// Returns the state, which [`Self::restored`] takes.
    #[must_use]
    pub fn save(&self) -> SavedDevice {
        let mut bytes = self.clock.save();
        bytes.extend(self.count().to_le_bytes());
        SavedDevice {
            version: VERSION,
            bytes,
        }
    }

    /// The guest reads the clock's port at this offset.
    pub fn read_clock(&mut self, offset: u64) -> u8 {
        self.clock.read(offset, SystemTime::now())
    }

    /// The guest writes the clock's port at this offset.
    pub fn write_clock(&mut self, offset: u64, value: u8) {
        self.clock.write(offset, value);
    }

    /// The guest reads a byte of the timer.
    #[must_use]
    pub fn read_timer(&self) -> [u8; TIMER_PORTS as usize] {
        self.count().to_le_bytes()
    }

    fn count(&self) -> u32 {
        self.timer.count(self.began.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restored_timer_goes_on_and_the_clocks_memory_is_kept() {
        let mut devices = FirmwareDevices::default();
        devices.write_clock(0, 0x40);
        devices.write_clock(1, 7);
        devices.timer = PmTimer::starting_at(1 << 20);
        let mut again = FirmwareDevices::restored(&devices.save()).unwrap();
        assert_eq!((again.read_clock(0), again.read_clock(1)), (0x40, 7));
        assert!(u32::from_le_bytes(again.read_timer()) >= 1 << 20);
    }

    #[test]
    fn states_that_no_such_devices_have_are_refused() {
        let sound = FirmwareDevices::default().save();
        let len = sound.bytes.len();
        for bytes in [
            Vec::new(),
            sound.bytes[..len - 1].to_vec(),
            [&*sound.bytes, &[0]].concat(),
        ] {
            let saved = SavedDevice { version: 1, bytes };
            assert!(FirmwareDevices::restored(&saved).is_err());
        }
        let newer = SavedDevice {
            version: 2,
            ..sound
        };
        assert!(FirmwareDevices::restored(&newer).is_err());
    }
}
