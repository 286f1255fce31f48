//! The guest's wall clock, which has no hardware clock of its own to follow.
//!
//! Where the host's KVM answers the guest's hypercall for its clock (KVM_HC_CLOCK_PAIRING), the
//! guest follows that clock by PTP: periodically, when it is configured, and whenever the host asks
//! for the guest's time, as after a pause or when the host's own clock was set. Elsewhere the host
//! sends the time after the guest has booted, and from then on by how much the clock is to be
//! advanced.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::sync::OnceLock;
use std::time::Duration;

use podvisor_agent_protocol::ClockBracket;
use rustix::time::{ClockId, DynamicClockId, Timespec, clock_gettime, clock_gettime_dynamic};

/// Nanoseconds until the year 2262, when they no longer fit 63 bits.
const MAX_TIME_NS: u64 = i64::MAX.unsigned_abs();
const NS_PER_S: i128 = 1_000_000_000;
/// More exact than a call over vsock.
const EXACT_ENOUGH_NS: i128 = 1_000_000;
/// From this difference on, the clock is stepped instead of running 0.05 % faster or slower for an
/// hour; NTP's value.
const STEP_NS: i128 = 128_000_000;
/// Two clocks that both run on crystals drift apart by some milliseconds in this time.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(64);
/// How often the host's clock is read at most, to get one reading without interruption.
const MAX_READINGS: usize = 5;
/// How long a time may have been in transit from the host.
const LONGEST_WAY_NS: i128 = NS_PER_S;
/// The kernel's name for the host's clock.
const HOST_CLOCK: &str = "KVM virtual PTP";

/// The clock cannot be set.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClockError {
    /// Not between 1970 and 2262.
    #[error("time out of range: not between 1970 and 2262")]
    OutOfRange,
    /// The kernel refuses to set it.
    #[error("cannot set the clock")]
    Kernel(#[from] io::Error),
}

/// Converts the time of a request.
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

/// The correction of a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Correction {
    /// The clock is right; an earlier correction that is still running is ended.
    Nothing,
    /// Slew by this many microseconds, without a jump.
    Slew(i32),
    /// Step by this many microseconds.
    Step(i64),
}

impl Correction {
    /// Returns the correction for a clock that is behind by `behind_ns`.
    fn of(behind_ns: i128) -> Self {
        // A value that does not fit exceeds the difference of any two clocks: the kernel refuses
        // it.
        let step = || Self::Step(i64::try_from(behind_ns / 1000).unwrap_or(i64::MAX));
        match behind_ns.abs() {
            0..EXACT_ENOUGH_NS => Self::Nothing,
            EXACT_ENOUGH_NS..STEP_NS => {
                i32::try_from(behind_ns / 1000).map_or_else(|_| step(), Self::Slew)
            }
            _ => step(),
        }
    }

    fn apply(self) -> Result<(), ClockError> {
        match self {
            Self::Nothing => crate::sys::slew_clock(0)?,
            Self::Slew(microseconds) => crate::sys::slew_clock(microseconds)?,
            // Also ends a correction that is still running.
            Self::Step(microseconds) => crate::sys::step_clock(microseconds)?,
        }
        Ok(())
    }
}

/// Corrects the clock to that of the host or, if that cannot be read, to the `time` that the host
/// sent: by a step if it is far off, otherwise by running faster or slower.
///
/// # Errors
///
/// [`ClockError::Kernel`].
pub fn correct(time: Timespec) -> Result<(), ClockError> {
    let behind = behind_host().unwrap_or_else(|| behind_sent(nanoseconds(time), now()));
    Correction::of(behind).apply()
}

/// Advances the clock by that many nanoseconds, in the same way as [`correct`].
///
/// # Errors
///
/// [`ClockError::Kernel`].
pub fn gain(nanoseconds: i64) -> Result<(), ClockError> {
    Correction::of(nanoseconds.into()).apply()
}

/// Returns the clock's time in nanoseconds since 1970, and whether it was just corrected by the
/// host's clock.
///
/// # Errors
///
/// [`ClockError::Kernel`].
pub fn read() -> Result<(u64, bool), ClockError> {
    let behind = behind_host();
    if let Some(behind) = behind {
        Correction::of(behind).apply()?;
    }
    Ok((u64::try_from(now()).unwrap_or(0), behind.is_some()))
}

fn nanoseconds(time: Timespec) -> i128 {
    i128::from(time.tv_sec) * NS_PER_S + i128::from(time.tv_nsec)
}

fn now() -> i128 {
    nanoseconds(clock_gettime(ClockId::Realtime))
}

/// Returns how far the clock is behind a time that was sent some time ago. A clock that is ahead by
/// no more than the transit may have taken is not set back.
fn behind_sent(sent: i128, now: i128) -> i128 {
    match sent - now {
        ahead if (-LONGEST_WAY_NS..0).contains(&ahead) => 0,
        behind => behind,
    }
}

/// Returns how far the clock is behind that of the host; `None` if the host's cannot be read.
fn behind_host() -> Option<i128> {
    let clock = host_clock()?;
    let mut best = None;
    for _ in 0..MAX_READINGS {
        let before = now();
        let host = clock_gettime_dynamic(DynamicClockId::Dynamic(clock.as_fd()));
        let after = now();
        let other = host
            .inspect_err(|error| tracing::warn!(%error, "cannot read the host's clock"))
            .ok()?;
        let bracket = ClockBracket {
            before,
            other: nanoseconds(other),
            after,
        };
        best = ClockBracket::narrower(best, bracket);
        if best.is_some_and(|best| best.width() < EXACT_ENOUGH_NS) {
            break;
        }
    }
    best.map(|best| best.behind())
}

/// Follows the host's clock forever; returns immediately if there is none to follow.
pub async fn follow_host() {
    if host_clock().is_none() {
        return tracing::debug!("the host's KVM has no clock for guests: it is to send the time");
    }
    loop {
        tokio::time::sleep(FOLLOW_INTERVAL).await;
        if let Err(error) = read() {
            tracing::warn!(%error, "cannot follow the host's clock");
        }
    }
}

/// Returns KVM's clock, which exists from boot on or never.
fn host_clock() -> Option<&'static File> {
    static CLOCK: OnceLock<Option<File>> = OnceLock::new();
    CLOCK.get_or_init(find_host_clock).as_ref()
}

fn find_host_clock() -> Option<File> {
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
        assert_eq!(Correction::of(-999_999), Correction::Nothing);
        assert_eq!(of_ms(5), Correction::Slew(5000));
        assert_eq!(of_ms(-127), Correction::Slew(-127_000));
        assert_eq!(of_ms(128), Correction::Step(128_000));
        assert_eq!(of_ms(-3_600_000), Correction::Step(-3_600_000_000));
        let least = i128::from(i64::MIN);
        assert_eq!(Correction::of(least), Correction::Step(i64::MIN / 1000));
    }

    #[test]
    fn a_time_that_was_long_on_its_way_does_not_set_the_clock_back() {
        let now = 1_700_000_000 * NS_PER_S;
        assert_eq!(behind_sent(now - 300_000_000, now), 0);
        assert_eq!(behind_sent(now, now), 0);
        assert_eq!(behind_sent(now + 5, now), 5);
        let hour = 3600 * NS_PER_S;
        assert_eq!(behind_sent(now + hour, now), hour);
        assert_eq!(behind_sent(now - hour, now), -hour);
    }
}
