//! Whether vhost serves the queue pair of a device that has it.
//!
//! The kernel hands frames of the tap to the driver as they are. So it serves only drivers that may
//! get any of them; the device itself, which checks each frame, serves the others. It then waits
//! for the pair's notifications in its own epoll instance, since its event loop does not.

use std::io;

use vm_memory::VolatileSlice;

use super::MIN_TIMER;
use super::NetDevice;
use crate::net::config::LinkState;
use crate::net::events::Direction;
use crate::net::feature;
use crate::net::header::{HEADER_LEN, MIN_FRAME};
use crate::net::offloads::Offloads;
use crate::net::vhost::RINGS;
use crate::virtio::{Queue, StartError};

/// The most frames that are taken from a backend at once to be dropped: several times as many as
/// the queue of a tap has (1000).
const MAX_WAITING: usize = 4096;

impl NetDevice {
    /// Whether the driver may get whatever the kernel hands on:
    ///
    /// * With `MRG_RXBUF` the kernel writes the number of buffers; otherwise older kernels leave
    ///   what is in the driver's buffer (§5.1.6.4.1).
    /// * A tap marks frames as valid whose checksum its host knows, whatever it was told about
    ///   checksums; without `GUEST_CSUM` a driver must see no mark (§5.1.6.4.1).
    /// * Frames that exceed a negotiated `MTU` must not reach the driver (§5.1.4.1); the kernel
    ///   knows nothing of it.
    fn suits_vhost(&self) -> bool {
        let checksums = self.features & self.guest_offloads & feature::GUEST_CSUM != 0;
        checksums && self.features & (feature::MRG_RXBUF | feature::MTU) == feature::MRG_RXBUF
    }

    /// Decides who serves the pair's queues, before any of them starts.
    pub(super) fn choose_server(&mut self) {
        let by_kernel = self.vhost.is_some() && self.suits_vhost();
        let Some(queue) = self.host.first() else {
            return;
        };
        if by_kernel == self.by_kernel {
            return;
        }
        self.by_kernel = by_kernel;
        let watched = match by_kernel {
            true => {
                self.events.ignore_nic(&*queue.nic);
                Ok(())
            }
            false => self.events.watch_nic(&*queue.nic),
        };
        if let Err(error) = watched {
            self.refused = Some(error);
        }
    }

    /// Starts a queue of the pair.
    pub(super) fn start_ring(&mut self, ring: usize, queue: Queue) -> Result<(), StartError> {
        let index = queue.index();
        let Some(vhost) = self.vhost.as_mut().filter(|_| self.by_kernel) else {
            if self.vhost.is_some() {
                let watched = self.events.watch_kick(ring, queue.kick());
                watched.map_err(|source| StartError::Host { index, source })?;
            }
            return self.start_own(queue);
        };
        let tap = self.host.first().map(|queue| queue.nic.fd());
        let tap = tap.filter(|_| self.link == LinkState::Up);
        vhost.start(ring, queue, self.features, tap)?;
        if ring == 0 {
            self.counters.vhost_starts.one();
        }
        Ok(())
    }

    /// Serves the pair from now on, if the driver no longer takes what the kernel hands on. It does
    /// so until the driver starts again.
    pub(super) fn take_over(&mut self) {
        if !self.by_kernel || self.suits_vhost() {
            return;
        }
        self.choose_server();
        for ring in 0..RINGS {
            let queue = self.vhost.as_mut().and_then(|vhost| vhost.stop(ring));
            if let Some(queue) = queue
                && let Err(error) = self.start_ring(ring, queue)
            {
                self.refused = Some(io::Error::other(error));
            }
        }
        // For what was made available before.
        self.events.soon(Direction::Receive, MIN_TIMER);
        self.events.soon(Direction::Transmit, MIN_TIMER);
    }

    /// Drops the frames that the backend holds since it could leave more work to the driver than
    /// now: nobody would check them.
    pub(super) fn drop_outdated(&mut self, before: Offloads, now: Offloads) {
        let (Some(vhost), Some(queue)) = (&mut self.vhost, self.host.first_mut()) else {
            return;
        };
        if before.and(now) == before {
            return;
        }
        vhost.hold();
        let mut header = [0; HEADER_LEN];
        // The rest of a frame is lost.
        let mut bytes = [0; MIN_FRAME];
        for _ in 0..MAX_WAITING {
            let bytes = VolatileSlice::from(bytes.as_mut_slice());
            match queue.nic.receive(&mut header, &[bytes]) {
                Ok(_) => self.counters.rx_dropped.one(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // Others may wait behind it.
                Err(_) => {}
            }
        }
        if self.link == LinkState::Up
            && let Err(error) = vhost.resume(self.features, queue.nic.fd())
        {
            self.refused = Some(error);
            self.events.soon(Direction::Receive, MIN_TIMER);
        }
    }
}
