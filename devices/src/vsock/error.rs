//! Why the host's side of a vsock device cannot be set up.

use std::io;
use std::path::PathBuf;

use super::{MAX_GUEST_CID, MAX_PATH, MIN_GUEST_CID};

/// Why the host's side of a vsock device cannot be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VsockError {
    /// CIDs 0 to 2 and 2³²-1 are reserved, and larger ones do not exist.
    #[error("{cid} cannot be a guest's CID: choose one from {MIN_GUEST_CID} to {MAX_GUEST_CID}")]
    GuestCid {
        /// The CID.
        cid: u64,
    },
    /// The operating system limits a Unix socket's path.
    #[error(
        "the socket path {} is longer than the {} bytes that leave room for `_PORT`: choose a shorter one",
        path.display(),
        MAX_PATH
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// The path exists and is not a socket.
    #[error("{} exists and is no socket: remove it, or choose another path", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// Another process listens there.
    #[error("another process listens on {}: choose another path, or end that process", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// The socket could not be created.
    #[error("failed to listen on {}: its directory must exist and be writable", path.display())]
    Listen {
        /// The path.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// No epoll instance, or a descriptor that cannot be waited for.
    #[error("failed to wait for the sockets of the vsock device")]
    Epoll(#[source] io::Error),
}
