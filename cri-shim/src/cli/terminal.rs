//! The user's terminal: raw mode with guaranteed restoration, its size, and logs that stay readable
//! in raw mode.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::panic;
use std::sync::{Mutex, PoisonError};

use anyhow::Context as _;
use rustix::termios::{self, OptionalActions, Termios};

use crate::sandbox::TerminalSize;

/// The terminal in raw mode, and its previous settings. Outside of `RawMode` so that a panic on any
/// thread can restore it.
static RAW: Mutex<Option<(OwnedFd, Termios)>> = Mutex::new(None);

/// Returns whether `file` is a terminal.
pub(super) fn is_terminal(file: impl AsFd) -> bool {
    termios::isatty(file)
}

/// Returns the size of the first of stdout and stdin that is a terminal and knows its size.
pub(super) fn size() -> Option<TerminalSize> {
    let size = |file: rustix::fd::BorrowedFd<'_>| termios::tcgetwinsize(file).ok();
    let known = |size: &termios::Winsize| size.ws_row != 0 && size.ws_col != 0;
    let size = size(io::stdout().as_fd())
        .filter(known)
        .or_else(|| size(io::stdin().as_fd()).filter(known))?;
    Some(TerminalSize {
        rows: size.ws_row,
        columns: size.ws_col,
    })
}

/// Returns the size, or the default of a terminal that does not know its size.
pub(super) fn size_or_usual() -> TerminalSize {
    size().unwrap_or(TerminalSize {
        rows: 24,
        columns: 80,
    })
}

/// While this exists, every key is passed to the program unchanged, and nothing is echoed.
#[derive(Debug)]
pub(super) struct RawMode(());

impl RawMode {
    /// Sets the terminal on stdin to raw mode.
    pub(super) fn enter() -> anyhow::Result<Self> {
        let stdin = io::stdin();
        let before = termios::tcgetattr(&stdin).context("cannot read the terminal's settings")?;
        let file = stdin
            .as_fd()
            .try_clone_to_owned()
            .context("cannot keep the terminal open")?;
        let mut raw = before.clone();
        raw.make_raw();
        *lock() = Some((file, before));
        // From here on, dropping the guard restores the settings.
        let guard = Self(());
        termios::tcsetattr(&stdin, OptionalActions::Drain, &raw)
            .context("cannot make the terminal raw")?;
        Ok(guard)
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

fn lock() -> std::sync::MutexGuard<'static, Option<(OwnedFd, Termios)>> {
    RAW.lock().unwrap_or_else(PoisonError::into_inner)
}

fn restore() {
    if let Some((file, before)) = lock().take() {
        // A closed terminal needs no restoring.
        let _ = termios::tcsetattr(&file, OptionalActions::Now, &before);
    }
}

/// Installs a panic hook that restores the terminal and prints the panic in one line.
pub(super) fn restore_on_panic() {
    panic::set_hook(Box::new(|info| {
        restore();
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        let what = info.payload_as_str().unwrap_or("no message");
        let _ = writeln!(
            io::stderr(),
            "podvisor: this is a bug in podvisor, please report it: {what} ({place})"
        );
    }));
}

/// Writes logs to stderr, with the carriage returns that a raw terminal needs.
#[derive(Debug, Default)]
pub(super) struct LogWriter(());

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let is_raw = lock().is_some();
        let mut stderr = io::stderr().lock();
        if is_raw {
            for line in bytes.split_inclusive(|byte| *byte == b'\n') {
                match line.strip_suffix(b"\n") {
                    Some(line) => {
                        stderr.write_all(line)?;
                        stderr.write_all(b"\r\n")?;
                    }
                    None => stderr.write_all(line)?,
                }
            }
        } else {
            stderr.write_all(bytes)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
