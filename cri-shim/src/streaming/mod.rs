//! Streams of containers over HTTP: exec, attach and port-forward, by the protocols of `kubectl`, a
//! kubelet and `crictl`.
//!
//! A call of the Container Runtime Interface registers its request here and gets a URL with a token
//! (`Streaming::exec` and the like); a client that opens the URL within a minute, once, gets the
//! streams. A connection is upgraded to SPDY/3.1 ([`spdy`]) or to a WebSocket (`websocket`), or to
//! SPDY within a WebSocket (`tunnel`); all end in the same channels (`channel`), which a session
//! (`command`, `port_forward`) connects to the descriptors that a `Backend` provides.
//!
//! Nothing here knows pods, sandboxes or the Container Runtime Interface. Clients are not trusted:
//! everything is bounded, and a client that does not read only delays itself. No buffer grows, as a
//! side that writes too fast is not read from.

mod backend;
mod channel;
mod command;
mod pipe;
mod port_forward;
mod server;
pub mod spdy;
mod status;
mod token;
mod tunnel;
mod websocket;

pub(crate) use backend::{
    AttachRequest, Backend, BackendError, BoxFuture, ExecRequest, PortForwardRequest, Process,
};
pub(crate) use pipe::ForeignStream;
pub(crate) use server::{Streaming, StreamingError};
pub(crate) use token::TokenError;

#[cfg(test)]
mod tests;
