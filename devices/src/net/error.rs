//! Why a network device cannot be created.

use std::io;

use super::pair::MAX_QUEUE_PAIRS;
use super::stream::StreamError;
use super::tap::TapError;
use super::vhost::VhostError;

/// Why a network device cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetDeviceError {
    /// The descriptor is not a suitable tap.
    #[error("the tap cannot be used for a network device")]
    Tap(#[source] TapError),
    /// The descriptor is not a suitable socket.
    #[error("the socket cannot be used for a network device")]
    Stream(#[source] StreamError),
    /// The descriptor is not a suitable one of vhost.
    #[error("vhost cannot be used for a network device")]
    Vhost(#[source] VhostError),
    /// No queue of the backend, or too many.
    #[error("a network device has 1 to {MAX_QUEUE_PAIRS} queue pairs, not {count}")]
    QueuePairs {
        /// How many were asked for.
        count: usize,
    },
    /// The host did not create a descriptor.
    #[error("failed to create {what} for a network device")]
    Descriptor {
        /// Its kind.
        what: &'static str,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
}
