//! Names of signals, as users and images write them.

/// The signal that no process can catch.
pub const SIGKILL: u8 = 9;

/// Linux' signals by number; names as in signal(7) without SIG.
const NAMES: [(&str, u8); 31] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("STKFLT", 16),
    ("CHLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("PWR", 30),
    ("SYS", 31),
];

/// Other names of some of them.
const ALIASES: [(&str, u8); 3] = [("IOT", 6), ("CLD", 17), ("POLL", 29)];

/// The first and the last real-time signal, as the C library counts them.
const REAL_TIME: (u8, u8) = (34, 64);

/// Reads `TERM`, `SIGTERM`, `RTMIN+3` or `15`.
pub fn parse(text: &str) -> Result<u8, String> {
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let mut known = NAMES.iter().chain(&ALIASES);
    if let Some((_, number)) = known.find(|(known, _)| *known == name) {
        return Ok(*number);
    }
    let (first, last) = REAL_TIME;
    let number = match (name.strip_prefix("RTMIN"), name.strip_prefix("RTMAX")) {
        (Some(""), _) => Some(first),
        (_, Some("")) => Some(last),
        (Some(more), _) => more
            .strip_prefix('+')
            .and_then(|n| first.checked_add(n.parse().ok()?)),
        (_, Some(less)) => less
            .strip_prefix('-')
            .and_then(|n| last.checked_sub(n.parse().ok()?)),
        (None, None) => name.parse().ok(),
    };
    let is_signal = |number: &u8| (1..=31).contains(number) || (first..=last).contains(number);
    number
        .filter(is_signal)
        .ok_or_else(|| format!("`{text}` is no signal; write a name such as TERM, or a number"))
}

/// Returns the name of a signal as docker writes it, `SIGTERM` or `SIGRTMIN+3`; the number of one
/// that has no name.
pub fn name(signal: u8) -> String {
    let named = NAMES.iter().find(|(_, number)| *number == signal);
    let (first, last) = REAL_TIME;
    match (named, signal.checked_sub(first)) {
        (Some((name, _)), _) => format!("SIG{name}"),
        (None, Some(0)) => "SIGRTMIN".to_owned(),
        (None, Some(more)) if signal <= last => format!("SIGRTMIN+{more}"),
        (None, _) => signal.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_shown_by_a_name_that_is_read_again() {
        for (number, shown) in [(15, "SIGTERM"), (34, "SIGRTMIN"), (37, "SIGRTMIN+3")] {
            assert_eq!(name(number), shown);
        }
        for number in (1..=31).chain(34..=64) {
            assert_eq!(parse(&name(number)), Ok(number));
        }
        assert_eq!(name(32), "32");
    }

    #[test]
    fn signals_have_names_and_numbers() {
        for (text, number) in [
            ("TERM", 15),
            ("SIGKILL", 9),
            ("SIGPOLL", 29),
            ("sighup", 1),
            ("10", 10),
            ("RTMIN", 34),
            ("SIGRTMIN+3", 37),
            ("RTMAX-1", 63),
            ("quit", 3),
            ("9", 9),
            ("RTMAX", 64),
            ("SIGRTMAX-1", 63),
        ] {
            assert_eq!(parse(text), Ok(number), "{text}");
        }
        for bad in [
            "",
            "SIG",
            "0",
            "32",
            "65",
            "-1",
            "RTMIN+31",
            "RTMAX-300",
            "FOO",
            "SIGNO",
            "RTMIN+99",
            "RTMAX+1",
            "RTMINx",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
