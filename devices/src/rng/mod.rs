//! The entropy device (§5.4): fills buffers of the driver with random bytes of the host's kernel.
//!
//! The bytes come from `getrandom(2)`, which never runs out. A request gets at most [`MAX_REQUEST`]
//! bytes, however many it asks for, as §5.4.6 permits, so that a driver cannot keep the host busy
//! with a few descriptors.

mod device;

pub use device::{MAX_REQUEST, RngDevice};
