//! Why a network device cannot be had.

use std::io;

use super::pair::MAX_QUEUE_PAIRS;
use super::stream::StreamError;
use super::tap::TapError;
use super::vhost::VhostError;

/// Why there is no network device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetDeviceError {
    /// The descriptor is not a tap that can be used.
    #[error("the tap cannot be used for a network device")]
    Tap(#[source] TapError),
    /// The descriptor is not a socket that can be used.
    #[error("the socket cannot be used for a network device")]
    Stream(#[source] StreamError),
    /// The descriptor is not one of vhost that can be used.
    #[error("vhost cannot be used for a network device")]
    Vhost(#[source] VhostError),
    /// No queue of a backend, or too many.
    #[error("a network device has 1 to {MAX_QUEUE_PAIRS} queue pairs, not {count}")]
    QueuePairs {
        /// How many were asked for.
        count: usize,
    },
    /// The host refused a descriptor.
    #[error("failed to create {what} for a network device")]
    Descriptor {
        /// Which.
        what: &'static str,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
}
