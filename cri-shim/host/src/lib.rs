//! What podvisor's processes on a host have in common, below pods, networks and machines.
//!
//! | module | subject |
//! | --- | --- |
//! | [`blocking`] | work that blocks its thread, or changes it |
//! | [`removal`] | directories whose contents are not trusted |
//! | [`request`] | the number of the request that a task works for |
//! | [`signal`] | names of signals |
//! | [`stall_timeout`] | time limits that a host's pauses do not use up |
//! | [`turns`] | a limit of what runs at the same time |
//! | [`watch`] | descriptors that the event loop waits for |
//!
//! Nothing here knows what it is used for.

pub mod blocking;
pub mod removal;
pub mod request;
pub mod signal;
#[cfg(any(test, feature = "test-utils"))]
pub mod small_disk;
pub mod stall_timeout;
pub mod turns;
pub mod watch;
