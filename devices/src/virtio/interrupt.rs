//! How a device interrupts its driver, whichever transport it sits on.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;

use vmm_sys_util::eventfd::EventFd;

/// An interrupt line that is raised for a moment (edge-triggered). Called from any thread; never
/// waits for the guest.
pub trait InterruptLine: Debug + Send + Sync {
    /// Raises it.
    fn raise(&self);
}

/// For an irqfd, or whoever else reads it.
impl InterruptLine for EventFd {
    fn raise(&self) {
        // A write to an eventfd fails only when 2^64 - 2 interrupts were never taken.
        let _ = self.write(1);
    }
}

/// Sends the two kinds of device interrupts (§2.3). Called from any thread; never blocks.
pub trait Interrupt: Debug + Send + Sync {
    /// Used Buffer Notification for the queue with this index.
    fn signal_queue(&self, queue: u16);

    /// The eventfd whose writes are Used Buffer Notifications of this queue, where the
    /// transport needs nothing else for one: for vhost.
    fn queue_eventfd(&self, queue: u16) -> Option<BorrowedFd<'_>> {
        let _ = queue;
        None
    }

    /// Configuration Change Notification.
    fn signal_config(&self);

    /// Sets `DEVICE_NEEDS_RESET` and tells the driver by a configuration change (§2.1.2).
    fn signal_needs_reset(&self);
}
