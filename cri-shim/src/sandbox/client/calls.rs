//! What a sandbox can be asked for: a method for each request of the control socket.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use oci_spec::runtime::LinuxResources;

use super::super::agent::GROUPS_MAX;
use super::super::cgroup;
use super::super::error::{RefusalKind, SandboxError};
use super::super::oom;
use super::super::types::{
    ContainerInfo, ContainerStats, ContainerUser, CreateContainer, DeviceSource, Exec, ProcessExit,
    Started, StdioFds, TerminalSize,
};
use super::super::wire::{
    Answer, Call, CreateHeader, DeviceHeader, DeviceKind, ExecHeader, FrameError, StdioHeader,
};
use super::{REQUEST_TIMEOUT, SandboxClient};

impl SandboxClient {
    /// Makes a container; its process waits for the start. Says who that will be.
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
            id: container.id,
            image_digest: container.image_digest,
            volumes,
            readonly_rootfs: container.readonly_rootfs,
            spec: container.spec,
            user: container.user,
            supplemental_groups: container.supplemental_groups,
            has_log: container.log.is_some(),
            tty: container.tty,
            stdin: container.stdin,
            stdin_once: container.stdin_once,
            restart: container.restart,
            devices,
            guest_devices: container.guest_devices,
            etc_hosts: container.etc_hosts,
            etc_resolv_conf: container.etc_resolv_conf,
            etc_hostname: container.etc_hostname,
        };
        let fds = [container.image].into_iter().chain(images);
        let fds = fds.chain(container.log);
        let fds = fds.chain(disks.into_iter().flatten()).collect();
        match self.call(Call::Create(Box::new(header)), fds).await? {
            // They are kept with the container.
            (Answer::Created(user), _) if user.groups.len() > GROUPS_MAX => {
                Err(self.control(FrameError::Groups(user.groups.len())))
            }
            (Answer::Created(user), _) => Ok(user),
            _ => Err(self.unfit()),
        }
    }

    /// Lets a container's process run.
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

    /// Sends a signal to a process, or with `all` to each of the container's.
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

    /// Waits for the end of a process, however long that takes; its output has been written
    /// then. May be asked again; of processes that `exec` started, the sandbox remembers the
    /// last 256 that ended.
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

    /// Kills what is left of a container and frees what it held. One that does not exist is
    /// no error.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn delete_container(&self, id: &str) -> Result<(), SandboxError> {
        let call = Call::Delete { id: id.to_owned() };
        self.done(call, Vec::new()).await
    }

    /// Starts a further process in a running container. Its streams are served until they
    /// end, by the sandbox's process.
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

    /// Connects files to the streams of a container's process, from now on. The files are
    /// closed when the process's output has ended. An attacher that falls more than 1 MiB
    /// behind is disconnected: nobody else waits for it.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn attach(&self, id: &str, stdio: StdioFds) -> Result<(), SandboxError> {
        self.attach_as(id, stdio, false).await
    }

    /// As [`Self::attach`], and the process waits for this reader as for the end of a pipe: it
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

    /// From now on the sandbox shuts itself down when this container's process has ended.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn end_with(&self, id: &str) -> Result<(), SandboxError> {
        let call = Call::EndWith { id: id.to_owned() };
        self.done(call, Vec::new()).await
    }

    /// Asks a container to end by a signal; when it still runs after `grace`, the sandbox kills
    /// it. The deadline is the sandbox's: it holds whether or not anybody is connected. Returns
    /// at once; [`Self::wait`] tells the end. Of several requests the earliest deadline holds.
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

    /// From now on a container's process is not started again when it ends.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn end_restarts(&self, id: &str) -> Result<(), SandboxError> {
        let call = Call::EndRestarts { id: id.to_owned() };
        self.done(call, Vec::new()).await
    }

    /// Stops the guest between two instructions.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] when it is paused already, or a device is in the middle of
    /// something long; or the sandbox is gone.
    pub async fn pause(&self) -> Result<(), SandboxError> {
        self.done(Call::Pause, Vec::new()).await
    }

    /// Lets a paused guest go on; its clock is set.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] when it is not paused, or the sandbox is gone.
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

    /// Tells a process's terminal its size.
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

    /// Bounds a container's log: its lines go by turns to the file that it has and to `other`, both
    /// opened for appending, each of which has at most `max_bytes` (but for a longer line) and is
    /// emptied when its turn comes. The times of their first lines tell which is the older one.
    /// Holds until the log is reopened.
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

    /// Gives a container another log, as after a rotation. Each line is in one of the two.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn reopen_log(&self, id: &str, log: OwnedFd) -> Result<(), SandboxError> {
        let call = Call::ReopenLog { id: id.to_owned() };
        self.done(call, vec![log]).await
    }

    /// What a container uses.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn stats(&self, id: &str) -> Result<ContainerStats, SandboxError> {
        self.stats_of(id, false).await
    }

    /// As [`Self::stats`], without descriptors, threads and the guest's own figures, which cost
    /// more than all the rest: for who asks often.
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

    /// The sandbox's containers, in the order of their ids.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub async fn list(&self) -> Result<Vec<ContainerInfo>, SandboxError> {
        match self.call(Call::List, Vec::new()).await? {
            (Answer::List(list), _) => Ok(list),
            _ => Err(self.unfit()),
        }
    }

    /// Changes a container's limits; what `resources` leaves out stays as it is.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn update_resources(
        &self,
        id: &str,
        resources: &LinuxResources,
    ) -> Result<(), SandboxError> {
        let call = Call::UpdateResources {
            id: id.to_owned(),
            resources: Box::new(resources.clone()),
        };
        self.done(call, Vec::new()).await
    }

    /// Has the guest, which was launched with `memory` bytes and for `most` more, have `growth`
    /// more, or as near as it gets within `patience`: what is in use stays. The control group's
    /// limit goes with it. Returns how much more it has then, which is `most` at most.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] when the sandbox was launched without growth,
    /// [`SandboxError::Control`] when its process claims more than it can have, or it is gone.
    pub async fn grow(
        &self,
        memory: u64,
        growth: u64,
        most: u64,
        patience: Duration,
    ) -> Result<u64, SandboxError> {
        let dir = &self.inner.dir;
        cgroup::allow_memory(dir, memory.saturating_add(growth));
        let call = Call::Grow {
            bytes: growth,
            patience_ms: u64::try_from(patience.as_millis()).unwrap_or(u64::MAX),
        };
        let limit = patience.saturating_add(REQUEST_TIMEOUT);
        match self.call_within(limit, call, Vec::new()).await? {
            // The limit is not the process's own to set.
            (Answer::Grown(grown), _) if grown > most => {
                Err(self.control(FrameError::Grown { grown, most }))
            }
            (Answer::Grown(grown), _) => {
                // What the guest still has it may use.
                let more = grown.max(growth);
                cgroup::limit_memory(dir, memory.saturating_add(more));
                Ok(grown)
            }
            _ => Err(self.unfit()),
        }
    }

    /// Whether the sandbox's process is of a podvisor that has [`Self::await_pressure`].
    pub(crate) fn tells_pressure(&self) -> bool {
        self.greeting.tells_pressure
    }

    /// Waits until the guest's containers run short of memory. Those that need more are held up
    /// then, for half a minute at most: time to [`Self::grow`], and to ask this again.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] by a process that an older podvisor started, or it is gone.
    pub async fn await_pressure(&self) -> Result<(), SandboxError> {
        if !self.tells_pressure() {
            return Err(SandboxError::refused(
                RefusalKind::WrongState,
                "the sandbox's process is of an older podvisor and does not tell",
            ));
        }
        match self.wait_for(Call::AwaitPressure, Vec::new()).await? {
            (Answer::Done, _) => Ok(()),
            _ => Err(self.unfit()),
        }
    }

    /// Has the guest use `count` vCPUs: more than it was launched with, or fewer again. The control
    /// group's limit goes with it.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] when the sandbox was launched for fewer at most, or it is gone.
    pub async fn set_vcpus(&self, count: u8) -> Result<(), SandboxError> {
        let set = self.done(Call::SetCpus { count }, Vec::new()).await;
        if set.is_ok() {
            cgroup::limit_cpus(&self.inner.dir, count);
        }
        set
    }

    /// Sets the share of CPU time that the sandbox has when others want it, too: 1024 is that of
    /// one CPU, as in the older kind of control groups.
    pub fn set_cpu_shares(&self, shares: u64) {
        cgroup::weigh_cpus(&self.inner.dir, shares);
    }

    /// Sets how readily the host's kernel kills the sandbox when it has no memory left: -1000 is
    /// never, 1000 before all others.
    ///
    /// # Errors
    /// The process is gone, or the privilege is missing.
    pub fn set_oom_score_adj(&self, value: i16) -> io::Result<()> {
        oom::set(self.inner.pid, value)
    }

    /// What the sandbox takes of the host's memory, in bytes, if its control group is below
    /// `parent`, a path from the hierarchy's root.
    #[must_use]
    pub fn memory_below(&self, parent: &Path) -> Option<u64> {
        cgroup::memory_below(&self.inner.dir, parent)
    }

    /// A stream socket (non-blocking) that is connected to a TCP port of the guest's loopback.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] with the reason, or the sandbox is gone.
    pub async fn port_forward(&self, port: u16) -> Result<OwnedFd, SandboxError> {
        match self.call(Call::PortForward { port }, Vec::new()).await? {
            (Answer::Stream, mut fds) if fds.len() == 1 => fds.pop().ok_or_else(|| self.unfit()),
            _ => Err(self.unfit()),
        }
    }

    /// A stream socket that is connected to the guest's serial console, whether or not the guest
    /// answers. It ends with the machine.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] of kind `WrongState` when the machine was made without a console;
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
