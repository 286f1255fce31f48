//! Signal numbers of the API, which are not Linux'.

use crate::signal;

/// No signal is requested.
const RUNTIME_DEFAULT: i32 = 0;

/// Names of the API's signals, from number 1 on.
const NAMES: [&str; 34] = [
    "ABRT", "ALRM", "BUS", "CHLD", "CLD", "CONT", "FPE", "HUP", "ILL", "INT", "IO", "IOT", "KILL",
    "PIPE", "POLL", "PROF", "PWR", "QUIT", "SEGV", "STKFLT", "STOP", "SYS", "TERM", "TRAP", "TSTP",
    "TTIN", "TTOU", "URG", "USR1", "USR2", "VTALRM", "WINCH", "XCPU", "XFSZ",
];

/// RTMIN to RTMAX in the API; Linux' numbers are one less, as the C library counts them.
const REAL_TIME: std::ops::RangeInclusive<i32> = 35..=65;

/// Returns Linux' number of a signal of the API; `None` for the runtime's default.
///
/// # Errors
///
/// If the API has no such signal.
pub(super) fn from_cri(signal: i32) -> Result<Option<u32>, String> {
    if signal == RUNTIME_DEFAULT {
        return Ok(None);
    }
    let unknown = || format!("there is no signal {signal}");
    if REAL_TIME.contains(&signal) {
        return Ok(u32::try_from(signal - 1).ok());
    }
    let index = usize::try_from(signal)
        .ok()
        .and_then(|number| number.checked_sub(1));
    let name = index
        .and_then(|index| NAMES.get(index))
        .ok_or_else(unknown)?;
    signal::parse(name).map(|number| Some(number.into()))
}

/// Returns the API's number of a Linux signal.
pub(super) fn to_cri(number: u32) -> i32 {
    let all = (1..).take(NAMES.len()).chain(REAL_TIME);
    let is_it = |signal: &i32| from_cri(*signal) == Ok(Some(number));
    all.into_iter().find(is_it).unwrap_or(RUNTIME_DEFAULT)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn signals_are_counted_as_in_the_interface() {
        for (signal, number) in [
            (0, None),
            (1, Some(6)),
            (4, Some(17)),
            (5, Some(17)),
            (15, Some(29)),
            (23, Some(15)),
            (29, Some(10)),
            (34, Some(25)),
            (35, Some(34)),
            (50, Some(49)),
            (51, Some(50)),
            (65, Some(64)),
        ] {
            assert_eq!(from_cri(signal), Ok(number), "{signal}");
        }
        assert_eq!(from_cri(66).unwrap_err(), "there is no signal 66");
        assert_eq!(to_cri(15), 23);
        assert_eq!(to_cri(17), 4);
        assert_eq!(to_cri(64), 65);
        assert_eq!(to_cri(32), RUNTIME_DEFAULT);
    }

    #[test]
    fn every_signal_of_linux_has_a_number_there() {
        for number in (1..=31).chain(34..=64) {
            assert_eq!(from_cri(to_cri(number)), Ok(Some(number)), "{number}");
        }
    }

    proptest! {
        #[test]
        fn any_number_is_taken_or_refused(signal: i32, number: u32) {
            let _ = from_cri(signal);
            let _ = to_cri(number);
        }
    }
}
