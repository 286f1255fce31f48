//! The network device: its queue pairs and its control queue.

mod build;
mod kernel;

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use super::config::{LinkState, STATUS_AT, status};
use super::control::{self, Command};
use super::counters::Counters;
use super::events::{Direction, Events, Ready};
use super::feature::{self, accepted, offered};
use super::filter::{ReceiveFilter, RxMode};
use super::host::{Arrivals, HostQueue};
use super::mac::MacAddress;
use super::offloads::Offloads;
use super::pair::{Pair, Role, queue_sizes};
use super::receive::{Receiver, Turn};
use super::saved::DriverState;
use super::transmit::Transmitter;
use super::vhost::{RINGS, Report, Vhost};
use crate::virtio::{
    ConfigSpace, DeviceInfo, DeviceType, Fault, Limiter, Placement, Progress, Queue, Rate,
    RestoreError, SavedDevice, StartError, VirtioDevice,
};

/// Bytes of commands, and descriptors counted as bytes, before the event loop gets control back.
const CONTROL_BUDGET: usize = 64 << 10;

/// How often drivers may change the offloads of the backend, and as often its filter: each change
/// makes the host wait for a lock that its whole network stack shares.
const BACKEND_CHANGES: Rate = Rate {
    per_second: 1,
    burst: 16,
};

/// The shortest time that a timer accepts.
const MIN_TIMER: Duration = Duration::from_nanos(1);

/// A virtio network device over any [`Nic`](super::Nic).
pub struct NetDevice {
    /// The backend's queues, one for each pair.
    host: Vec<HostQueue>,
    mac: MacAddress,
    mtu: Option<u16>,
    link: LinkState,
    events: Events,
    inbound: Limiter,
    outbound: Limiter,
    pairs: Vec<Pair>,
    /// The number of pairs that the driver receives on: the first ones.
    active: usize,
    /// The pair that the next round over all pairs starts with.
    first: usize,
    control: Option<Queue>,
    /// Serves the only pair instead of this device, if the driver suits it.
    vhost: Option<Vhost>,
    /// It does, since the driver started.
    by_kernel: bool,
    /// The negotiated features, and which of [`feature::GUEST_OFFLOADS`] are on.
    features: u64,
    guest_offloads: u64,
    /// The offloads that the backend was last set to; `None` before the first time.
    left: Option<Offloads>,
    changes: Limiter,
    rx_mode: RxMode,
    /// The frames that the backend was last set to receive.
    passed: ReceiveFilter,
    /// It receives more than the driver wants, because the driver changed its mind too often.
    refilter: bool,
    filter_changes: Limiter,
    /// The driver's settings in a restored snapshot, until it starts.
    restored: Option<DriverState>,
    /// The error of the backend if it refused the negotiated offloads.
    refused: Option<io::Error>,
    config: Arc<ConfigSpace>,
    counters: Arc<Counters>,
}

impl fmt::Debug for NetDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetDevice")
            .field("host", &self.host)
            .field("mac", &self.mac)
            .field("mtu", &self.mtu)
            .field("link", &self.link)
            .field("pairs", &self.pairs)
            .field("active", &self.active)
            .field("control", &self.control)
            .field("features", &self.features)
            .finish_non_exhaustive()
    }
}

impl NetDevice {
    /// Sets the link up or down, and notifies the driver (§5.1.6.5.4).
    pub fn set_link(&mut self, link: LinkState) {
        if self.link == link {
            return;
        }
        self.link = link;
        self.config.update(STATUS_AT, &status(link));
        if let (Some(vhost), Some(queue), true) =
            (&mut self.vhost, self.host.first(), self.by_kernel)
        {
            match link {
                LinkState::Up => self.refused = vhost.resume(self.features, queue.nic.fd()).err(),
                LinkState::Down => vhost.hold(),
            }
        } else {
            self.watch_again();
        }
        // The backend does not report again a frame that it may hold already.
        self.events.soon(Direction::Receive, MIN_TIMER);
    }

    fn pair_count(&self) -> u16 {
        // At most MAX_QUEUE_PAIRS.
        u16::try_from(self.pairs.len()).unwrap_or(1)
    }

    /// Returns the role of queue `index` for the driver.
    fn role(&self, index: u16) -> Option<Role> {
        let known = match self.features & feature::MQ {
            0 => 1,
            _ => self.pairs.len(),
        };
        Role::of(index, known)
    }

    fn watch_again(&self) {
        for (number, queue) in self.host.iter().enumerate() {
            self.events.watch_again(number, &*queue.nic);
        }
    }

    /// Delivers frames to the driver on a pair, if it is active.
    fn receive(&mut self, pair: usize) -> Result<Turn, Fault> {
        self.check()?;
        let arrivals = Arrivals::of(&mut self.host, pair, self.active, &mut self.inbound);
        let (Some(mut arrivals), Some(Pair { inbound, rx, .. })) =
            (arrivals, self.pairs.get_mut(pair))
        else {
            return Ok(Turn::Idle);
        };
        match rx {
            Some(rx) if self.link == LinkState::Up => {
                rx.turn(&mut arrivals, inbound, &self.counters)
            }
            _ => Ok(Turn::Idle),
        }
    }

    /// Sends the frames in the transmit queue of a pair, active or not.
    fn transmit(&mut self, pair: usize) -> Result<Turn, Fault> {
        self.check()?;
        let (Some(queue), Some(Pair { tx: Some(tx), .. })) =
            (self.host.get_mut(pair), self.pairs.get_mut(pair))
        else {
            return Ok(Turn::Idle);
        };
        let (limiter, link) = (&mut self.outbound, self.link);
        tx.turn(&mut *queue.nic, limiter, link, &self.counters)
    }

    /// Schedules the work that a turn left; returns [`Progress::More`] if it can be done
    /// immediately.
    fn schedule_rest(&mut self, direction: Direction, pair: usize, turn: Turn) -> Progress {
        match turn {
            Turn::Idle => {}
            Turn::More => return Progress::More,
            Turn::Wait(wait) => self.events.soon(direction, wait),
            Turn::Blocked => {
                if let Some(queue) = self.host.get(pair) {
                    self.events.await_room(pair, &*queue.nic);
                }
            }
        }
        Progress::Idle
    }

    /// Iterates over `count` pairs, starting with a different one each time: so a rate limit does
    /// not always hold back the same pair.
    fn round(&mut self, count: usize) -> impl Iterator<Item = usize> + use<> {
        let first = self.first.min(count);
        self.first = match first.saturating_add(1) {
            next if next < count => next,
            _ => 0,
        };
        (first..count).chain(0..first)
    }

    fn serve_commands(&mut self) -> Result<Progress, Fault> {
        let Some(mut queue) = self.control.take() else {
            return Ok(Progress::Idle);
        };
        let progress = queue.serve(CONTROL_BUDGET, |queue, chain| {
            let done = self.carry_out(Command::parse(&chain, queue.memory(), self.features)?);
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
            Command::SetPromiscuous(on) => {
                self.rx_mode.promiscuous = on;
                self.filter();
                true
            }
            Command::SetAllMulticast(on) => {
                self.rx_mode.all_multicast = on;
                self.filter();
                true
            }
            Command::SetTables(unicast, multicast) => {
                self.rx_mode.unicast = unicast;
                self.rx_mode.multicast = multicast;
                self.filter();
                true
            }
            Command::SetMac(mac) => {
                self.config.update_quietly(0, &mac.0);
                self.filter();
                true
            }
            Command::SetPairs(pairs) => self.activate(pairs.into()),
            Command::SetOffloads(bits) => {
                let known = bits & !(self.features & feature::GUEST_OFFLOADS) == 0;
                let done = known && self.switch_offloads(bits).is_ok();
                self.take_over();
                done
            }
            Command::Unknown => false,
        }
    }

    /// Receives on the first `count` pairs from now on (§5.1.6.5.5). `false` if the driver does not
    /// have that many.
    fn activate(&mut self, count: usize) -> bool {
        let known = self.features & feature::MQ != 0 && count > 0;
        let pairs = self.pairs.get(..count).filter(|_| known);
        if !pairs.is_some_and(|pairs| pairs.iter().all(Pair::runs)) {
            return false;
        }
        self.active = count;
        // Frames that were already read for the others are lost, as on any wire.
        for pair in self.pairs.iter_mut().skip(count) {
            pair.inbound.forget();
        }
        // Frames that were reported to another pair now belong to this one.
        self.events.soon(Direction::Receive, MIN_TIMER);
        true
    }

    /// Sets the offloads that frames for the driver may use from now on.
    fn switch_offloads(&mut self, bits: u64) -> io::Result<()> {
        let offloads = accepted(bits);
        self.leave(offloads)?;
        self.guest_offloads = bits;
        for rx in self.pairs.iter_mut().filter_map(|pair| pair.rx.as_mut()) {
            rx.accept(offloads);
        }
        Ok(())
    }

    /// Sets the backend to leave no more than these offloads to the driver. If drivers change them
    /// too often, it leaves even less: offloads are then only removed, and come back at the limited
    /// rate.
    fn leave(&mut self, offloads: Offloads) -> io::Result<()> {
        let Some(queue) = self.host.first_mut() else {
            return Ok(());
        };
        let offloads = match self.left {
            Some(left) if self.changes.wait().is_some() => left.and(offloads),
            _ => offloads,
        };
        if self.left == Some(offloads) {
            return Ok(());
        }
        let before = self.left.unwrap_or(Offloads::NONE);
        queue.nic.set_offloads(offloads)?;
        self.changes.charge(0);
        self.left = Some(offloads);
        self.drop_outdated(before, offloads);
        Ok(())
    }

    /// Sets the restored settings of a driver, if it can have any.
    fn set_rx_mode(&mut self, mode: Option<RxMode>) {
        let known = self.features & feature::CTRL_RX != 0;
        self.rx_mode = mode.filter(|_| known).unwrap_or_default();
        self.filter();
    }

    /// Sets the backend to receive the frames that the driver wants. If drivers change their mind
    /// too often, or the backend refuses, it receives all frames: filters are an optimization, and
    /// drivers check addresses themselves (§5.1.6.5.1).
    fn filter(&mut self) {
        let wanted = self.rx_mode.filter(self.current_mac());
        self.refilter = false;
        if wanted == self.passed {
            return;
        }
        let Some(queue) = self.host.first_mut() else {
            return;
        };
        if wanted != ReceiveFilter::All {
            if self.filter_changes.wait().is_none() {
                self.filter_changes.charge(0);
                if queue.nic.set_filter(&wanted).is_ok() {
                    self.passed = wanted;
                    return;
                }
            } else {
                // Set when the device is woken up by a frame, wanted or not; of vhost, by the next
                // command.
                self.refilter = true;
                if self.passed == ReceiveFilter::All {
                    return;
                }
            }
        }
        // Nothing more can be done about a refusal.
        let _ = queue.nic.set_filter(&ReceiveFilter::All);
        self.passed = ReceiveFilter::All;
    }

    /// The address that the driver has set or reads.
    fn current_mac(&self) -> MacAddress {
        let mut mac = [0; 6];
        self.config.read(0, &mut mac);
        MacAddress(mac)
    }

    /// Serves a queue in this process.
    fn start_own(&mut self, queue: Queue) -> Result<(), StartError> {
        let index = queue.index();
        let role = self.role(index);
        match role {
            Some(Role::Receive(pair)) => {
                let mergeable = self.features & feature::MRG_RXBUF != 0;
                let mtu = self.mtu.filter(|_| self.features & feature::MTU != 0);
                let accepted = accepted(self.guest_offloads);
                let receiver = Receiver::new(queue, mergeable, accepted, mtu);
                place(
                    self.pairs.get_mut(pair).map(|pair| &mut pair.rx),
                    receiver,
                    index,
                )?;
            }
            Some(Role::Transmit(pair)) => {
                let transmitter = Transmitter::new(queue, offered(self.features));
                place(
                    self.pairs.get_mut(pair).map(|pair| &mut pair.tx),
                    transmitter,
                    index,
                )?;
            }
            Some(Role::Control) => place(Some(&mut self.control), queue, index)?,
            None => return Err(StartError::NoSuchQueue { index }),
        }
        if matches!(role, Some(Role::Receive(number)) if number < self.active) {
            // Frames may have arrived while the backend was not watched.
            self.watch_again();
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), Fault> {
        match self.refused.take() {
            Some(error) => Err(Fault::host(
                "setting up the backend of a network card",
                error,
            )),
            None => Ok(()),
        }
    }
}

impl VirtioDevice for NetDevice {
    fn info(&self) -> DeviceInfo {
        let offloads = self.host.first().map(|queue| queue.nic.offloads());
        let several = match self.pairs.len() {
            ..=1 => 0,
            _ => feature::MQ,
        };
        DeviceInfo {
            device_type: DeviceType::Net,
            queue_sizes: queue_sizes(self.pairs.len()),
            features: feature::of_backend(offloads.unwrap_or(Offloads::NONE))
                | self.mtu.map_or(0, |_| feature::MTU)
                | several,
            config: self.config.clone(),
            counters: self.counters.clone(),
        }
    }

    /// The kernel writes where vhost serves, and has a log of its own.
    fn logs_writes(&self) -> bool {
        self.vhost.is_none()
    }

    /// Several pairs mean much traffic, which should not delay other devices.
    fn placement(&self) -> Placement {
        match self.pairs.len() {
            ..=1 => Placement::Shared,
            _ => Placement::Own,
        }
    }

    /// The kernel waits for the notifications of a pair that it serves, or this device if it could
    /// serve it.
    fn watches(&self, index: u16) -> bool {
        self.vhost.is_none() || usize::from(index) >= RINGS
    }

    fn negotiated(&mut self, features: u64) {
        self.features = features;
        let restored = self.restored.take();
        let wanted = restored
            .as_ref()
            .map_or(feature::GUEST_OFFLOADS, |state| state.offloads);
        self.active = match (&restored, features & feature::MQ) {
            (None, _) | (_, 0) => 1,
            (Some(state), _) => state.active.into(),
        };
        self.set_rx_mode(restored.map(|state| state.rx_mode));
        self.refused = self.switch_offloads(features & wanted).err();
        self.choose_server();
    }

    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        match self.role(queue.index()).and_then(Role::ring) {
            Some(ring) => self.start_ring(ring, queue),
            None => self.start_own(queue),
        }
    }

    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        let role = self.role(index)?;
        if let (Some(ring), Some(vhost)) = (role.ring(), &mut self.vhost)
            && let Some(queue) = vhost.stop(ring)
        {
            return Some(queue);
        }
        let queue = match role {
            Role::Receive(pair) => self.pairs.get_mut(pair)?.stop_receiving(),
            Role::Transmit(pair) => self.pairs.get_mut(pair)?.stop_transmitting(),
            Role::Control => self.control.take(),
        }?;
        if self.vhost.is_some() {
            self.events.ignore_kick(queue.kick());
        }
        Some(queue)
    }

    fn reset(&mut self) {
        self.config.update(0, &self.mac.0);
        for pair in &mut self.pairs {
            pair.inbound.forget();
        }
        self.features = 0;
        self.guest_offloads = 0;
        self.set_rx_mode(None);
        self.active = 1;
        self.restored = None;
        self.refused = None;
    }

    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        let (direction, pair, turn) = match self.role(index) {
            Some(Role::Receive(pair)) => (Direction::Receive, pair, self.receive(pair)?),
            Some(Role::Transmit(pair)) => (Direction::Transmit, pair, self.transmit(pair)?),
            Some(Role::Control) => return self.serve_commands(),
            None => return Ok(Progress::Idle),
        };
        Ok(self.schedule_rest(direction, pair, turn))
    }

    fn backend(&self) -> Option<BorrowedFd<'_>> {
        Some(self.events.backend())
    }

    fn on_backend(&mut self) -> Result<Progress, Fault> {
        let Ready {
            frames,
            receive,
            room,
            transmit,
            vhost,
        } = self.events.take(&self.host);
        for (report, _) in Report::ALL.into_iter().zip(vhost).filter(|(_, is)| *is) {
            if let Some(vhost) = &self.vhost {
                vhost.take(report)?;
            }
        }
        for (queue, frames) in self.host.iter_mut().zip(frames) {
            queue.ready |= frames;
        }
        if self.refilter && self.filter_changes.wait().is_none() {
            self.filter();
        }
        if receive || frames.contains(&true) {
            for pair in self.round(self.active) {
                let turn = self.receive(pair)?;
                if self.schedule_rest(Direction::Receive, pair, turn) == Progress::More {
                    self.events.soon(Direction::Receive, MIN_TIMER);
                }
            }
        }
        if transmit || room {
            for pair in self.round(self.pairs.len()) {
                let turn = self.transmit(pair)?;
                if self.schedule_rest(Direction::Transmit, pair, turn) == Progress::More {
                    self.events.soon(Direction::Transmit, MIN_TIMER);
                }
            }
        }
        // Remaining work keeps the backend readable.
        Ok(Progress::Idle)
    }

    fn save(&self) -> SavedDevice {
        let state = DriverState {
            mac: self.current_mac().0,
            offloads: self.guest_offloads,
            // At most MAX_QUEUE_PAIRS.
            active: u16::try_from(self.active).unwrap_or(1),
            link: self.link,
            rx_mode: self.rx_mode.clone(),
        };
        state.save()
    }

    /// Restores the driver's address, offloads, filter and queue pairs, and the link's state.
    /// Frames in flight are lost, as on any wire.
    fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreError> {
        let state = DriverState::restore(saved, self.pair_count())?;
        self.config.update(0, &state.mac);
        self.set_link(state.link);
        if self.features == 0 {
            self.restored = Some(state);
        } else {
            self.active = state.active.into();
            self.set_rx_mode(Some(state.rx_mode));
            let offloads = self.features & state.offloads;
            self.refused = self.switch_offloads(offloads).err();
            self.choose_server();
        }
        Ok(())
    }
}

/// Sets the server of queue `index`, if the queue does not run yet.
fn place<T>(place: Option<&mut Option<T>>, server: T, index: u16) -> Result<(), StartError> {
    match place {
        Some(place @ None) => *place = Some(server),
        Some(Some(_)) => return Err(StartError::Running { index }),
        None => return Err(StartError::NoSuchQueue { index }),
    }
    Ok(())
}

#[cfg(test)]
#[path = "device_tests/mod.rs"]
mod tests;

#[cfg(test)]
#[path = "pair_tests.rs"]
mod pair_tests;
