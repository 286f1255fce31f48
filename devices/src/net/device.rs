//! The network device and its three queues.

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::config::{LinkState, MIN_MTU, STATUS_AT, config, status};
use super::control::{self, Command};
use super::counters::Counters;
use super::events::{Direction, Events, Ready};
use super::feature::{self, accepted, offered};
use super::nic::{MacAddress, Nic};
use super::receive::{Inbound, Receiver, Turn};
use super::stream::{FrameStream, StreamError};
use super::tap::{Tap, TapError};
use super::transmit::Transmitter;
use crate::virtio::{
    ConfigSpace, DeviceInfo, DeviceType, Fault, Limiter, Progress, Queue, Rate, RestoreError,
    SavedDevice, StartError, VirtioDevice,
};

/// Queue numbers (§5.1.2).
const RX: u16 = 0;
const TX: u16 = 1;
const CONTROL: u16 = 2;

const QUEUE_SIZES: [u16; 3] = [256, 256, 64];

/// Bytes of commands, and descriptors counted as bytes, before the event loop gets its turn
/// again.
const CONTROL_BUDGET: usize = 64 << 10;

/// The shortest time that a timer knows.
const NOW: Duration = Duration::from_nanos(1);

/// Why there is no network device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetDeviceError {
    /// The descriptor is not a tap that can be used.
    #[error("the tap cannot be used for a network device")]
    Tap(#[source] TapError),
    /// The descriptor is not a socket that can be used.
    #[error("the socket cannot be used for a network device")]
    Stream(#[source] StreamError),
    /// The host refused a descriptor.
    #[error("failed to create {what} for a network device")]
    Descriptor {
        /// Which.
        what: &'static str,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
}

/// A virtio network device over any [`Nic`].
pub struct NetDevice {
    nic: Box<dyn Nic>,
    mac: MacAddress,
    mtu: Option<u16>,
    link: LinkState,
    events: Events,
    inbound: Inbound,
    outbound: Limiter,
    rx: Option<Receiver>,
    tx: Option<Transmitter>,
    control: Option<Queue>,
    /// What driver and device agreed on, and which of [`feature::GUEST_OFFLOADS`] are on.
    features: u64,
    guest_offloads: u64,
    /// Those that were on in a snapshot.
    restored: Option<u64>,
    /// The backend refused what the driver negotiated.
    refused: Option<io::Error>,
    config: Arc<ConfigSpace>,
    counters: Arc<Counters>,
}

impl fmt::Debug for NetDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetDevice")
            .field("nic", &self.nic)
            .field("mac", &self.mac)
            .field("mtu", &self.mtu)
            .field("link", &self.link)
            .field("rx", &self.rx)
            .field("tx", &self.tx)
            .field("control", &self.control)
            .field("features", &self.features)
            .finish_non_exhaustive()
    }
}

impl NetDevice {
    /// A device over a tap that somebody else opened; see [`Tap::new`].
    ///
    /// # Errors
    /// When `fd` is not such a tap, or descriptors run out.
    pub fn tap(fd: OwnedFd) -> Result<Self, NetDeviceError> {
        let tap = Tap::new(fd).map_err(NetDeviceError::Tap)?;
        Self::new(Box::new(tap))
    }

    /// A device over a connected stream socket with a length before each frame; see
    /// [`FrameStream::new`].
    ///
    /// # Errors
    /// When `fd` is not such a socket, or descriptors run out.
    pub fn stream(fd: OwnedFd) -> Result<Self, NetDeviceError> {
        let stream = FrameStream::new(fd).map_err(NetDeviceError::Stream)?;
        Self::new(Box::new(stream))
    }

    /// A device over any backend, with a random address.
    ///
    /// # Errors
    /// When descriptors or random numbers cannot be had.
    pub fn new(nic: Box<dyn Nic>) -> Result<Self, NetDeviceError> {
        let mac = random_mac()?;
        let events = Events::new(&*nic)?;
        Ok(Self {
            nic,
            mac,
            mtu: None,
            link: LinkState::Up,
            events,
            inbound: Inbound::default(),
            outbound: Limiter::default(),
            rx: None,
            tx: None,
            control: None,
            features: 0,
            guest_offloads: 0,
            restored: None,
            refused: None,
            config: Arc::new(ConfigSpace::new(config(mac, LinkState::Up, 1, None))),
            counters: Arc::default(),
        })
    }

    /// The hardware address that the driver reads; random and locally administered unless said.
    #[must_use]
    pub fn mac(mut self, mac: MacAddress) -> Self {
        self.mac = mac;
        self.reconfigured()
    }

    /// The MTU in bytes that the driver is told; less than [`MIN_MTU`] counts as that.
    #[must_use]
    pub fn mtu(mut self, mtu: u16) -> Self {
        self.mtu = Some(mtu.max(MIN_MTU));
        self.reconfigured()
    }

    fn reconfigured(mut self) -> Self {
        let config = config(self.mac, self.link, 1, self.mtu);
        self.config = Arc::new(ConfigSpace::new(config));
        self
    }

    /// Limits what the driver receives, in bytes and in frames. What exceeds the rate stays
    /// with the backend.
    #[must_use]
    pub fn limit_receive(mut self, bytes: Option<Rate>, frames: Option<Rate>) -> Self {
        self.inbound.limiter = Limiter::new(bytes, frames);
        self
    }

    /// Limits what the driver sends, in bytes and in frames. What exceeds the rate stays in the
    /// driver's queue.
    #[must_use]
    pub fn limit_transmit(mut self, bytes: Option<Rate>, frames: Option<Rate>) -> Self {
        self.outbound = Limiter::new(bytes, frames);
        self
    }

    /// Plugs the cable in or pulls it: the driver is told (§5.1.6.5.4).
    pub fn set_link(&mut self, link: LinkState) {
        if self.link == link {
            return;
        }
        self.link = link;
        self.config.update(STATUS_AT, &status(link));
        self.events.watch_again(&*self.nic);
        // A frame may be held that the backend does not report again.
        self.events.soon(Direction::Receive, NOW);
    }

    fn receive(&mut self) -> Result<Turn, Fault> {
        self.check()?;
        match &mut self.rx {
            Some(rx) if self.link == LinkState::Up => {
                rx.turn(&mut *self.nic, &mut self.inbound, &self.counters)
            }
            _ => Ok(Turn::Idle),
        }
    }

    fn transmit(&mut self) -> Result<Turn, Fault> {
        self.check()?;
        match &mut self.tx {
            Some(tx) => tx.turn(
                &mut *self.nic,
                &mut self.outbound,
                self.link,
                &self.counters,
            ),
            None => Ok(Turn::Idle),
        }
    }

    fn serve_commands(&mut self) -> Result<Progress, Fault> {
        let Some(mut queue) = self.control.take() else {
            return Ok(Progress::Idle);
        };
        let progress = queue.serve(CONTROL_BUDGET, |queue, chain| {
            let done = self.carry_out(Command::parse(&chain, queue.memory())?);
            self.counters.commands.one();
            if !done {
                self.counters.commands_refused.one();
            }
            let written = control::acknowledge(&chain, queue.memory(), done)?;
            queue.complete(chain, written)?;
            Ok(0)
        });
        self.control = Some(queue);
        progress
    }

    fn carry_out(&mut self, command: Command) -> bool {
        match command {
            Command::Filter => true,
            Command::SetMac(mac) => {
                self.config.update(0, &mac.0);
                true
            }
            Command::SetOffloads(bits) => {
                let known = bits & !(self.features & feature::GUEST_OFFLOADS) == 0;
                known && self.switch_offloads(bits).is_ok()
            }
            Command::Unknown => false,
        }
    }

    /// Has frames for the driver come with these offloads from now on.
    fn switch_offloads(&mut self, bits: u64) -> io::Result<()> {
        let offloads = accepted(bits);
        self.nic.set_offloads(offloads)?;
        self.guest_offloads = bits;
        if let Some(rx) = &mut self.rx {
            rx.accept(offloads);
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), Fault> {
        match self.refused.take() {
            Some(error) => Err(Fault::host(
                "setting the offloads of a network backend",
                error,
            )),
            None => Ok(()),
        }
    }
}

impl VirtioDevice for NetDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            device_type: DeviceType::Net,
            queue_sizes: QUEUE_SIZES.to_vec(),
            features: feature::of_backend(self.nic.offloads())
                | self.mtu.map_or(0, |_| feature::MTU),
            config: self.config.clone(),
            counters: self.counters.clone(),
        }
    }

    fn negotiated(&mut self, features: u64) {
        self.features = features;
        let wanted = self.restored.take().unwrap_or(feature::GUEST_OFFLOADS);
        self.refused = self.switch_offloads(features & wanted).err();
    }

    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        let index = queue.index();
        let free = match index {
            RX => self.rx.is_none(),
            TX => self.tx.is_none(),
            CONTROL => self.control.is_none(),
            _ => return Err(StartError::NoSuchQueue { index }),
        };
        if !free {
            return Err(StartError::Running { index });
        }
        match index {
            RX => {
                let mergeable = self.features & feature::MRG_RXBUF != 0;
                let offloads = accepted(self.guest_offloads);
                self.rx = Some(Receiver::new(queue, mergeable, offloads));
                // Frames may have come while nobody watched.
                self.events.watch_again(&*self.nic);
            }
            TX => self.tx = Some(Transmitter::new(queue, offered(self.features))),
            _ => self.control = Some(queue),
        }
        Ok(())
    }

    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        match index {
            RX => self.rx.take().map(Receiver::stop),
            TX => self.tx.take().map(Transmitter::stop),
            CONTROL => self.control.take(),
            _ => None,
        }
    }

    fn reset(&mut self) {
        self.config.update(0, &self.mac.0);
        self.inbound.forget();
        self.features = 0;
        self.guest_offloads = 0;
        self.restored = None;
        self.refused = None;
    }

    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        let (direction, turn) = match index {
            RX => (Direction::Receive, self.receive()?),
            TX => (Direction::Transmit, self.transmit()?),
            CONTROL => return self.serve_commands(),
            _ => return Ok(Progress::Idle),
        };
        match turn {
            Turn::Idle => return Ok(Progress::Idle),
            Turn::More => return Ok(Progress::More),
            Turn::Wait(wait) => self.events.soon(direction, wait),
            Turn::Blocked => self.events.await_room(&*self.nic),
        }
        Ok(Progress::Idle)
    }

    fn backend(&self) -> Option<BorrowedFd<'_>> {
        Some(self.events.backend())
    }

    fn on_backend(&mut self) -> Result<Progress, Fault> {
        let Ready {
            nic,
            receive,
            room,
            transmit,
        } = self.events.take(&*self.nic);
        if nic {
            self.inbound.ready = true;
        }
        let received = if nic || receive {
            self.receive()?
        } else {
            Turn::Idle
        };
        let transmitted = if room || transmit {
            self.transmit()?
        } else {
            Turn::Idle
        };
        let turns = [
            (Direction::Receive, received),
            (Direction::Transmit, transmitted),
        ];
        for (direction, turn) in turns {
            match turn {
                Turn::Idle => {}
                Turn::More => self.events.soon(direction, NOW),
                Turn::Wait(wait) => self.events.soon(direction, wait),
                Turn::Blocked => self.events.await_room(&*self.nic),
            }
        }
        // What is left makes the backend readable.
        Ok(Progress::Idle)
    }

    fn save(&self) -> SavedDevice {
        let mut mac = [0; 6];
        self.config.read(0, &mut mac);
        let offloads = self.guest_offloads.to_le_bytes();
        let bytes = mac.into_iter().chain(offloads).collect();
        SavedDevice { version: 1, bytes }
    }

    /// The driver's address and offloads. Frames on their way are lost, as on any wire.
    fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreError> {
        let (Some(mac), Some(offloads)) = (
            saved.of_version(1)?.first_chunk::<6>(),
            saved
                .bytes
                .get(6..)
                .and_then(|rest| <[u8; 8]>::try_from(rest).ok()),
        ) else {
            return Err(RestoreError::Invalid {
                what: "a network card's state is an address and its offloads",
            });
        };
        let offloads = u64::from_le_bytes(offloads);
        if offloads & !feature::GUEST_OFFLOADS != 0 {
            return Err(RestoreError::Invalid {
                what: "offloads of a network card that do not exist",
            });
        }
        self.config.update(0, mac);
        if self.features == 0 {
            self.restored = Some(offloads);
        } else {
            self.refused = self.switch_offloads(self.features & offloads).err();
        }
        Ok(())
    }
}

fn random_mac() -> Result<MacAddress, NetDeviceError> {
    let mut bytes = [0; 6];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).map_err(
        |source| NetDeviceError::Descriptor {
            what: "a random address",
            source: source.into(),
        },
    )?;
    let [first, ..] = &mut bytes;
    // Locally administered, for one station.
    *first = *first & !1 | 2;
    Ok(MacAddress(bytes))
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
