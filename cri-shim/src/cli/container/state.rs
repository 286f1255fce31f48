//! What has become of containers, and clearing away what was left by a process that was killed.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use tracing::debug;

use super::record::Claim;
use super::{Containers, Entry, volumes};
use crate::sandbox::{
    ContainerInfo, ContainerState, ProcessExit, SandboxClient, SandboxError, SandboxExit,
    exit_record,
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
    /// It ended by itself, or was asked to.
    Exited(ProcessExit),
    /// Its sandbox ended before it; why, where that is known.
    Dead(Option<SandboxExit>),
}

impl State {
    pub(in crate::cli) async fn of(entry: &Entry) -> anyhow::Result<Self> {
        match SandboxClient::connect(&entry.dir).await {
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
                exit: Some(exit), ..
            }) => Self::Exited(exit),
            Some(info) if info.state == ContainerState::Running => Self::Running {
                client,
                info,
                is_paused,
            },
            _ if Claim::is_taken(&entry.dir) => Self::Starting,
            // Whoever was starting it was killed before it ran.
            _ => {
                client.shutdown(Duration::ZERO).await?;
                Self::Dead(None)
            }
        })
    }

    fn of_ended(entry: &Entry) -> Self {
        let Some(record) = exit_record(&entry.dir) else {
            return Self::Dead(None);
        };
        let own = record
            .containers
            .into_iter()
            .find(|info| info.id == entry.record.id);
        match own.and_then(|info| info.exit) {
            Some(exit) if record.exit == SandboxExit::PoweredOff => Self::Exited(exit),
            Some(exit) if exit.code != KILLED => Self::Exited(exit),
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
            Self::Exited(_) => "exited",
            Self::Dead(_) => "dead",
        }
    }

    /// The exit code, once there is one. A container whose sandbox died was killed.
    pub(in crate::cli) fn exit_code(&self) -> Option<i32> {
        match self {
            Self::Exited(exit) => Some(exit.code),
            Self::Dead(_) => Some(KILLED),
            Self::Starting | Self::Running { .. } => None,
        }
    }

    pub(in crate::cli) fn has_ended(&self) -> bool {
        self.exit_code().is_some()
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

/// Removes a container that has ended, and all that is left of it.
pub(in crate::cli) async fn remove(entry_dir: &Path) -> anyhow::Result<()> {
    let _claim = Claim::take(entry_dir).context("cannot lock the container's directory")?;
    // Its sandbox may be on its way out, or still be there without its container.
    if let Ok(client) = SandboxClient::connect(entry_dir).await {
        client.shutdown(Duration::ZERO).await?;
    }
    volumes::unmount_all(entry_dir)?;
    let removed = fs::remove_dir_all(entry_dir);
    removed.with_context(|| format!("cannot remove {}", entry_dir.display()))
}

/// Clears away what nobody looks after: containers that were to be removed when they had ended,
/// what was being made when its maker was killed, mounts of containers that are gone. Gives the
/// names of what was removed.
pub(in crate::cli) async fn sweep(containers: &Containers) -> anyhow::Result<Vec<String>> {
    let mut removed = Vec::new();
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
                let state = State::of(&entry).await;
                let has_ended = state.is_ok_and(|state| state.has_ended());
                if has_ended && !is_temporary && !entry.record.volumes.is_empty() {
                    volumes::unmount_all(&dir)?;
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
