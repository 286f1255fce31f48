//! Adds and removes devices while loops run.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use podvisor_devices::virtio::{Placement, Worker};
use vmm_sys_util::eventfd::EventFd;

use super::event_loop::{EventLoop, Link};
use super::faults::Faults;
use super::loops::{Loops, SHARED_LOOP_NAME};
use super::mailbox::Mailbox;

/// How long a loop may be busy with something else.
const LOOP_TIMEOUT: Duration = Duration::from_secs(5);

/// A place for a device that is plugged in.
#[derive(Debug)]
pub(crate) struct ReservedSlot {
    pub(crate) link: Link,
    /// A loop that is to run on its own thread; `None` if it runs already.
    new: Option<EventLoop>,
}

impl Loops {
    /// Reserves a place for a device named `name`.
    pub(crate) fn reserve(
        &self,
        name: &str,
        placement: Placement,
        faults: &Faults,
    ) -> io::Result<ReservedSlot> {
        let shared = match placement {
            Placement::Own => None,
            Placement::Shared => {
                let entries = self.entries();
                let shared = entries.iter().find(|(name, _)| name == SHARED_LOOP_NAME);
                shared.map(|(_, mailbox)| mailbox.clone())
            }
        };
        if let Some(mailbox) = shared {
            let slot = ask(&mailbox, EventLoop::reserve)?;
            return Ok(ReservedSlot {
                link: Link { mailbox, slot },
                new: None,
            });
        }
        let name = match placement {
            Placement::Own => format!("vm-{name}"),
            Placement::Shared => SHARED_LOOP_NAME.to_owned(),
        };
        let (new, link) = new_loop(name, faults)?;
        Ok(ReservedSlot {
            link,
            new: Some(new),
        })
    }

    /// Adds a loop that is about to run. It is asked to pause, to resume and to end until its
    /// thread has ended, even if its device is removed.
    pub(crate) fn add(&self, event_loop: &EventLoop) {
        let entry = (event_loop.name().to_owned(), event_loop.mailbox());
        self.entries().push(entry);
    }
}

/// Removes a device, and ends its loop if that is the device's own. When this returns, the device
/// is gone.
///
/// # Errors
/// Fails if the device is busy; it is removed as soon as it is not.
pub(crate) fn remove(link: Link) -> io::Result<()> {
    let (done, wait) = sync_channel(1);
    send_removal(link, done);
    match wait.recv_timeout(LOOP_TIMEOUT) {
        // A loop that has ended has no devices.
        Ok(()) | Err(RecvTimeoutError::Disconnected) => Ok(()),
        Err(RecvTimeoutError::Timeout) => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Makes the loop that has the device by then remove it.
fn send_removal(link: Link, done: SyncSender<()>) {
    let Link { mailbox, slot } = link;
    mailbox.send(Box::new(move |event_loop| {
        if let Some(moved) = event_loop.remove(slot) {
            return send_removal(moved, done);
        }
        if event_loop.name() != SHARED_LOOP_NAME {
            event_loop.end();
        }
        // The receiver is gone after a timeout.
        let _ = done.send(());
    }));
}

impl ReservedSlot {
    /// Gives the loop its worker. Returns the loop if it has yet to be run.
    pub(crate) fn install(
        self,
        worker: Worker,
        kicks: Vec<Arc<EventFd>>,
    ) -> io::Result<Option<EventLoop>> {
        let slot = self.link.slot;
        match self.new {
            Some(mut event_loop) => {
                event_loop.fill(slot, worker, kicks)?;
                Ok(Some(event_loop))
            }
            None => {
                let fill = move |event_loop: &mut EventLoop| event_loop.fill(slot, worker, kicks);
                ask(&self.link.mailbox, fill)??;
                Ok(None)
            }
        }
    }
}

/// Creates a loop for a single device, and the link to its place there.
pub(crate) fn own_loop(device: &str, faults: &Faults) -> io::Result<(EventLoop, Link)> {
    new_loop(format!("vm-{device}"), faults)
}

fn new_loop(name: String, faults: &Faults) -> io::Result<(EventLoop, Link)> {
    let mut new = EventLoop::new(name, faults.clone())?;
    let link = Link {
        mailbox: new.mailbox(),
        slot: new.reserve(),
    };
    Ok((new, link))
}

/// Makes a loop do something, and waits for the result.
fn ask<R: Send + 'static>(
    mailbox: &Mailbox<EventLoop>,
    work: impl FnOnce(&mut EventLoop) -> R + Send + 'static,
) -> io::Result<R> {
    let (done, wait) = sync_channel(1);
    mailbox.send(Box::new(move |event_loop| {
        // The receiver is gone after a timeout.
        let _ = done.send(work(event_loop));
    }));
    // A loop that has ended drops the commands that it is sent.
    wait.recv_timeout(LOOP_TIMEOUT)
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))
}
