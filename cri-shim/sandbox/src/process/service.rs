//! Executes and answers the requests of the control socket.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use super::super::error::SandboxError;
use super::super::types::{RefusalKind, SandboxExit};
use super::super::wire::{
    Answer, CONTROL_VERSION, Call, CreateHeader, DeviceHeader, DeviceKind, Greeting,
};
use super::containers::{Containers, CreateFiles};
use super::end::{Cause, Shutdown};
use super::fds::Fds;
use super::guest::Guest;
use super::own_os;

/// The state that answers to requests need.
#[derive(Debug, Clone)]
pub(super) struct Service {
    pub(super) guest: Guest,
    /// Layers of the jail that the host does not have.
    pub(super) missing_layers: Arc<[String]>,
    /// Sends reasons for ending the machine.
    pub(super) shutdown: mpsc::UnboundedSender<Shutdown>,
    /// How the machine ended, as soon as it is known.
    pub(super) cause: Cause,
    /// As `cause`, but once all output is written.
    pub(super) exit: watch::Receiver<Option<SandboxExit>>,
}

impl Service {
    /// Executes a request; returns the answer and its descriptors.
    pub(super) async fn answer(
        &self,
        call: Call,
        fds: Fds,
    ) -> Result<(Answer, Vec<OwnedFd>), SandboxError> {
        let has_agent = matches!(self.guest, Guest::Agent(_));
        let answer = match call {
            Call::Hello { .. } => Answer::Hello(Greeting {
                version: CONTROL_VERSION,
                takes_devices: has_agent,
                missing_layers: self.missing_layers.to_vec(),
                tells_pressure: has_agent,
                drops_waits: true,
            }),
            Call::Shutdown { grace_ms } => {
                // Fails if the machine is ending anyway.
                let grace = Duration::from_millis(grace_ms);
                let _ = self.shutdown.send(Shutdown::Within(grace));
                Answer::Done
            }
            Call::Ended => Answer::Ended(self.ended().await),
            // The connection has handled it.
            Call::Abandon { .. } => Answer::Done,
            Call::List => Answer::List(self.guest.list()),
            Call::EndWith { id } => {
                self.end_with(&id)?;
                Answer::Done
            }
            Call::Pause => {
                self.guest.pause().await?;
                Answer::Done
            }
            Call::Resume => {
                self.guest.resume().await?;
                Answer::Done
            }
            Call::IsPaused => Answer::IsPaused(self.guest.is_paused()),
            Call::Console => return Ok((Answer::Stream, vec![self.guest.console()?])),
            Call::Vsock { port } => {
                return Ok((Answer::Stream, vec![self.guest.vsock(port).await?]));
            }
            call => return self.about_containers(call, fds).await,
        };
        Ok((answer, Vec::new()))
    }

    /// Executes a request that is about containers.
    async fn about_containers(
        &self,
        call: Call,
        mut fds: Fds,
    ) -> Result<(Answer, Vec<OwnedFd>), SandboxError> {
        let containers = match &self.guest {
            Guest::Agent(containers) => containers,
            Guest::OwnOs(system) => {
                let answer = own_os::answer(system, call, fds).await?;
                return Ok((answer, Vec::new()));
            }
        };
        let answer = match call {
            Call::Create(header) => create(containers, *header, fds).await?,
            Call::Start { id } => Answer::Started(Containers::start(containers, &id).await?),
            Call::Signal {
                id,
                exec_id,
                signal,
                all,
            } => {
                let exec_id = exec_id.as_deref();
                containers.signal(&id, exec_id, signal, all).await?;
                Answer::Done
            }
            Call::Wait { id, exec_id } => {
                Answer::Exit(containers.wait(&id, exec_id.as_deref()).await?)
            }
            Call::Delete { id } => {
                containers.delete(&id).await?;
                Answer::Done
            }
            Call::Exec(header) => {
                let files = fds.stdio(header.stdio)?;
                containers.exec(*header, files).await?;
                Answer::Done
            }
            Call::Attach {
                id,
                stdio,
                is_whole,
            } => {
                let files = fds.stdio(stdio)?;
                containers.attach(&id, files, is_whole).await?;
                Answer::Done
            }
            Call::Stop {
                id,
                signal,
                grace_ms,
            } => {
                let grace = Duration::from_millis(grace_ms);
                containers.stop(&id, signal, grace).await?;
                Answer::Done
            }
            Call::EndRestarts { id } => {
                containers.end_restarts(&id)?;
                Answer::Done
            }
            Call::Resize { id, exec_id, size } => {
                containers.resize(&id, exec_id.as_deref(), size).await?;
                Answer::Done
            }
            Call::ReopenLog { id } => {
                containers.reopen_log(&id, fds.next()?).await?;
                Answer::Done
            }
            Call::CheckHealth { id, check } => {
                Containers::check_health(containers, &id, *check)?;
                Answer::Done
            }
            Call::LimitLog { id, max_bytes } => {
                containers.limit_log(&id, fds.next()?, max_bytes).await?;
                Answer::Done
            }
            Call::Stats { id, brief } => {
                Answer::Stats(Box::new(containers.stats(&id, brief).await?))
            }
            Call::UpdateResources { id, resources } => {
                containers.update_resources(&id, &resources).await?;
                Answer::Done
            }
            Call::Grow { bytes, patience_ms } => {
                let patience = Duration::from_millis(patience_ms);
                Answer::Grown(containers.grow(bytes, patience).await?)
            }
            Call::AwaitPressure => {
                containers.await_pressure().await?;
                Answer::Done
            }
            Call::SetCpus { count } => {
                containers.set_cpus(count).await?;
                Answer::Done
            }
            Call::PortForward { port } => {
                let stream = containers.port_forward(port).await?;
                return Ok((Answer::Stream, vec![stream]));
            }
            Call::BootMachine(_) => return Err(booted()),
            Call::GuestAgent { .. }
            | Call::ReadKernel { .. }
            | Call::CopyFile { .. }
            | Call::Reboot { .. }
            | Call::SaveMachine { .. }
            | Call::DumpMemory { .. }
            | Call::Dump { .. }
            | Call::GrowDisk { .. }
            | Call::SetLinks { .. }
            | Call::PlugDisk { .. }
            | Call::UnplugDisk { .. }
            | Call::SendMachine { .. }
            | Call::ReceiveMachine { .. }
            | Call::CancelMigration { .. }
            | Call::ResolveMigration { .. }
            | Call::Migration { .. }
            | Call::BootReport { .. } => {
                return Err(SandboxError::refused(
                    RefusalKind::InvalidArgument,
                    format!(
                        "cannot {}: the guest has no operating system of its own",
                        call.action()
                    ),
                ));
            }
            // Not about containers.
            Call::Hello { .. }
            | Call::Shutdown { .. }
            | Call::Ended
            | Call::Abandon { .. }
            | Call::List
            | Call::EndWith { .. }
            | Call::Pause
            | Call::Resume
            | Call::IsPaused
            | Call::Console
            | Call::Vsock { .. } => Answer::Done,
        };
        Ok((answer, Vec::new()))
    }

    /// Ends the machine when the container's process has ended permanently.
    fn end_with(&self, id: &str) -> Result<(), SandboxError> {
        let mut exit = self.guest.end_with(id)?;
        let shutdown = self.shutdown.clone();
        tokio::spawn(async move {
            // An error means that the container was deleted, which does not end the machine.
            if exit.wait_for(Option::is_some).await.is_ok() {
                let _ = shutdown.send(Shutdown::Done);
            }
        });
        Ok(())
    }

    /// Waits until the machine has ended.
    async fn ended(&self) -> SandboxExit {
        let mut exit = self.exit.clone();
        let exit = exit.wait_for(Option::is_some).await;
        let exit = exit.ok().and_then(|exit| exit.clone());
        exit.unwrap_or(SandboxExit::Died)
    }
}

/// The refusal of a second machine beside that of the agent.
fn booted() -> SandboxError {
    SandboxError::refused(
        RefusalKind::WrongState,
        "the sandbox has a machine already: launch one for an operating system of its own",
    )
}

async fn create(
    containers: &Arc<Containers>,
    header: CreateHeader,
    mut fds: Fds,
) -> Result<Answer, SandboxError> {
    let digests = [&header.image_digest].into_iter().chain(&header.volumes);
    let images = digests.map(|digest| Ok((digest.clone(), fds.next()?)));
    let images = images.collect::<Result<Vec<_>, SandboxError>>()?;
    let log = header.has_log.then(|| fds.next()).transpose()?;
    let is_disk = |device: &&DeviceHeader| matches!(device.source, DeviceKind::Disk { .. });
    let disks = header.devices.iter().filter(is_disk);
    let disks = disks.map(|_| fds.next()).collect::<Result<_, _>>()?;
    let files = CreateFiles { images, log, disks };
    let user = Containers::create(containers, header, files).await?;
    Ok(Answer::Created(user))
}
