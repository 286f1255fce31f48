//! Why the process could not start its work.

use std::io;

use super::super::error::SandboxError;
use super::super::wire::FrameError;

/// The reason why the process could not start its work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// The process's environment could not be set up.
    #[error("failed to {action}")]
    SetUp {
        /// What was tried.
        action: &'static str,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// It was not started by podvisor.
    #[error("stdin is not the socket on which podvisor sends a sandbox's configuration")]
    NotLaunched(#[source] FrameError),
    /// There is no sandbox; its launcher was told why.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

/// Returns what makes an error of the operating system's answer.
pub(super) fn set_up(action: &'static str) -> impl FnOnce(io::Error) -> ProcessError {
    move |source| ProcessError::SetUp { action, source }
}
