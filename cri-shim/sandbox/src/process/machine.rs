//! Requests about the machine, as opposed to its containers.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::super::error::SandboxError as Error;
use super::super::stdio::{open, stream_id};
use super::super::types::RefusalKind;
use super::containers::{Containers, wrong_state};

impl Containers {
    /// Changes the guest's additional memory to `bytes`; returns what it has then.
    pub(super) async fn grow(&self, bytes: u64, patience: Duration) -> Result<u64, Error> {
        let grown = self.sandbox.machine().grow(bytes, patience).await;
        grown.map_err(wrong_state)
    }

    /// Waits until the guest's containers run short of memory.
    pub(super) async fn await_pressure(&self) -> Result<(), Error> {
        Ok(self.sandbox.agent().await_pressure().await?)
    }

    /// Makes the guest use `count` CPUs.
    pub(super) async fn set_cpus(&self, count: u8) -> Result<(), Error> {
        let added = self.sandbox.machine().add_cpus(count).await;
        added.map_err(wrong_state)?;
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
        attached.map_err(wrong_state)?;
        Ok(theirs.into())
    }
}
