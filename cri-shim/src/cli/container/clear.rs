//! Removal of containers, and cleanup of what killed processes left.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::{StreamExt as _, stream};
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinHandle};
use tracing::debug;

use super::claim::Claim;
use super::record;
use super::state::MAX_CONCURRENT_QUERIES;
use super::{Containers, Entry, Record, State, events, network, volumes};
use crate::removal::remove_tree_aside;
use crate::sandbox::{
    DEFAULT_CGROUP_PARENT, EventAction, SandboxClient, SandboxError, remove_empty_cgroups,
};

/// How long a sweep waits for a machine's process: a slower one is left for the next sweep.
const SWEEP_RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long another process may take to create or remove a container.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(60);

/// Removes an ended container or pod, and all that is left of it. It is not an error if another
/// process removes it at the same time.
pub(in crate::cli) async fn remove(entry_dir: &Path) -> anyhow::Result<()> {
    let Some(_claim) = claim(entry_dir).await? else {
        return Ok(());
    };
    let record = record::read(entry_dir).with_context(|| unreadable(entry_dir))?;
    let pod = record.as_ref().filter(|record| record.pod.is_some());
    match pod {
        // Its sandbox may be exiting, or still run without its container.
        None => match SandboxClient::connect(entry_dir).await {
            Ok(client) => client.shutdown(Duration::ZERO).await?,
            Err(SandboxError::Gone { .. }) => {}
            Err(error) => return Err(error.into()),
        },
        Some(record) => leave_pod(entry_dir, record).await?,
    }
    remove_files(entry_dir, record.as_ref()).await
}

/// Like [`remove`], for an ended container with its own machine: the machine's process may still
/// run, and is not waited for.
pub(in crate::cli) async fn remove_ended(entry: &Entry) -> anyhow::Result<()> {
    match claim(&entry.dir).await? {
        Some(_claim) => remove_files(&entry.dir, Some(&entry.record)).await,
        None => Ok(()),
    }
}

/// Returns `None` if another process has removed the directory.
async fn claim(entry_dir: &Path) -> anyhow::Result<Option<Claim>> {
    match Claim::take_within(entry_dir, CLAIM_TIMEOUT).await {
        Ok(Some(claim)) => Ok(Some(claim)),
        Ok(None) => Err(kept(entry_dir)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).context("cannot lock the container's directory"),
    }
}

/// Returns the error for a directory that another process keeps locked for too long.
fn kept(entry_dir: &Path) -> anyhow::Error {
    let holder = Claim::holder(entry_dir);
    let process = holder.map_or_else(String::new, |pid| format!(", process {pid},"));
    anyhow::anyhow!(
        "who makes or removes the container in {}{process} is not done after {} s; try again, or \
         end that process first",
        entry_dir.display(),
        CLAIM_TIMEOUT.as_secs()
    )
}

/// Removes a container's resources on the host other than its machine.
async fn remove_files(entry_dir: &Path, record: Option<&Record>) -> anyhow::Result<()> {
    if let Some(record) = record {
        events::note_end(entry_dir, record);
        network::detach(entry_dir, record).await?;
    }
    volumes::unmount_all(entry_dir)?;
    let removed = remove_tree_aside(entry_dir).await;
    removed.with_context(|| format!("cannot remove {}", entry_dir.display()))?;
    if let Some(record) = record
        && !record.is_pod
    {
        events::note(entry_dir, &events::event(record, EventAction::Destroy));
    }
    Ok(())
}

/// Removes a container from its pod's machine.
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
        Err(SandboxError::Gone { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    volumes::remove(&entry.shared(), &entry.record)
}

/// Releases the resources on the host that an ended container does not need any more. What cannot
/// be released now is left for the next sweep.
pub(in crate::cli) async fn release_resources(entry: &Entry) {
    // For pods, the events of each of their containers are recorded.
    if !entry.record.is_pod {
        events::note_end(&entry.dir, &entry.record);
    }
    let taken = network::detach(&entry.dir, &entry.record).await;
    let taken = taken.and_then(|()| match &entry.record {
        record if record.pod.is_some() => volumes::remove(&entry.shared(), record),
        record if record.volumes.is_empty() && !record.is_pod => Ok(()),
        _ => volumes::unmount_all(&entry.dir),
    });
    if let Err(error) = taken {
        crate::cli::report(&error);
    }
}

/// Returns the message for a directory whose record cannot be read.
fn unreadable(dir: &Path) -> String {
    format!(
        "the record of a container in {} is not understood, so it is left alone; a podvisor of \
         another version may have made it, and that can remove it",
        dir.display()
    )
}

/// The action for a directory.
enum SweepAction {
    Nothing,
    /// Release its resources on the host.
    Settle(Box<Entry>),
    /// Remove it; with the name of the container.
    Remove(PathBuf, Option<String>),
    /// Report the error and keep it.
    Tell(anyhow::Error),
}

/// Cleans up: containers that were to be removed at their end, containers whose creator was killed,
/// mounts and networks of ended containers. Returns the names of what was removed. Machines that do
/// not answer are left alone.
pub(in crate::cli) async fn sweep(containers: &Containers) -> anyhow::Result<Vec<String>> {
    Ok(Sweep::begin(containers)?.ended().await)
}

/// A [`sweep`] that runs in parallel with other work.
#[derive(Debug)]
pub(in crate::cli) struct Sweep {
    work: JoinHandle<Vec<String>>,
    /// Dropped to stop waiting for machines that have not answered.
    patience: oneshot::Sender<Infallible>,
}

impl Sweep {
    /// Starts with the current containers.
    pub(in crate::cli) fn begin(containers: &Containers) -> anyhow::Result<Self> {
        Self::begin_within(containers, SWEEP_RESPONSE_TIMEOUT)
    }

    fn begin_within(containers: &Containers, limit: Duration) -> anyhow::Result<Self> {
        remove_empty_cgroups(DEFAULT_CGROUP_PARENT);
        let dirs = containers.dirs()?;
        let (patience, is_over) = oneshot::channel();
        let work = clear_away(containers.clone(), dirs, limit, is_over);
        Ok(Self {
            work: tokio::spawn(work),
            patience,
        })
    }

    /// Waits until it is done; returns the names of what was removed.
    pub(in crate::cli) async fn ended(self) -> Vec<String> {
        let Self { work, patience } = self;
        let removed = result_of(work).await;
        drop(patience);
        removed
    }

    /// Like [`Self::ended`], but machines that have not answered yet are left for the next sweep.
    pub(in crate::cli) async fn ended_by_now(self) -> Vec<String> {
        let Self { work, patience } = self;
        drop(patience);
        result_of(work).await
    }
}

async fn result_of(work: JoinHandle<Vec<String>>) -> Vec<String> {
    match work.await.map_err(JoinError::try_into_panic) {
        Ok(removed) => removed,
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        // The runtime is shutting down.
        Err(Err(_)) => Vec::new(),
    }
}

async fn clear_away(
    containers: Containers,
    dirs: Vec<(PathBuf, io::Result<Option<Record>>)>,
    limit: Duration,
    mut is_over: oneshot::Receiver<Infallible>,
) -> Vec<String> {
    let looks = dirs.into_iter().enumerate();
    let looks = looks.map(|(number, (dir, record))| {
        let look = look_at(&containers, dir, record, limit);
        async move { (number, look.await) }
    });
    // Concurrently: each one that hangs takes the whole timeout.
    let mut looks = pin!(stream::iter(looks).buffer_unordered(MAX_CONCURRENT_QUERIES));
    let mut findings = Vec::new();
    loop {
        tokio::select! {
            biased;
            found = looks.next() => match found {
                Some(found) => findings.push(found),
                None => break,
            },
            _ = &mut is_over => break,
        }
    }
    findings.sort_by_key(|(number, _)| *number);
    let mut removed = Vec::new();
    for (_, finding) in findings {
        match finding {
            SweepAction::Nothing => {}
            SweepAction::Tell(error) => crate::cli::report(&error),
            SweepAction::Settle(entry) => release_resources(&entry).await,
            SweepAction::Remove(dir, name) => match (remove(&dir).await, name) {
                (Ok(()), name) => {
                    removed.push(name.unwrap_or_else(|| dir.display().to_string()));
                }
                (Err(error), Some(name)) => crate::cli::report(&error.context(format!(
                    "container {name} has ended and was to be removed, which the next command \
                     tries again"
                ))),
                (Err(error), None) => {
                    let error = format!("{error:#}");
                    debug!(
                        dir = %dir.display(),
                        error,
                        "failed to clean up a directory; the next command retries"
                    );
                }
            },
        }
    }
    removed
}

async fn look_at(
    containers: &Containers,
    dir: PathBuf,
    record: io::Result<Option<Record>>,
    limit: Duration,
) -> SweepAction {
    if Claim::is_taken(&dir) {
        return SweepAction::Nothing;
    }
    let record = match record {
        Ok(Some(record)) => record,
        Ok(None) => {
            return match containers.is_abandoned(&dir) {
                Ok(true) => SweepAction::Remove(dir, None),
                _ => SweepAction::Nothing,
            };
        }
        Err(error) => {
            return SweepAction::Tell(anyhow::Error::from(error).context(unreadable(&dir)));
        }
    };
    let entry = Entry { dir, record };
    let has_ended = match entry.record.is_pod {
        true => matches!(
            SandboxClient::connect_within(&entry.dir, limit).await,
            Err(SandboxError::Gone { .. })
        ),
        false => {
            let state = State::within(&entry, limit).await;
            state.is_ok_and(|state| state.has_ended())
        }
    };
    match (has_ended, entry.record.remove) {
        (false, _) => SweepAction::Nothing,
        (true, false) => SweepAction::Settle(Box::new(entry)),
        (true, true) => SweepAction::Remove(entry.dir, Some(entry.record.name)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    #[test]
    fn only_what_was_being_made_is_cleared_away() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::open(root.path()).unwrap();
        let dir = |name: &str| root.path().join(record::CONTAINERS).join(name);
        for name in ["my-notes", "aaaaaaaaaaaa", "bbbbbbbbbbbb"] {
            fs::create_dir_all(dir(name)).unwrap();
        }
        fs::write(
            dir("bbbbbbbbbbbb").join("container.json"),
            "{\"of\": \"tomorrow\"}",
        )
        .unwrap();
        let runtime = crate::cli::runtime().unwrap();
        let removed = runtime.block_on(sweep(&containers)).unwrap();
        assert_eq!(removed, [dir("aaaaaaaaaaaa").display().to_string()]);
        assert!(dir("my-notes").exists() && dir("bbbbbbbbbbbb").exists());
        runtime.block_on(remove(&dir("bbbbbbbbbbbb"))).unwrap_err();
        assert!(dir("bbbbbbbbbbbb").exists());
    }

    #[tokio::test]
    async fn a_machine_that_does_not_answer_is_not_waited_for_by_who_has_other_things_to_do() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::open(root.path()).unwrap();
        let make = |id: &str, remove: bool| {
            let record = Record {
                remove,
                ..record::sample(id, id)
            };
            containers.create(record).unwrap().0
        };
        let (ended, stopped, kept) = (make("a", true), make("b", true), make("c", false));
        // As for a stopped process: clients connect and get no answer.
        let _socket = UnixListener::bind(stopped.dir.join("control.sock")).unwrap();
        let sweep = Sweep::begin_within(&containers, Duration::from_secs(1 << 20)).unwrap();
        let removed = sweep.ended_by_now().await;
        assert_eq!(removed, [ended.record.name]);
        assert!(!ended.dir.exists() && stopped.dir.exists() && kept.dir.exists());
    }

    #[tokio::test(start_paused = true)]
    async fn who_keeps_a_container_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let _claim = Claim::take(dir.path()).unwrap();
        let error = remove(dir.path()).await.unwrap_err().to_string();
        let process = format!("process {},", std::process::id());
        assert!(error.contains(&process), "{error}");
        assert!(dir.path().exists());
    }

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
