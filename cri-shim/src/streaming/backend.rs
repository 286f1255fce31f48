//! The interface to containers, which streams are connected to.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use crate::sandbox::{StdioFds, TerminalSize};

use std::os::fd::OwnedFd;

/// A future that a trait object returns.
pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A failure, in words for the client.
pub(crate) type BackendError = Box<dyn std::error::Error + Send + Sync>;

/// A command to execute in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExecRequest {
    pub(crate) container: String,
    pub(crate) command: Vec<String>,
    pub(crate) tty: bool,
    pub(crate) stdin: bool,
    pub(crate) stdout: bool,
    pub(crate) stderr: bool,
}

/// The streams of a container's own process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AttachRequest {
    pub(crate) container: String,
    pub(crate) tty: bool,
    pub(crate) stdin: bool,
    pub(crate) stdout: bool,
    pub(crate) stderr: bool,
}

/// Ports of a pod. If none are named, the client may ask for any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PortForwardRequest {
    pub(crate) pod: String,
    pub(crate) ports: Vec<u16>,
}

/// A process whose streams are connected.
pub(crate) struct Process {
    /// Resolves to its exit code when it has ended.
    pub(crate) exit: BoxFuture<'static, Result<i32, BackendError>>,
    /// Sets the size of its terminal.
    pub(crate) resize: Box<dyn Fn(TerminalSize) -> BoxFuture<'static, ()> + Send + Sync>,
    /// For a client that is gone: ends what only this client needed.
    pub(crate) abandon: BoxFuture<'static, ()>,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process").finish_non_exhaustive()
    }
}

/// The containers' side. Descriptors that it gets are stream sockets; it closes them, or has them
/// closed, when the process can no longer read or write.
pub(crate) trait Backend: Send + Sync + 'static {
    /// Starts a process.
    fn exec(
        &self,
        request: ExecRequest,
        stdio: StdioFds,
    ) -> BoxFuture<'_, Result<Process, BackendError>>;

    /// Connects streams to a running process.
    fn attach(
        &self,
        request: AttachRequest,
        stdio: StdioFds,
    ) -> BoxFuture<'_, Result<Process, BackendError>>;

    /// Connects to a port on a pod's loopback.
    fn port_forward<'a>(
        &'a self,
        pod: &'a str,
        port: u16,
    ) -> BoxFuture<'a, Result<OwnedFd, BackendError>>;
}
