//! `vhost-net`: the kernel moves frames between the rings of one queue pair and a tap.
//!
//! Its inputs are an open `/dev/vhost-net` and, while a queue runs, the queue's rings, its
//! notifications and the tap. Its outputs are eventfds: for interrupts, which the device's event
//! loop passes on ([`Vhost::take`]), and for rings that the kernel could not read. [`Kernel`] makes
//! the requests to the kernel; [`Rings`] is its interface to the device.
#![allow(unsafe_code)] // vhost ioctls that refer to guest memory; borrowed eventfds

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use vhost::vhost_kern::VhostKernBackend;
use vhost::vhost_kern::vhost_binding::{VHOST_NET_SET_BACKEND, vhost_vring_file};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{GuestAddress, GuestAddressSpace, GuestMemory, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::ioctl::ioctl_with_ref;

use super::feature::MRG_RXBUF;
use crate::GuestRam;
use crate::virtio::{Fault, Queue, QueueState, StartError, features};

/// Features that the kernel must support: all those that the device offers and that concern the
/// rings.
const REQUIRED_FEATURES: u64 = features::RING | MRG_RXBUF;

/// Rings of a pair: receive, transmit.
pub(super) const RINGS: usize = 2;

/// Why a descriptor cannot serve a device's queues.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VhostError {
    /// Not `/dev/vhost-net`.
    #[error("the descriptor is not an open /dev/vhost-net")]
    NotVhost(#[source] io::Error),
    /// Of an older kernel, or not for networks.
    #[error("vhost offers the features {offered:#x}, and {REQUIRED_FEATURES:#x} are needed")]
    Features {
        /// Its features.
        offered: u64,
    },
    /// It serves another device, or the host permits no more threads.
    #[error("VHOST_SET_OWNER failed: open /dev/vhost-net once per network device")]
    Owner(#[source] io::Error),
    /// The host did not create a descriptor.
    #[error("failed to create an eventfd for vhost")]
    Eventfd(#[source] io::Error),
}

/// The server of rings. While it serves them, only it reads and writes them.
trait Rings: fmt::Debug + Send {
    /// Sets the negotiated features and the memory of all rings. Called before the first ring of a
    /// pair.
    fn begin(&mut self, features: u64, queue: &Queue) -> io::Result<()>;

    /// Serves a ring from its position on, with this tap.
    fn serve(&self, number: usize, ring: &Ring, queue: &Queue, tap: RawFd) -> io::Result<()>;

    /// Stops serving a ring, and completes what was taken. Returns the position.
    fn leave(&self, number: usize) -> io::Result<u16>;
}

/// One queue pair that the kernel serves.
#[derive(Debug)]
pub(super) struct Vhost {
    kernel: Box<dyn Rings>,
    rings: [Ring; RINGS],
}

#[derive(Debug)]
struct Ring {
    queue: Option<Queue>,
    /// The kernel serves it.
    active: bool,
    call: EventFd,
    error: EventFd,
}

/// A report of the kernel, with its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Report {
    /// Buffers were used, and the driver wants an interrupt.
    Interrupt(usize),
    /// The ring, or the memory that it refers to, cannot be read.
    Error(usize),
}

impl Report {
    pub(super) const ALL: [Self; 4] = [
        Self::Interrupt(0),
        Self::Interrupt(1),
        Self::Error(0),
        Self::Error(1),
    ];
}

impl Vhost {
    /// Takes `/dev/vhost-net`. From now on it uses the memory of this process.
    pub(super) fn new(fd: OwnedFd) -> Result<Self, VhostError> {
        let kernel = Kernel {
            fd,
            ram: Arc::default(),
        };
        let offered = kernel.get_features();
        let offered = offered.map_err(|error| VhostError::NotVhost(io_error(error)))?;
        if offered & REQUIRED_FEATURES != REQUIRED_FEATURES {
            return Err(VhostError::Features { offered });
        }
        let owned = kernel.set_owner();
        owned.map_err(|error| VhostError::Owner(io_error(error)))?;
        Self::over(Box::new(kernel))
    }

    fn over(kernel: Box<dyn Rings>) -> Result<Self, VhostError> {
        let ring = || {
            Ok(Ring {
                queue: None,
                active: false,
                call: eventfd()?,
                error: eventfd()?,
            })
        };
        let rings = [ring(), ring()];
        let [receive, transmit] =
            rings.map(|ring: io::Result<_>| ring.map_err(VhostError::Eventfd));
        Ok(Self {
            kernel,
            rings: [receive?, transmit?],
        })
    }

    /// The descriptor that is readable if there is such a report.
    pub(super) fn fd(&self, report: Report) -> Option<BorrowedFd<'_>> {
        let fd = match report {
            Report::Interrupt(number) => &self.rings.get(number)?.call,
            Report::Error(number) => &self.rings.get(number)?.error,
        };
        Some(borrow(fd))
    }

    /// Takes a queue; the kernel serves it from now on, unless `tap` is `None`.
    pub(super) fn start(
        &mut self,
        number: usize,
        queue: Queue,
        features: u64,
        tap: Option<BorrowedFd<'_>>,
    ) -> Result<(), StartError> {
        let index = queue.index();
        let Some(ring) = self.rings.get_mut(number) else {
            return Err(StartError::NoSuchQueue { index });
        };
        if ring.queue.is_some() {
            return Err(StartError::Running { index });
        }
        ring.queue = Some(queue);
        let Some(tap) = tap else {
            return Ok(());
        };
        let activated = self.activate(number, features, tap);
        activated.map_err(|source| {
            self.stop(number);
            StartError::Host { index, source }
        })
    }

    /// Returns a queue, with nothing in flight.
    pub(super) fn stop(&mut self, number: usize) -> Option<Queue> {
        self.deactivate(number);
        self.rings.get_mut(number)?.queue.take()
    }

    /// Makes the kernel serve all queues that were started.
    pub(super) fn resume(&mut self, features: u64, tap: BorrowedFd<'_>) -> io::Result<()> {
        (0..RINGS).try_for_each(|number| self.activate(number, features, tap))
    }

    /// Makes the kernel stop serving the queues.
    pub(super) fn hold(&mut self) {
        for number in 0..RINGS {
            self.deactivate(number);
        }
    }

    fn activate(&mut self, number: usize, features: u64, tap: BorrowedFd<'_>) -> io::Result<()> {
        let is_first = !self.rings.iter().any(|ring| ring.active);
        let Some(ring) = self.rings.get_mut(number) else {
            return Ok(());
        };
        let Some(queue) = ring.queue.as_ref().filter(|_| !ring.active) else {
            return Ok(());
        };
        if is_first {
            self.kernel.begin(features & REQUIRED_FEATURES, queue)?;
        }
        self.kernel.serve(number, ring, queue, tap.as_raw_fd())?;
        ring.active = true;
        // For buffers that were made available before.
        let _ = queue.kick().write(1);
        Ok(())
    }

    fn deactivate(&mut self, number: usize) {
        let Some(ring) = self.rings.get_mut(number) else {
            return;
        };
        let Some(queue) = ring.queue.as_mut().filter(|_| ring.active) else {
            return;
        };
        ring.active = false;
        match self.kernel.leave(number) {
            // Every chain that was taken is completed.
            Ok(position) => queue.set_state(QueueState {
                next_avail: position,
                next_used: position,
            }),
            Err(error) => {
                tracing::error!(
                    %error,
                    number,
                    "VHOST_GET_VRING_BASE failed; the queue's position is lost"
                )
            }
        }
        // The last interrupt may be in flight.
        if ring.call.read().is_ok() {
            queue.interrupt().signal_queue(queue.index());
        }
        let _ = ring.error.read();
    }

    /// Passes an interrupt on.
    ///
    /// # Errors
    /// If the kernel could not read a ring.
    pub(super) fn take(&self, report: Report) -> Result<(), Fault> {
        let (Report::Interrupt(number) | Report::Error(number)) = report;
        let Some(ring) = self.rings.get(number) else {
            return Ok(());
        };
        let reported = match report {
            Report::Interrupt(_) => ring.call.read(),
            Report::Error(_) => ring.error.read(),
        };
        let (Some(queue), true, true) = (&ring.queue, ring.active, reported.is_ok()) else {
            return Ok(());
        };
        match report {
            Report::Interrupt(_) => {
                queue.interrupt().signal_queue(queue.index());
                Ok(())
            }
            Report::Error(_) => Err(Fault::protocol("vhost cannot use a ring or its buffers")),
        }
    }
}

impl Drop for Vhost {
    /// The descriptor may stay open elsewhere, but guest memory goes away.
    fn drop(&mut self) {
        self.hold();
    }
}

/// `/dev/vhost-net`, and the memory with the rings.
struct Kernel {
    fd: OwnedFd,
    ram: Arc<GuestRam>,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel")
            .field("fd", &self.fd)
            .finish_non_exhaustive()
    }
}

impl AsRawFd for Kernel {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl VhostKernBackend for Kernel {
    type AS = Arc<GuestRam>;

    fn mem(&self) -> &Self::AS {
        &self.ram
    }

    /// Checks the ring's addresses. The kernel gets host addresses and does not check regions: each
    /// part of a ring must be contiguous there.
    fn is_valid(&self, ring: &VringConfigData) -> bool {
        let size = usize::from(ring.queue_size);
        // §2.7, including the event indices.
        let parts = [
            (ring.desc_table_addr, size.saturating_mul(16)),
            (
                ring.avail_ring_addr,
                size.saturating_mul(2).saturating_add(6),
            ),
            (
                ring.used_ring_addr,
                size.saturating_mul(8).saturating_add(6),
            ),
        ];
        let memory = self.ram.memory();
        let mut parts = parts.iter();
        parts.all(|(at, len)| memory.get_slice(GuestAddress(*at), *len).is_ok())
    }
}

impl Rings for Kernel {
    fn begin(&mut self, features: u64, queue: &Queue) -> io::Result<()> {
        self.ram = Arc::new(queue.ram().clone());
        self.set_features(features).map_err(io_error)?;
        self.set_memory(queue.memory())
    }

    fn serve(&self, number: usize, ring: &Ring, queue: &Queue, tap: RawFd) -> io::Result<()> {
        self.set_ring(number, queue, ring)?;
        self.set_backend(number, tap)
    }

    fn leave(&self, number: usize) -> io::Result<u16> {
        // When this returns, the kernel no longer touches the ring and its buffers.
        self.set_backend(number, -1)?;
        let base = self.get_vring_base(number).map_err(io_error)?;
        let [low, high, ..] = base.to_le_bytes();
        Ok(u16::from_le_bytes([low, high]))
    }
}

impl Kernel {
    /// Passes all of guest memory to the kernel, since a driver's buffers may be anywhere in it.
    fn set_memory(&self, memory: &GuestRam) -> io::Result<()> {
        let regions = memory.iter().map(|region| VhostUserMemoryRegionInfo {
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr().expose_provenance() as u64,
            ..VhostUserMemoryRegionInfo::default()
        });
        let regions: Vec<_> = regions.collect();
        self.set_mem_table(&regions).map_err(io_error)
    }

    fn set_ring(&self, number: usize, queue: &Queue, ring: &Ring) -> io::Result<()> {
        let config = queue.config();
        let data = VringConfigData {
            queue_max_size: queue.size(),
            queue_size: queue.size(),
            flags: 0,
            desc_table_addr: config.desc_table,
            used_ring_addr: config.used_ring,
            avail_ring_addr: config.avail_ring,
            log_addr: None,
        };
        self.set_vring_num(number, queue.size())
            .and_then(|()| self.set_vring_base(number, queue.state().next_avail))
            .and_then(|()| self.set_vring_addr(number, &data))
            .and_then(|()| self.set_vring_call(number, &ring.call))
            .and_then(|()| self.set_vring_err(number, &ring.error))
            .and_then(|()| self.set_vring_kick(number, queue.kick()))
            .map_err(io_error)
    }

    /// Starts to serve a ring with a tap, or stops if it is -1.
    fn set_backend(&self, number: usize, tap: RawFd) -> io::Result<()> {
        let backend = vhost_vring_file {
            index: u32::try_from(number).unwrap_or(u32::MAX),
            fd: tap,
        };
        // SAFETY: the kernel reads one `struct vhost_vring_file` from a valid reference. The guest
        // memory that was passed to it before is mapped as long as the queue exists.
        let result = unsafe { ioctl_with_ref(self, VHOST_NET_SET_BACKEND(), &backend) };
        match result {
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

pub(super) fn borrow(fd: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the eventfd is open as long as it is borrowed.
    unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
}

fn eventfd() -> io::Result<EventFd> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
}

fn io_error(error: vhost::Error) -> io::Error {
    match error {
        vhost::Error::IoctlError(error) => error,
        other => io::Error::other(other),
    }
}

#[cfg(test)]
#[path = "vhost_tests.rs"]
mod tests;
