//! The clock of a PC with its memory (MC146818): two ports, by which firmware learns the time.
//!
//! The time is the host's, in UTC: what a guest writes to it is dropped, and so is what it writes
//! to the status registers, except for the form of numbers. There are no interrupts. The rest is
//! memory, which is zero at first.

use std::time::{Duration, SystemTime};

use crate::virtio::RestoreError;

/// The port of the index register; that of the selected register follows.
pub const PORT: u16 = 0x70;
/// The number of ports.
pub const PORTS: u16 = 2;

const SECONDS: u8 = 0x00;
const MINUTES: u8 = 0x02;
const HOURS: u8 = 0x04;
const DAY_OF_WEEK: u8 = 0x06;
const DAY: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
const STATUS_A: u8 = 0x0a;
const STATUS_B: u8 = 0x0b;
const STATUS_C: u8 = 0x0c;
const STATUS_D: u8 = 0x0d;
/// Where PCs have the century.
const CENTURY: u8 = 0x32;

/// The oscillator runs at 32,768 Hz; no update is in progress.
const RUNNING: u8 = 0x26;
/// The clock has had power.
const VALID: u8 = 1 << 7;
/// Hours go to 23.
const HOURS_24: u8 = 1 << 1;
/// Numbers are binary instead of decimal digits.
const BINARY: u8 = 1 << 2;
/// The hours after noon, where they go to 12.
const AFTERNOON: u8 = 1 << 7;

/// The bits of the index port that select a register; the last one masks NMIs on a PC.
const INDEX: u8 = 0x7f;
/// The bytes of memory and registers.
const SIZE: usize = 128;

/// The state that is saved: the index, status B, and the memory.
pub(super) const SAVED: usize = SIZE + 2;

/// After this time, registers show another second without a read of the first register.
const LATCHED: Duration = Duration::from_secs(1);

/// The clock and its memory.
#[derive(Debug)]
pub struct CmosClock {
    index: u8,
    status_b: u8,
    memory: [u8; SIZE],
    /// The time whose parts the registers show, so that those of one time are read together.
    latched: SystemTime,
}

impl Default for CmosClock {
    fn default() -> Self {
        Self {
            index: 0,
            status_b: HOURS_24,
            memory: [0; SIZE],
            latched: SystemTime::UNIX_EPOCH,
        }
    }
}

impl CmosClock {
    /// Returns the state, which [`Self::restore`] takes.
    pub(super) fn save(&self) -> Vec<u8> {
        let mut bytes = vec![self.index, self.status_b];
        bytes.extend(self.memory);
        bytes
    }

    /// Creates a clock in a saved state; its time is the host's.
    pub(super) fn restore(bytes: &[u8]) -> Result<Self, RestoreError> {
        let state = bytes
            .split_first_chunk()
            .and_then(|([index, status_b], memory)| {
                Some((*index, *status_b, memory.try_into().ok()?))
            });
        match state {
            Some((index, status_b, memory))
                if index & !INDEX == 0 && status_b & !(HOURS_24 | BINARY) == 0 =>
            {
                Ok(Self {
                    index,
                    status_b,
                    memory,
                    latched: SystemTime::UNIX_EPOCH,
                })
            }
            _ => Err(RestoreError::Invalid {
                what: "a CMOS clock in a state that none has",
            }),
        }
    }

    /// The guest reads the port at this offset, at this time.
    pub fn read(&mut self, offset: u64, now: SystemTime) -> u8 {
        match offset {
            0 => self.index,
            1 => self.register(now),
            _ => 0xff,
        }
    }

    /// The guest writes the port at this offset.
    pub fn write(&mut self, offset: u64, value: u8) {
        match (offset, self.index) {
            (0, _) => self.index = value & INDEX,
            (1, STATUS_B) => self.status_b = value & (HOURS_24 | BINARY),
            (1, SECONDS | MINUTES | HOURS | DAY_OF_WEEK..=YEAR) => {}
            (1, STATUS_A | STATUS_C | STATUS_D | CENTURY) => {}
            (1, index) => {
                if let Some(byte) = self.memory.get_mut(usize::from(index)) {
                    *byte = value;
                }
            }
            _ => {}
        }
    }

    fn register(&mut self, now: SystemTime) -> u8 {
        // Drivers read one of these first; the others within the same second.
        let is_first = matches!(self.index, SECONDS | STATUS_A);
        let age = now.duration_since(self.latched);
        if is_first || age.is_err() || age.is_ok_and(|age| age >= LATCHED) {
            self.latched = now;
        }
        let time = || Time::of(self.latched);
        match self.index {
            SECONDS => self.number(time().second),
            MINUTES => self.number(time().minute),
            HOURS => self.hours(time().hour),
            DAY_OF_WEEK => self.number(time().day_of_week),
            DAY => self.number(time().day),
            MONTH => self.number(time().month),
            YEAR => self.number(time().year),
            CENTURY => self.number(time().century),
            STATUS_A => RUNNING,
            STATUS_B => self.status_b,
            STATUS_C => 0,
            STATUS_D => VALID,
            index => self.memory.get(usize::from(index)).copied().unwrap_or(0),
        }
    }

    /// Returns a number below 100 in the form that the guest has chosen.
    fn number(&self, number: u8) -> u8 {
        match self.status_b & BINARY {
            0 => ((number / 10) << 4) | (number % 10),
            _ => number,
        }
    }

    fn hours(&self, hour: u8) -> u8 {
        if self.status_b & HOURS_24 != 0 {
            return self.number(hour);
        }
        let shown = match hour % 12 {
            0 => 12,
            hour => hour,
        };
        let half = if hour < 12 { 0 } else { AFTERNOON };
        self.number(shown) | half
    }
}

/// A time in parts, each below 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Time {
    second: u8,
    minute: u8,
    hour: u8,
    /// From 1, Sunday.
    day_of_week: u8,
    day: u8,
    month: u8,
    year: u8,
    century: u8,
}

impl Time {
    /// Times before 1970 are 1970, those after 9999 have its years.
    fn of(time: SystemTime) -> Self {
        let seconds = time
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let part = |number: u64| u8::try_from(number % 100).unwrap_or(0);
        let days = seconds / 86_400;
        // Whole periods of 400 years first, of 97 leap years, so that this ends soon.
        let mut rest = days % 146_097;
        let mut year = (days / 146_097 % 25)
            .saturating_mul(400)
            .saturating_add(1970);
        while let Some(less) = rest.checked_sub(days_of(year)) {
            rest = less;
            year = year.saturating_add(1);
        }
        let mut month: u64 = 1;
        while let Some(less) = rest.checked_sub(days_of_month(year, month)) {
            rest = less;
            month = month.saturating_add(1);
        }
        Self {
            second: part(seconds % 60),
            minute: part(seconds / 60 % 60),
            hour: part(seconds / 3600 % 24),
            // The first day was a Thursday.
            day_of_week: part((days.saturating_add(4) % 7).saturating_add(1)),
            day: part(rest.saturating_add(1)),
            month: part(month),
            year: part(year),
            century: part(year / 100),
        }
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_of(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

fn days_of_month(year: u64, month: u64) -> u64 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// As drivers do: the update flag, then the parts.
    fn read(clock: &mut CmosClock, now: SystemTime) -> [u8; 8] {
        [STATUS_A, SECONDS, MINUTES, HOURS, DAY, MONTH, YEAR, CENTURY].map(|register| {
            clock.write(0, register);
            clock.read(1, now)
        })
    }

    #[test]
    fn the_time_is_the_hosts_in_each_form_of_numbers() {
        let mut clock = CmosClock::default();
        // 2024-02-29 23:59:58.
        let leap = at(1_709_251_198);
        let decimal = [RUNNING, 0x58, 0x59, 0x23, 0x29, 0x02, 0x24, 0x20];
        assert_eq!(read(&mut clock, leap), decimal);
        clock.write(0, STATUS_B);
        clock.write(1, 0xff);
        assert_eq!(clock.read(1, leap), HOURS_24 | BINARY, "no interrupts");
        assert_eq!(read(&mut clock, leap), [RUNNING, 58, 59, 23, 29, 2, 24, 20]);
        clock.write(0, STATUS_B);
        clock.write(1, 0);
        assert_eq!(read(&mut clock, leap)[3], 0x11 | AFTERNOON);
        assert_eq!(read(&mut clock, at(0))[3], 0x12, "midnight");
        assert_eq!(read(&mut clock, at(12 * 3600))[3], 0x12 | AFTERNOON);
    }

    #[test]
    fn days_months_and_centuries_change_when_they_should() {
        let days = [
            (0, (1970, 1, 1, 5)),
            (951_782_400, (2000, 2, 29, 3)),
            (951_868_800, (2000, 3, 1, 4)),
            (4_107_542_399, (2100, 2, 28, 1)),
            (4_107_542_400, (2100, 3, 1, 2)),
            (253_402_300_799, (9999, 12, 31, 6)),
        ];
        for (seconds, (year, month, day, of_week)) in days {
            let time = Time::of(at(seconds));
            let parts = (
                u32::from(time.century) * 100 + u32::from(time.year),
                time.month,
                time.day,
                time.day_of_week,
            );
            assert_eq!(parts, (year, month, day, of_week), "{seconds}");
        }
    }

    #[test]
    fn the_parts_of_a_time_are_read_together() {
        let mut clock = CmosClock::default();
        let just_before = SystemTime::UNIX_EPOCH + Duration::from_millis(59_999);
        clock.write(0, SECONDS);
        assert_eq!(clock.read(1, just_before), 0x59);
        clock.write(0, MINUTES);
        assert_eq!(clock.read(1, just_before + Duration::from_millis(5)), 0);
        assert_eq!(clock.read(1, at(120)), 2, "another time");
        assert_eq!(clock.read(1, at(0)), 0, "the host's clock was set back");
    }

    #[test]
    fn what_is_written_to_the_clock_is_dropped_and_memory_keeps_it() {
        let mut clock = CmosClock::default();
        let now = at(1_000_000_000);
        let before = read(&mut clock, now);
        for index in 0..=u8::MAX {
            clock.write(0, index);
            clock.write(1, 0x5a & !BINARY & !HOURS_24 | HOURS_24);
            assert_eq!(clock.read(0, now), index & 0x7f);
            assert_eq!(clock.read(2, now), 0xff);
        }
        assert_eq!(read(&mut clock, now), before);
        clock.write(0, 0x0f);
        assert_eq!(clock.read(1, now), 0x5a);
        let again = CmosClock::restore(&clock.save());
        assert_eq!(again.unwrap().read(1, now), 0x5a);
    }

    #[test]
    fn states_that_no_clock_has_are_refused() {
        let sound = CmosClock::default().save();
        assert_eq!(sound.len(), SAVED);
        let changed = |at: usize, to: u8| {
            let mut bytes = sound.clone();
            bytes[at] = to;
            bytes
        };
        let wrong = [
            Vec::new(),
            sound[1..].to_vec(),
            [sound.clone(), vec![0]].concat(),
            changed(0, 0x80),
            changed(1, 0x40),
        ];
        for bytes in wrong {
            assert!(CmosClock::restore(&bytes).is_err(), "{}", bytes.len());
        }
    }
}
