//! The stream over which a machine moves.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::super::super::error::SandboxError;
use super::super::super::stdio::StdioError;

/// Makes a stream block, and each read and write fail when nothing comes for so long.
pub(super) fn prepared(connection: OwnedFd, timeout: Duration) -> Result<UnixStream, SandboxError> {
    let connection = UnixStream::from(connection);
    // None would mean for ever.
    let timeout = Some(timeout.max(Duration::from_millis(1)));
    let set_up = connection
        .set_nonblocking(false)
        .and_then(|()| connection.set_read_timeout(timeout))
        .and_then(|()| connection.set_write_timeout(timeout));
    let name = "connection";
    set_up.map_err(|source| StdioError::SetUp { name, source })?;
    Ok(connection)
}

/// Returns another descriptor of it.
pub(super) fn again(connection: &UnixStream) -> Result<UnixStream, SandboxError> {
    let name = "connection";
    let again = connection.try_clone();
    Ok(again.map_err(|source| StdioError::SetUp { name, source })?)
}
