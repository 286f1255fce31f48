//! The containers of the guest, and what each of them holds.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use podvisor_agent_protocol::limits;
use tokio::task::JoinHandle;

use super::error::{ContainerError, Result};
use super::execs::Execs;
use super::files::directory::Directory;
use super::files::memory::Memory;
use super::files::rootfs::{Image, Images, MountPoint, Rootfs};
use super::files::submounts::{Held, Submounts};
use super::limit::TooMany;
use super::lock::lock;
use super::process::Process;
use super::process::pidns::SharedPids;
use super::process::turns::{ContainerTurns, LaunchLimits};
use super::users::namespace::{UserNamespace, UserNamespaces};
use super::users::own::OwnUser;
use crate::cgroup::Cgroup;
use crate::cgroup::devices::DeviceFilter;
use crate::cgroup::pressure::Pressure;
use crate::guest::shares::BASE;
use crate::launcher::Confinement;
use crate::reaper::{Reaper, ended};
use crate::stdio::StreamRegistry;

/// All containers of the guest. Clones share one table.
#[derive(Debug, Clone)]
pub struct Containers {
    pub(super) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) base: PathBuf,
    pub(super) reaper: Reaper,
    pub(super) hub: StreamRegistry,
    pub(super) images: Images,
    pub(super) memory: Memory,
    pub(super) submounts: Submounts,
    pub(super) pids: SharedPids,
    pub(super) users: UserNamespaces,
    pub(super) launches: LaunchLimits,
    pub(super) pressure: Pressure,
    pub(super) table: Mutex<Table>,
}

#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) created: u64,
    pub(super) slots: HashMap<String, Slot>,
}

/// `Busy` while a container is being created or removed.
#[derive(Debug)]
pub(super) enum Slot {
    Busy,
    Ready(Arc<Container>),
}

/// One container.
#[derive(Debug)]
pub(super) struct Container {
    pub(super) order: u64,
    /// The agent's short name.
    pub(super) name: String,
    pub(super) cgroup: Cgroup,
    /// The devices that its processes may use.
    pub(super) devices: Option<DeviceFilter>,
    /// Number of OOM kills before the current process was created.
    pub(super) oom_kills_before: u64,
    /// Whether there was an OOM kill after that; set when the control group that counts them is
    /// removed.
    pub(super) was_oom_killed: OnceLock<bool>,
    pub(super) init: Process,
    /// Kills the processes that its own process leaves behind when it ends.
    pub(super) cleanup: Mutex<Option<JoinHandle<()>>>,
    /// The restrictions of its own process that libcontainer does not apply.
    pub(super) confinement: Option<Confinement>,
    pub(super) started: Mutex<Option<u64>>,
    pub(super) turns: ContainerTurns,
    pub(super) execs: Execs,
    pub(super) user: OwnUser,
    /// The user namespace of its processes, unless they are in the guest's.
    pub(super) users: Option<Arc<UserNamespace>>,
    // Fields drop in order: mounts in the directory are dropped before the directory. Nothing is
    // mounted any more while the container is being deleted, or after it was released.
    pub(super) rootfs: Mutex<Option<Rootfs>>,
    /// Images that are mounted in addition to the root.
    pub(super) volumes: Mutex<Vec<Arc<Image>>>,
    /// Binds of volumes in memory, and of images whose ids are mapped.
    pub(super) bound: Mutex<Vec<MountPoint>>,
    /// The host's volumes.
    pub(super) held: Mutex<Held>,
    pub(super) directory: Arc<Directory>,
}

impl Containers {
    /// Creates an empty table.
    #[must_use]
    pub fn new(reaper: Reaper, hub: StreamRegistry) -> Self {
        Self {
            shared: Arc::new(Shared {
                base: PathBuf::from(BASE),
                reaper,
                hub,
                images: Images::default(),
                memory: Memory::default(),
                submounts: Submounts::default(),
                pids: SharedPids::default(),
                users: UserNamespaces::default(),
                launches: LaunchLimits::default(),
                pressure: Pressure::default(),
                table: Mutex::default(),
            }),
        }
    }

    pub(super) fn reserve(&self, id: &str) -> Result<u64> {
        podvisor_agent_protocol::validate_id(id)?;
        let mut table = self.lock();
        if table.slots.len() >= limits::CONTAINERS {
            let (what, limit) = ("containers", limits::CONTAINERS);
            return Err(TooMany { what, limit }.into());
        }
        match table.slots.entry(id.to_owned()) {
            Entry::Occupied(_) => return Err(ContainerError::Exists(id.to_owned())),
            Entry::Vacant(vacant) => vacant.insert(Slot::Busy),
        };
        table.created += 1;
        Ok(table.created)
    }

    pub(super) fn get(&self, id: &str) -> Result<Arc<Container>> {
        match self.lock().slots.get(id) {
            Some(Slot::Ready(container)) => Ok(container.clone()),
            Some(Slot::Busy) => Err(ContainerError::WrongState {
                id: id.to_owned(),
                state: "busy",
            }),
            None => Err(ContainerError::NotFound(id.chars().take(64).collect())),
        }
    }

    pub(super) fn state_of(&self, container: &Container) -> PathBuf {
        self.shared.base.join("state").join(&container.name)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.shared.table)
    }
}

impl Container {
    /// Kills the processes that the container's process leaves behind when it ends. In a separate
    /// pid namespace the kernel does that; without one they would continue to run.
    pub(super) fn end_with_init(&self) {
        let (mut exit, cgroup) = (self.init.exit(), self.cgroup.clone());
        let cleanup = tokio::spawn(async move {
            if ended(&mut exit).await.is_ok()
                && let Err(error) = cgroup.kill()
            {
                tracing::warn!(%error, "cannot kill what a container left behind");
            }
        });
        *lock(&self.cleanup) = Some(cleanup);
    }
}

/// Runs a future to its end even if the caller is dropped.
pub(super) async fn run_to_end<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    tokio::spawn(work).await.unwrap_or_else(|error| {
        Err(ContainerError::Io {
            action: "carry the request out",
            source: error.into(),
        })
    })
}

/// As [`run_to_end`], but calls `abandon` after `work` has succeeded if the caller was dropped by
/// then.
pub(super) async fn run_for_caller<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
    abandon: impl FnOnce() + Send + 'static,
) -> Result<T> {
    let caller = Arc::new(());
    let call = Arc::downgrade(&caller);
    let done = run_to_end(async move {
        let done = work.await;
        if done.is_ok() && call.strong_count() == 0 {
            abandon();
        }
        done
    })
    .await;
    drop(caller);
    done
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::sync::mpsc;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn what_is_created_after_its_caller_is_gone_is_abandoned_and_nothing_else_is() {
        for (is_gone, succeeds) in [(true, true), (true, false), (false, true), (false, false)] {
            let (go, gone) = oneshot::channel();
            let (abandoned, mut abandons) = mpsc::unbounded_channel();
            let work = async move {
                gone.await.unwrap();
                match succeeds {
                    true => Ok(7),
                    false => Err(ContainerError::NotFound("c".to_owned())),
                }
            };
            let mut run = Box::pin(run_for_caller(work, move || abandoned.send(()).unwrap()));
            assert!((&mut run).now_or_never().is_none());
            if is_gone {
                drop(run);
                go.send(()).unwrap();
            } else {
                go.send(()).unwrap();
                assert_eq!(run.await.ok(), succeeds.then_some(7));
            }
            // `None` when the work is over.
            let expected = (is_gone && succeeds).then_some(());
            assert_eq!(abandons.recv().await, expected);
        }
    }
}
