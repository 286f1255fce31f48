//! The Unix socket that host programs connect to, and those that the guest's connections lead to.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};

use super::MAX_PATH;
use super::error::VsockError;
use super::host::VsockHost;

/// A listening socket; its file is removed when it is dropped.
#[derive(Debug)]
pub(super) struct Listener {
    path: PathBuf,
    /// Device and inode of the socket's file: only this file is removed.
    file: Option<(u64, u64)>,
    socket: OwnedFd,
}

impl Listener {
    /// Listens at `path`, replacing a socket that a dead process left behind.
    pub(super) fn bind(path: &Path) -> Result<Self, VsockError> {
        if path.as_os_str().len() > MAX_PATH {
            return Err(VsockError::PathTooLong { path: path.into() });
        }
        clear_stale(path)?;
        let listen_error = |source: Errno| VsockError::Listen {
            path: path.into(),
            source: source.into(),
        };
        let socket = stream_socket().map_err(listen_error)?;
        let address = SocketAddrUnix::new(path).map_err(listen_error)?;
        bind(&socket, &address).map_err(|error| match error {
            Errno::ADDRINUSE => VsockError::InUse { path: path.into() },
            other => listen_error(other),
        })?;
        let listener = Self {
            path: path.into(),
            file: identity(path),
            socket,
        };
        listen(&listener.socket, 128).map_err(listen_error)?;
        Ok(listener)
    }
}

impl VsockHost for Listener {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn accept(&mut self) -> io::Result<Option<OwnedFd>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            match accept_with(&self.socket, flags) {
                Ok(stream) => return Ok(Some(stream)),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Connects to the host program that listens at `PATH_PORT`. If that listener's backlog is
    /// full, this fails with EAGAIN immediately, and the guest's connection is refused.
    fn connect(&mut self, port: u32) -> io::Result<OwnedFd> {
        let mut path = self.path.clone().into_os_string();
        path.push(format!("_{port}"));
        let socket = stream_socket()?;
        connect(&socket, &SocketAddrUnix::new(Path::new(&path))?)?;
        Ok(socket)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let there = identity(&self.path);
        if there.is_some() && there == self.file {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Device and inode of the file at `path`.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let meta = fs::symlink_metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

fn stream_socket() -> Result<OwnedFd, Errno> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

/// Removes a socket file that a dead process left behind; any other file at the path is an error.
fn clear_stale(path: &Path) -> Result<(), VsockError> {
    let Ok(meta) = fs::symlink_metadata(path) else {
        return Ok(());
    };
    if !meta.file_type().is_socket() {
        return Err(VsockError::NotASocket { path: path.into() });
    }
    let listen_error = |source: io::Error| VsockError::Listen {
        path: path.into(),
        source,
    };
    let probe = stream_socket().map_err(|error| listen_error(error.into()))?;
    let address = SocketAddrUnix::new(path).map_err(|error| listen_error(error.into()))?;
    match connect(&probe, &address) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(listen_error),
        Err(Errno::NOENT) => Ok(()),
        _ => Err(VsockError::InUse { path: path.into() }),
    }
}
