//! Lines on the console, which is stdout.

use std::io::Write as _;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Bytes of a line: configurations of disks are quoted in some.
const LINE_BYTES: usize = 4096;

/// The time since the machine's start, as its clock has it.
pub(crate) fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// Writes a line; control characters, which a terminal would obey, as `?`.
pub(crate) fn say(text: &str) {
    let mut line = format!("podvisor-loader: {}", printable(text));
    line.push('\n');
    // A console that is gone is no reason to stop.
    let _ = std::io::stdout().lock().write_all(line.as_bytes());
}

fn printable(text: &str) -> String {
    let mut line = String::new();
    for letter in text.chars() {
        if line.len() >= LINE_BYTES {
            line.push('…');
            break;
        }
        line.push(if letter.is_control() { '?' } else { letter });
    }
    line
}

/// Waits until the terminal has sent all.
pub(crate) fn drain() {
    let _ = std::io::stdout().lock().flush();
    let _ = rustix::termios::tcdrain(rustix::stdio::stdout());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_line_of_bounded_length() {
        assert_eq!(printable("a\u{1b}[2Jb\nc\u{9b}"), "a?[2Jb?c?");
        assert_eq!(
            printable(&"x".repeat(10_000)).chars().count(),
            LINE_BYTES + 1
        );
    }
}
