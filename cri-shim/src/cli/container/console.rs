//! `podvisor console`: connects to the serial console of a machine, even if its guest hangs.

use std::collections::VecDeque;
use std::io::{self, Read as _};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::thread;

use anyhow::Context as _;
use clap::Args;
use rustix::net::{SendFlags, send};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;

use super::{Containers, sweep};
use crate::cli::input::Stdin;
use crate::cli::keys::{DetachDetector, DetachKeys, parse as parse_keys};
use crate::cli::output::write_on;
use crate::cli::signals::{Signals, exit_code_of};
use crate::cli::terminal::{self, RawMode};
use crate::cli::{Globals, notice};
use crate::sandbox::{RefusalKind, SandboxClient};
use crate::streaming::ForeignStream;

/// Maximum number of typed bytes that wait for the guest: the length of a terminal's line.
const MAX_PENDING_INPUT: usize = 4096;

#[derive(Debug, Args)]
pub(in crate::cli) struct ConsoleArgs {
    /// Keys that leave the console, with commas between several
    #[arg(long, value_name = "KEYS", default_value = "ctrl-]", value_parser = parse_keys)]
    detach_keys: DetachKeys,

    /// Container or pod
    #[arg(value_name = "CONTAINER")]
    container: String,
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
    // A thread may be blocked in a read of stdin forever.
    runtime.shutdown_background();
    code
}

async fn talk(console: OwnedFd, keys: &DetachKeys) -> anyhow::Result<u8> {
    let mut signals = Signals::new()?;
    let is_terminal = terminal::is_terminal(io::stdin());
    if is_terminal {
        notice(&format!("connected to the console; {keys} leaves it"));
    }
    let raw = is_terminal.then(RawMode::enter).transpose()?;
    // Keys detach only on a terminal: other input is passed to the guest unchanged.
    let escape = is_terminal.then(|| DetachDetector::new(keys.clone()));
    let connected = connect(console, keys_typed()?, escape, write_on);
    let code = tokio::select! {
        left = connected => left.map(|()| 0)?,
        signal = signals.ending() => exit_code_of(signal),
    };
    drop(raw);
    if is_terminal {
        notice("left the console");
    }
    Ok(code)
}

/// Forwards input and console output until the user detaches or either side ends.
async fn connect(
    console: OwnedFd,
    mut typed: mpsc::Receiver<Vec<u8>>,
    mut escape: Option<DetachDetector>,
    mut show: impl FnMut(&[u8]) -> anyhow::Result<ControlFlow<()>>,
) -> anyhow::Result<()> {
    // The machine's process may have this end open, too, and make it block: it is no reason to wait
    // for a guest.
    let at_once = console.try_clone()?;
    let (mut output, mut input) = ForeignStream::new(console)?.into_split();
    let mut bytes = vec![0; 4096];
    let mut has_input = true;
    // Input that the guest has not read yet. The user can leave even if the guest hangs.
    let mut waiting = VecDeque::new();
    loop {
        let takes_keys = has_input && (escape.is_some() || waiting.is_empty());
        tokio::select! {
            count = output.read(&mut bytes) => match count {
                Ok(0) | Err(_) => return Ok(()),
                Ok(count) => {
                    if show(bytes.get(..count).unwrap_or_default())?.is_break() {
                        return Ok(());
                    }
                }
            },
            keys = typed.recv(), if takes_keys => match (keys, &mut escape) {
                (Some(keys), Some(escape)) => {
                    let (passed, leaves) = escape.pass(&keys);
                    // As on a serial line, input without room is lost.
                    let room = MAX_PENDING_INPUT.saturating_sub(waiting.len());
                    waiting.extend(passed.into_iter().take(room));
                    if leaves {
                        // Typed before the keys: written if that is possible without waiting.
                        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                        let _ = send(&at_once, waiting.make_contiguous(), flags);
                        return Ok(());
                    }
                }
                (Some(keys), None) => waiting.extend(keys),
                (None, _) => has_input = false,
            },
            count = input.write(waiting.as_slices().0), if !waiting.is_empty() => {
                waiting.drain(..count.context("the console takes no input any more")?);
            }
        }
    }
}

/// Reads the input on a thread of its own.
fn keys_typed() -> anyhow::Result<mpsc::Receiver<Vec<u8>>> {
    let (sender, typed) = mpsc::channel(16);
    let read = move || {
        let mut buffer = [0; 1024];
        while let Ok(count) = Stdin.read(&mut buffer) {
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    fn to_nobody(_: &[u8]) -> anyhow::Result<ControlFlow<()>> {
        Ok(ControlFlow::Continue(()))
    }

    #[tokio::test]
    async fn a_guest_that_takes_nothing_keeps_nobody_from_leaving() {
        let (ours, mut guest) = UnixStream::pair().unwrap();
        let (keys, typed) = mpsc::channel(16);
        let escape = Some(DetachDetector::new(parse_keys("ctrl-]").unwrap()));
        let types = async {
            for _ in 0..1000 {
                keys.send(vec![b'x'; 1024]).await.unwrap();
            }
            keys.send(b"yz\x1d".to_vec()).await.unwrap();
        };
        let (left, ()) = tokio::join!(connect(ours.into(), typed, escape, to_nobody), types);
        left.unwrap();
        let mut taken = Vec::new();
        guest.read_to_end(&mut taken).unwrap();
        assert!(taken.starts_with(&[b'x'; MAX_PENDING_INPUT]));
    }

    #[tokio::test]
    async fn what_is_typed_before_the_keys_that_leave_is_the_guests() {
        let (ours, mut guest) = UnixStream::pair().unwrap();
        let (keys, typed) = mpsc::channel(1);
        let escape = Some(DetachDetector::new(parse_keys("ctrl-]").unwrap()));
        keys.send(b"reboot\r\x1dx".to_vec()).await.unwrap();
        let left = connect(ours.into(), typed, escape, to_nobody).await;
        left.unwrap();
        let mut taken = String::new();
        guest.read_to_string(&mut taken).unwrap();
        assert_eq!(taken, "reboot\r");
    }

    #[test]
    fn a_machine_that_makes_the_console_block_keeps_nobody_from_leaving() {
        let (ours, guest) = UnixStream::pair().unwrap();
        // As the machine's process may keep one.
        let held = ours.try_clone().unwrap();
        let (done, left) = std::sync::mpsc::channel();
        // A call that blocks fails the test instead of holding it up.
        thread::spawn(move || {
            let runtime = crate::cli::runtime().unwrap();
            let connected = runtime.block_on(async {
                let (keys, typed) = mpsc::channel(16);
                let escape = Some(DetachDetector::new(parse_keys("ctrl-]").unwrap()));
                let types = async {
                    keys.send(b"x".to_vec()).await.unwrap();
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    held.set_nonblocking(false).unwrap();
                    for _ in 0..1000 {
                        keys.send(vec![b'x'; 1024]).await.unwrap();
                    }
                    keys.send(b"yz\x1d".to_vec()).await.unwrap();
                };
                tokio::join!(connect(ours.into(), typed, escape, to_nobody), types).0
            });
            let flags = rustix::fs::fcntl_getfl(&held).unwrap();
            done.send((connected, flags)).unwrap();
        });
        let (connected, flags) = left.recv_timeout(Duration::from_secs(20)).unwrap();
        connected.unwrap();
        assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
        drop(guest);
    }

    #[tokio::test]
    async fn a_pipe_loses_nothing_to_a_guest_that_is_slow() {
        let (ours, mut guest) = UnixStream::pair().unwrap();
        let (keys, typed) = mpsc::channel(1);
        let input: Vec<u8> = (0..=u8::MAX).cycle().take(1 << 20).collect();
        let sent = input.clone();
        let pipe = async {
            for chunk in sent.chunks(1024) {
                keys.send(chunk.to_vec()).await.unwrap();
            }
            drop(keys);
        };
        let takes = tokio::task::spawn_blocking(move || {
            let mut taken = vec![0; input.len()];
            guest.read_exact(&mut taken).unwrap();
            assert!(taken == input, "bytes are lost");
        });
        let passes = connect(ours.into(), typed, None, to_nobody);
        let (passed, (), taken) = tokio::join!(passes, pipe, takes);
        passed.unwrap();
        taken.unwrap();
    }
}
