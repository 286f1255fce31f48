//! The keys by which a user detaches from a program on a terminal; the program continues.

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{IntoRawFd as _, OwnedFd};
use std::sync::Arc;
use std::thread;

use anyhow::Context as _;
use clap::Args;
use tokio::sync::Notify;

use super::input::Stdin;

/// Bytes per read.
const READ_SIZE: usize = 1024;

#[derive(Debug, Clone, Args)]
pub(super) struct DetachArgs {
    /// Keys that leave a program on a terminal, with commas between several; it goes on. '' for
    /// none: all keys are the program's
    #[arg(long, value_name = "KEYS", default_value = "ctrl-p,ctrl-q")]
    #[arg(value_parser = parse_or_none)]
    pub(super) detach_keys: DetachKeys,
}

/// The key sequence to detach; if empty, keys never detach.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct DetachKeys(Vec<u8>);

/// Shows the keys as [`parse`] reads them.
impl fmt::Display for DetachKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, byte) in self.0.iter().enumerate() {
            f.write_str(if place > 0 { "," } else { "" })?;
            match byte {
                0..0x20 => write!(f, "ctrl-{}", char::from(byte | 0x40).to_ascii_lowercase())?,
                byte => write!(f, "{}", char::from(*byte))?,
            }
        }
        Ok(())
    }
}

/// Parses the keys as [`parse`] does, or an empty text for none.
fn parse_or_none(text: &str) -> Result<DetachKeys, String> {
    match text {
        "" => Ok(DetachKeys::default()),
        keys => parse(keys).map_err(|error| format!("{error}, or '' to never detach")),
    }
}

/// Parses docker's format: `a`, `ctrl-a`, `ctrl-@`, `ctrl-[`, and the like, separated by commas.
pub(super) fn parse(text: &str) -> Result<DetachKeys, String> {
    let key = |key: &str| match key.as_bytes() {
        [byte] => Some(*byte),
        [b'c', b't', b'r', b'l', b'-', byte] => match byte.to_ascii_uppercase() {
            upper @ b'@'..=b'_' => Some(upper & 0x1f),
            _ => None,
        },
        _ => None,
    };
    let keys: Option<Vec<u8>> = text.split(',').map(key).collect();
    let usage = || "write keys such as ctrl-] or ctrl-p,ctrl-q".to_owned();
    keys.filter(|keys| !keys.is_empty())
        .map(DetachKeys)
        .ok_or_else(usage)
}

/// Finds the detach keys in the input.
#[derive(Debug)]
pub(super) struct DetachDetector {
    keys: DetachKeys,
    /// How many of them have been typed, and are held back.
    seen: usize,
}

impl DetachDetector {
    pub(super) fn new(keys: DetachKeys) -> Self {
        Self { keys, seen: 0 }
    }

    /// Returns the part of the input for the guest, and whether the user detaches.
    pub(super) fn pass(&mut self, input: &[u8]) -> (Vec<u8>, bool) {
        let mut passed = Vec::with_capacity(input.len());
        for byte in input {
            if self.keys.0.get(self.seen) == Some(byte) {
                self.seen += 1;
                if self.seen == self.keys.0.len() {
                    return (passed, true);
                }
                continue;
            }
            passed.extend(self.keys.0.iter().take(self.seen));
            self.seen = 0;
            if self.keys.0.first() == Some(byte) {
                self.seen = 1;
            } else {
                passed.push(*byte);
            }
        }
        (passed, false)
    }
}

/// Notifications of a raw terminal on stdin.
#[derive(Debug, Default)]
pub(super) struct TerminalEvents {
    /// The user detaches.
    pub(super) left: Notify,
    /// The terminal was closed.
    pub(super) hung_up: Notify,
}

/// Reads this process's stdin, a raw terminal, on a thread of its own, and forwards it without the
/// detach keys. Returns the program's input, which is not closed when the user detaches, and when
/// the terminal is closed only if the program `ends` with it.
pub(super) fn watched_stdin(
    keys: DetachKeys,
    ends: bool,
) -> anyhow::Result<(OwnedFd, Arc<TerminalEvents>)> {
    let (passed, mut writer) = io::pipe().context("cannot create a pipe for what is typed")?;
    let events = Arc::new(TerminalEvents::default());
    let told = Arc::clone(&events);
    let pass = move || {
        let mut escape = DetachDetector::new(keys);
        let mut buffer = [0; READ_SIZE];
        let event = loop {
            // The end of input is a character where a terminal is raw.
            let count = match Stdin.read(&mut buffer) {
                Ok(0) | Err(_) if ends => return told.hung_up.notify_one(),
                Ok(0) | Err(_) => break &told.hung_up,
                Ok(count) => count,
            };
            let (passed, has_left) = escape.pass(buffer.get(..count).unwrap_or_default());
            if writer.write_all(&passed).is_err() {
                return;
            }
            if has_left {
                break &told.left;
            }
        };
        // It stays open until this process exits: the program would take a closed input for its
        // end.
        let _ = OwnedFd::from(writer).into_raw_fd();
        event.notify_one();
    };
    let thread = thread::Builder::new().name("keys".to_owned());
    thread.spawn(pass).context("cannot read stdin")?;
    Ok((passed.into(), events))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_docker_has_them() {
        assert_eq!(parse("ctrl-]"), Ok(DetachKeys(vec![0x1d])));
        assert_eq!(parse("ctrl-p,ctrl-Q"), Ok(DetachKeys(vec![0x10, 0x11])));
        assert_eq!(parse("~,."), Ok(DetachKeys(b"~.".to_vec())));
        for shown in ["ctrl-]", "ctrl-p,ctrl-q", "ctrl-@,a", "~,."] {
            assert_eq!(parse(shown).unwrap().to_string(), shown);
        }
        for bad in ["", "ctrl-", "ctrl-1", "esc", "a,,b"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_keys_that_leave_are_found_and_others_pass() {
        let mut escape = DetachDetector::new(DetachKeys(b"~.".to_vec()));
        assert_eq!(escape.pass(b"ab"), (b"ab".to_vec(), false));
        assert_eq!(escape.pass(b"c~"), (b"c".to_vec(), false));
        assert_eq!(escape.pass(b"d~~"), (b"~d~".to_vec(), false));
        assert_eq!(escape.pass(b".x"), (Vec::new(), true));
    }

    #[test]
    fn without_keys_all_input_is_the_programs() {
        let keys = parse_or_none("").unwrap();
        let mut escape = DetachDetector::new(keys);
        let all: Vec<u8> = (0..=u8::MAX).collect();
        assert_eq!(escape.pass(&all), (all.clone(), false));
        assert_eq!(escape.pass(b"\x10\x11"), (b"\x10\x11".to_vec(), false));
        assert_eq!(parse_or_none("ctrl-]"), parse("ctrl-]"));
        assert!(parse_or_none(",").unwrap_err().contains("never detach"));
    }

    #[test]
    fn a_program_may_be_without_detach_keys_but_a_console_not() {
        use clap::Parser as _;
        let parsed = |line: &[&str]| crate::cli::Cli::try_parse_from(line).map(drop);
        for line in [
            ["podvisor", "run", "--detach-keys", "", "box"].as_slice(),
            &["podvisor", "exec", "--detach-keys=", "one", "sh"],
            &["podvisor", "attach", "--detach-keys", "", "one"],
        ] {
            assert!(parsed(line).is_ok(), "{line:?}");
        }
        assert!(parsed(&["podvisor", "console", "--detach-keys", "", "one"]).is_err());
    }
}
