//! SPDY/3.1, the server's side, as far as Kubernetes speaks it.
//!
//! * [`frame`] is the wire format: headers of frames, without their payload.
//! * [`headers`] packs and unpacks blocks of names and values.
//! * `connection` carries streams over a connection that was upgraded.
//!
//! Flow control is TCP's: Kubernetes' clients neither send nor heed `WINDOW_UPDATE`, so that
//! windows of 64 KiB would never open again. Data is read from the connection only as fast as
//! the streams' readers take it.

pub mod frame;
pub mod headers;

pub(super) mod connection;
pub(super) mod session;
