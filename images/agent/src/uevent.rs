//! The kernel's events for devices that are added, removed or changed.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The kernel's own events, as opposed to those that udev repeats.
const KERNEL_GROUP: u32 = 1;

/// A socket for the kernel's device events.
#[derive(Debug)]
pub(crate) struct Uevents {
    socket: AsyncFd<OwnedFd>,
}

impl Uevents {
    pub(crate) fn open() -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            Some(KOBJECT_UEVENT),
        )?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, KERNEL_GROUP))?;
        Ok(Self {
            socket: crate::sys::watch(socket, Interest::READABLE)?,
        })
    }

    /// Waits for the next event. Which one it is does not matter: callers check again for what they
    /// wait for.
    pub(crate) async fn next(&self) -> io::Result<()> {
        let mut event = [0; 8192];
        loop {
            let mut ready = self.socket.readable().await?;
            let received = ready.try_io(|socket| {
                Ok(rustix::net::recv(
                    socket,
                    &mut event[..],
                    RecvFlags::empty(),
                ))
            });
            match received {
                // Events were lost: also a reason to check again.
                Ok(Ok(Ok(_) | Err(Errno::NOBUFS))) => return Ok(()),
                Ok(Ok(Err(Errno::AGAIN))) => ready.clear_ready(),
                Ok(Ok(Err(Errno::INTR))) | Err(_) => {}
                Ok(Ok(Err(error))) => return Err(error.into()),
                Ok(Err(error)) => return Err(error),
            }
        }
    }
}
