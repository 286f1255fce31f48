//! What becomes of a queue that a device is given.

/// Why a queue could not be started. The driver sees `DEVICE_NEEDS_RESET`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The device type has no such queue.
    #[error("there is no queue {index}")]
    NoSuchQueue {
        /// The queue's index.
        index: u16,
    },
    /// The queue is already running.
    #[error("queue {index} is already running")]
    Running {
        /// The queue's index.
        index: u16,
    },
    /// The host cannot serve the queue.
    #[error("queue {index} could not be started")]
    Host {
        /// The queue's index.
        index: u16,
        /// The error of the host.
        #[source]
        source: std::io::Error,
    },
}

/// Whether a device has caught up with a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Progress {
    /// Nothing can be done now: wait for the next notification.
    Idle,
    /// The device used up its share of the event loop and wants to be called again.
    More,
}
