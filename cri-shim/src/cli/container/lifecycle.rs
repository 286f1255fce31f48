//! `stop`, `kill`, `pause`, `unpause`, `wait` and `rm`: several containers at once, each printed
//! as it was named when it is done.

use std::time::Duration;

use anyhow::{bail, ensure};
use clap::Args;
use tokio::time::timeout;

use super::events::{self, event};
use super::state::{remove, running, settle};
use super::{Containers, Entry, State, sweep};
use crate::cli::Globals;
use crate::sandbox::{EventAction, RefusalKind, SandboxClient, SandboxError};
use crate::signal::parse as parse_signal;

const SIGKILL: u8 = 9;

/// How long after its grace period a container may take to be gone whose guest works: it is killed,
/// its output written, its machine powered off.
const UNANSWERED: Duration = Duration::from_secs(60);

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

fn note(entry: &Entry, action: EventAction) {
    events::note(&entry.dir, &event(&entry.record, action));
}

/// A container that has ended by itself meanwhile is as good as stopped.
pub(super) fn unless_gone(done: Result<(), SandboxError>) -> anyhow::Result<()> {
    match done {
        Err(error) if error.is_gone() || error.kind() == Some(RefusalKind::NotFound) => Ok(()),
        done => Ok(done?),
    }
}

/// Asks a container to end, kills it after `grace`, and returns when its sandbox and what it had
/// of the host are gone.
pub(in crate::cli) async fn end(
    client: &SandboxClient,
    entry: &Entry,
    signal: u8,
    grace: Duration,
) -> anyhow::Result<()> {
    let id = &entry.record.id;
    unless_gone(client.stop_container(id, signal.into(), grace).await)?;
    // A sandbox of its own ends with its container.
    if timeout(grace + UNANSWERED, entry.ended(client))
        .await
        .is_err()
    {
        ensure!(
            entry.record.pod.is_none(),
            "container {} does not end: its guest does not answer; `podvisor pod rm -f` ends that",
            entry.record.name
        );
        crate::cli::notice("the guest does not answer, so its machine is killed");
        client.shutdown(Duration::ZERO).await?;
    }
    settle(entry).await;
    Ok(())
}

pub(in crate::cli) fn stop(globals: &Globals, args: &StopArgs) -> anyhow::Result<u8> {
    let grace = Duration::from_secs(args.time.into());
    each(globals, &args.containers, async |entry| {
        if let Some(client) = State::of(&entry).await?.client() {
            end(client, &entry, entry.record.stop_signal, grace).await?;
            note(&entry, EventAction::Stop);
        }
        Ok(None)
    })
}

pub(in crate::cli) fn kill(globals: &Globals, args: &KillArgs) -> anyhow::Result<u8> {
    each(globals, &args.containers, async |entry| {
        let state = State::of(&entry).await?;
        let killed = event(&entry.record, EventAction::Kill).with("signal", args.signal);
        if let (SIGKILL, Some(client)) = (args.signal, state.client()) {
            events::note(&entry.dir, &killed);
            end(client, &entry, SIGKILL, Duration::ZERO).await?;
            return Ok(None);
        }
        let (client, _, is_paused) = running(&entry).await?;
        if is_paused {
            bail!(
                "container {} is paused; `podvisor unpause` it first",
                entry.record.name
            );
        } else {
            if args.signal == entry.record.stop_signal {
                // It is asked to end, not to begin anew.
                client.end_restarts(&entry.record.id).await?;
            }
            events::note(&entry.dir, &killed);
            client
                .signal(&entry.record.id, None, args.signal.into(), false)
                .await?;
        }
        Ok(None)
    })
}

/// What stands still is the machine, and all that is in it.
fn ensure_own_machine(entry: &Entry) -> anyhow::Result<()> {
    match &entry.pod() {
        None => Ok(()),
        Some(pod) => bail!(
            "container {} shares its machine with the pod {}, which would stand still as a whole",
            entry.record.name,
            pod.record.name
        ),
    }
}

pub(in crate::cli) fn pause(globals: &Globals, args: &NamesArgs) -> anyhow::Result<u8> {
    each(globals, &args.containers, async |entry| {
        ensure_own_machine(&entry)?;
        running(&entry).await?.0.pause().await?;
        note(&entry, EventAction::Pause);
        Ok(None)
    })
}

pub(in crate::cli) fn unpause(globals: &Globals, args: &NamesArgs) -> anyhow::Result<u8> {
    each(globals, &args.containers, async |entry| {
        ensure_own_machine(&entry)?;
        running(&entry).await?.0.resume().await?;
        note(&entry, EventAction::Unpause);
        Ok(None)
    })
}

pub(in crate::cli) fn wait(globals: &Globals, args: &NamesArgs) -> anyhow::Result<u8> {
    each(globals, &args.containers, async |entry| {
        let mut state = State::of(&entry).await?;
        if let Some(client) = state.client() {
            match client.wait(&entry.record.id, None).await {
                Ok(exit) => return Ok(Some(exit.code.to_string())),
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
            State::Running { client, .. } | State::Restarting { client, .. } if args.force => {
                end(&client, &entry, SIGKILL, Duration::ZERO).await?;
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
