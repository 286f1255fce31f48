//! SPDY/3.1 as Kubernetes' clients speak it: the server's side of one connection with many
//! streams.
//!
//! The clients (Go's spdystream) know frames and header blocks of the protocol and none of its
//! flow control: they neither send nor heed WINDOW_UPDATE. So back-pressure is the
//! connection's: a frame is read when the stream that it is for has room, and written when
//! the client takes it. No byte is buffered without a bound, and none is dropped.
//!
//! `frame` and `headers` turn bytes into frames and back, [`Connection`] has the streams.

mod connection;
mod frame;
mod headers;

#[cfg(test)]
mod tests;

pub(super) use connection::{Connection, SpdyStream};
#[cfg(test)]
pub(super) use frame::Frame;
#[cfg(test)]
pub(super) use headers::{Deflater, Inflater};

use std::io;

/// Names and values of a stream's header; names in lower case.
pub(super) type Headers = Vec<(String, String)>;

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpdyError {
    /// The socket.
    #[error("the connection broke")]
    Io(#[from] io::Error),
    /// The client does not speak SPDY/3.1.
    #[error("the client broke the protocol: {0}")]
    Protocol(&'static str),
}
