//! The interface of a network device to its backend.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

use vm_memory::VolatileSlice;

use super::filter::ReceiveFilter;
use super::header::HEADER_LEN;
use super::offloads::Offloads;

/// A source and sink of Ethernet frames, each with a header as in §5.1.6 before it.
///
/// The calls never wait: the device is served by an event loop.
pub trait Nic: fmt::Debug + Send {
    /// The offloads that it supports in both directions. Always the same.
    fn offloads(&self) -> Offloads {
        Offloads::ALL
    }

    /// Sends the rest of earlier frames. Called before each frame that is sent, and after the last
    /// one.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if nothing can be sent before [`Self::fd`] is writable: the
    /// driver's frames stay in its queue until then. Others are failures of the backend, and the
    /// rest is lost.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Sends one frame from guest memory.
    ///
    /// # Errors
    /// Any reason why the frame cannot be sent: then it is lost.
    fn send(&mut self, header: &[u8; HEADER_LEN], frame: &[VolatileSlice<'_>]) -> io::Result<()>;

    /// Receives one frame into guest memory; returns its length without the header. A frame that is
    /// longer than the slices is truncated.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is none; others are failures of the backend.
    fn receive(
        &mut self,
        header: &mut [u8; HEADER_LEN],
        frame: &[VolatileSlice<'_>],
    ) -> io::Result<usize>;

    /// A descriptor that is readable when there is a frame to receive, and writable when one can
    /// be sent again, for an edge-triggered epoll instance.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Sets the offloads that received frames may use. Called before the first frame of each driver
    /// whose accepted offloads differ from the previous ones; if a backend has several queues, on
    /// the first one, for all of them.
    ///
    /// # Errors
    /// If the backend cannot do so.
    fn set_offloads(&mut self, offloads: Offloads) -> io::Result<()>;

    /// Sets which frames the driver wants; all until the first call. If a backend has several
    /// queues, it is called on the first one, for all of them. A backend may receive others too
    /// (§5.1.6.5.1), and by default it ignores this.
    ///
    /// # Errors
    /// If the backend cannot do so; then it is called with [`ReceiveFilter::All`].
    fn set_filter(&mut self, filter: &ReceiveFilter) -> io::Result<()> {
        let _ = filter;
        Ok(())
    }
}
