//! The memory for the output of commands that calls collect.

use tokio::sync::{Semaphore, SemaphorePermit};

/// Bytes of output that are kept at the same time, for all commands of the node.
const KEPT_BYTES: usize = 256 << 20;

/// The memory for collected output, in bytes: containers that print much must not exhaust the
/// node's memory.
#[derive(Debug)]
pub(in crate::cri) struct OutputRoom(Semaphore);

impl Default for OutputRoom {
    fn default() -> Self {
        Self::of(KEPT_BYTES)
    }
}

impl OutputRoom {
    pub(in crate::cri) fn of(bytes: usize) -> Self {
        Self(Semaphore::new(bytes))
    }

    /// Reserves that many bytes until the permit is dropped; `None` if not enough are free.
    pub(in crate::cri) fn take(&self, bytes: usize) -> Option<SemaphorePermit<'_>> {
        self.0.try_acquire_many(u32::try_from(bytes).ok()?).ok()
    }
}
