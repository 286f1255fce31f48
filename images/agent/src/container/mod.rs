//! Containers: created from an image, run by libcontainer, ended and cleaned up.
//!
//! A request enters through [`Containers`]. A container is created in this order, and removed in
//! the opposite one, all in `make`: user namespace and user ([`users`]), image, overlay and volumes
//! ([`files`]), specification ([`spec`]), process with its streams ([`process`]). Its processes are
//! in one control group ([`crate::cgroup`]).
//!
//! Within the guest a container has a short name chosen by the agent (`c1`), so that paths stay
//! short whatever name the host uses. Files are below [`BASE`]; none of them is visible in a
//! container, whose mount namespace has another root.

pub mod files;
pub mod process;
pub mod spec;
pub mod users;

mod error;
mod make;
mod remove;
mod resources;
mod stats;
mod status;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use podvisor_agent_protocol::{api, limits};
use tokio::task::JoinHandle;

use crate::cgroup::Cgroup;
use crate::cgroup::devices::DeviceFilter;
use crate::cgroup::pressure::Pressure;
use crate::guest::shares::BASE;
use crate::launcher::Confinement;
use crate::reaper::{Reaper, ended, now_ns};
use crate::stdio::StreamRegistry;
pub use error::{ContainerError, Result};
use files::directory::{Directory, remove_directory};
use files::memory::Memory;
use files::rootfs::{Image, Images, MountPoint, Rootfs};
use files::submounts::{Held, Submounts};
use process::Process;
use process::execs::Execs;
use process::notify::notify;
use process::pidns::SharedPids;
use process::turns::{ContainerTurns, LaunchLimits};
pub use status::{ContainerExit, Created, Started};
use users::namespace::{UserNamespace, UserNamespaces};
use users::own::OwnUser;

/// All containers of the guest. Clones share one table.
#[derive(Debug, Clone)]
pub struct Containers {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    base: PathBuf,
    reaper: Reaper,
    hub: StreamRegistry,
    images: Images,
    memory: Memory,
    submounts: Submounts,
    pids: SharedPids,
    users: UserNamespaces,
    launches: LaunchLimits,
    pressure: Pressure,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    created: u64,
    slots: HashMap<String, Slot>,
}

/// `Busy` while a container is being created or removed.
#[derive(Debug)]
enum Slot {
    Busy,
    Ready(Arc<Container>),
}

/// One container.
#[derive(Debug)]
struct Container {
    order: u64,
    /// The agent's short name.
    name: String,
    cgroup: Cgroup,
    /// The devices that its processes may use.
    devices: Option<DeviceFilter>,
    /// Number of OOM kills before the current process was created.
    oom_kills_before: u64,
    /// Whether there was an OOM kill after that; set when the control group that counts them is
    /// removed.
    was_oom_killed: OnceLock<bool>,
    init: Process,
    /// Kills the processes that its own process leaves behind when it ends.
    cleanup: Mutex<Option<JoinHandle<()>>>,
    /// The restrictions of its own process that libcontainer does not apply.
    confinement: Option<Confinement>,
    started: Mutex<Option<u64>>,
    turns: ContainerTurns,
    execs: Execs,
    user: OwnUser,
    /// The user namespace of its processes, unless they are in the guest's.
    users: Option<Arc<UserNamespace>>,
    // Fields drop in order: mounts in the directory are dropped before the directory. Nothing is
    // mounted any more while the container is being deleted, or after it was released.
    rootfs: Mutex<Option<Rootfs>>,
    /// Images that are mounted in addition to the root.
    volumes: Mutex<Vec<Arc<Image>>>,
    /// Binds of volumes in memory, and of images whose ids are mapped.
    bound: Mutex<Vec<MountPoint>>,
    /// The host's volumes.
    held: Mutex<Held>,
    directory: Arc<Directory>,
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

    /// Creates a container; its process waits for [`Containers::start`].
    ///
    /// # Errors
    ///
    /// [`ContainerError`]; nothing of the container is left then.
    pub async fn create(&self, request: api::CreateContainerRequest) -> Result<Created> {
        let id = request.container_id.clone();
        let order = self.reserve(&id)?;
        // Not cancelled when the host's connection closes: half a container cannot be undone.
        let this = self.clone();
        run_to_end(async move {
            let made = this.make(order, &request).await;
            let mut table = this.lock();
            match made {
                Ok(container) => {
                    let created = Created {
                        pid: container.init.pid(),
                        user: container.user.ids().clone(),
                    };
                    container.end_with_init();
                    table.slots.insert(id, Slot::Ready(Arc::new(container)));
                    Ok(created)
                }
                Err(error) => {
                    table.slots.remove(&id);
                    Err(error)
                }
            }
        })
        .await
    }

    fn reserve(&self, id: &str) -> Result<u64> {
        podvisor_agent_protocol::validate_id(id)?;
        let mut table = self.lock();
        if table.slots.len() >= limits::CONTAINERS {
            return Err(ContainerError::TooMany {
                what: "containers",
                limit: limits::CONTAINERS,
            });
        }
        match table.slots.entry(id.to_owned()) {
            Entry::Occupied(_) => return Err(ContainerError::Exists(id.to_owned())),
            Entry::Vacant(vacant) => vacant.insert(Slot::Busy),
        };
        table.created += 1;
        Ok(table.created)
    }

    /// Lets a container's process execute its command.
    ///
    /// # Errors
    ///
    /// [`ContainerError`] of kind `WrongState` if it was started before or has ended.
    pub fn start(&self, id: &str) -> Result<Started> {
        let container = self.get(id)?;
        let mut started = lock(&container.started);
        if started.is_some() || container.init.has_ended() {
            return Err(ContainerError::WrongState {
                id: id.to_owned(),
                state: "started already",
            });
        }
        notify(self.state_of(&container)).map_err(|source| ContainerError::Start {
            id: id.to_owned(),
            source,
        })?;
        let at_ns = now_ns();
        *started = Some(at_ns);
        Ok(Started {
            pid: container.init.pid(),
            at_ns,
        })
    }

    /// Starts an additional process in a running container. Returns its pid. If the caller is
    /// dropped before, the process is killed as soon as it exists.
    ///
    /// # Errors
    ///
    /// [`ContainerError`].
    pub async fn exec(&self, request: api::ExecProcessRequest) -> Result<u32> {
        podvisor_agent_protocol::validate_id(&request.exec_id)?;
        let container = self.get(&request.container_id)?;
        if lock(&container.started).is_none() || container.init.has_ended() {
            return Err(ContainerError::WrongState {
                id: request.container_id,
                state: "not running",
            });
        }
        container.execs.reserve(&request.exec_id)?;
        let this = self.clone();
        let (of, exec_id) = (Arc::clone(&container), request.exec_id.clone());
        let made = async move {
            let oom_kills = container.cgroup.oom_kills();
            let made = this.make_exec(&container, &request).await;
            match made {
                Ok(process) => {
                    let pid = process.pid();
                    container.execs.made(request.exec_id, process, oom_kills);
                    Ok(pid)
                }
                Err(error) => {
                    container.execs.failed(&request.exec_id);
                    // libcontainer's own message for that is of no use to the host.
                    if container.init.has_ended() {
                        return Err(ContainerError::WrongState {
                            id: request.container_id,
                            state: "not running",
                        });
                    }
                    Err(error)
                }
            }
        };
        run_for_caller(made, move || of.execs.abandon(&exec_id)).await
    }

    /// Sends a signal to one process; a process that has ended does not get it.
    ///
    /// # Errors
    ///
    /// [`ContainerError`].
    pub fn signal(&self, id: &str, exec_id: &str, signal: u8) -> Result<()> {
        let failed = |source| ContainerError::Io {
            action: "send the signal",
            source,
        };
        self.with_process(id, exec_id, |process| {
            process.signal(signal).map_err(failed)
        })??;
        Ok(())
    }

    /// Sends a signal to all processes of a container.
    ///
    /// # Errors
    ///
    /// [`ContainerError`].
    pub fn signal_all(&self, id: &str, signal: u8) -> Result<()> {
        let cgroup = &self.get(id)?.cgroup;
        let sent = if signal == 9 {
            cgroup.kill()
        } else {
            cgroup.signal(signal)
        };
        sent.map_err(|source| ContainerError::Io {
            action: "signal the container",
            source,
        })
    }

    /// Waits until a process has ended; returns immediately if it has.
    ///
    /// # Errors
    ///
    /// [`ContainerError`] of kind `NotFound`, also if the container is deleted meanwhile.
    pub async fn wait(&self, id: &str, exec_id: &str) -> Result<ContainerExit> {
        let container = self.get(id)?;
        let mut exit = self.with_process(id, exec_id, Process::exit)?;
        let exit = ended(&mut exit)
            .await
            .map_err(|_| ContainerError::NotFound(id.to_owned()))?;
        let oom_killed = match exec_id {
            "" => container.is_oom_killed(),
            exec_id => {
                let oom_kills = container.cgroup.oom_kills();
                container
                    .execs
                    .is_oom_killed(exec_id, exit.status, oom_kills)
            }
        };
        container.execs.told(exec_id);
        Ok(ContainerExit { exit, oom_killed })
    }

    /// Sets the size of a process's terminal.
    ///
    /// # Errors
    ///
    /// [`ContainerError`] of kind `WrongState` if it has none.
    pub fn resize(&self, id: &str, exec_id: &str, size: (u16, u16)) -> Result<()> {
        let failed = |source| ContainerError::Io {
            action: "resize the terminal",
            source,
        };
        if self.with_process(id, exec_id, |process| process.resize(size).map_err(failed))?? {
            Ok(())
        } else {
            Err(ContainerError::WrongState {
                id: id.to_owned(),
                state: "without a terminal",
            })
        }
    }

    /// Changes the limits of a container.
    ///
    /// # Errors
    ///
    /// [`ContainerError`].
    pub fn update(&self, id: &str, resources_json: &[u8]) -> Result<()> {
        let resources = resources::parse(resources_json)?;
        let container = self.get(id)?;
        let limit = resources.memory().and_then(|memory| memory.limit());
        if let Some(limit) = limit.and_then(|limit| u64::try_from(limit).ok()) {
            let used = container.cgroup.memory_in_use();
            if limit < used {
                return Err(ContainerError::MemoryInUse { limit, used });
            }
        }
        resources::apply(&resources, &container.cgroup).map_err(|source| ContainerError::Limits {
            id: id.to_owned(),
            source: Box::new(source),
        })
    }

    /// Waits until the containers run short of memory; see [`Pressure::wait`].
    ///
    /// # Errors
    ///
    /// [`ContainerError::Io`].
    pub async fn pressure(&self) -> Result<()> {
        let waited = self.shared.pressure.wait().await;
        waited.map_err(|source| ContainerError::Io {
            action: "wait for a shortage of memory",
            source,
        })
    }

    fn with_process<T>(
        &self,
        id: &str,
        exec_id: &str,
        look: impl FnOnce(&Process) -> T,
    ) -> Result<T> {
        let container = self.get(id)?;
        if exec_id.is_empty() {
            return Ok(look(&container.init));
        }
        Ok(look(&*container.execs.get(exec_id)?))
    }

    fn get(&self, id: &str) -> Result<Arc<Container>> {
        match self.lock().slots.get(id) {
            Some(Slot::Ready(container)) => Ok(container.clone()),
            Some(Slot::Busy) => Err(ContainerError::WrongState {
                id: id.to_owned(),
                state: "busy",
            }),
            None => Err(ContainerError::NotFound(id.chars().take(64).collect())),
        }
    }

    fn state_of(&self, container: &Container) -> PathBuf {
        self.shared.base.join("state").join(&container.name)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.shared.table)
    }
}

impl Container {
    /// Kills the processes that the container's process leaves behind when it ends. In a separate
    /// pid namespace the kernel does that; without one they would continue to run.
    fn end_with_init(&self) {
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
async fn run_to_end<T: Send + 'static>(
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
async fn run_for_caller<T: Send + 'static>(
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

// A panic while a lock is held ends the agent, so locks are never poisoned.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
