//! The memory balloon (§5.5): returns guest memory to the host.
//!
//! It has three functions; the first two release memory with the same `madvise`:
//! * The balloon itself: the owner sets a target ([`BalloonDevice::set_target`]), the driver
//!   allocates pages in its guest and reports them, and takes them back when the target shrinks or
//!   its guest runs out of memory.
//! * Free page reporting: the driver reports free pages of its guest, shortly after they became
//!   free. The guest may use such pages at any time; touching them allocates them again.
//! * [`BalloonDevice::request_stats`] releases nothing, but asks the driver for memory statistics
//!   of its guest.
//!
//! A driver that reports memory that does not exist, or that it still uses, only harms its own
//! guest.

mod device;
mod stats;

pub use device::{BalloonDevice, MAX_PAGES};
pub use stats::BalloonStats;
