//! How a device interrupts its driver, independent of the transport.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;

use vmm_sys_util::eventfd::EventFd;

/// An edge-triggered interrupt line. Called from any thread; never waits for the guest.
pub trait InterruptLine: Debug + Send + Sync {
    /// Raises it.
    fn raise(&self);
}

/// For an irqfd, or any other reader of the eventfd.
impl InterruptLine for EventFd {
    fn raise(&self) {
        // A write to an eventfd fails only when 2^64 - 2 interrupts are pending.
        let _ = self.write(1);
    }
}

/// Sends the two kinds of device interrupts (§2.3). Called from any thread; never blocks.
pub trait Interrupt: Debug + Send + Sync {
    /// Used Buffer Notification for the queue with this index.
    fn signal_queue(&self, queue: u16);

    /// The eventfd whose writes are Used Buffer Notifications of this queue, if writing to it is
    /// all that the transport needs: for vhost.
    fn queue_eventfd(&self, queue: u16) -> Option<BorrowedFd<'_>> {
        let _ = queue;
        None
    }

    /// Configuration Change Notification.
    fn signal_config(&self);

    /// Sets `DEVICE_NEEDS_RESET` and sends a Configuration Change Notification (§2.1.2).
    fn signal_needs_reset(&self);
}
