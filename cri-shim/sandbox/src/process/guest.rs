//! What is in the guest of a sandbox's process.
//!
//! The process itself (its jail, its control socket, the record of its exit) is the same for both
//! kinds: it asks the [`Guest`] to stop, to write the rest of its output, and to carry out the
//! requests that are about it.

use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::super::error::SandboxError;
use super::super::types::{ContainerInfo, ProcessExit, RefusalKind, SandboxExit};
use super::containers::Containers;
use super::end::{Shutdown, end_of};
use super::maintenance;
use super::own_os::OwnOs;

/// What is in the guest.
#[derive(Debug, Clone)]
pub(super) enum Guest {
    /// podvisor's kernel and agent, and the containers that the agent runs.
    Agent(Arc<Containers>),
    /// An operating system of its own, in a machine that comes later than the process and may be
    /// replaced by another one.
    OwnOs(Arc<OwnOs>),
}

impl Guest {
    /// Becomes true when the guest no longer runs, though it may not be known yet how it ended.
    pub(super) fn stopped(&self) -> watch::Receiver<bool> {
        match self {
            Self::Agent(containers) => containers.sandbox.machine().stopped(),
            Self::OwnOs(system) => system.stopped(),
        }
    }

    /// Periodic work that the guest needs while it runs.
    pub(super) async fn upkeep(self) {
        match self {
            Self::Agent(containers) => maintenance::of_guest(containers).await,
            // It looks after itself.
            Self::OwnOs(_) => {}
        }
    }

    /// Pauses the guest between two instructions.
    pub(super) async fn pause(&self) -> Result<(), SandboxError> {
        match self {
            Self::Agent(containers) => containers.pause().await,
            Self::OwnOs(system) => system.pause().await,
        }
    }

    /// Resumes a paused guest.
    pub(super) async fn resume(&self) -> Result<(), SandboxError> {
        match self {
            Self::Agent(containers) => containers.resume().await,
            Self::OwnOs(system) => system.resume().await,
        }
    }

    pub(super) fn is_paused(&self) -> bool {
        match self {
            Self::Agent(containers) => containers.is_paused(),
            Self::OwnOs(system) => system.is_paused(),
        }
    }

    /// Returns a socket that is connected to the guest's serial console.
    pub(super) fn console(&self) -> Result<OwnedFd, SandboxError> {
        match self {
            Self::Agent(containers) => containers.console(),
            Self::OwnOs(_) => Err(SandboxError::NoAgent {
                request: "open a second console",
                advice: ": attach to its container instead",
            }),
        }
    }

    /// Returns a socket that is connected to a vsock port of a guest with its own operating system.
    pub(super) async fn vsock(&self, port: u32) -> Result<OwnedFd, SandboxError> {
        match self {
            // Its ports are the agent's.
            Self::Agent(_) => Err(SandboxError::refused(
                RefusalKind::InvalidArgument,
                "cannot connect to a vsock port: the guest has no operating system of its own",
            )),
            Self::OwnOs(system) => system.vsock(port).await,
        }
    }

    pub(super) fn list(&self) -> Vec<ContainerInfo> {
        match self {
            Self::Agent(containers) => containers.list(),
            Self::OwnOs(system) => system.list(),
        }
    }

    /// Makes the sandbox end with a container's process; returns a receiver of its exit.
    pub(super) fn end_with(
        &self,
        id: &str,
    ) -> Result<watch::Receiver<Option<ProcessExit>>, SandboxError> {
        match self {
            Self::Agent(containers) => containers.end_with(id),
            Self::OwnOs(system) => system.end_with(id),
        }
    }

    /// Handles the end of the guest: writes the rest of the output, and answers waiting clients.
    async fn is_gone(&self) {
        match self {
            Self::Agent(containers) => containers.guest_is_gone().await,
            Self::OwnOs(system) => system.guest_is_gone().await,
        }
    }

    /// Stops waiting for readers that do not read the output.
    async fn detach_readers(&self) {
        match self {
            Self::Agent(containers) => containers.detach_readers().await,
            Self::OwnOs(system) => system.detach_readers().await,
        }
    }

    /// Waits for the machine's end, and causes it if there is a reason: see [`end_of`].
    pub(super) async fn ended(
        &self,
        shutdowns: &mut mpsc::UnboundedReceiver<Shutdown>,
        leaves_nothing: bool,
    ) -> (SandboxExit, Option<Instant>) {
        match self {
            Self::Agent(containers) => end_of(containers, shutdowns, leaves_nothing).await,
            Self::OwnOs(system) => end_of(system, shutdowns, leaves_nothing).await,
        }
    }

    /// Waits until the rest of the containers' output is written, and read by readers that are
    /// waited for unless their time is over.
    pub(super) async fn drain(&self, reads_are_over: impl Future<Output = ()>) {
        let mut drained = pin!(self.is_gone());
        tokio::select! {
            () = &mut drained => {}
            () = reads_are_over => {
                self.detach_readers().await;
                drained.await;
            }
        }
    }
}
