//! Builders of a network device: its backend, address, MTU and rates.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{BACKEND_CHANGES, NetDevice};
use crate::net::config::{LinkState, MIN_MTU, config};
use crate::net::error::NetDeviceError;
use crate::net::events::Events;
use crate::net::filter::{ReceiveFilter, RxMode};
use crate::net::host::HostQueue;
use crate::net::mac::MacAddress;
use crate::net::nic::Nic;
use crate::net::pair::{MAX_QUEUE_PAIRS, Pair};
use crate::net::stream::FrameStream;
use crate::net::tap::Tap;
use crate::net::vhost::Vhost;
use crate::virtio::{ConfigSpace, Limiter, Rate};

impl NetDevice {
    /// Creates a device over a tap that the caller has opened; see [`Tap::new`].
    ///
    /// # Errors
    /// If `fd` is not such a tap, or descriptors run out.
    pub fn tap(fd: OwnedFd) -> Result<Self, NetDeviceError> {
        let tap = Tap::new(fd).map_err(NetDeviceError::Tap)?;
        Self::new(Box::new(tap))
    }

    /// Creates a device with several queue pairs over as many queues of one tap; see
    /// [`Tap::queues`].
    ///
    /// # Errors
    /// If `fds` are not such queues, or descriptors run out; [`NetDeviceError::QueuePairs`] if
    /// there are none, or more than [`MAX_QUEUE_PAIRS`].
    pub fn tap_queues(fds: Vec<OwnedFd>) -> Result<Self, NetDeviceError> {
        let taps = Tap::queues(fds).map_err(NetDeviceError::Tap)?;
        let nic = |tap| -> Box<dyn Nic> { Box::new(tap) };
        Self::over(taps.into_iter().map(nic).collect())
    }

    /// Creates a device over a tap, see [`Tap::new`], whose frames the kernel moves: `vhost` is an
    /// open `/dev/vhost-net`, one for each device. Then frames cost this process nothing but
    /// interrupts, and are not counted. While the link is down, what the driver has made available
    /// stays in the queues. A device with a rate limit is served without `vhost`, and so is a
    /// driver that negotiated `MTU`, or not `MRG_RXBUF` and `GUEST_CSUM`: the kernel would give it
    /// frames that it does not take. Call this in the process that runs the VM: the kernel uses the
    /// memory of the calling process.
    ///
    /// If `/dev/vhost-net` is missing or may not be opened, use [`Self::tap`], which behaves the
    /// same.
    ///
    /// # Errors
    /// As [`Self::tap`]; [`NetDeviceError::Vhost`] if the kernel is too old, or `vhost` is another
    /// file or used by another device.
    pub fn vhost(tap: OwnedFd, vhost: OwnedFd) -> Result<Self, NetDeviceError> {
        let vhost = Vhost::new(vhost).map_err(NetDeviceError::Vhost)?;
        Self::tap(tap)?.served_by(vhost)
    }

    /// Sets what the driver finds when it starts: a link unless this says [`LinkState::Down`].
    #[must_use]
    pub fn link(mut self, link: LinkState) -> Self {
        self.set_link(link);
        self
    }

    /// Makes `vhost` serve the only pair, of drivers that suit it.
    pub(in crate::net) fn served_by(mut self, vhost: Vhost) -> Result<Self, NetDeviceError> {
        self.events.watch_vhost(&vhost)?;
        self.vhost = Some(vhost);
        Ok(self)
    }

    /// Creates a device over a connected stream socket with a length before each frame; see
    /// [`FrameStream::new`].
    ///
    /// # Errors
    /// If `fd` is not such a socket, or descriptors run out.
    pub fn stream(fd: OwnedFd) -> Result<Self, NetDeviceError> {
        let stream = FrameStream::new(fd).map_err(NetDeviceError::Stream)?;
        Self::new(Box::new(stream))
    }

    /// Creates a device over any backend, with a random address.
    ///
    /// # Errors
    /// If descriptors or random numbers are not available.
    pub fn new(nic: Box<dyn Nic>) -> Result<Self, NetDeviceError> {
        Self::over(vec![nic])
    }

    /// Creates a device with several queue pairs, over the queues of one backend: frames that are
    /// sent on any of them go to the same network, and a frame arrives on one of them. Their
    /// offloads are set on the first one.
    ///
    /// # Errors
    /// As [`Self::new`]; [`NetDeviceError::QueuePairs`] if there are none, or more than
    /// [`MAX_QUEUE_PAIRS`].
    pub fn over(queues: Vec<Box<dyn Nic>>) -> Result<Self, NetDeviceError> {
        let count = queues.len();
        let pairs = u16::try_from(count).ok();
        let Some(pairs) = pairs.filter(|_| (1..=MAX_QUEUE_PAIRS).contains(&count)) else {
            return Err(NetDeviceError::QueuePairs { count });
        };
        let mac = MacAddress::random().map_err(|source| NetDeviceError::Descriptor {
            what: "a random address",
            source,
        })?;
        let host: Vec<_> = queues.into_iter().map(HostQueue::new).collect();
        let events = Events::new(&host)?;
        Ok(Self {
            mac,
            mtu: None,
            link: LinkState::Up,
            events,
            inbound: Limiter::default(),
            outbound: Limiter::default(),
            pairs: host.iter().map(|_| Pair::default()).collect(),
            active: 1,
            first: 0,
            host,
            control: None,
            vhost: None,
            by_kernel: false,
            left: None,
            changes: Limiter::new(None, Some(BACKEND_CHANGES)),
            features: 0,
            guest_offloads: 0,
            rx_mode: RxMode::default(),
            passed: ReceiveFilter::All,
            refilter: false,
            filter_changes: Limiter::new(None, Some(BACKEND_CHANGES)),
            restored: None,
            refused: None,
            config: Arc::new(ConfigSpace::new(config(mac, LinkState::Up, pairs, None))),
            counters: Arc::default(),
        })
    }

    /// Sets the hardware address that the driver reads; by default it is random and locally
    /// administered.
    #[must_use]
    pub fn mac(mut self, mac: MacAddress) -> Self {
        self.mac = mac;
        self.reconfigured()
    }

    /// Sets the MTU in bytes that the driver reads; at least [`MIN_MTU`]. A driver that takes note
    /// of it is served without `vhost`.
    #[must_use]
    pub fn mtu(mut self, mtu: u16) -> Self {
        self.mtu = Some(mtu.max(MIN_MTU));
        self.reconfigured()
    }

    fn reconfigured(mut self) -> Self {
        let config = config(self.mac, self.link, self.pair_count(), self.mtu);
        self.config = Arc::new(ConfigSpace::new(config));
        self
    }

    /// Limits the rate at which the driver receives, in bytes and in frames. Frames above the rate
    /// stay in the backend.
    #[must_use]
    pub fn limit_receive(mut self, bytes: Option<Rate>, frames: Option<Rate>) -> Self {
        self.inbound = Limiter::new(bytes, frames);
        self.without_vhost()
    }

    /// Limits the rate at which the driver sends, in bytes and in frames. Frames above the rate
    /// stay in the driver's queue.
    #[must_use]
    pub fn limit_transmit(mut self, bytes: Option<Rate>, frames: Option<Rate>) -> Self {
        self.outbound = Limiter::new(bytes, frames);
        self.without_vhost()
    }

    /// The kernel cannot limit rates.
    fn without_vhost(mut self) -> Self {
        if let Some(vhost) = self.vhost.take() {
            self.events.forget_vhost(&vhost);
        }
        self
    }
}
