//! The connection to a sandbox's process, before any message is exchanged.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::Duration;

use podvisor_host::watch as watch_fd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::time::sleep;

use super::super::error::SandboxError;
use super::super::wire::CONTROL_SOCKET;
use super::gone;

/// Delay before connecting again while the listener's backlog is full: no event reports room.
const RETRY: Duration = Duration::from_millis(20);

/// A connected socket, and the process that listens.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    pid: Pid,
    process: AsyncFd<OwnedFd>,
}

impl Connection {
    /// Connects, whether or not the process accepts.
    pub(super) async fn open(dir: &Path) -> Result<Self, SandboxError> {
        let path = dir.join(CONTROL_SOCKET);
        let file_error = |action, source| SandboxError::File {
            action,
            path: path.clone(),
            source,
        };
        let stream = loop {
            match UnixStream::connect(&path).await {
                Ok(stream) => break stream,
                Err(error) => match error.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                        return Err(gone(dir));
                    }
                    io::ErrorKind::WouldBlock => sleep(RETRY).await,
                    _ => return Err(file_error("connect to", error)),
                },
            }
        };
        let find = "find the process behind";
        let peer = stream
            .peer_cred()
            .map_err(|error| file_error(find, error))?;
        let pid = peer.pid().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| gone(dir))?;
        let process = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Ok(process) => process,
            Err(Errno::SRCH) => return Err(gone(dir)),
            Err(error) => return Err(file_error(find, error.into())),
        };
        // While the connection is open, its process lives: the pid has not been reused.
        if !is_open(&stream).map_err(|error| file_error(find, error.into()))? {
            return Err(gone(dir));
        }
        let process = watch_fd::readable(process).map_err(|error| file_error(find, error))?;
        Ok(Self {
            stream,
            pid,
            process,
        })
    }

    /// A connection to a process that a test has started.
    #[cfg(test)]
    pub(super) fn of(stream: UnixStream, process: &std::process::Child) -> Self {
        let pid = Pid::from_child(process);
        let process = pidfd_open(pid, PidfdFlags::NONBLOCK).unwrap();
        Self {
            stream,
            pid,
            process: watch_fd::readable(process).unwrap(),
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Kills the process, and returns when it is gone.
    pub(super) async fn kill(self, dir: &Path) -> Result<(), SandboxError> {
        let failed = |source| SandboxError::File {
            action: "kill the process behind",
            path: dir.join(CONTROL_SOCKET),
            source,
        };
        match pidfd_send_signal(self.process.get_ref(), Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => return Err(failed(error.into())),
        }
        let _ = self.process.readable().await.map_err(failed)?;
        Ok(())
    }

    pub(super) fn into_parts(self) -> (UnixStream, u32, AsyncFd<OwnedFd>) {
        let pid = self.pid();
        (self.stream, pid, self.process)
    }
}

/// Whether the other side has not closed the connection.
fn is_open(stream: &UnixStream) -> rustix::io::Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::RDHUP)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&now))?;
    Ok(!fds[0]
        .revents()
        .intersects(PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR))
}
