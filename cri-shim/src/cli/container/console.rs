//! `podvisor console`: the serial console of a machine, also of one whose guest hangs.

use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::thread;

use anyhow::{Context as _, ensure};
use clap::Args;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::{Containers, sweep};
use crate::cli::signals::{Signals, exit_code_of};
use crate::cli::terminal::{self, RawMode};
use crate::cli::{Globals, notice};
use crate::sandbox::{RefusalKind, SandboxClient};

#[derive(Debug, Args)]
pub(in crate::cli) struct ConsoleArgs {
    /// Keys that leave the console, with commas between several
    #[arg(long, value_name = "KEYS", default_value = "ctrl-]", value_parser = parse_keys)]
    detach_keys: Keys,

    /// Container or pod
    #[arg(value_name = "CONTAINER")]
    container: String,
}

/// What is typed to leave.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Keys(Vec<u8>);

/// Reads docker's form: `a`, `ctrl-a`, `ctrl-@`, `ctrl-[`, and the like, with commas between.
fn parse_keys(text: &str) -> Result<Keys, String> {
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
        .map(Keys)
        .ok_or_else(usage)
}

/// Finds the keys that leave among those that are typed.
#[derive(Debug)]
struct Escape<'a> {
    keys: &'a [u8],
    /// How many of them have been typed, and kept back.
    seen: usize,
}

impl Escape<'_> {
    /// What of the input is for the guest; the second is true when the user leaves.
    fn pass(&mut self, input: &[u8]) -> (Vec<u8>, bool) {
        let mut passed = Vec::with_capacity(input.len());
        for byte in input {
            if self.keys.get(self.seen) == Some(byte) {
                self.seen += 1;
                if self.seen == self.keys.len() {
                    return (passed, true);
                }
                continue;
            }
            passed.extend(self.keys.iter().take(self.seen));
            self.seen = 0;
            if self.keys.first() == Some(byte) {
                self.seen = 1;
            } else {
                passed.push(*byte);
            }
        }
        (passed, false)
    }
}

pub(in crate::cli) fn run(globals: &Globals, args: &ConsoleArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let runtime = crate::cli::runtime()?;
    let code = runtime.block_on(async {
        sweep(&containers).await?;
        let name = &args.container;
        let entry = match containers.find(name) {
            Ok(entry) => entry,
            Err(error) => containers.find_pod(name).map_err(|_| error)?,
        };
        let client = SandboxClient::connect(&entry.sandbox_dir())
            .await
            .with_context(|| format!("{name} is not running"))?;
        let console = match client.console().await {
            Err(error) if error.kind() == Some(RefusalKind::WrongState) => {
                return Err(anyhow::Error::from(error).context(format!(
                    "{name} has no console; `podvisor run --console pty` gives a machine one when it is made"
                )));
            }
            console => console?,
        };
        talk(console, &args.detach_keys).await
    });
    // A thread may sit in a read of stdin for ever.
    runtime.shutdown_background();
    code
}

async fn talk(console: OwnedFd, keys: &Keys) -> anyhow::Result<u8> {
    let console = StdUnixStream::from(console);
    console.set_nonblocking(true)?;
    let (mut output, mut input) = UnixStream::from_std(console)?.into_split();
    let mut signals = Signals::new()?;
    let is_terminal = terminal::is_terminal(io::stdin());
    if is_terminal {
        notice("connected to the console; Ctrl-] leaves it unless --detach-keys says otherwise");
    }
    let raw = is_terminal.then(RawMode::enter).transpose()?;
    let mut typed = keys_typed()?;
    let mut escape = Escape {
        keys: &keys.0,
        seen: 0,
    };
    let mut bytes = vec![0; 4096];
    let mut has_input = true;
    let code = loop {
        tokio::select! {
            count = output.read(&mut bytes) => match count {
                Ok(0) | Err(_) => break 0,
                Ok(count) => show(bytes.get(..count).unwrap_or_default())?,
            },
            keys = typed.recv(), if has_input => match keys {
                // Only a terminal's user leaves by keys: other input is the guest's as it is.
                Some(keys) if is_terminal => {
                    let (passed, leaves) = escape.pass(&keys);
                    ensure!(
                        passed.is_empty() || input.write_all(&passed).await.is_ok(),
                        "the console takes no input any more"
                    );
                    if leaves {
                        break 0;
                    }
                }
                Some(keys) => input.write_all(&keys).await.context("the console takes no input")?,
                None => has_input = false,
            },
            signal = signals.ending() => break exit_code_of(signal),
        }
    };
    drop(raw);
    if is_terminal {
        notice("left the console");
    }
    Ok(code)
}

/// What is typed, read by a thread of its own.
fn keys_typed() -> anyhow::Result<mpsc::Receiver<Vec<u8>>> {
    let (sender, typed) = mpsc::channel(16);
    let read = move || {
        let mut buffer = [0; 1024];
        let mut stdin = io::stdin().lock();
        while let Ok(count) = stdin.read(&mut buffer) {
            let keys = buffer.get(..count).unwrap_or_default().to_vec();
            if count == 0 || sender.blocking_send(keys).is_err() {
                return;
            }
        }
    };
    let thread = thread::Builder::new().name("keys".to_owned());
    thread.spawn(read).context("cannot read stdin")?;
    Ok(typed)
}

fn show(bytes: &[u8]) -> anyhow::Result<()> {
    let stdout = io::stdout();
    let mut rest = bytes;
    while !rest.is_empty() {
        match rustix::io::write(stdout.as_fd(), rest) {
            Ok(count) => rest = rest.get(count..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot write to stdout"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_docker_has_them() {
        assert_eq!(parse_keys("ctrl-]"), Ok(Keys(vec![0x1d])));
        assert_eq!(parse_keys("ctrl-p,ctrl-Q"), Ok(Keys(vec![0x10, 0x11])));
        assert_eq!(parse_keys("~,."), Ok(Keys(b"~.".to_vec())));
        for bad in ["", "ctrl-", "ctrl-1", "esc", "a,,b"] {
            assert!(parse_keys(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_keys_that_leave_are_found_and_others_pass() {
        let mut escape = Escape {
            keys: b"~.",
            seen: 0,
        };
        assert_eq!(escape.pass(b"ab"), (b"ab".to_vec(), false));
        assert_eq!(escape.pass(b"c~"), (b"c".to_vec(), false));
        assert_eq!(escape.pass(b"d~~"), (b"~d~".to_vec(), false));
        assert_eq!(escape.pass(b".x"), (Vec::new(), true));
    }
}
