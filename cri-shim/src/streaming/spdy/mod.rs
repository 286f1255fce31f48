//! SPDY/3.1 on the server's side, as far as Kubernetes uses it.
//!
//! * [`frame`] is the wire format: headers of frames, without their payload.
//! * [`headers`] packs and unpacks blocks of names and values.
//! * `connection` carries streams over an upgraded connection.
//!
//! Flow control is TCP's: Kubernetes' clients neither send nor respect `WINDOW_UPDATE`, so windows
//! of

pub mod frame;
pub mod headers;

pub(super) mod connection;
pub(super) mod session;
