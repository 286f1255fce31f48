//! Streams to containers and pods: Exec, Attach and PortForward.
//!
//! A gRPC call is answered with a URL of this server; the token in it is good for one
//! connection within a minute ([`tokens`]). Who connects there (the kubelet, or `crictl`)
//! upgrades HTTP/1.1 ([`http`]) to SPDY/3.1 ([`spdy`]); [`remote_command`] and
//! [`port_forward`] are the protocols on it. What goes to a process and comes from it passes
//! through sockets whose other ends the sandbox's process has: nothing is buffered beyond
//! them, so that who is slow slows the other side down.

mod http;
mod port_forward;
mod remote_command;
mod server;
mod spdy;
mod tokens;

pub(super) use server::{StreamingServer, serve};
pub(super) use tokens::Target;

/// Why a connection ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    /// The HTTP request.
    #[error("invalid HTTP request: {0}")]
    Http(&'static str),
    /// The client's part of SPDY.
    #[error(transparent)]
    Spdy(#[from] spdy::SpdyError),
    /// A socket.
    #[error("a stream broke")]
    Io(#[from] std::io::Error),
    /// The client asked for streams, and did not open them.
    #[error("the client did not open its streams within {0} s")]
    Missing(u64),
    /// The container, or its pod.
    #[error(transparent)]
    Cri(Box<super::error::CriError>),
}
