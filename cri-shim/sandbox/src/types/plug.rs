//! A disk that is taken from a guest with an operating system of its own.

use serde::{Deserialize, Serialize};

/// How a disk was taken from a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unplugged {
    /// The guest has released it, or never had it.
    Released,
    /// The guest did not release it in time: what it had not written to the disk is lost.
    Forced,
}
