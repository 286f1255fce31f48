//! What a virtio device is to its transport and to its event loop.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::{Fault, Interrupt, Queue};
use crate::GuestRam;

/// Device type numbers (§5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum DeviceType {
    /// Network card (§5.1).
    Net = 1,
    /// Block device (§5.2).
    Block = 2,
    /// Console (§5.3).
    Console = 3,
    /// Entropy device (§5.4).
    Entropy = 4,
    /// Memory balloon (§5.5).
    Balloon = 5,
    /// Socket device (§5.10).
    Vsock = 19,
    /// Memory device (§5.15).
    Mem = 24,
    /// File system (§5.11).
    FileSystem = 26,
}

impl DeviceType {
    /// A short name, for logs and counters.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Net => "net",
            Self::Block => "blk",
            Self::Console => "console",
            Self::Entropy => "rng",
            Self::Balloon => "balloon",
            Self::Vsock => "vsock",
            Self::Mem => "mem",
            Self::FileSystem => "fs",
        }
    }
}

/// What a device gets when its driver says `DRIVER_OK`.
#[derive(Debug)]
pub struct Resources {
    /// Guest memory.
    pub mem: GuestRam,
    /// One entry per queue of [`VirtioDevice::queue_sizes`]; `None` where the driver left the
    /// queue disabled.
    pub queues: Vec<Option<Queue>>,
    /// The way to interrupt the driver for configuration changes. (Queues carry their own.)
    pub irq: Arc<dyn Interrupt>,
    /// The feature bits that driver and device agreed on.
    pub features: u64,
}

impl Resources {
    /// Takes queue `index`, which the device cannot work without.
    ///
    /// # Errors
    /// [`StartError::QueueMissing`] when the driver did not enable it.
    pub fn require(&mut self, index: usize) -> Result<Queue, StartError> {
        self.queues
            .get_mut(index)
            .and_then(Option::take)
            .ok_or(StartError::QueueMissing { index })
    }
}

/// Why a device would not start. The driver sees `DEVICE_NEEDS_RESET`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The driver said `DRIVER_OK` without a queue that the device type requires.
    #[error("the driver did not enable queue {index}, which this device type requires")]
    QueueMissing {
        /// The queue's index.
        index: usize,
    },
    /// The device runs already.
    #[error("the device runs already")]
    Running,
}

/// Whether a device has caught up with a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Progress {
    /// Nothing is left that could be done now: wait for the next notification.
    Idle,
    /// The device used up its share of the event loop and wants to be called again.
    More,
}

/// One of a device's counters, as read by its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// In snake case; a counter of bytes ends in `_bytes`.
    pub name: &'static str,
    /// Since the device was made.
    pub value: u64,
}

/// A virtio device, apart from its transport.
///
/// `start` and `stop` serve activation, reset, pause, snapshot and shutdown alike: a device that
/// is stopped holds no descriptor chain and no queue. The calls are serialised by the owner.
pub trait VirtioDevice: std::fmt::Debug + Send {
    /// The device's type number.
    fn device_type(&self) -> DeviceType;

    /// The largest size of each queue, in descriptors; powers of two.
    fn queue_sizes(&self) -> &[u16];

    /// Device-specific feature bits; the transport adds [`super::features::RING`].
    fn features(&self) -> u64;

    /// Reads configuration space. Bytes beyond its end read as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes configuration space; the default ignores it, as for read-only fields.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }

    /// Takes the queues and begins to serve them.
    ///
    /// # Errors
    /// When a required queue is missing. Nothing has been started then.
    fn start(&mut self, resources: Resources) -> Result<(), StartError>;

    /// Completes or gives up what is in flight and hands the queues back, in order.
    /// A device that does not run returns nothing.
    fn stop(&mut self) -> Vec<Option<Queue>>;

    /// The driver reset the device, which does not run: what it knows of that driver's doings
    /// (connections, say) is forgotten. Stopping alone, for a pause, keeps it.
    fn reset(&mut self) {}

    /// Whether the device is between [`Self::start`] and [`Self::stop`]. Nobody waits on
    /// [`Self::backend`] of a device that is not.
    fn is_running(&self) -> bool;

    /// The driver notified queue `index`. A call without `start`, or for a queue that does not
    /// exist, does nothing.
    ///
    /// # Errors
    /// Any [`Fault`] means that the device must be stopped.
    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault>;

    /// A file descriptor that is readable when the host side has work for
    /// [`Self::on_backend`]. It stays the same for the device's life; devices with several, or
    /// whose interest changes, own an epoll instance and return that.
    fn backend(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// [`Self::backend`] is readable.
    ///
    /// # Errors
    /// Any [`Fault`] means that the device must be stopped.
    fn on_backend(&mut self) -> Result<Progress, Fault> {
        Ok(Progress::Idle)
    }

    /// The device's counters.
    fn counters(&self) -> Vec<Counter>;
}

/// Reads `data.len()` bytes at `offset` of a configuration space that is `config`; what lies
/// beyond its end, for any `offset` whatever, reads as zero.
pub fn read_config(config: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let rest = usize::try_from(offset)
        .ok()
        .and_then(|start| config.get(start..))
        .unwrap_or(&[]);
    for (to, from) in data.iter_mut().zip(rest) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_reads_beyond_the_end_are_zero() {
        let config = [1, 2, 3, 4];
        let mut data = [9; 4];
        read_config(&config, 2, &mut data);
        assert_eq!(data, [3, 4, 0, 0]);
        data = [9; 4];
        read_config(&config, u64::MAX, &mut data);
        assert_eq!(data, [0; 4]);
        read_config(&config, 4, &mut []);
        let mut wide = [9; 9];
        read_config(&config, 0, &mut wide);
        assert_eq!(wide, [1, 2, 3, 4, 0, 0, 0, 0, 0]);
    }
}
