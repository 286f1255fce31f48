//! `stop`, `kill`, `pause`, `unpause`, `wait` and `rm`: several containers at once, each printed
//! as it was named when it is done.

use std::time::Duration;

use anyhow::bail;
use clap::Args;

use super::record::Record;
use super::state::{remove, running};
use super::{Containers, Entry, State, sweep};
use crate::cli::Globals;
use crate::sandbox::{RefusalKind, SandboxClient, SandboxError};
use crate::signal::parse as parse_signal;

const SIGKILL: u8 = 9;

#[derive(Debug, Args)]
pub(in crate::cli) struct StopArgs {
    /// Seconds until a program is killed that does not end
    #[arg(short = 't', long, value_name = "SECONDS", default_value = "10")]
    time: u32,

    /// Names or ids
    #[arg(value_name = "CONTAINER", required = true)]
    containers: Vec<String>,
}

#[derive(Debug, Args)]
pub(in crate::cli) struct KillArgs {
    /// Signal to send
    #[arg(short, long, value_name = "SIGNAL", default_value = "KILL", value_parser = parse_signal)]
    signal: u8,

    /// Names or ids
    #[arg(value_name = "CONTAINER", required = true)]
    containers: Vec<String>,
}

#[derive(Debug, Args)]
pub(in crate::cli) struct NamesArgs {
    /// Names or ids
    #[arg(value_name = "CONTAINER", required = true)]
    containers: Vec<String>,
}

#[derive(Debug, Args)]
pub(in crate::cli) struct RmArgs {
    /// Kill it first if it runs
    #[arg(short, long)]
    force: bool,

    /// Names or ids
    #[arg(value_name = "CONTAINER", required = true)]
    containers: Vec<String>,
}

/// Does `work` with each container; one failure is reported and the others are still tried.
fn each(
    globals: &Globals,
    names: &[String],
    work: impl AsyncFn(Entry) -> anyhow::Result<Option<String>>,
) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let mut code = 0;
        for name in names {
            let done = match containers.find(name) {
                Ok(entry) => work(entry).await,
                Err(error) => Err(error),
            };
            match done {
                Ok(said) => crate::cli::print(&format!("{}\n", said.as_ref().unwrap_or(name)))?,
                Err(error) => {
                    crate::cli::report(&error);
                    code = crate::cli::FAILURE;
                }
            }
        }
        Ok(code)
    })
}

/// A container that has ended by itself meanwhile is as good as stopped.
fn unless_gone(done: Result<(), SandboxError>) -> anyhow::Result<()> {
    match done {
        Err(error) if error.is_gone() || error.kind() == Some(RefusalKind::NotFound) => Ok(()),
        done => Ok(done?),
    }
}

/// Asks a container to end, kills it after `grace`, and returns when its sandbox is gone.
async fn end(
    client: &SandboxClient,
    record: &Record,
    signal: u8,
    grace: Duration,
) -> anyhow::Result<()> {
    unless_gone(
        client
            .stop_container(&record.id, signal.into(), grace)
            .await,
    )?;
    // The sandbox ends with its container.
    client.ended().await;
    Ok(())
}

pub(in crate::cli) fn stop(globals: &Globals, args: &StopArgs) -> anyhow::Result<u8> {
    let grace = Duration::from_secs(args.time.into());
    each(globals, &args.containers, async |entry| {
        if let State::Running { client, .. } = State::of(&entry).await? {
            end(&client, &entry.record, entry.record.stop_signal, grace).await?;
        }
        Ok(None)
    })
}

pub(in crate::cli) fn kill(globals: &Globals, args: &KillArgs) -> anyhow::Result<u8> {
    each(globals, &args.containers, async |entry| {
        let (client, _, is_paused) = running(&entry).await?;
        if args.signal == SIGKILL {
            end(&client, &entry.record, SIGKILL, Duration::ZERO).await?;
        } else if is_paused {
            bail!(
                "container {} is paused; `podvisor unpause` it first",
                entry.record.name
            );
        } else {
            client
                .signal(&entry.record.id, None, args.signal.into(), false)
                .await?;
        }
        Ok(None)
    })
}

pub(in crate::cli) fn pause(globals: &Globals, args: &NamesArgs) -> anyhow::Result<u8> {
    each(globals, &args.containers, async |entry| {
        running(&entry).await?.0.pause().await?;
        Ok(None)
    })
}

pub(in crate::cli) fn unpause(globals: &Globals, args: &NamesArgs) -> anyhow::Result<u8> {
    each(globals, &args.containers, async |entry| {
        running(&entry).await?.0.resume().await?;
        Ok(None)
    })
}

pub(in crate::cli) fn wait(globals: &Globals, args: &NamesArgs) -> anyhow::Result<u8> {
    each(globals, &args.containers, async |entry| {
        let mut state = State::of(&entry).await?;
        if let State::Running { client, .. } = &state {
            match client.wait(&entry.record.id, None).await {
                Ok(exit) => state = State::Exited(exit),
                Err(error) if error.is_gone() => state = State::of(&entry).await?,
                Err(error) => return Err(error.into()),
            }
        }
        match state.exit_code() {
            Some(code) => Ok(Some(code.to_string())),
            None => bail!("container {} does not run yet", entry.record.name),
        }
    })
}

pub(in crate::cli) fn rm(globals: &Globals, args: &RmArgs) -> anyhow::Result<u8> {
    each(globals, &args.containers, async |entry| {
        match State::of(&entry).await? {
            State::Running { client, .. } if args.force => {
                end(&client, &entry.record, SIGKILL, Duration::ZERO).await?;
            }
            state if !state.has_ended() && !args.force => bail!(
                "container {} is {}; `podvisor stop` it first, or give --force",
                entry.record.name,
                state.word()
            ),
            _ => {}
        }
        remove(&entry.dir).await?;
        Ok(None)
    })
}
