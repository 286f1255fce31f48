//! The guest's wall clock, which has no hardware of its own to follow.
//!
//! The host sets it when the guest has booted, and again after a pause or a restore. In between
//! it follows the host's by PTP, where the host's KVM answers the guest's hypercall for it
//! (KVM_HC_CLOCK_PAIRING); elsewhere the host has to send the time now and then.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::time::Duration;

use rustix::time::{
    ClockId, DynamicClockId, Timespec, clock_gettime, clock_gettime_dynamic, clock_settime,
};

/// Seconds until 2262, where nanoseconds leave 63 bits.
const MAX_TIME_NS: u64 = i64::MAX.unsigned_abs();
const NS_PER_S: i128 = 1_000_000_000;
/// Nearer than a call over vsock takes.
const EXACT_ENOUGH_NS: i128 = 1_000_000;
/// Past this a clock jumps rather than running 0.05 % faster or slower for an hour; NTP's figure.
const STEP_NS: i128 = 128_000_000;
/// Two clocks that both run on crystals drift apart by some milliseconds in this time.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(64);
/// The kernel's name of the host's clock.
const HOST_CLOCK: &str = "KVM virtual PTP";

/// The clock cannot be set.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClockError {
    /// Not between 1970 and 2262.
    #[error("the time is not between 1970 and 2262")]
    OutOfRange,
    /// The kernel refuses.
    #[error("cannot set the clock")]
    Kernel(#[from] io::Error),
}

/// The time of a request.
///
/// # Errors
///
/// [`ClockError::OutOfRange`].
pub fn time(unix_time_ns: u64) -> Result<Timespec, ClockError> {
    const NS_PER_S: u64 = 1_000_000_000;
    if !(1..=MAX_TIME_NS).contains(&unix_time_ns) {
        return Err(ClockError::OutOfRange);
    }
    // Both fit: the time is below 2⁶³ ns.
    Ok(Timespec {
        tv_sec: i64::try_from(unix_time_ns / NS_PER_S).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(unix_time_ns % NS_PER_S).unwrap_or(0),
    })
}

/// What to do about a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Correction {
    Nothing,
    /// By this many microseconds, while time goes on without a jump.
    Slew(i32),
    Step,
}

impl Correction {
    fn of(difference_ns: i128) -> Self {
        match difference_ns.abs() {
            0..EXACT_ENOUGH_NS => Self::Nothing,
            // It fits: it is below STEP_NS.
            EXACT_ENOUGH_NS..STEP_NS => {
                i32::try_from(difference_ns / 1000).map_or(Self::Step, Self::Slew)
            }
            _ => Self::Step,
        }
    }
}

/// Brings the clock to `time`: by a jump if it is far off, by running faster or slower if not.
///
/// # Errors
///
/// [`ClockError::Kernel`].
pub fn correct(time: Timespec) -> Result<(), ClockError> {
    let now = clock_gettime(ClockId::Realtime);
    match Correction::of(nanoseconds(time) - nanoseconds(now)) {
        Correction::Nothing => {}
        Correction::Slew(microseconds) => crate::sys::slew_clock(microseconds)?,
        Correction::Step => clock_settime(ClockId::Realtime, time).map_err(io::Error::from)?,
    }
    Ok(())
}

fn nanoseconds(time: Timespec) -> i128 {
    i128::from(time.tv_sec) * NS_PER_S + i128::from(time.tv_nsec)
}

/// Follows the host's clock for ever; returns at once where there is none to follow.
pub async fn follow_host() {
    let Some(clock) = host_clock() else {
        return tracing::debug!("the host's KVM has no clock for guests: it is to send the time");
    };
    loop {
        tokio::time::sleep(FOLLOW_INTERVAL).await;
        let followed = clock_gettime_dynamic(DynamicClockId::Dynamic(clock.as_fd()))
            .map_err(|error| ClockError::Kernel(error.into()))
            .and_then(correct);
        if let Err(error) = followed {
            tracing::warn!(%error, "cannot follow the host's clock");
        }
    }
}

fn host_clock() -> Option<File> {
    let devices = fs::read_dir("/sys/class/ptp").ok()?;
    let device = devices.filter_map(Result::ok).find(|device| {
        fs::read_to_string(device.path().join("clock_name"))
            .is_ok_and(|name| name.trim_end() == HOST_CLOCK)
    })?;
    File::open(std::path::Path::new("/dev").join(device.file_name())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_split_into_seconds_and_nanoseconds() {
        let split = time(1_700_000_000_123_456_789).unwrap();
        assert_eq!((split.tv_sec, split.tv_nsec), (1_700_000_000, 123_456_789));
        assert_eq!(time(MAX_TIME_NS).unwrap().tv_sec, 9_223_372_036);
        assert!(time(MAX_TIME_NS + 1).is_err());
        assert!(time(0).is_err());
    }

    #[test]
    fn small_differences_are_slewed_and_large_ones_stepped() {
        let of_ms = |ms: i128| Correction::of(ms * 1_000_000);
        assert_eq!(Correction::of(999_999), Correction::Nothing);
        assert_eq!(of_ms(5), Correction::Slew(5000));
        assert_eq!(of_ms(-127), Correction::Slew(-127_000));
        assert_eq!(of_ms(128), Correction::Step);
        assert_eq!(of_ms(-3_600_000), Correction::Step);
        assert_eq!(Correction::of(i128::from(i64::MIN)), Correction::Step);
    }
}
