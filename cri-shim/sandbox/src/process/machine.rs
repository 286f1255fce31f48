//! Requests about the machine, as opposed to its containers, and its end.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use tracing::debug;

use super::super::error::SandboxError as Error;
use super::super::stdio::{open, stream_id};
use super::super::types::{RefusalKind, SandboxExit};
use super::containers::Containers;
use super::end::EndOfMachine;

impl Containers {
    /// Changes the guest's additional memory to `bytes`; returns what it has then.
    pub(super) async fn grow(&self, bytes: u64, patience: Duration) -> Result<u64, Error> {
        let grown = self.sandbox.machine().grow(bytes, patience).await;
        grown.map_err(Error::wrong_state)
    }

    /// Waits until the guest's containers run short of memory.
    pub(super) async fn await_pressure(&self) -> Result<(), Error> {
        Ok(self.sandbox.agent().await_pressure().await?)
    }

    /// Makes the guest use `count` CPUs.
    pub(super) async fn set_cpus(&self, count: u8) -> Result<(), Error> {
        let added = self.sandbox.machine().add_cpus(count).await;
        added.map_err(Error::wrong_state)?;
        Ok(self.sandbox.agent().set_cpus(count).await?)
    }

    /// Returns a connection to a port of the guest's loopback.
    pub(super) async fn port_forward(&self, port: u16) -> Result<OwnedFd, Error> {
        let agent = self.sandbox.agent();
        let id = stream_id()?;
        // First of all: the guest would keep a stream for which no request comes.
        agent.port_forward(id, port).await?;
        let stream = open(agent.mux(), "port", id).await?;
        let stream = stream.into_std();
        stream.map(OwnedFd::from).map_err(|source| {
            Error::refused(
                RefusalKind::Internal,
                format!("cannot pass a stream on: {source}"),
            )
        })
    }

    /// Returns a socket that is connected to the guest's serial console.
    pub(super) fn console(&self) -> Result<OwnedFd, Error> {
        let (ours, theirs) = UnixStream::pair().map_err(|source| {
            Error::refused(
                RefusalKind::Internal,
                format!("cannot make a socket: {source}"),
            )
        })?;
        let attached = self.sandbox.machine().attach_console(ours);
        attached.map_err(Error::wrong_state)?;
        Ok(theirs.into())
    }
}

impl EndOfMachine for Arc<Containers> {
    async fn exit(&self) -> SandboxExit {
        self.sandbox.machine().ended().await.into()
    }

    fn has_stopped(&self) -> bool {
        *self.sandbox.machine().stopped().borrow()
    }

    async fn lost(&self) {
        self.sandbox.agent().lost().await;
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.sandbox.machine().vsock_counters()
    }

    fn ask_to_stop(&self) {
        let containers = Arc::clone(self);
        tokio::spawn(async move {
            if containers.is_paused()
                && let Err(error) = containers.resume().await
            {
                debug!(%error, "the guest stays paused");
            }
            containers.sandbox.ask_to_stop().await;
        });
    }

    fn kill(&self) {
        self.sandbox.machine().kill();
    }
}
