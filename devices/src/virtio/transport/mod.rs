//! Transports: register accesses of a driver in, `start` and `stop` of a device out.
//!
//! A transport holds what the driver configures (status, features, queue addresses) and the
//! means to interrupt it. It does not know which device it carries; the device does not know
//! which transport it sits on.

mod mmio;
mod status;

pub use mmio::{MmioInterrupt, MmioTransport, WINDOW_SIZE};
pub use status::Status;
