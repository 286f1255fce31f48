//! What has become of containers.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::{StreamExt as _, stream};
use tracing::debug;

use super::Entry;
use super::claim::Claim;
use super::ports::Port;
use crate::patience::timeout;
use crate::sandbox::{
    ContainerInfo, ContainerState, ProcessExit, SandboxClient, SandboxError, SandboxExit,
    exit_record, exit_recorded_at,
};

/// How long a machine's process may take to say what has become of a container.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// As [`RESPONSE_TIMEOUT`], of one that somebody is starting.
const STARTING_RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Machines that are asked at once.
pub(super) const MAX_CONCURRENT_QUERIES: usize = 32;

/// Where a container is in its life.
#[derive(Debug)]
pub(in crate::cli) enum State {
    /// Somebody is starting it right now.
    Starting,
    Running {
        client: SandboxClient,
        info: ContainerInfo,
        is_paused: bool,
    },
    /// Its program has ended, and is about to be started again.
    Restarting {
        client: SandboxClient,
        exit: ProcessExit,
        restarts: u32,
    },
    /// It ended by itself, or was asked to.
    Exited { exit: ProcessExit, restarts: u32 },
    /// Its sandbox ended before it; why, where that is known.
    Dead(Option<SandboxExit>),
    /// Its machine's process, of this number, is there and does not answer.
    Unresponsive { pid: Option<u32> },
}

impl State {
    pub(in crate::cli) async fn of(entry: &Entry) -> anyhow::Result<Self> {
        Self::within(entry, RESPONSE_TIMEOUT).await
    }

    /// As [`Self::of`], once nobody is starting it any more.
    pub(in crate::cli) async fn once_started(entry: &Entry) -> anyhow::Result<Self> {
        loop {
            match Self::of(entry).await? {
                Self::Starting => Claim::released(&entry.dir).await?,
                state => return Ok(state),
            }
        }
    }

    /// As [`Self::of`], for who has more patience or less.
    pub(super) async fn within(entry: &Entry, limit: Duration) -> anyhow::Result<Self> {
        // Looked at before the machine is asked: who starts a container lets go when it runs.
        let is_claimed = Claim::is_taken(&entry.dir);
        let limit = match is_claimed {
            // A process answers nobody before its guest has booted.
            true => limit.min(STARTING_RESPONSE_TIMEOUT),
            false => limit,
        };
        match SandboxClient::connect_within(&entry.sandbox_dir(), limit).await {
            Ok(client) => Self::of_running(entry, client, limit, is_claimed).await,
            Err(SandboxError::Gone { .. }) if is_claimed => Ok(Self::Starting),
            Err(SandboxError::Gone { .. }) => Ok(Self::of_ended(entry)),
            // Its guest boots.
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
        Ok(match own {
            Some(ContainerInfo {
                state: ContainerState::Restarting,
                exit: Some(exit),
                restarts,
                ..
            }) => Self::Restarting {
                client,
                exit,
                restarts,
            },
            Some(ContainerInfo {
                state: ContainerState::Exited,
                exit: Some(exit),
                restarts,
                ..
            }) => Self::Exited { exit, restarts },
            Some(info) if info.state == ContainerState::Running => Self::Running {
                client,
                info,
                is_paused,
            },
            _ if is_claimed => Self::Starting,
            // Whoever was starting it was killed before it ran.
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
                Self::Dead(None)
            }
        })
    }

    fn of_ended(entry: &Entry) -> Self {
        let Some(record) = exit_record(&entry.sandbox_dir()) else {
            return Self::Dead(None);
        };
        let own = record
            .containers
            .into_iter()
            .find(|info| info.id == entry.record.id);
        match own {
            Some(ContainerInfo {
                exit: Some(exit),
                restarts,
                ..
            }) if record.exit == SandboxExit::PoweredOff || exit.code != KILLED_EXIT_CODE => {
                Self::Exited { exit, restarts }
            }
            _ => Self::Dead(Some(record.exit)),
        }
    }

    /// A word, as podman has it.
    pub(in crate::cli) fn word(&self) -> &'static str {
        match self {
            Self::Starting => "created",
            Self::Running {
                is_paused: false, ..
            } => "running",
            Self::Running { .. } => "paused",
            Self::Restarting { .. } => "restarting",
            Self::Exited { .. } => "exited",
            Self::Dead(_) => "dead",
            Self::Unresponsive { .. } => "unresponsive",
        }
    }

    /// How often the program was started again.
    pub(in crate::cli) fn restarts(&self) -> u32 {
        match self {
            Self::Running { info, .. } => info.restarts,
            Self::Restarting { restarts, .. } | Self::Exited { restarts, .. } => *restarts,
            Self::Starting | Self::Dead(_) | Self::Unresponsive { .. } => 0,
        }
    }

    /// The exit code, once there is one. A container whose sandbox died was killed.
    pub(in crate::cli) fn exit_code(&self) -> Option<i32> {
        match self {
            Self::Exited { exit, .. } => Some(exit.code),
            Self::Dead(_) => Some(KILLED_EXIT_CODE),
            Self::Starting
            | Self::Running { .. }
            | Self::Restarting { .. }
            | Self::Unresponsive { .. } => None,
        }
    }

    /// When it ended, where that is known.
    pub(in crate::cli) fn ended_at(&self) -> Option<SystemTime> {
        match self {
            Self::Exited { exit, .. } => Some(UNIX_EPOCH + Duration::from_nanos(exit.exited_at_ns)),
            _ => None,
        }
    }

    /// The way to its sandbox, while it runs or will again.
    pub(in crate::cli) fn client(&self) -> Option<&SandboxClient> {
        match self {
            Self::Running { client, .. } | Self::Restarting { client, .. } => Some(client),
            Self::Starting | Self::Exited { .. } | Self::Dead(_) | Self::Unresponsive { .. } => {
                None
            }
        }
    }

    pub(in crate::cli) fn has_ended(&self) -> bool {
        self.exit_code().is_some()
    }
}

impl Entry {
    /// Waits until the container has ended for good, and its machine with it if that is its own:
    /// how that did.
    pub(in crate::cli) async fn ended(&self, client: &SandboxClient) -> Option<SandboxExit> {
        if self.record.pod.is_none() {
            return Some(client.ended().await);
        }
        if let Err(error) = client.wait(&self.record.id, None).await {
            debug!(%error, "the container is gone");
        }
        None
    }

    /// When its machine, which has ended, did so; or the host, before which it must have been.
    pub(in crate::cli) fn machine_ended_at(&self) -> Option<SystemTime> {
        let booted = || {
            let uptime = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
            let uptime = Duration::from_secs(uptime.tv_sec.try_into().ok()?);
            let booted = SystemTime::now().checked_sub(uptime)?;
            (self.record.created_at() < booted).then_some(booted)
        };
        exit_recorded_at(&self.sandbox_dir()).or_else(booted)
    }

    /// The ports that lead to the container; none once it has ended.
    pub(in crate::cli) fn ports(&self, state: &State) -> &[Port] {
        match state.has_ended() {
            true => &[],
            false => &self.record.ports,
        }
    }
}

/// What has become of each. They are asked at once, so that those which do not answer take the
/// time of one.
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

/// What is said of a machine that another podvisor has started.
pub(in crate::cli) fn other_version(entry: &Entry) -> String {
    let record = &entry.record;
    let (what, command) = match (record.is_pod, &record.pod) {
        (true, _) => ("pod", "pod rm -f"),
        (false, Some(_)) => ("the pod of container", "pod rm -f"),
        (false, None) => ("container", "rm -f"),
    };
    format!(
        "{what} {} was started by another version of podvisor; `podvisor {command}` ends it, or \
         use the podvisor that started it",
        record.name
    )
}

/// The error of what cannot be done with a machine that does not answer.
pub(in crate::cli) fn unresponsive(entry: &Entry, pid: Option<u32>) -> anyhow::Error {
    let process = pid.map_or_else(String::new, |pid| format!(" {pid}"));
    let (what, command) = match entry.pod() {
        _ if entry.record.is_pod => (format!("pod {}", entry.record.name), "pod rm -f"),
        Some(pod) => (
            format!(
                "container {} of the pod {}",
                entry.record.name, pod.record.name
            ),
            "pod rm -f",
        ),
        None => (format!("container {}", entry.record.name), "rm -f"),
    };
    anyhow::anyhow!(
        "the machine's process{process} of {what} does not answer, as one that is stopped; \
         `podvisor {command}` kills it"
    )
}

/// What is said of a container which its pod still makes or deletes, though nobody waits for it.
fn being_made(entry: &Entry) -> anyhow::Error {
    anyhow::anyhow!(
        "container {} is still being made or deleted by its pod's machine; wait for it, or end the \
         pod by `podvisor pod rm -f`",
        entry.record.name
    )
}

/// The exit code of what was killed, as a container is whose machine died: 128 and the number of
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
            "container {} is not running, but {}",
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

    /// The next request on a control socket.
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

    #[test]
    fn a_container_that_has_just_been_started_is_not_shut_down() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::open(root.path()).unwrap();
        let (entry, claim) = containers.create(sample("a", "one")).unwrap();
        let listener = UnixListener::bind(entry.sandbox_dir().join("control.sock")).unwrap();
        // Whoever starts it has done so, and goes, while the machine is being asked.
        let machine = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            let mut claim = Some(claim);
            while let Some(asks) = request(&mut stream) {
                match asks["call"].as_str() {
                    Some("IsPaused") => answer(&mut stream, &asks, &json!({"IsPaused": false})),
                    Some("List") => {
                        claim.take();
                        answer(&mut stream, &asks, &json!({"List": []}));
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
        let asked = machine.join().unwrap();
        assert_eq!(asked.len(), 3, "{asked:?}");
        assert_eq!(word, "created");
    }
}
