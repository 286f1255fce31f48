//! A step's terminal output: one line at its start, one at its end with its duration, and on a
//! terminal a progress line in between. All on stderr: stdout is for results.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Prints an error and its causes, one per line.
pub(crate) fn error(error: &anyhow::Error) {
    eprintln!("error: {error}");
    for cause in error.chain().skip(1) {
        eprintln!("  because: {cause}");
    }
}

/// Prints a remark that is not an error.
pub(crate) fn note(text: &str) {
    eprintln!("note: {text}");
}

/// Formats a duration for people: `4.2 s`, `3 min 07 s`.
pub(crate) fn time(duration: Duration) -> String {
    let seconds = duration.as_secs();
    if seconds < 60 {
        format!("{:.1} s", duration.as_secs_f64())
    } else {
        format!("{} min {:02} s", seconds / 60, seconds % 60)
    }
}

/// A running step.
#[derive(Debug)]
pub(crate) struct Step {
    name: String,
    began: Instant,
    shown: Option<Instant>,
    terminal: bool,
}

impl Step {
    /// Starts and announces a step.
    pub(crate) fn begin(name: impl Into<String>) -> Self {
        let name = name.into();
        eprintln!("==> {name}");
        Self {
            name,
            began: Instant::now(),
            shown: None,
            terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Replaces the progress line, at most ten times a second; does nothing without a terminal.
    pub(crate) fn progress(&mut self, text: &str) {
        let due = self
            .shown
            .is_none_or(|at| at.elapsed() >= Duration::from_millis(100));
        if !self.terminal || !due {
            return;
        }
        self.shown = Some(Instant::now());
        let columns = rustix::termios::tcgetwinsize(rustix::stdio::stderr())
            .map_or(80, |size| usize::from(size.ws_col).max(20));
        let line = format!("    {} {text}", time(self.began.elapsed()));
        let line: String = line.chars().take(columns - 1).collect();
        eprint!("\r\x1b[2K{line}");
        let _ = std::io::stderr().flush();
    }

    fn clear(&mut self) {
        if self.shown.take().is_some() {
            eprint!("\r\x1b[2K");
        }
    }

    /// Reports that the step is done, and its duration.
    pub(crate) fn done(mut self) -> Duration {
        self.clear();
        let took = self.began.elapsed();
        eprintln!("    {}: {}", self.name, time(took));
        took
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        self.clear();
    }
}
