//! Writes the agent's own `tracing` events to the kernel's log.
//!
//! /dev/kmsg is bounded (a ring) and rate-limited per writer by the kernel, so no event, and no
//! container that provokes events, can fill the guest's memory. The host sees the log on the serial
//! console if that is enabled. `PODVISOR_AGENT_LOG=debug` on the kernel command line, which the
//! kernel passes to PID 1 as an environment variable, shows more.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing::field::{Field, Visit};
use tracing::span;
use tracing::{Event, Level, Metadata, Subscriber};

/// The kernel truncates longer records.
const MAX_LINE: usize = 900;

/// The environment variable that sets the most detailed level shown.
pub(crate) const LEVEL_VARIABLE: &str = "PODVISOR_AGENT_LOG";

struct Kmsg {
    sink: Option<File>,
    level: Level,
    next_span: AtomicU64,
}

/// Sends this process's events to /dev/kmsg, or to standard error if that cannot be opened. Only
/// the first call has an effect.
pub(crate) fn init() {
    let sink = File::options().write(true).open("/dev/kmsg").ok();
    let level = std::env::var(LEVEL_VARIABLE)
        .ok()
        .and_then(|v| v.parse().ok());
    let subscriber = Kmsg {
        sink,
        level: level.unwrap_or(Level::INFO),
        next_span: AtomicU64::new(1),
    };
    // An error means that a subscriber is already set, which is fine.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Writes one line without `tracing`, for a process that is about to end.
pub(crate) fn emergency(message: &str) {
    let line = bounded(format!("<2>podvisor-agent: {message}"));
    let written = File::options()
        .write(true)
        .open("/dev/kmsg")
        .and_then(|mut kmsg| kmsg.write_all(line.as_bytes()));
    if written.is_err() {
        eprintln!("{line}");
    }
}

/// Truncates a line and removes newlines, which would forge records of other facilities.
fn bounded(mut line: String) -> String {
    if line.len() > MAX_LINE {
        line.truncate(line.floor_char_boundary(MAX_LINE));
    }
    if line.contains(char::is_control) {
        line = line.replace(char::is_control, " ");
    }
    line
}

impl Subscriber for Kmsg {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // A library's warnings are details here, and there are many.
        let detail = !metadata.target().starts_with("podvisor") && *metadata.level() == Level::WARN;
        let level = if detail {
            Level::DEBUG
        } else {
            *metadata.level()
        };
        metadata.is_event() && level <= self.level
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        // Ids have to be unique and not zero.
        span::Id::from_u64(self.next_span.fetch_add(1, Ordering::Relaxed).max(1))
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let target = event.metadata().target();
        let priority = match *event.metadata().level() {
            // A library's failure is reported to the host, which decides how severe it is: a
            // command that does not exist must not disturb a quiet console.
            Level::ERROR if !target.starts_with("podvisor") => 6,
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        let mut line = format!("<{priority}>{target}:");
        event.record(&mut Line(&mut line));
        let line = bounded(line);
        match &self.sink {
            // A full or rate-limited log drops the record; there is no other place to report that.
            Some(kmsg) => drop((&mut &*kmsg).write_all(line.as_bytes())),
            None => eprintln!("{line}"),
        }
    }
}

/// Collects an event's fields as ` message key=value …`.
struct Line<'a>(&'a mut String);

impl Visit for Line<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String does not fail.
        let _ = if field.name() == "message" {
            write!(self.0, " {value:?}")
        } else {
            write!(self.0, " {}={value:?}", field.name())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_record_is_one_line_of_bounded_length(text in "(?s).{0,2000}") {
            let line = bounded(text);
            prop_assert!(line.len() <= MAX_LINE);
            prop_assert!(!line.contains('\n'));
        }
    }
}
