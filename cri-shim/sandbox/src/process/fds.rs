//! The descriptors that come with a request.

use std::os::fd::OwnedFd;

use super::super::error::SandboxError;
use super::super::types::{RefusalKind, StdioFds};
use super::super::wire::{FrameError, StdioHeader};

/// The descriptors of a request, in order.
pub(super) struct Fds(std::vec::IntoIter<OwnedFd>);

impl Fds {
    pub(super) fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into_iter())
    }

    pub(super) fn next(&mut self) -> Result<OwnedFd, SandboxError> {
        self.0.next().ok_or_else(|| {
            let message = FrameError::MissingFd.to_string();
            SandboxError::refused(RefusalKind::InvalidArgument, message)
        })
    }

    pub(super) fn stdio(&mut self, header: StdioHeader) -> Result<StdioFds, SandboxError> {
        let mut file = |is_there: bool| is_there.then(|| self.next()).transpose();
        Ok(StdioFds {
            stdin: file(header.stdin)?,
            stdout: file(header.stdout)?,
            stderr: file(header.stderr)?,
        })
    }
}
