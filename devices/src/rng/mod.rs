//! The entropy device (§5.4): buffers of the driver in, bytes of the host's kernel out.
//!
//! The bytes come from `getrandom(2)`, which never runs dry. A request is answered with at most
//! [`MAX_REQUEST`] bytes whatever it asks for, as §5.4.6 permits, so that a driver cannot keep
//! the host busy by a few descriptors.

mod device;

pub use device::{MAX_REQUEST, RngDevice};
