//! Containers: created from an image, run by libcontainer, ended and cleaned up.
//!
//! A request enters through [`Containers`]. A container is created in this order, and removed in
//! the opposite one, all in `make`: user namespace and user ([`users`]), image, overlay and volumes
//! ([`files`]), specification ([`spec`]), process with its streams ([`process`]). Its processes are
//! in one control group ([`crate::cgroup`]).
//!
//! Within the guest a container has a short name chosen by the agent (`c1`), so that paths stay
//! short whatever name the host uses. Files are below [`BASE`](crate::guest::shares::BASE); none of
//! them is visible in a container, whose mount namespace has another root.

pub mod files;
pub mod limit;
pub mod process;
pub mod spec;
pub mod spec_error;
pub mod users;

mod error;
mod execs;
mod lock;
mod make;
mod remove;
mod resources;
mod restart;
mod stats;
mod status;
mod table;

use std::sync::Arc;

use podvisor_agent_protocol::api;

use crate::reaper::{ended, now_ns};
pub use error::{ContainerError, Result};
use lock::lock;
use process::Process;
use process::notify::notify;
pub use status::{ContainerExit, Created, Started};
pub use table::Containers;
use table::{Slot, run_for_caller, run_to_end};

impl Containers {
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
}
