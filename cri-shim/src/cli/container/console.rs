//! `podvisor console`: the serial console of a machine, also of one whose guest hangs.

use std::io::{self, Read as _};
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::thread;

use anyhow::{Context as _, ensure};
use clap::Args;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::{Containers, sweep};
use crate::cli::keys::{Escape, Keys, parse as parse_keys};
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
    let mut escape = Escape::new(keys.clone());
    let mut bytes = vec![0; 4096];
    let mut has_input = true;
    let code = loop {
        tokio::select! {
            count = output.read(&mut bytes) => match count {
                Ok(0) | Err(_) => break 0,
                Ok(count) => {
                    if show(bytes.get(..count).unwrap_or_default())?.is_break() {
                        break 0;
                    }
                }
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

/// Writes what the console says. A reader that has gone away is the end of it.
fn show(bytes: &[u8]) -> anyhow::Result<ControlFlow<()>> {
    let stdout = io::stdout();
    let mut rest = bytes;
    while !rest.is_empty() {
        match rustix::io::write(stdout.as_fd(), rest) {
            Ok(count) => rest = rest.get(count..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::PIPE) => return Ok(ControlFlow::Break(())),
            Err(error) => return Err(error).context("cannot write to stdout"),
        }
    }
    Ok(ControlFlow::Continue(()))
}
