//! Streams of containers over HTTP: exec, attach and port-forward, as `kubectl`, a kubelet and
//! `crictl` speak them.
//!
//! A call of the Container Runtime Interface leaves its request here and gets a URL with a token
//! (`Streaming::exec` and its like); whoever opens the URL within a minute, once, has the
//! streams. A connection is upgraded to SPDY/3.1 ([`spdy`]) or to a WebSocket (`websocket`), or to
//! SPDY within a WebSocket (`tunnel`); all end in the same channels (`channel`), which a session
//! (`command`, `port_forward`) joins to the descriptors that a `Backend` has for them.
//!
//! Nothing here knows pods, sandboxes or the Container Runtime Interface. Clients are not
//! trusted: everything is bounded, and a client that does not read holds up itself alone, since
//! no buffer grows: who writes too fast is not read from.

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
pub(crate) use server::{Streaming, StreamingError};
pub(crate) use token::TokenError;

#[cfg(test)]
mod tests;
