//! The guest's clock (`spec.domain.clock`).

use serde_json::Value;

use super::Domain;
use crate::{Causes, FieldPath, cause::shown};

object! {
    /// The clock's base and its timers.
    pub struct Clock {
        /// The clock is UTC.
        pub utc: Option<ClockUtc>,
        /// The clock is that of a time zone.
        pub timezone: Option<String>,
        /// Timers.
        pub timer: Option<TimerSet>,
    }

    /// An offset to UTC.
    pub struct ClockUtc {
        /// Seconds.
        pub offset_seconds: Option<i64>,
    }

    /// The timers of a machine.
    pub struct TimerSet {
        /// KVM's clock: what guests have.
        pub kvm: Option<Timer>,
        /// Refused unless it is off.
        pub hpet: Option<Timer>,
        /// Refused unless it is off.
        pub pit: Option<Timer>,
        /// Refused unless it is off.
        pub rtc: Option<Timer>,
        /// Refused unless it is off.
        pub hyperv: Option<Timer>,
    }

    /// A timer.
    pub struct Timer {
        /// Whether it is there; it is where nothing is said.
        pub present: Option<bool>,
        /// What happens to missed ticks.
        pub tick_policy: Option<String>,
        /// What the timer follows.
        pub track: Option<Value>,
    }
}

pub(super) fn apply_defaults(clock: Option<&mut Clock>) {
    let Some(timers) = clock.and_then(|clock| clock.timer.as_mut()) else {
        return;
    };
    let TimerSet {
        kvm,
        hpet,
        pit,
        rtc,
        hyperv,
    } = timers;
    for timer in [kvm, hpet, pit, rtc, hyperv].into_iter().flatten() {
        timer.present.get_or_insert(true);
    }
}

pub(super) fn validate(domain: &Domain, path: &FieldPath, causes: &mut Causes) {
    let Some(clock) = &domain.clock else { return };
    let path = path.child("clock");
    if clock.utc.is_some() && clock.timezone.is_some() {
        causes.invalid(&path, "must not have both utc and timezone");
    }
    if let Some(zone) = clock.timezone.as_deref().filter(|zone| !is_utc(zone)) {
        causes.not_supported(
            &path.child("timezone"),
            format_args!(
                "is {}, but the machine's clock can only be UTC",
                shown(zone)
            ),
        );
    }
    if clock
        .utc
        .as_ref()
        .is_some_and(|utc| utc.offset_seconds.unwrap_or(0) != 0)
    {
        causes.not_supported(&path.child("utc.offsetSeconds"), "must be 0");
    }
    let Some(timers) = &clock.timer else { return };
    let path = path.child("timer");
    let absent = [
        ("hpet", &timers.hpet),
        ("pit", &timers.pit),
        ("rtc", &timers.rtc),
        ("hyperv", &timers.hyperv),
    ];
    for (name, timer) in absent {
        if timer
            .as_ref()
            .is_some_and(|timer| timer.present != Some(false))
        {
            causes.not_supported(
                &path.child(name).child("present"),
                "must be false: guests have KVM's clock and no other timer",
            );
        }
    }
    if timers
        .kvm
        .as_ref()
        .is_some_and(|timer| timer.present == Some(false))
    {
        causes.not_supported(
            &path.child("kvm.present"),
            "must be true: guests have no other timer",
        );
    }
}

fn is_utc(zone: &str) -> bool {
    matches!(zone, "UTC" | "Etc/UTC" | "utc")
}
