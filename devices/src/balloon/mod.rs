//! The memory balloon (§5.5): guest memory that the host gets back.
//!
//! Three ways lead there, all by the same `madvise`:
//! * The balloon itself: the owner sets a target ([`BalloonDevice::set_target`]), the driver takes
//!   pages from its guest and names them, and takes them back when the target shrinks or its guest
//!   runs out of memory.
//! * Free page reporting: the driver names what its guest has free, a moment after it became free.
//!   Such pages are the guest's at any time; touching them brings them back.
//! * [`BalloonDevice::request_stats`] takes nothing, but asks the driver how its guest fares.
//!
//! A driver that names memory that is not there, or that it still uses, hurts its own guest alone.

mod device;
mod stats;

pub use device::{BalloonDevice, MAX_PAGES};
pub use stats::BalloonStats;
