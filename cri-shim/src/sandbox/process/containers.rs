//! What a sandbox's process does with containers: each request of the control socket about
//! them is a method here.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oci_spec::runtime::LinuxResources;
use podvisor_agent_protocol::validate_id;
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::timeout;
use tracing::{debug, info};

use super::super::Sandbox;
use super::super::agent::{AgentContainer, AgentExec};
use super::super::error::{RefusalKind, SandboxError, SandboxError as Error};
use super::super::events::EventLog;
use super::super::stdio::{StreamSet, Streams, open, stream_id};
use super::super::types::{
    ContainerInfo, ContainerState, ContainerStats, ContainerUser, ProcessExit, RestartPolicy,
    Started, StdioFds, TerminalSize,
};
use super::super::wire::{CreateHeader, ExecHeader};
use super::container::Container;
use super::images::{self, Placement, Slots};
use super::output::ContainerStreams;
use super::restart::Processes;
use crate::machine::{Disk, MachineError, causes};

/// A terminal that nobody has told its size.
const TERMINAL: TerminalSize = TerminalSize {
    rows: 24,
    columns: 80,
};

const SIGKILL: u32 = 9;

/// The sandbox's guest and its containers.
#[derive(Debug)]
pub(super) struct Containers {
    sandbox: Arc<Sandbox>,
    containers: Mutex<BTreeMap<String, Entry>>,
    /// Held while a disk changes: a container's image is there, or on its way.
    images: AsyncMutex<Slots>,
    is_paused: AtomicBool,
    events: Option<Arc<EventLog>>,
}

#[derive(Debug, Clone)]
enum Entry {
    /// Its id is taken; the guest works on it.
    Changing,
    Made(Arc<Container>),
}

impl Containers {
    pub(super) fn new(sandbox: Arc<Sandbox>, image_slots: u8, events: Option<EventLog>) -> Self {
        Self {
            events: events.map(Arc::new),
            sandbox,
            containers: Mutex::default(),
            images: AsyncMutex::new(Slots::new(image_slots.into())),
            is_paused: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.containers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, id: &str) -> Result<Arc<Container>, Error> {
        match self.lock().get(id) {
            Some(Entry::Made(container)) => Ok(Arc::clone(container)),
            Some(Entry::Changing) => Err(SandboxError::refused(
                RefusalKind::WrongState,
                format!("container {id} is being made or deleted"),
            )),
            None => Err(not_found(id)),
        }
    }

    fn set(&self, id: &str, entry: Option<Entry>) {
        let mut containers = self.lock();
        match entry {
            Some(entry) => containers.insert(id.to_owned(), entry),
            None => containers.remove(id),
        };
    }

    pub(super) async fn create(
        &self,
        header: CreateHeader,
        images: Vec<(String, OwnedFd)>,
        log: Option<OwnedFd>,
    ) -> Result<ContainerUser, Error> {
        let id = header.id.clone();
        validate_id(&id).map_err(|error| {
            SandboxError::refused(RefusalKind::InvalidArgument, error.to_string())
        })?;
        {
            let mut containers = self.lock();
            if containers.contains_key(&id) {
                return Err(SandboxError::refused(
                    RefusalKind::AlreadyExists,
                    format!("container {id} exists already"),
                ));
            }
            containers.insert(id.clone(), Entry::Changing);
        }
        match self.make(header, images, log).await {
            Ok((container, user)) => {
                self.set(&id, Some(Entry::Made(Arc::new(container))));
                Ok(user)
            }
            Err(error) => {
                // What the agent has of it, if anything, must be gone before its disk is.
                if let Err(error) = self.forget(&id).await {
                    debug!(container = id, %error, "cannot delete what was half made");
                }
                self.set(&id, None);
                Err(error)
            }
        }
    }

    async fn make(
        &self,
        header: CreateHeader,
        images: Vec<(String, OwnedFd)>,
        log: Option<OwnedFd>,
    ) -> Result<(Container, ContainerUser), Error> {
        for (digest, image) in images {
            self.place(&header.id, &digest, image).await?;
        }
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
            id: header.id.clone(),
            image_serial,
            readonly_rootfs: header.readonly_rootfs,
            spec: header.spec,
            user: header.user,
            supplemental_groups: header.supplemental_groups,
            stdio: streams.request(),
            etc_hosts: header.etc_hosts,
            etc_resolv_conf: header.etc_resolv_conf,
            etc_hostname: header.etc_hostname,
        };
        let (pid, user) = agent.create(container).await?;
        let streams = streams.connect(agent.mux()).await?;
        let is_lasting = header.restart != RestartPolicy::Never;
        let streams = ContainerStreams::start(streams, log, header.stdin_once, is_lasting)?;
        let events = self.events.clone();
        let container = Container::new(header.id, pid, streams, processes, events);
        Ok((container, user))
    }

    /// Sees to it that the image is on a disk.
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
                slots.leave_one(index, id);
                slots.freed(index);
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Deletes a container in the guest, and takes its images' disks back.
    async fn forget(&self, id: &str) -> Result<(), Error> {
        self.sandbox.agent().delete(id).await?;
        let mut slots = self.images.lock().await;
        for index in slots.leave(id) {
            self.sandbox.machine().eject_disk(index).await?;
            slots.freed(index);
        }
        Ok(())
    }

    pub(super) async fn start(&self, id: &str) -> Result<Started, Error> {
        let container = self.get(id)?;
        let started = self.sandbox.agent().start(id).await?;
        container.started(started, self.sandbox.agent());
        Ok(started)
    }

    pub(super) async fn signal(
        &self,
        id: &str,
        exec_id: Option<&str>,
        signal: u32,
        all: bool,
    ) -> Result<(), Error> {
        let container = self.get(id)?;
        let _turn = container.processes.turn().await;
        let exec_id = exec_id.unwrap_or_default();
        let agent = self.sandbox.agent();
        Ok(agent.signal(id, exec_id, signal, all).await?)
    }

    /// The container's process is not started again.
    pub(super) fn end_restarts(&self, id: &str) -> Result<(), Error> {
        self.get(id)?.processes.end();
        Ok(())
    }

    pub(super) async fn wait(&self, id: &str, exec_id: Option<&str>) -> Result<ProcessExit, Error> {
        let mut exit = self.get(id)?.exit(exec_id)?;
        let known = exit.wait_for(Option::is_some).await;
        // Fails when the container was deleted without ever having been started.
        known
            .ok()
            .and_then(|exit| *exit)
            .ok_or_else(|| not_found(id))
    }

    pub(super) async fn delete(&self, id: &str) -> Result<(), Error> {
        let container = match self.get(id) {
            Ok(container) => container,
            Err(error) if error.kind() == Some(RefusalKind::NotFound) => return Ok(()),
            Err(error) => return Err(error),
        };
        container.processes.end();
        let turn = container.processes.turn().await;
        self.set(id, Some(Entry::Changing));
        let forgotten = self.forget(id).await;
        drop(turn);
        if let Err(error) = forgotten {
            // To be tried again.
            self.set(id, Some(Entry::Made(container)));
            return Err(error);
        }
        if container.info().state != ContainerState::Created {
            let mut exit = container.exit(None)?;
            // Its last lines are in the log when the answer comes.
            let _ = exit.wait_for(Option::is_some).await;
        }
        self.set(id, None);
        Ok(())
    }

    pub(super) async fn exec(&self, header: ExecHeader, files: StdioFds) -> Result<(), Error> {
        let container = self.get(&header.id)?;
        let streams = Streams::new(StreamSet::of(&files), header.tty)?;
        let agent = self.sandbox.agent();
        let exec = AgentExec {
            id: header.id,
            exec_id: header.exec_id.clone(),
            process: header.process,
            user: header.user,
            supplemental_groups: header.supplemental_groups,
            stdio: streams.request(),
        };
        agent.exec(exec).await?;
        let outputs = streams.attach(agent.mux(), files).await?;
        container.exec_started(header.exec_id, outputs, agent);
        Ok(())
    }

    pub(super) async fn attach(
        &self,
        id: &str,
        files: StdioFds,
        is_whole: bool,
    ) -> Result<(), Error> {
        let container = self.get(id)?;
        // It may have to wait for the log's disk.
        Ok(blocking(move || container.streams.attach(files, is_whole)).await??)
    }

    /// The end of a container's process.
    pub(super) fn exit_of(&self, id: &str) -> Result<watch::Receiver<Option<ProcessExit>>, Error> {
        self.get(id)?.exit(None)
    }

    /// Sends a signal, and SIGKILL when the process still runs after `grace`, whether or not
    /// somebody waits for it.
    pub(super) async fn stop(&self, id: &str, signal: u32, grace: Duration) -> Result<(), Error> {
        let container = self.get(id)?;
        let mut exit = container.exit(None)?;
        if exit.borrow().is_some() {
            return Ok(());
        }
        container.processes.end();
        if self.is_paused() {
            self.resume().await?;
        }
        // A process that is just being made gets the signal, too.
        let _turn = container.processes.turn().await;
        let agent = self.sandbox.agent().clone();
        if !grace.is_zero() {
            agent.signal(id, "", signal, false).await?;
        }
        let id = id.to_owned();
        tokio::spawn(async move {
            if timeout(grace, exit.wait_for(Option::is_some))
                .await
                .is_err()
            {
                info!(container = id, "the grace period is over");
                if let Err(error) = agent.signal(&id, "", SIGKILL, true).await {
                    debug!(container = id, %error, "cannot kill the container");
                }
            }
        });
        Ok(())
    }

    /// Stops the guest between two instructions.
    pub(super) async fn pause(&self) -> Result<(), Error> {
        self.sandbox.machine().pause().await.map_err(wrong_state)?;
        self.is_paused.store(true, Ordering::Release);
        Ok(())
    }

    /// Lets a paused guest go on, at the present time.
    pub(super) async fn resume(&self) -> Result<(), Error> {
        self.sandbox.machine().resume().await.map_err(wrong_state)?;
        self.is_paused.store(false, Ordering::Release);
        self.set_clock().await;
        Ok(())
    }

    pub(super) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Acquire)
    }

    /// Tells the guest the time: its clock drifts, and stands still while it is paused.
    pub(super) async fn set_clock(&self) {
        if self.is_paused() {
            return;
        }
        if let Err(error) = self.sandbox.agent().set_clock().await {
            debug!(%error, "the guest's clock is not set");
        }
    }

    pub(super) async fn resize(
        &self,
        id: &str,
        exec_id: Option<&str>,
        size: TerminalSize,
    ) -> Result<(), Error> {
        if exec_id.is_none() {
            self.get(id)?.processes.resized(size);
        }
        let agent = self.sandbox.agent();
        Ok(agent.resize(id, exec_id.unwrap_or_default(), size).await?)
    }

    pub(super) async fn reopen_log(&self, id: &str, log: OwnedFd) -> Result<(), Error> {
        let container = self.get(id)?;
        blocking(move || container.streams.reopen_log(log)).await
    }

    pub(super) async fn stats(&self, id: &str) -> Result<ContainerStats, Error> {
        Ok(self.sandbox.agent().stats(id).await?)
    }

    pub(super) fn list(&self) -> Vec<ContainerInfo> {
        let containers = self.lock();
        let made = containers.values().filter_map(|entry| match entry {
            Entry::Made(container) => Some(container.info()),
            Entry::Changing => None,
        });
        made.collect()
    }

    pub(super) async fn update_resources(
        &self,
        id: &str,
        resources: &LinuxResources,
    ) -> Result<(), Error> {
        Ok(self.sandbox.agent().update_resources(id, resources).await?)
    }

    /// Has the guest have so many bytes more than at first; says how many it has.
    pub(super) async fn grow(&self, bytes: u64, patience: Duration) -> Result<u64, Error> {
        let grown = self.sandbox.machine().grow(bytes, patience).await;
        grown.map_err(wrong_state)
    }

    /// Has the guest use so many CPUs.
    pub(super) async fn set_cpus(&self, count: u8) -> Result<(), Error> {
        let added = self.sandbox.machine().add_cpus(count).await;
        added.map_err(wrong_state)?;
        Ok(self.sandbox.agent().set_cpus(count).await?)
    }

    /// A connection to a port of the guest's loopback.
    pub(super) async fn port_forward(&self, port: u16) -> Result<OwnedFd, Error> {
        let agent = self.sandbox.agent();
        let id = stream_id()?;
        let stream = open(agent.mux(), "port", id).await?;
        agent.port_forward(id, port).await?;
        let stream = stream.into_std();
        stream.map(OwnedFd::from).map_err(|source| {
            SandboxError::refused(
                RefusalKind::Internal,
                format!("cannot pass a stream on: {source}"),
            )
        })
    }

    /// A socket that is connected to the guest's serial console.
    pub(super) fn console(&self) -> Result<OwnedFd, Error> {
        let (ours, theirs) = UnixStream::pair().map_err(|source| {
            SandboxError::refused(
                RefusalKind::Internal,
                format!("cannot make a socket: {source}"),
            )
        })?;
        let attached = self.sandbox.machine().attach_console(ours);
        attached.map_err(wrong_state)?;
        Ok(theirs.into())
    }

    /// The guest has ended: writes what came of the containers' output, and tells who waits.
    pub(super) async fn guest_is_gone(&self) {
        let made: Vec<Arc<Container>> = {
            let containers = self.lock();
            let made = containers.values().filter_map(|entry| match entry {
                Entry::Made(container) => Some(Arc::clone(container)),
                Entry::Changing => None,
            });
            made.collect()
        };
        for container in made {
            container.guest_is_gone().await;
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| SandboxError::refused(RefusalKind::Internal, error.to_string()))
}

fn serial(digest: &str) -> Result<String, Error> {
    images::serial(digest)
        .map_err(|error| SandboxError::refused(RefusalKind::InvalidArgument, error.to_string()))
}

fn wrong_state(error: MachineError) -> Error {
    SandboxError::refused(RefusalKind::WrongState, causes(&error))
}

fn not_found(id: &str) -> Error {
    SandboxError::refused(RefusalKind::NotFound, format!("no container {id}"))
}
