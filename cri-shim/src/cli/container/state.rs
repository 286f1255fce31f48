//! The current state of containers.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::{StreamExt as _, stream};
use tracing::debug;

use super::Entry;
use super::claim::Claim;
use super::ports::Port;
use crate::sandbox::{
    ContainerInfo, ContainerState, Health, ProcessExit, SandboxClient, SandboxError, SandboxExit,
    exit_record, exit_recorded_at,
};
use crate::stall_timeout::timeout;

/// How long a machine's process may take to report the state of a container.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Like [`RESPONSE_TIMEOUT`], for one that is being started.
const STARTING_RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Machines that are queried at the same time.
pub(in crate::cli) const MAX_CONCURRENT_QUERIES: usize = 32;

/// The state of a container.
#[derive(Debug)]
pub(in crate::cli) enum State {
    /// Another process is starting it.
    Starting,
    Running {
        client: SandboxClient,
        info: ContainerInfo,
        is_paused: bool,
    },
    /// Its program has ended, and is about to be restarted.
    Restarting {
        client: SandboxClient,
        exit: ProcessExit,
        info: ContainerInfo,
    },
    /// It ended by itself, or was stopped.
    Exited {
        exit: ProcessExit,
        info: ContainerInfo,
    },
    /// Its sandbox ended first.
    Dead {
        /// Why, if that is known.
        machine: Option<SandboxExit>,
        /// The container at that time, if its sandbox could record it.
        info: Option<ContainerInfo>,
    },
    /// Its machine's process, with this PID, runs but does not answer.
    Unresponsive { pid: Option<u32> },
}

impl State {
    /// Returns the container's health while it runs, if it is checked.
    pub(in crate::cli) fn health(&self) -> Option<&Health> {
        match self {
            Self::Running { info, .. } => info.health.as_ref(),
            _ => None,
        }
    }

    pub(in crate::cli) async fn of(entry: &Entry) -> anyhow::Result<Self> {
        Self::within(entry, RESPONSE_TIMEOUT).await
    }

    /// Like [`Self::of`], but waits while it is being started.
    pub(in crate::cli) async fn once_started(entry: &Entry) -> anyhow::Result<Self> {
        loop {
            match Self::of(entry).await? {
                Self::Starting => Claim::released(&entry.dir).await?,
                state => return Ok(state),
            }
        }
    }

    /// Like [`Self::of`], with a different timeout.
    pub(super) async fn within(entry: &Entry, limit: Duration) -> anyhow::Result<Self> {
        // Checked before the machine is queried: the claim is released once the container runs.
        let is_claimed = Claim::is_taken(&entry.dir);
        let limit = match is_claimed {
            // A process does not answer before its guest has booted.
            true => limit.min(STARTING_RESPONSE_TIMEOUT),
            false => limit,
        };
        match SandboxClient::connect_within(&entry.sandbox_dir(), limit).await {
            Ok(client) => Self::of_running(entry, client, limit, is_claimed).await,
            Err(SandboxError::Gone { .. }) if is_claimed => Ok(Self::Starting),
            Err(SandboxError::Gone { .. }) => Ok(Self::of_ended(entry)),
            // Its guest is booting.
            Err(SandboxError::Unresponsive { .. }) if is_claimed => Ok(Self::Starting),
            Err(SandboxError::Unresponsive { pid, .. }) => Ok(Self::Unresponsive { pid }),
            Err(error @ SandboxError::Version { .. }) => {
                Err(anyhow::Error::from(error).context(other_version(entry)))
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn of_running(
        entry: &Entry,
        client: SandboxClient,
        limit: Duration,
        is_claimed: bool,
    ) -> anyhow::Result<Self> {
        let answers = async {
            let is_paused = client.is_paused().await?;
            let list = client.list().await?;
            Ok((is_paused, list))
        };
        let (is_paused, list) = match timeout(limit, answers).await {
            Ok(Ok(answers)) => answers,
            Ok(Err(error)) => {
                let error: SandboxError = error;
                return match error.is_gone() {
                    true => {
                        client.ended().await;
                        Ok(Self::of_ended(entry))
                    }
                    false => Err(error.into()),
                };
            }
            Err(_) => {
                let pid = Some(client.pid());
                return Ok(Self::Unresponsive { pid });
            }
        };
        let own = list.into_iter().find(|info| info.id == entry.record.id);
        let exit = own.as_ref().and_then(|info| info.exit);
        Ok(match (own, exit) {
            (Some(info), Some(exit)) if info.state == ContainerState::Restarting => {
                Self::Restarting { client, exit, info }
            }
            (Some(info), Some(exit)) if info.state == ContainerState::Exited => {
                Self::Exited { exit, info }
            }
            // A state that a later version has is one of a container that it has made.
            (Some(info), _)
                if matches!(
                    info.state,
                    ContainerState::Running | ContainerState::Unknown
                ) =>
            {
                Self::Running {
                    client,
                    info,
                    is_paused,
                }
            }
            _ if is_claimed => Self::Starting,
            // The process that was starting it was killed before it ran.
            _ => {
                match entry.record.pod {
                    None => client.shutdown(Duration::ZERO).await?,
                    Some(_) => {
                        let deleted = client.delete_container(&entry.record.id);
                        timeout(limit, deleted)
                            .await
                            .map_err(|_| being_made(entry))??;
                    }
                }
                Self::Dead {
                    machine: None,
                    info: None,
                }
            }
        })
    }

    fn of_ended(entry: &Entry) -> Self {
        let Some(record) = exit_record(&entry.sandbox_dir()) else {
            return Self::Dead {
                machine: None,
                info: None,
            };
        };
        let own = record
            .containers
            .into_iter()
            .find(|info| info.id == entry.record.id);
        let exit = own.as_ref().and_then(|info| info.exit);
        match (own, exit) {
            (Some(info), Some(exit))
                if record.exit == SandboxExit::PoweredOff || exit.code != KILLED_EXIT_CODE =>
            {
                Self::Exited { exit, info }
            }
            (info, _) => Self::Dead {
                machine: Some(record.exit),
                info,
            },
        }
    }

    /// Returns the name of the state, as in podman.
    pub(in crate::cli) fn word(&self) -> &'static str {
        match self {
            Self::Starting => "created",
            Self::Running {
                is_paused: false, ..
            } => "running",
            Self::Running { .. } => "paused",
            Self::Restarting { .. } => "restarting",
            Self::Exited { .. } => "exited",
            Self::Dead { .. } => "dead",
            Self::Unresponsive { .. } => "unresponsive",
        }
    }

    /// Returns how often the program was restarted.
    pub(in crate::cli) fn restarts(&self) -> u32 {
        self.info().map_or(0, |info| info.restarts)
    }

    /// Returns what its sandbox tells or has recorded of it.
    fn info(&self) -> Option<&ContainerInfo> {
        match self {
            Self::Running { info, .. }
            | Self::Restarting { info, .. }
            | Self::Exited { info, .. } => Some(info),
            Self::Dead { info, .. } => info.as_ref(),
            Self::Starting | Self::Unresponsive { .. } => None,
        }
    }

    /// Returns when its program was started last, if that is known.
    pub(super) fn started_at(&self) -> Option<SystemTime> {
        let started = self.info()?.started_at_ns;
        (started != 0).then(|| UNIX_EPOCH + Duration::from_nanos(started))
    }

    /// Returns the exit code, if there is one. A container whose sandbox died counts as killed.
    pub(in crate::cli) fn exit_code(&self) -> Option<i32> {
        match self {
            Self::Exited { exit, .. } => Some(exit.code),
            Self::Dead { .. } => Some(KILLED_EXIT_CODE),
            Self::Starting
            | Self::Running { .. }
            | Self::Restarting { .. }
            | Self::Unresponsive { .. } => None,
        }
    }

    /// Returns the exit code that is shown, as docker has it: the last one of a program that is
    /// about to be restarted, and 0 before there is one.
    pub(super) fn shown_exit_code(&self) -> i32 {
        match self {
            Self::Restarting { exit, .. } => exit.code,
            _ => self.exit_code().unwrap_or(0),
        }
    }

    /// Returns when it ended, if that is known.
    pub(in crate::cli) fn ended_at(&self) -> Option<SystemTime> {
        match self {
            Self::Exited { exit, .. } => Some(UNIX_EPOCH + Duration::from_nanos(exit.exited_at_ns)),
            _ => None,
        }
    }

    /// Returns the client of its sandbox, if it runs or will be restarted.
    pub(in crate::cli) fn client(&self) -> Option<&SandboxClient> {
        match self {
            Self::Running { client, .. } | Self::Restarting { client, .. } => Some(client),
            Self::Starting
            | Self::Exited { .. }
            | Self::Dead { .. }
            | Self::Unresponsive { .. } => None,
        }
    }

    pub(in crate::cli) fn has_ended(&self) -> bool {
        self.exit_code().is_some()
    }
}

impl Entry {
    /// Waits until the container has ended permanently, and its own machine if it has one; returns
    /// how the machine ended.
    pub(in crate::cli) async fn ended(&self, client: &SandboxClient) -> Option<SandboxExit> {
        if self.record.pod.is_none() {
            return Some(client.ended().await);
        }
        if let Err(error) = client.wait(&self.record.id, None).await {
            debug!(%error, "the container is gone");
        }
        None
    }

    /// Returns when its machine ended: the recorded time, else that of the host's boot if it was
    /// booted since the container was created.
    pub(in crate::cli) fn machine_ended_at(&self) -> Option<SystemTime> {
        let booted = || {
            let uptime = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
            let uptime = Duration::from_secs(uptime.tv_sec.try_into().ok()?);
            let booted = SystemTime::now().checked_sub(uptime)?;
            (self.record.created_at() < booted).then_some(booted)
        };
        exit_recorded_at(&self.sandbox_dir()).or_else(booted)
    }

    /// Returns the published ports of the container, or of the pod that it is in; none once it has
    /// ended. `None` as the state means that it is unknown.
    pub(in crate::cli) fn ports(&self, state: Option<&State>) -> Vec<Port> {
        match state.is_some_and(State::has_ended) {
            true => Vec::new(),
            false => self.pod().unwrap_or_else(|| self.clone()).record.ports,
        }
    }
}

/// Returns the state of each. They are queried concurrently, so that several that do not answer
/// take only one timeout.
pub(in crate::cli) async fn states(entries: Vec<Entry>) -> Vec<(Entry, anyhow::Result<State>)> {
    let states = entries.into_iter().map(|entry| async move {
        let state = State::of(&entry).await;
        (entry, state)
    });
    stream::iter(states)
        .buffered(MAX_CONCURRENT_QUERIES)
        .collect()
        .await
}

/// Returns the message for a machine that another version of podvisor started.
pub(in crate::cli) fn other_version(entry: &Entry) -> String {
    let record = &entry.record;
    let (what, command) = match &record.pod {
        Some(_) => ("the pod of container", "pod rm -f".to_owned()),
        None => (record.what(), format!("{}rm -f", record.command_prefix())),
    };
    format!(
        "{what} {} was started by another version of podvisor; `podvisor {command}` ends it, or \
         use the podvisor that started it",
        record.name
    )
}

/// Returns the error for a machine that does not answer.
pub(in crate::cli) fn unresponsive(entry: &Entry, pid: Option<u32>) -> anyhow::Error {
    let process = pid.map_or_else(String::new, |pid| format!(" {pid}"));
    let record = &entry.record;
    let (what, command) = match entry.pod() {
        Some(pod) => (
            format!("container {} of the pod {}", record.name, pod.record.name),
            "pod rm -f".to_owned(),
        ),
        None => (
            format!("{} {}", record.what(), record.name),
            format!("{}rm -f", record.command_prefix()),
        ),
    };
    anyhow::anyhow!(
        "the machine's process{process} of {what} does not answer, as one that is stopped; \
         `podvisor {command}` kills it"
    )
}

/// Returns the error for a container that its pod is still creating or deleting, though no caller
/// waits for it.
fn being_made(entry: &Entry) -> anyhow::Error {
    anyhow::anyhow!(
        "container {} is still being made or deleted by its pod's machine; wait for it, or end the \
         pod by `podvisor pod rm -f`",
        entry.record.name
    )
}

/// The exit code of a container that was killed, or whose machine died: 128 plus the number of
/// SIGKILL.
pub(super) const KILLED_EXIT_CODE: i32 = 137;

/// A running container.
pub(in crate::cli) async fn running(
    entry: &Entry,
) -> anyhow::Result<(SandboxClient, ContainerInfo, bool)> {
    match State::of(entry).await? {
        State::Running {
            client,
            info,
            is_paused,
        } => Ok((client, info, is_paused)),
        State::Unresponsive { pid } => Err(unresponsive(entry, pid)),
        state => anyhow::bail!(
            "{} {} is not running, but {}",
            entry.record.what(),
            entry.record.name,
            state.word()
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::thread;

    use serde_json::{Value, json};

    use super::super::Containers;
    use super::super::record::sample;
    use super::*;

    /// Returns the next request on a control socket.
    fn request(stream: &mut UnixStream) -> Option<Value> {
        let mut length = [0; 4];
        stream.read_exact(&mut length).ok()?;
        let mut body = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut body).ok()?;
        serde_json::from_slice(&body).ok()
    }

    fn answer(stream: &mut UnixStream, request: &Value, answer: &Value) {
        let reply = json!({"number": request["number"], "answer": {"Ok": answer}});
        let body = serde_json::to_vec(&reply).unwrap();
        let length = u32::try_from(body.len()).unwrap();
        stream.write_all(&length.to_le_bytes()).unwrap();
        stream.write_all(&body).unwrap();
    }

    /// Asks for the state of a container whose starting process finishes meanwhile, or before.
    /// Its machine has these containers. Returns the state, and what the machine was asked.
    fn asked_for_state(list: serde_json::Value, is_claimed: bool) -> (String, Vec<String>) {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::open(root.path()).unwrap();
        let (entry, claim) = containers.create(sample("a", "one")).unwrap();
        let listener = UnixListener::bind(entry.sandbox_dir().join("control.sock")).unwrap();
        let mut claim = is_claimed.then_some(claim);
        let machine = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            while let Some(asks) = request(&mut stream) {
                match asks["call"].as_str() {
                    Some("IsPaused") => answer(&mut stream, &asks, &json!({"IsPaused": false})),
                    Some("List") => {
                        claim.take();
                        answer(&mut stream, &asks, &json!({"List": list}));
                    }
                    _ if asks["call"].get("Hello").is_some() => {
                        let version = asks["call"]["Hello"].clone();
                        answer(&mut stream, &asks, &json!({"Hello": version}));
                    }
                    _ => answer(&mut stream, &asks, &json!("Done")),
                }
                asked.push(asks["call"].to_string());
            }
            asked
        });
        let runtime = crate::cli::runtime().unwrap();
        let state = async { timeout(Duration::from_secs(60), State::of(&entry)).await };
        let word = runtime.block_on(async { state.await.unwrap().unwrap().word() });
        drop(runtime);
        (word.to_owned(), machine.join().unwrap())
    }

    #[test]
    fn a_container_that_has_just_been_started_is_not_shut_down() {
        let (word, asked) = asked_for_state(json!([]), true);
        assert_eq!(asked.len(), 3, "{asked:?}");
        assert_eq!(word, "created");
    }

    #[test]
    fn a_container_in_a_state_of_a_later_version_goes_on() {
        let list = json!([{
            "id": "a".repeat(64), "state": "Sleeping", "pid": 7, "started_at_ns": 1, "exit": null
        }]);
        let (word, asked) = asked_for_state(list, false);
        assert_eq!(asked.len(), 3, "{asked:?}");
        assert_eq!(word, "running");
    }
}
