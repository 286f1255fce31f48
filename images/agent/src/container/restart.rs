//! Restart of a container's process after it has ended. What was created for the container stays as
//! the process left it: root filesystem, directory, control group with its limits and rules.

use std::sync::{Arc, Mutex, OnceLock};

use podvisor_agent_protocol::api;

use super::error::{ContainerError, Result};
use super::execs::Execs;
use super::files::directory::remove_directory;
use super::lock::lock;
use super::make::{make_group, rewrite_bundle};
use super::process::Process;
use super::process::launch::{Launcher, Streams};
use super::process::turns::ContainerTurns;
use super::table::{Container, Containers, Slot, run_to_end};
use crate::launcher::NewProcess;

impl Containers {
    /// Creates the process of a container again; it waits for [`Containers::start`]. Returns its
    /// pid.
    ///
    /// # Errors
    ///
    /// [`ContainerError`] of kind `WrongState` if its process has not ended. The container stays as
    /// it was.
    pub async fn restart(&self, request: api::RestartContainerRequest) -> Result<u32> {
        let default_stdio = api::Stdio::default();
        let streams = Streams::new(request.stdio.as_ref().unwrap_or(&default_stdio))?;
        let id = request.container_id;
        let container = self.take_ended(&id)?;
        let this = self.clone();
        run_to_end(async move {
            let made = this.make_process(&container, streams).await;
            let (container, made) = match made {
                Ok(init) => {
                    let pid = init.pid();
                    (Arc::new(container.with_process(init)), Ok(pid))
                }
                Err(error) => (container, Err(error)),
            };
            if made.is_ok() {
                container.end_with_init();
            }
            this.lock().slots.insert(id, Slot::Ready(container));
            made
        })
        .await
    }

    /// Marks the container as busy, for work on it.
    fn take_ended(&self, id: &str) -> Result<Arc<Container>> {
        let container = self.get(id)?;
        if !container.init.has_ended() {
            return Err(ContainerError::WrongState {
                id: id.to_owned(),
                state: "running",
            });
        }
        if lock(&container.rootfs).is_none() {
            return Err(ContainerError::WrongState {
                id: id.to_owned(),
                state: "released",
            });
        }
        self.lock().slots.insert(id.to_owned(), Slot::Busy);
        Ok(container)
    }

    async fn make_process(&self, container: &Container, streams: Streams) -> Result<Process> {
        let cleanup = lock(&container.cleanup).take();
        if let Some(cleanup) = cleanup {
            // If it ran late, it would kill the new process. If it had panicked, the guest would
            // have ended.
            let _ = cleanup.await;
        }
        container
            .cgroup
            .reset()
            .await
            .map_err(|source| ContainerError::Io {
                action: "end the container's processes",
                source,
            })?;
        if !container.cgroup.path().exists() {
            // libcontainer removes it if it cannot create a process, and would create it without
            // the container's rules.
            make_group(&container.cgroup, container.devices.as_ref())?;
        }
        remove_directory(&self.state_of(container));
        rewrite_bundle(container)?;
        let launcher = Launcher {
            launches: &self.shared.launches,
            turns: &container.turns,
            reaper: &self.shared.reaper,
            hub: &self.shared.hub,
            name: &container.name,
            state: self.shared.base.join("state"),
            directory: container.directory.path.clone(),
            uid: container.guest_uid(container.user.ids().uid())?,
            confinement: container.confinement.clone(),
        };
        let kind = NewProcess::Create {
            bundle: container.directory.path.clone(),
        };
        Ok(launcher.make(kind, streams).await?)
    }
}

impl Container {
    /// Returns the container with another process, which takes over everything that this one holds.
    fn with_process(&self, init: Process) -> Self {
        Self {
            order: self.order,
            name: self.name.clone(),
            cgroup: self.cgroup.clone(),
            devices: self.devices.clone(),
            oom_kills_before: self.cgroup.oom_kills(),
            was_oom_killed: OnceLock::new(),
            init,
            cleanup: Mutex::default(),
            confinement: self.confinement.clone(),
            started: Mutex::default(),
            turns: ContainerTurns::default(),
            execs: Execs::default(),
            user: self.user.clone(),
            users: self.users.clone(),
            rootfs: Mutex::new(lock(&self.rootfs).take()),
            volumes: Mutex::new(std::mem::take(&mut *lock(&self.volumes))),
            bound: Mutex::new(std::mem::take(&mut *lock(&self.bound))),
            held: Mutex::new(std::mem::take(&mut *lock(&self.held))),
            directory: Arc::clone(&self.directory),
        }
    }
}
