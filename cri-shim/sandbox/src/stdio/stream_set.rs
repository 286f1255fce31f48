//! Which standard streams a process has.

use crate::types::StdioFds;

/// The standard streams that a process has; the others are `/dev/null`. On a terminal, stdin and
/// stderr are part of stdout's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamSet {
    /// Input may be written to it. A terminal without it gets no keys.
    pub stdin: bool,
    /// Its stdout is read.
    pub stdout: bool,
    /// Its stderr is read.
    pub stderr: bool,
}

impl StreamSet {
    /// The streams of `files`.
    #[must_use]
    pub fn of(files: &StdioFds) -> Self {
        Self {
            stdin: files.stdin.is_some(),
            stdout: files.stdout.is_some(),
            stderr: files.stderr.is_some(),
        }
    }
}
