//! `stop`, `kill`, `pause`, `unpause`, `wait` and `rm`: several containers concurrently; each name
//! is printed as it was given when it is done.

use std::time::Duration;

use anyhow::{anyhow, bail, ensure};
use clap::Args;
use futures_util::{StreamExt as _, stream};
use tokio::time::timeout;

use super::clear::{release_resources, remove};
use super::events::{self, event};
use super::state::{running, unresponsive};
use super::{Containers, Entry, State, sweep};
use crate::cli::Globals;
use crate::cli::signals::exit_code_of;
use crate::sandbox::{EventAction, ProcessExit, RefusalKind, SandboxClient, SandboxExit};
use crate::signal::{SIGKILL, parse as parse_signal};

/// Default seconds that a program has to end, as in docker.
const STOP_TIMEOUT: u32 = 10;

/// Returns whether a machine ended unexpectedly.
pub(in crate::cli) fn has_failed(machine: &SandboxExit) -> bool {
    !matches!(machine, SandboxExit::PoweredOff | SandboxExit::Killed)
}

/// Returns whether a program was killed for another reason than its memory usage.
pub(in crate::cli) fn is_killed(program: &ProcessExit) -> bool {
    program.code == i32::from(exit_code_of(SIGKILL)) && !program.oom_killed
}

/// How long after its grace period a container of a working guest may take until it is gone:
/// killed, its output written, its machine powered off.
const STOP_MARGIN: Duration = Duration::from_secs(60);

/// How long after its program a machine may take to end so that both are reported together.
const MACHINE_EXIT_WAIT: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(in crate::cli) struct StopArgs {
    /// Seconds to wait before killing the program [default: of `run --stop-timeout`, or
    /// 10]
    #[arg(short = 't', long, visible_alias = "timeout", value_name = "SECONDS")]
    time: Option<u32>,

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

impl NamesArgs {
    pub(in crate::cli) fn names(&self) -> &[String] {
        &self.containers
    }
}

#[derive(Debug, Args)]
pub(in crate::cli) struct RmArgs {
    /// Kill it first if it runs
    #[arg(short, long)]
    force: bool,

    /// Accepted and ignored: there are no anonymous volumes
    #[arg(short, long)]
    volumes: bool,

    /// Names or ids
    #[arg(value_name = "CONTAINER", required = true)]
    containers: Vec<String>,
}

/// Runs `work` for each container; it returns what to print.
fn each(
    globals: &Globals,
    names: &[String],
    work: impl AsyncFn(Entry) -> anyhow::Result<Option<String>>,
) -> anyhow::Result<u8> {
    each_name(globals, names, async |containers, name| {
        let said = work(containers.find(name)?).await?;
        Ok(Some(said.unwrap_or_else(|| name.to_owned())))
    })
}

/// Runs `work` for each name; it returns what to print. A failure is reported, and the others are
/// still tried.
pub(in crate::cli) fn each_name(
    globals: &Globals,
    names: &[String],
    work: impl AsyncFn(&Containers, &str) -> anyhow::Result<Option<String>>,
) -> anyhow::Result<u8> {
    let containers = globals.containers()?;
    crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let works = names.iter().map(async |name| work(&containers, name).await);
        at_once(works.collect()).await
    })
}

/// Runs all concurrently, as each may take its grace period, and reports them in order.
pub(in crate::cli) async fn at_once(
    works: Vec<impl Future<Output = anyhow::Result<Option<String>>>>,
) -> anyhow::Result<u8> {
    let mut code = 0;
    let count = works.len().max(1);
    let mut works = stream::iter(works).buffered(count);
    while let Some(done) = works.next().await {
        match done {
            Ok(Some(said)) => crate::cli::print(&format!("{said}\n"))?,
            Ok(None) => {}
            Err(error) => {
                crate::cli::report(&error);
                code = crate::cli::FAILURE;
            }
        }
    }
    Ok(code)
}

fn note(entry: &Entry, action: EventAction) {
    events::note(&entry.dir, &event(&entry.record, action));
}

/// Asks a container to end, which its machine kills after `grace`, and waits until it has ended,
/// and its own machine if it has one. Returns false if it does not end because its guest does not
/// answer.
pub(in crate::cli) async fn ask_to_end(
    client: &SandboxClient,
    entry: &Entry,
    signal: u8,
    grace: Duration,
) -> anyhow::Result<bool> {
    let id = &entry.record.id;
    let ended = async {
        match client.stop_container(id, signal.into(), grace).await {
            // One that has ended meanwhile counts as stopped.
            Err(error) if error.is_gone() || error.kind() == Some(RefusalKind::NotFound) => {}
            asked => asked?,
        }
        entry.ended(client).await;
        anyhow::Ok(())
    };
    let ended = timeout(grace + STOP_MARGIN, ended).await;
    ended.map_or(Ok(false), |ended| ended.map(|()| true))
}

/// Asks a container to end, kills it after `grace`, and returns once its sandbox and its resources
/// on the host are gone.
pub(in crate::cli) async fn end(
    client: &SandboxClient,
    entry: &Entry,
    signal: u8,
    grace: Duration,
) -> anyhow::Result<()> {
    if !ask_to_end(client, entry, signal, grace).await? {
        ensure!(
            entry.record.pod.is_none(),
            "container {} does not end: its guest does not answer; `podvisor pod rm -f` ends that",
            entry.record.name
        );
        crate::cli::notice("the guest does not answer, so its machine is killed");
        client.shutdown(Duration::ZERO).await?;
    }
    release_resources(entry).await;
    Ok(())
}

/// Returns the grace period of a container: `time` if it is given.
pub(in crate::cli) fn grace(entry: &Entry, time: Option<u32>) -> Duration {
    let seconds = time.or(entry.record.stop_timeout).unwrap_or(STOP_TIMEOUT);
    Duration::from_secs(seconds.into())
}

pub(in crate::cli) fn stop(globals: &Globals, args: &StopArgs) -> anyhow::Result<u8> {
    each(globals, &args.containers, async |entry| {
        // One that is being started counts as not stopped.
        match State::once_started(&entry).await? {
            State::Running { client, .. } | State::Restarting { client, .. } => {
                let grace = grace(&entry, args.time);
                end(&client, &entry, entry.record.stop_signal, grace).await?;
                note(&entry, EventAction::Stop);
            }
            State::Unresponsive { pid } => return Err(unresponsive(&entry, pid)),
            State::Starting | State::Exited { .. } | State::Dead { .. } => {}
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
        if let State::Restarting { client, .. } = &state
            && args.signal == entry.record.stop_signal
        {
            events::note(&entry.dir, &killed);
            end_between_starts(client, &entry).await?;
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
                // It should end, not restart.
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

/// Ends a container whose program is about to be started again, as its stop signal does.
async fn end_between_starts(client: &SandboxClient, entry: &Entry) -> anyhow::Result<()> {
    let (record, signal) = (&entry.record, entry.record.stop_signal.into());
    client.end_restarts(&record.id).await?;
    let ended = async {
        match client.signal(&record.id, None, signal, false).await {
            // It was started meanwhile.
            Ok(()) => return Ok(()),
            // None is started any more.
            Err(error) if error.is_gone() || error.kind().is_some() => {}
            Err(error) => return Err(error.into()),
        }
        entry.ended(client).await;
        release_resources(entry).await;
        Ok(())
    };
    timeout(STOP_MARGIN, ended).await.unwrap_or_else(|_| {
        let command = match record.pod {
            None => "rm -f",
            Some(_) => "pod rm -f",
        };
        Err(anyhow!(
            "container {} does not end: its guest does not answer; `podvisor {command}` ends that",
            record.name
        ))
    })
}

/// Pausing applies to the machine, and so to all containers in it.
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

/// Reports why a program was killed with its machine.
fn tell_why(entry: &Entry, machine: &SandboxExit) {
    if has_failed(machine) {
        let record = &entry.record;
        crate::cli::notice(&format!("{} {}: {machine}", record.what(), record.name));
        crate::cli::notice_kernel_log(machine.kernel_log());
    }
}

pub(in crate::cli) fn wait(globals: &Globals, args: &NamesArgs) -> anyhow::Result<u8> {
    each(globals, &args.containers, async |entry| {
        let mut state = State::once_started(&entry).await?;
        if let Some(client) = state.client() {
            match client.wait(&entry.record.id, None).await {
                Ok(exit) => {
                    if entry.record.pod.is_none()
                        && is_killed(&exit)
                        && let Ok(machine) = timeout(MACHINE_EXIT_WAIT, client.ended()).await
                    {
                        tell_why(&entry, &machine);
                    }
                    return Ok(Some(exit.code.to_string()));
                }
                Err(error) if error.is_gone() => state = State::of(&entry).await?,
                Err(error) => return Err(error.into()),
            }
        }
        if let State::Dead {
            machine: Some(machine),
            ..
        } = &state
        {
            tell_why(&entry, machine);
        }
        match (state.exit_code(), state) {
            (Some(code), _) => Ok(Some(code.to_string())),
            (None, State::Unresponsive { pid }) => Err(unresponsive(&entry, pid)),
            (None, state) => bail!("container {} is {}", entry.record.name, state.word()),
        }
    })
}

pub(in crate::cli) fn rm(globals: &Globals, args: &RmArgs) -> anyhow::Result<u8> {
    each_name(globals, &args.containers, async |containers, name| {
        let entry = match args.force {
            true => containers.find_if_there(name)?,
            false => Some(containers.find(name)?),
        };
        // As in docker and podman, a missing container is not an error with -f.
        let Some(entry) = entry else {
            return Ok(None);
        };
        match args.force {
            true => force_remove(&entry).await?,
            false => remove_ended(&entry).await?,
        }
        Ok(Some(name.to_owned()))
    })
}

async fn remove_ended(entry: &Entry) -> anyhow::Result<()> {
    match State::of(entry).await? {
        State::Unresponsive { pid } => return Err(unresponsive(entry, pid)),
        state => ensure!(
            state.has_ended(),
            "{} {} is {}; `podvisor {}stop` it first, or give --force",
            entry.record.what(),
            entry.record.name,
            state.word(),
            entry.record.command_prefix()
        ),
    }
    remove(&entry.dir).await
}

/// Removes a container in any state.
pub(in crate::cli) async fn force_remove(entry: &Entry) -> anyhow::Result<()> {
    match State::of(entry).await {
        Ok(State::Running { client, .. } | State::Restarting { client, .. }) => {
            end(&client, entry, SIGKILL, Duration::ZERO).await?;
        }
        // It does not answer, or its answer is not understood; or it boots, and the process that
        // waits for that is notified of its end.
        Ok(State::Unresponsive { .. } | State::Starting) | Err(_) if entry.record.pod.is_none() => {
            SandboxClient::kill(&entry.dir).await?;
        }
        Ok(State::Unresponsive { pid }) => return Err(unresponsive(entry, pid)),
        state => drop(state?),
    }
    remove(&entry.dir).await
}

#[cfg(test)]
mod tests {
    use tokio::sync::Barrier;

    use super::*;

    #[tokio::test]
    async fn works_are_done_at_once_however_many_they_are() {
        let all = Barrier::new(100);
        let works = (0..100).map(|_| async {
            all.wait().await;
            Ok(None)
        });
        let done = timeout(Duration::from_secs(60), at_once(works.collect()));
        assert_eq!(done.await.unwrap().unwrap(), 0);
    }
}
