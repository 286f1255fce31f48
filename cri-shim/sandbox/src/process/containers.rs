//! Operations on containers: each request of the control socket about them is a method here.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use oci_spec::runtime::LinuxResources;
use podvisor_agent_protocol::{api, validate_id};
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use super::super::agent::AgentContainer;
use super::super::error::{SandboxError, SandboxError as Error};
use super::super::events::EventLog;
use super::super::in_process::Sandbox;
use super::super::stdio::StreamSet;
use super::super::types::{
    ContainerInfo, ContainerState, ContainerStats, ContainerUser, Health, HealthCheck, ProcessExit,
    RefusalKind, RestartPolicy, Started, StdioFds, TerminalSize,
};
use super::super::wire::{CreateHeader, DeviceHeader, DeviceKind, ExecHeader};
use super::blocking::blocking;
use super::container::Container;
use super::entries::{Entries, Entry, not_found};
use super::execs;
use super::health;
use super::images::{self, Placement, Slots};
use super::output::ContainerStreams;
use super::pauses::Pauses;
use super::plugs::Plugs;
use super::restart::Processes;
use crate::machine::{Disk, MachineError, causes};

/// The size of a terminal whose client has not sent one.
const TERMINAL: TerminalSize = TerminalSize {
    rows: 24,
    columns: 80,
};

/// How long the guest may take to free a container's resources before the container's end is
/// reported.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(15);

/// Delays between attempts to undo a creation: each is twice the one before, up to the longest.
#[derive(Debug)]
struct RetryDelays(Duration);

impl RetryDelays {
    const FIRST: Duration = Duration::from_secs(1);
    const LONGEST: Duration = Duration::from_secs(64);

    fn next(&mut self) -> Duration {
        let next = (2 * self.0).min(Self::LONGEST);
        std::mem::replace(&mut self.0, next)
    }
}

impl Default for RetryDelays {
    fn default() -> Self {
        Self(Self::FIRST)
    }
}

/// The open files of a container to be created.
#[derive(Debug)]
pub(super) struct CreateFiles {
    /// By digest.
    pub(super) images: Vec<(String, OwnedFd)>,
    pub(super) log: Option<OwnedFd>,
    /// In the order of the devices.
    pub(super) disks: Vec<OwnedFd>,
}

/// The sandbox's guest and its containers.
#[derive(Debug)]
pub(super) struct Containers {
    pub(super) sandbox: Arc<Sandbox>,
    entries: Entries,
    /// Held while a disk's image changes, so that an image is either present or being placed.
    images: AsyncMutex<Slots>,
    /// Held while a disk is plugged or unplugged.
    plugs: AsyncMutex<Plugs>,
    pauses: Pauses,
    events: Option<Arc<EventLog>>,
}

impl Containers {
    pub(super) fn new(sandbox: Arc<Sandbox>, image_slots: u8, events: Option<EventLog>) -> Self {
        Self {
            events: events.map(Arc::new),
            sandbox,
            entries: Entries::default(),
            images: AsyncMutex::new(Slots::new(image_slots.into())),
            plugs: AsyncMutex::default(),
            pauses: Pauses::default(),
        }
    }

    pub(super) async fn create(
        this: &Arc<Self>,
        header: CreateHeader,
        files: CreateFiles,
    ) -> Result<ContainerUser, Error> {
        let id = header.config.id.clone();
        validate_id(&id).map_err(|error| {
            SandboxError::refused(RefusalKind::InvalidArgument, error.to_string())
        })?;
        this.entries.take(&id)?;
        match this.make(header, files).await {
            Ok((container, user)) => {
                this.entries
                    .set(&id, Some(Entry::Made(Arc::new(container))));
                Ok(user)
            }
            Err(error) => {
                if this.is_unmade(&id).await {
                    this.entries.set(&id, None);
                } else {
                    this.entries.set(&id, Some(Entry::Unmaking));
                    let this = Arc::clone(this);
                    tokio::spawn(async move {
                        let mut delays = RetryDelays::default();
                        while !this.is_unmade(&id).await {
                            sleep(delays.next()).await;
                        }
                        this.entries.set(&id, None);
                    });
                }
                Err(error)
            }
        }
    }

    /// Undoes a partial creation: the agent must have removed its part before the disk is taken
    /// away. False if it has not, for example while it still creates the container, though its
    /// answer is no longer waited for, or if it does not answer: until it does, the container's
    /// disks are in use.
    async fn is_unmade(&self, id: &str) -> bool {
        let forgotten = self.forget(id).await;
        if let Err(error) = &forgotten {
            debug!(container = id, %error, "cannot delete what was half made");
        }
        forgotten.is_ok()
    }

    async fn make(
        &self,
        header: CreateHeader,
        files: CreateFiles,
    ) -> Result<(Container, ContainerUser), Error> {
        let CreateFiles { images, log, disks } = files;
        let id = header.config.id.clone();
        for (digest, image) in images {
            self.place(&id, &digest, image).await?;
        }
        let devices = self.plug(&id, &header.devices, disks).await?;
        let image_serial = serial(&header.image_digest)?;
        let set = StreamSet {
            stdin: header.stdin,
            stdout: true,
            stderr: true,
        };
        let processes = Processes::new(header.restart, set, header.tty.then_some(TERMINAL));
        let streams = processes.streams()?;
        let agent = self.sandbox.agent();
        let container = AgentContainer {
            config: header.config,
            image_serial,
            stdio: streams.request(),
            devices,
        };
        let (pid, user) = agent.create(container).await?;
        let streams = streams.connect(agent.mux()).await?;
        let is_lasting = header.restart != RestartPolicy::Never;
        let streams = ContainerStreams::start(streams, log, header.stdin_once, is_lasting)?;
        let events = self.events.clone();
        let container = Container::new(id, pid, streams, processes, events);
        Ok((container, user))
    }

    /// Makes sure that the image is on a disk.
    async fn place(&self, id: &str, digest: &str, image: OwnedFd) -> Result<(), Error> {
        let serial = serial(digest)?;
        let mut slots = self.images.lock().await;
        let placement = slots.take(&serial, id).map_err(|error| {
            SandboxError::refused(RefusalKind::ResourceExhausted, error.to_string())
        })?;
        if let Placement::Insert(index) = placement {
            let disk = Disk {
                file: image.into(),
                serial: serial.clone(),
            };
            if let Err(error) = self.sandbox.machine().insert_disk(index, disk).await {
                slots.freed(index);
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Plugs in a container's disks; returns the devices for the request to the agent.
    async fn plug(
        &self,
        id: &str,
        wanted: &[DeviceHeader],
        disks: Vec<OwnedFd>,
    ) -> Result<Vec<api::Device>, Error> {
        let mut disks = disks.into_iter();
        let mut plugs = self.plugs.lock().await;
        let mut is_new = false;
        for device in wanted {
            let DeviceKind::Disk {
                serial,
                is_read_only,
                ..
            } = &device.source
            else {
                continue;
            };
            // There are as many files as such devices.
            let Some(file) = disks.next() else { break };
            if plugs.take(serial, id) {
                continue;
            }
            let disk = Disk {
                file: file.into(),
                serial: serial.clone(),
            };
            let plugged = self.sandbox.machine().plug_disk(disk, *is_read_only).await;
            let plugged = plugged.map_err(|error| match error {
                MachineError::NotPci => Error::wrong_state(error),
                MachineError::Full => {
                    SandboxError::refused(RefusalKind::ResourceExhausted, causes(&error))
                }
                error => error.into(),
            })?;
            plugs.add(serial.clone(), plugged, id);
            is_new = true;
        }
        if is_new {
            self.sandbox.agent().scan_devices().await?;
        }
        Ok(wanted.iter().map(agent_device).collect())
    }

    /// Frees the resources of a container that has ended permanently, but keeps its exit and its
    /// log.
    async fn release(&self, container: &Container) {
        let _turn = container.processes.turn().await;
        let id = &container.id;
        if container.ends_sandbox() || self.entries.get(id).is_err() {
            // Or it is being deleted.
            return;
        }
        let released = async {
            self.sandbox.agent().release(id).await?;
            self.take_back(id).await
        };
        match timeout(RELEASE_TIMEOUT, released).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                debug!(
                    container = id,
                    %error,
                    "failed to release the container; it is released on deletion"
                )
            }
            Err(_) => debug!(container = id, "timed out releasing the container"),
        }
    }

    /// Deletes a container in the guest, and frees its disks.
    async fn forget(&self, id: &str) -> Result<(), Error> {
        self.sandbox.agent().delete(id).await?;
        self.take_back(id).await
    }

    /// Frees the disks that only the container `id`, which is gone, used.
    async fn take_back(&self, id: &str) -> Result<(), Error> {
        let mut plugs = self.plugs.lock().await;
        for (serial, disk) in plugs.leave(id) {
            self.sandbox.agent().remove_device(&disk.address()).await?;
            // The guest no longer has it, and a machine does not unplug a device twice.
            plugs.forget(&serial);
            if let Err(error) = self.sandbox.machine().unplug_disk(&disk).await {
                warn!(
                    serial,
                    %error,
                    "failed to unplug the disk; it stays open until the machine exits"
                );
            }
        }
        drop(plugs);
        let mut slots = self.images.lock().await;
        for index in slots.leave(id) {
            self.sandbox.machine().eject_disk(index).await?;
            slots.freed(index);
        }
        Ok(())
    }

    pub(super) async fn start(this: &Arc<Self>, id: &str) -> Result<Started, Error> {
        let container = this.entries.get(id)?;
        // A client that connects meanwhile must not take it for one that nobody has started.
        let _pending = container.processes.begin_start();
        let started = this.sandbox.agent().start(id).await?;
        let containers = Arc::clone(this);
        let release = async move |container: Arc<Container>| containers.release(&container).await;
        container.started(started, this.sandbox.agent(), release);
        Ok(started)
    }

    pub(super) async fn signal(
        &self,
        id: &str,
        exec_id: Option<&str>,
        signal: u32,
        all: bool,
    ) -> Result<(), Error> {
        let container = self.entries.get(id)?;
        let _turn = container.processes.turn().await;
        let exec_id = exec_id.unwrap_or_default();
        let agent = self.sandbox.agent();
        Ok(agent.signal(id, exec_id, signal, all).await?)
    }

    /// Checks the container's health from its start to its end.
    pub(super) fn check_health(
        this: &Arc<Self>,
        id: &str,
        check: HealthCheck,
    ) -> Result<(), Error> {
        let container = this.entries.get(id)?;
        container.set_health(Health::default());
        let containers = Arc::clone(this);
        let is_paused = move || containers.is_paused();
        let agent = this.sandbox.agent().clone();
        tokio::spawn(health::watch(agent, is_paused, container, check));
        Ok(())
    }

    /// Disables restarts of the container's process.
    pub(super) fn end_restarts(&self, id: &str) -> Result<(), Error> {
        self.entries.get(id)?.processes.end();
        Ok(())
    }

    pub(super) async fn wait(&self, id: &str, exec_id: Option<&str>) -> Result<ProcessExit, Error> {
        let mut exit = self.entries.get(id)?.exit(exec_id)?;
        let known = exit.wait_for(Option::is_some).await;
        // Fails if the container was deleted without ever having been started.
        known
            .ok()
            .and_then(|exit| *exit)
            .ok_or_else(|| not_found(id))
    }

    pub(super) async fn delete(&self, id: &str) -> Result<(), Error> {
        // A container that is still being created may be unwanted already.
        let container = match self.entries.made(id).await {
            Ok(container) => container,
            Err(error) if error.kind() == Some(RefusalKind::NotFound) => return Ok(()),
            Err(error) => return Err(error),
        };
        container.processes.end();
        let turn = container.processes.turn().await;
        self.entries.set(id, Some(Entry::Unmaking));
        let forgotten = self.forget(id).await;
        drop(turn);
        if let Err(error) = forgotten {
            // For another attempt.
            self.entries.set(id, Some(Entry::Made(container)));
            return Err(error);
        }
        if container.info().state != ContainerState::Created {
            let mut exit = container.exit(None)?;
            container.hurry_readers().await;
            // Its last lines are in the log when this is answered.
            let _ = exit.wait_for(Option::is_some).await;
        }
        self.entries.set(id, None);
        Ok(())
    }

    pub(super) async fn exec(&self, header: ExecHeader, files: StdioFds) -> Result<(), Error> {
        let container = self.entries.get(&header.id)?;
        execs::start(&container, self.sandbox.agent(), header, files).await
    }

    pub(super) async fn attach(
        &self,
        id: &str,
        files: StdioFds,
        is_whole: bool,
    ) -> Result<(), Error> {
        let container = self.entries.get(id)?;
        // This may have to wait for the log's disk.
        Ok(blocking(move || container.streams.attach(files, is_whole)).await??)
    }

    /// Makes the sandbox end with a container's process; returns a receiver of its exit.
    pub(super) fn end_with(&self, id: &str) -> Result<watch::Receiver<Option<ProcessExit>>, Error> {
        let container = self.entries.get(id)?;
        container.set_ends_sandbox();
        container.exit(None)
    }

    /// As [`Container::stop`], but resumes a paused guest.
    pub(super) async fn stop(&self, id: &str, signal: u32, grace: Duration) -> Result<(), Error> {
        let container = self.entries.get(id)?;
        if container.exit(None)?.borrow().is_some() {
            return Ok(());
        }
        // First of all: a guest that does not answer must not delay the deadline.
        container.stop(self.sandbox.agent(), signal, grace)?;
        if self.is_paused() {
            self.resume().await?;
        }
        Ok(())
    }

    /// Pauses the guest between two instructions.
    pub(super) async fn pause(&self) -> Result<(), Error> {
        let paused = self.pauses.pause(self.sandbox.machine().pause()).await;
        paused.map_err(Error::wrong_state)
    }

    /// Resumes a paused guest and sets its clock.
    pub(super) async fn resume(&self) -> Result<(), Error> {
        let resumed = self.sandbox.machine().resume();
        let resumed = self.pauses.resume(resumed, self.sandbox.agent()).await;
        resumed.map_err(Error::wrong_state)
    }

    pub(super) fn is_paused(&self) -> bool {
        self.pauses.is_paused()
    }

    /// Sets the guest's clock, which drifts. A paused guest's is set when the guest goes on.
    pub(super) async fn set_clock(&self) {
        self.pauses.set_clock(self.sandbox.agent()).await;
    }

    /// Makes the guest forget files that were removed on the host: their space is not free until
    /// then.
    pub(super) async fn forget_files(&self) {
        if self.is_paused() {
            return;
        }
        match self.sandbox.machine().count_removed_objects().await {
            Ok(0) => return,
            Ok(count) => debug!(count, "the guest knows files that the host has removed"),
            Err(error) => return debug!(%error, "files that the guest knows are not looked at"),
        }
        if let Err(error) = self.sandbox.agent().forget_files().await {
            debug!(%error, "the guest does not forget files");
        }
    }

    pub(super) async fn resize(
        &self,
        id: &str,
        exec_id: Option<&str>,
        size: TerminalSize,
    ) -> Result<(), Error> {
        if exec_id.is_none() {
            self.entries.get(id)?.processes.resized(size);
        }
        let agent = self.sandbox.agent();
        Ok(agent.resize(id, exec_id.unwrap_or_default(), size).await?)
    }

    pub(super) async fn reopen_log(&self, id: &str, log: OwnedFd) -> Result<(), Error> {
        let container = self.entries.get(id)?;
        blocking(move || container.streams.reopen_log(log)).await
    }

    pub(super) async fn limit_log(
        &self,
        id: &str,
        other: OwnedFd,
        max_bytes: u64,
    ) -> Result<(), Error> {
        let container = self.entries.get(id)?;
        blocking(move || container.streams.limit_log(other, max_bytes)).await
    }

    pub(super) async fn stats(&self, id: &str, brief: bool) -> Result<ContainerStats, Error> {
        Ok(self.sandbox.agent().stats(id, brief).await?)
    }

    pub(super) fn list(&self) -> Vec<ContainerInfo> {
        let made = self.entries.all();
        made.iter().map(|container| container.info()).collect()
    }

    pub(super) async fn update_resources(
        &self,
        id: &str,
        resources: &LinuxResources,
    ) -> Result<(), Error> {
        Ok(self.sandbox.agent().update_resources(id, resources).await?)
    }

    /// Stops waiting for readers that do not read containers' output.
    pub(super) async fn detach_readers(&self) {
        let made = self.entries.all();
        join_all(made.iter().map(|container| container.detach_readers())).await;
    }

    /// Handles the end of the guest: writes the rest of the containers' output, and answers waiting
    /// clients.
    pub(super) async fn guest_is_gone(&self) {
        let made = self.entries.all();
        join_all(made.iter().map(|container| container.guest_is_gone())).await;
    }
}

fn agent_device(device: &DeviceHeader) -> api::Device {
    let mut asked = api::Device {
        path: device.path.clone(),
        access: device.access.clone(),
        ..Default::default()
    };
    match &device.source {
        DeviceKind::Guest { path } => asked.set_guest_path(path.clone()),
        DeviceKind::Disk {
            serial,
            mode,
            uid,
            gid,
            ..
        } => {
            asked.set_disk_serial(serial.clone());
            (asked.mode, asked.uid, asked.gid) = (*mode, *uid, *gid);
        }
    }
    asked
}

fn serial(digest: &str) -> Result<String, Error> {
    images::serial(digest)
        .map_err(|error| SandboxError::refused(RefusalKind::InvalidArgument, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_to_undo_a_creation_become_rarer_and_do_not_end() {
        let mut delays = RetryDelays::default();
        let seconds: Vec<_> = (0..9).map(|_| delays.next().as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
    }
}
