//! What has become of containers, and clearing away what was left by a process that was killed.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use tracing::debug;

use super::ports::Port;
use super::record::{self, Claim};
use super::{Containers, Entry, Record, events, network, volumes};
use crate::sandbox::{
    ContainerInfo, ContainerState, DEFAULT_CGROUP_PARENT, EventAction, ProcessExit, SandboxClient,
    SandboxError, SandboxExit, exit_record, remove_empty_cgroups,
};

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
}

impl State {
    pub(in crate::cli) async fn of(entry: &Entry) -> anyhow::Result<Self> {
        match SandboxClient::connect(&entry.sandbox_dir()).await {
            Ok(client) => Self::of_running(entry, client).await,
            Err(SandboxError::Gone { .. }) if Claim::is_taken(&entry.dir) => Ok(Self::Starting),
            Err(SandboxError::Gone { .. }) => Ok(Self::of_ended(entry)),
            Err(error) => Err(error.into()),
        }
    }

    async fn of_running(entry: &Entry, client: SandboxClient) -> anyhow::Result<Self> {
        let answers = async {
            let is_paused = client.is_paused().await?;
            let list = client.list().await?;
            Ok((is_paused, list))
        };
        let (is_paused, list) = match answers.await {
            Ok(answers) => answers,
            Err(error) => {
                let error: SandboxError = error;
                return match error.is_gone() {
                    true => {
                        client.ended().await;
                        Ok(Self::of_ended(entry))
                    }
                    false => Err(error.into()),
                };
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
            _ if Claim::is_taken(&entry.dir) => Self::Starting,
            // Whoever was starting it was killed before it ran.
            _ => {
                match entry.record.pod {
                    None => client.shutdown(Duration::ZERO).await?,
                    Some(_) => client.delete_container(&entry.record.id).await?,
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
            }) if record.exit == SandboxExit::PoweredOff || exit.code != KILLED => {
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
        }
    }

    /// How often the program was started again.
    pub(in crate::cli) fn restarts(&self) -> u32 {
        match self {
            Self::Running { info, .. } => info.restarts,
            Self::Restarting { restarts, .. } | Self::Exited { restarts, .. } => *restarts,
            Self::Starting | Self::Dead(_) => 0,
        }
    }

    /// The exit code, once there is one. A container whose sandbox died was killed.
    pub(in crate::cli) fn exit_code(&self) -> Option<i32> {
        match self {
            Self::Exited { exit, .. } => Some(exit.code),
            Self::Dead(_) => Some(KILLED),
            Self::Starting | Self::Running { .. } | Self::Restarting { .. } => None,
        }
    }

    /// The way to its sandbox, while it runs or will again.
    pub(in crate::cli) fn client(&self) -> Option<&SandboxClient> {
        match self {
            Self::Running { client, .. } | Self::Restarting { client, .. } => Some(client),
            Self::Starting | Self::Exited { .. } | Self::Dead(_) => None,
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

    /// The ports that lead to the container; none once it has ended.
    pub(in crate::cli) fn ports(&self, state: &State) -> &[Port] {
        match state.has_ended() {
            true => &[],
            false => &self.record.ports,
        }
    }
}

/// 128 and the number of SIGKILL.
const KILLED: i32 = 137;

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
        state => anyhow::bail!(
            "container {} is not running, but {}",
            entry.record.name,
            state.word()
        ),
    }
}

/// Removes a container or pod that has ended, and all that is left of it. One that somebody else
/// removes at the same time is removed.
pub(in crate::cli) async fn remove(entry_dir: &Path) -> anyhow::Result<()> {
    let _claim = match Claim::take(entry_dir) {
        Ok(claim) => claim,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).context("cannot lock the container's directory"),
    };
    let record = record::read(entry_dir);
    let pod = record.as_ref().filter(|record| record.pod.is_some());
    match pod {
        // Its sandbox may be on its way out, or still be there without its container.
        None => {
            if let Ok(client) = SandboxClient::connect(entry_dir).await {
                client.shutdown(Duration::ZERO).await?;
            }
        }
        Some(record) => leave_pod(entry_dir, record).await?,
    }
    if let Some(record) = &record {
        events::note_end(entry_dir, record);
        network::detach(entry_dir, record).await?;
    }
    volumes::unmount_all(entry_dir)?;
    let removed = fs::remove_dir_all(entry_dir);
    removed.with_context(|| format!("cannot remove {}", entry_dir.display()))?;
    if let Some(record) = &record
        && !record.is_pod
    {
        events::note(entry_dir, &events::event(record, EventAction::Destroy));
    }
    Ok(())
}

/// Takes a container out of its pod's machine.
async fn leave_pod(entry_dir: &Path, record: &Record) -> anyhow::Result<()> {
    let entry = Entry {
        dir: entry_dir.to_owned(),
        record: record.clone(),
    };
    match SandboxClient::connect(&entry.sandbox_dir()).await {
        Ok(client) => match client.delete_container(&record.id).await {
            Err(error) if !error.is_gone() => return Err(error.into()),
            _ => {}
        },
        Err(error) => debug!(%error, "the pod's machine is gone"),
    }
    volumes::remove(&entry.shared(), &entry.record)
}

/// Takes away what an ended container has of the host, which it does not need any more. What
/// cannot be taken away now is left for the next sweep.
pub(in crate::cli) async fn settle(entry: &Entry) {
    // What became of a pod's containers is told of each.
    if !entry.record.is_pod {
        events::note_end(&entry.dir, &entry.record);
    }
    let taken = network::detach(&entry.dir, &entry.record).await;
    let taken =
        taken.and_then(
            |()| match entry.record.volumes.is_empty() && !entry.record.is_pod {
                true => Ok(()),
                false => volumes::unmount_all(&entry.dir),
            },
        );
    if let Err(error) = taken {
        crate::cli::report(&error);
    }
}

/// Clears away what nobody looks after: containers that were to be removed when they had ended,
/// what was being made when its maker was killed, mounts and networks of containers that have
/// ended. Gives the
/// names of what was removed.
pub(in crate::cli) async fn sweep(containers: &Containers) -> anyhow::Result<Vec<String>> {
    let mut removed = Vec::new();
    remove_empty_cgroups(DEFAULT_CGROUP_PARENT);
    for (dir, record) in containers.dirs()? {
        if Claim::is_taken(&dir) {
            continue;
        }
        let name = match &record {
            Some(record) => record.name.clone(),
            None => dir.display().to_string(),
        };
        let is_over = match record {
            None => containers.is_abandoned(&dir)?,
            Some(record) => {
                let is_temporary = record.remove;
                let entry = Entry {
                    dir: dir.clone(),
                    record,
                };
                let has_ended = match entry.record.is_pod {
                    true => matches!(
                        SandboxClient::connect(&entry.dir).await,
                        Err(SandboxError::Gone { .. })
                    ),
                    false => {
                        let state = State::of(&entry).await;
                        state.is_ok_and(|state| state.has_ended())
                    }
                };
                if has_ended && !is_temporary {
                    settle(&entry).await;
                }
                has_ended && is_temporary
            }
        };
        if is_over {
            match remove(&dir).await {
                Ok(()) => removed.push(name),
                // Somebody else may be doing the same.
                Err(error) => {
                    debug!(name, error = %format!("{error:#}"), "a container is left for now")
                }
            }
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn what_somebody_else_removes_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("c");
        let removed = || {
            let runtime = crate::cli::runtime().unwrap();
            runtime.block_on(remove(&dir)).unwrap();
            assert!(!dir.exists());
        };
        for _ in 0..50 {
            fs::create_dir_all(dir.join("files")).unwrap();
            thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(removed);
                }
            });
        }
        removed();
    }
}
