//! The requests to a sandbox: a method for each request of the control socket.

use std::os::fd::OwnedFd;
use std::time::Duration;

use super::super::agent::GROUPS_MAX;
use super::super::error::SandboxError;
use super::super::types::{
    BootMachine, BootReport, ContainerInfo, ContainerStats, ContainerUser, CreateContainer,
    DeviceSource, Exec, HealthCheck, ProcessExit, ReadKernel, RefusalKind, SaveMachine, Started,
    StdioFds, TerminalSize,
};
use super::super::wire::{
    Answer, BootHeader, Call, CreateHeader, DeviceHeader, DeviceKind, ExecHeader, FrameError,
    StdioHeader,
};
use super::SandboxClient;

/// How long all of a machine's memory and its disks may take to be written.
const SAVE_TIMEOUT: Duration = Duration::from_secs(3600);

impl SandboxClient {
    /// Creates a container; its process waits for the start. Returns the process's user.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn create_container(
        &self,
        container: CreateContainer,
    ) -> Result<ContainerUser, SandboxError> {
        let (volumes, images): (Vec<_>, Vec<_>) = container
            .volumes
            .into_iter()
            .map(|volume| (volume.digest, volume.image))
            .unzip();
        if !container.devices.is_empty() && !self.greeting.takes_devices {
            return Err(SandboxError::refused(
                RefusalKind::WrongState,
                "the sandbox's process is of an older podvisor, whose containers have no devices; \
                 run the pod anew",
            ));
        }
        let (devices, disks): (Vec<_>, Vec<_>) = container
            .devices
            .into_iter()
            .map(|device| {
                let (source, file) = split_device(device.source);
                let header = DeviceHeader {
                    path: device.path,
                    access: device.access,
                    source,
                };
                (header, file)
            })
            .unzip();
        let header = CreateHeader {
            config: container.config,
            image_digest: container.image_digest,
            volumes,
            has_log: container.log.is_some(),
            tty: container.tty,
            stdin: container.stdin,
            stdin_once: container.stdin_once,
            restart: container.restart,
            devices,
        };
        let fds = [container.image].into_iter().chain(images);
        let fds = fds.chain(container.log);
        let fds = fds.chain(disks.into_iter().flatten()).collect();
        match self.call(Call::Create(Box::new(header)), fds).await? {
            // The groups are stored with the container.
            (Answer::Created(user), _) if user.groups.len() > GROUPS_MAX => {
                Err(self.control(FrameError::Groups(user.groups.len())))
            }
            (Answer::Created(user), _) => Ok(user),
            _ => Err(self.unfit()),
        }
    }

    /// Boots the machine of a sandbox whose guest has an operating system of its own. It is a
    /// container from then on, which runs: it is waited for, stopped and deleted as one, and may be
    /// attached to. Several may follow each other.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn boot_machine(&self, boot: BootMachine) -> Result<Started, SandboxError> {
        let (header, fds) = BootHeader::new(boot);
        let call = Call::BootMachine(Box::new(header));
        match self.call(call, fds).await? {
            (Answer::Started(started), _) => Ok(started),
            _ => Err(self.unfit()),
        }
    }

    /// Reads what an image boots, by a machine of the loader alone, before the sandbox has one.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn read_kernel(&self, read: ReadKernel) -> Result<(), SandboxError> {
        let call = Call::ReadKernel {
            cmdline: read.cmdline,
            memory: read.memory,
        };
        let files = [read.kernel, read.initramfs, read.image, read.frame];
        match self.call(call, files.map(Into::into).into()).await? {
            (Answer::Done, _) => Ok(()),
            _ => Err(self.unfit()),
        }
    }

    /// Tells how the latest machine of a container was booted, and how far it got.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] if there is no such container, or the process is of an older
    /// version; or the sandbox is gone.
    pub async fn boot_report(&self, id: &str) -> Result<BootReport, SandboxError> {
        let call = Call::BootReport {
            id: id.to_owned(),
            seen: None,
        };
        match self.call(call, Vec::new()).await? {
            (Answer::BootReport(report), _) => Ok(*report),
            _ => Err(self.unfit()),
        }
    }

    /// Waits until there is a report newer than a version of it (0 for any), without a time limit.
    ///
    /// # Errors
    /// As [`Self::boot_report`].
    pub async fn boot_report_after(
        &self,
        id: &str,
        version: u64,
    ) -> Result<BootReport, SandboxError> {
        let call = Call::BootReport {
            id: id.to_owned(),
            seen: Some(version),
        };
        match self.wait_for(call, Vec::new()).await? {
            (Answer::BootReport(report), _) => Ok(*report),
            _ => Err(self.unfit()),
        }
    }

    /// Saves a machine whose guest has an operating system of its own, which stands still
    /// meanwhile. The process does so to the end, whatever becomes of this call. One that is to end
    /// then has ended soon after this returns ([`Self::ended`]).
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, and the machine goes on; or the sandbox is gone.
    pub async fn save_machine(&self, id: &str, save: SaveMachine) -> Result<(), SandboxError> {
        let call = Call::SaveMachine {
            id: id.to_owned(),
            disks: save.disks.len(),
            plugged: save.plugged,
            then: save.then,
        };
        let mut fds = vec![save.state.into(), save.memory.into()];
        fds.extend(save.disks);
        match self.call_within(SAVE_TIMEOUT, call, fds).await? {
            (Answer::Done, _) => Ok(()),
            _ => Err(self.unfit()),
        }
    }

    /// Makes a disk of a guest with an operating system of its own, which has this serial number,
    /// at least `bytes` large. A guest that runs sees it at once; what is on the disk stays as it
    /// is.
    ///
    /// # Errors
    /// [`SandboxError::Refused`]: there is no such disk, it is larger, or cannot grow.
    pub async fn grow_disk(&self, id: &str, serial: &str, bytes: u64) -> Result<(), SandboxError> {
        let call = Call::GrowDisk {
            id: id.to_owned(),
            serial: serial.to_owned(),
            bytes,
        };
        self.done(call, Vec::new()).await
    }

    /// Takes the link from the cards of these interfaces of the sandbox's network, and gives all
    /// others of a guest with an operating system of its own one. The guest's drivers are told, and
    /// its next machines begin with the same links.
    ///
    /// # Errors
    /// [`SandboxError::Refused`]: there is no such interface, or the guest does not run, or moves.
    pub async fn set_links(&self, id: &str, down: Vec<String>) -> Result<(), SandboxError> {
        let call = Call::SetLinks {
            id: id.to_owned(),
            down,
        };
        self.done(call, Vec::new()).await
    }

    /// Starts a container's process.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn start_container(&self, id: &str) -> Result<Started, SandboxError> {
        let call = Call::Start { id: id.to_owned() };
        match self.call(call, Vec::new()).await? {
            (Answer::Started(started), _) => Ok(started),
            _ => Err(self.unfit()),
        }
    }

    /// Sends a signal to a process, or with `all` to each process of the container.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn signal(
        &self,
        id: &str,
        exec_id: Option<&str>,
        signal: u32,
        all: bool,
    ) -> Result<(), SandboxError> {
        let call = Call::Signal {
            id: id.to_owned(),
            exec_id: exec_id.map(str::to_owned),
            signal,
            all,
        };
        self.done(call, Vec::new()).await
    }

    /// Waits until a process ends, without a time limit; its output has been written then. May be
    /// called again; of processes that `exec` started, the sandbox remembers the last 256 that
    /// ended.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn wait(&self, id: &str, exec_id: Option<&str>) -> Result<ProcessExit, SandboxError> {
        let call = Call::Wait {
            id: id.to_owned(),
            exec_id: exec_id.map(str::to_owned),
        };
        match self.wait_for(call, Vec::new()).await? {
            (Answer::Exit(exit), _) => Ok(exit),
            _ => Err(self.unfit()),
        }
    }

    /// Kills what is left of a container and frees its resources. A missing container is not an
    /// error.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn delete_container(&self, id: &str) -> Result<(), SandboxError> {
        let call = Call::Delete { id: id.to_owned() };
        self.done(call, Vec::new()).await
    }

    /// Starts another process in a running container. The sandbox's process serves its streams
    /// until they end.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn exec(&self, id: &str, exec: Exec) -> Result<(), SandboxError> {
        let (stdio, fds) = split(exec.stdio);
        let header = ExecHeader {
            id: id.to_owned(),
            exec_id: exec.exec_id,
            process: exec.process,
            user: exec.user,
            supplemental_groups: exec.supplemental_groups,
            tty: exec.tty,
            stdio,
        };
        self.done(Call::Exec(Box::new(header)), fds).await
    }

    /// Connects files to the streams of a container's process, from now on. The files are closed
    /// when the process's output has ended. A client that falls more than 1 MiB behind is
    /// disconnected, so that others do not wait for it.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn attach(&self, id: &str, stdio: StdioFds) -> Result<(), SandboxError> {
        self.attach_as(id, stdio, false).await
    }

    /// As [`Self::attach`], but the process waits for this reader as for the reader of a pipe: it
    /// gets all of the output, however slowly it reads.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn attach_whole(&self, id: &str, stdio: StdioFds) -> Result<(), SandboxError> {
        self.attach_as(id, stdio, true).await
    }

    async fn attach_as(
        &self,
        id: &str,
        stdio: StdioFds,
        is_whole: bool,
    ) -> Result<(), SandboxError> {
        let (stdio, fds) = split(stdio);
        let call = Call::Attach {
            id: id.to_owned(),
            stdio,
            is_whole,
        };
        self.done(call, fds).await
    }

    /// Makes the sandbox shut itself down when this container's process ends.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn end_with(&self, id: &str) -> Result<(), SandboxError> {
        let call = Call::EndWith { id: id.to_owned() };
        self.done(call, Vec::new()).await
    }

    /// Asks a container to end by a signal; if it still runs after `grace`, the sandbox kills it.
    /// The sandbox's process keeps the deadline, whether or not a client is connected. Returns
    /// immediately; [`Self::wait`] reports the end. Of several requests, the earliest deadline
    /// holds.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn stop_container(
        &self,
        id: &str,
        signal: u32,
        grace: Duration,
    ) -> Result<(), SandboxError> {
        let call = Call::Stop {
            id: id.to_owned(),
            signal,
            grace_ms: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX),
        };
        self.done(call, Vec::new()).await
    }

    /// Disables further restarts of a container's process.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn end_restarts(&self, id: &str) -> Result<(), SandboxError> {
        let call = Call::EndRestarts { id: id.to_owned() };
        self.done(call, Vec::new()).await
    }

    /// Pauses the guest between two instructions.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] if it is paused already, or a device is in the middle of a long
    /// operation; or the sandbox is gone.
    pub async fn pause(&self) -> Result<(), SandboxError> {
        self.done(Call::Pause, Vec::new()).await
    }

    /// Resumes a paused guest and sets its clock.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] if it is not paused, or the sandbox is gone.
    pub async fn resume(&self) -> Result<(), SandboxError> {
        self.done(Call::Resume, Vec::new()).await
    }

    /// Whether the guest is paused.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub async fn is_paused(&self) -> Result<bool, SandboxError> {
        match self.call(Call::IsPaused, Vec::new()).await? {
            (Answer::IsPaused(is_paused), _) => Ok(is_paused),
            _ => Err(self.unfit()),
        }
    }

    /// Sets the size of a process's terminal.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn resize(
        &self,
        id: &str,
        exec_id: Option<&str>,
        size: TerminalSize,
    ) -> Result<(), SandboxError> {
        let call = Call::Resize {
            id: id.to_owned(),
            exec_id: exec_id.map(str::to_owned),
            size,
        };
        self.done(call, Vec::new()).await
    }

    /// Limits the size of a container's log: lines go alternately to its present file and to
    /// `other`, both opened for appending, each of which has at most `max_bytes` (except for a
    /// longer line) and is truncated when its turn comes. The times of their first lines tell which
    /// is the older one. Holds until the log is reopened.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn limit_log(
        &self,
        id: &str,
        other: OwnedFd,
        max_bytes: u64,
    ) -> Result<(), SandboxError> {
        let call = Call::LimitLog {
            id: id.to_owned(),
            max_bytes,
        };
        self.done(call, vec![other]).await
    }

    /// Has the container's health checked from its start on: by the sandbox's process, whether or
    /// not a client is connected. [`ContainerInfo::health`](crate::ContainerInfo::health) tells it.
    ///
    /// # Errors
    /// [`SandboxError`].
    pub async fn check_health(&self, id: &str, check: HealthCheck) -> Result<(), SandboxError> {
        let call = Call::CheckHealth {
            id: id.to_owned(),
            check: Box::new(check),
        };
        self.done(call, Vec::new()).await
    }

    /// Replaces a container's log, as after a rotation. Each line is in one of the two.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn reopen_log(&self, id: &str, log: OwnedFd) -> Result<(), SandboxError> {
        let call = Call::ReopenLog { id: id.to_owned() };
        self.done(call, vec![log]).await
    }

    /// Returns a container's resource usage.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn stats(&self, id: &str) -> Result<ContainerStats, SandboxError> {
        self.stats_of(id, false).await
    }

    /// As [`Self::stats`], without descriptors, threads and the guest's own figures, which cost
    /// more than all the rest: for frequent callers.
    ///
    /// # Errors
    /// As [`Self::stats`].
    pub async fn stats_in_brief(&self, id: &str) -> Result<ContainerStats, SandboxError> {
        self.stats_of(id, true).await
    }

    async fn stats_of(&self, id: &str, brief: bool) -> Result<ContainerStats, SandboxError> {
        let id = id.to_owned();
        let call = Call::Stats { id, brief };
        match self.call(call, Vec::new()).await? {
            (Answer::Stats(stats), _) => Ok(*stats),
            _ => Err(self.unfit()),
        }
    }

    /// Lists the sandbox's containers, sorted by id.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub async fn list(&self) -> Result<Vec<ContainerInfo>, SandboxError> {
        match self.call(Call::List, Vec::new()).await? {
            (Answer::List(list), _) => Ok(list),
            _ => Err(self.unfit()),
        }
    }

    /// Returns a non-blocking stream socket that is connected to a TCP port of the guest's
    /// loopback.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn port_forward(&self, port: u16) -> Result<OwnedFd, SandboxError> {
        match self.call(Call::PortForward { port }, Vec::new()).await? {
            (Answer::Stream, mut fds) if fds.len() == 1 => fds.pop().ok_or_else(|| self.unfit()),
            _ => Err(self.unfit()),
        }
    }

    /// Returns a stream socket that is connected to a vsock port of a guest with an
    /// operating system of its own. It ends if the guest refuses.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn vsock(&self, port: u32) -> Result<OwnedFd, SandboxError> {
        match self.call(Call::Vsock { port }, Vec::new()).await? {
            (Answer::Stream, mut fds) if fds.len() == 1 => fds.pop().ok_or_else(|| self.unfit()),
            _ => Err(self.unfit()),
        }
    }

    /// Returns a stream socket that is connected to the guest's serial console, whether or not the
    /// guest answers. It ends with the machine.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] of kind `WrongState` if the machine was built without a console;
    /// or the sandbox is gone.
    pub async fn console(&self) -> Result<OwnedFd, SandboxError> {
        match self.call(Call::Console, Vec::new()).await? {
            (Answer::Stream, mut fds) if fds.len() == 1 => fds.pop().ok_or_else(|| self.unfit()),
            _ => Err(self.unfit()),
        }
    }
}

fn split_device(source: DeviceSource) -> (DeviceKind, Option<OwnedFd>) {
    match source {
        DeviceSource::Guest(path) => (DeviceKind::Guest { path }, None),
        DeviceSource::Disk {
            file,
            serial,
            is_read_only,
            mode,
            uid,
            gid,
        } => {
            let kind = DeviceKind::Disk {
                serial,
                is_read_only,
                mode,
                uid,
                gid,
            };
            (kind, Some(file))
        }
    }
}

fn split(stdio: StdioFds) -> (StdioHeader, Vec<OwnedFd>) {
    let header = StdioHeader {
        stdin: stdio.stdin.is_some(),
        stdout: stdio.stdout.is_some(),
        stderr: stdio.stderr.is_some(),
    };
    let fds = [stdio.stdin, stdio.stdout, stdio.stderr];
    (header, fds.into_iter().flatten().collect())
}
