//! The device of all ports.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::event::epoll;

use super::control::{self, Event, MAX_NAME, Message};
use super::counters::Counters;
use super::port::{Port, Session};
use crate::virtio::{
    ConfigSpace, DeviceInfo, DeviceType, Fault, Progress, Queue, RestoreError, SavedDevice,
    SpareList, StartError, VirtioDevice,
};

/// `VIRTIO_CONSOLE_F_MULTIPORT` (§5.3.3).
const F_MULTIPORT: u64 = 1 << 1;

/// Queue numbers (§5.3.2); those of the ports with names follow.
const CONSOLE_TX: u16 = 1;
const CONTROL_RX: u16 = 2;
const CONTROL_TX: u16 = 3;
const FIRST: u16 = 4;

const QUEUE_SIZE: u16 = 64;

/// The maximum number of ports with names.
pub const MAX_PORTS: usize = 8;

/// Cost of control messages before the event loop gets control back.
const CONTROL_BUDGET: usize = 64 << 10;

/// The version of the saved state.
const VERSION: u32 = 1;

/// Why ports cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PortsError {
    /// None, or more than fit.
    #[error("{count} named ports: a device has 1 to {MAX_PORTS}")]
    Count {
        /// How many were named.
        count: usize,
    },
    /// A guest could not have it as the name of a file.
    #[error(
        "invalid port name {name:?}: it needs 1 to {MAX_NAME} bytes, without `/` or control characters"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// Two ports have the same name.
    #[error("two ports are named {name:?}")]
    Twice {
        /// The name.
        name: String,
    },
    /// The device has no port of this name.
    #[error("there is no port {name:?}: the device has {}", there.join(", "))]
    NoSuchPort {
        /// The name.
        name: String,
        /// The names of its ports.
        there: Vec<String>,
    },
    /// The host's end cannot be used.
    #[error("failed to prepare the host's end of a port")]
    Host(#[source] io::Error),
}

/// Ports with names, for programs in the guest that find theirs in `/dev/virtio-ports`.
pub struct PortsDevice {
    ports: Vec<Port>,
    /// The queues of port 0, which has no host's end.
    console: [Option<Queue>; 2],
    control_rx: Option<Queue>,
    control_tx: Option<Queue>,
    /// Contains the hosts' ends of all ports that can be served.
    epoll: OwnedFd,
    slices: SpareList,
    config: Arc<ConfigSpace>,
    counters: Arc<Counters>,
}

impl fmt::Debug for PortsDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortsDevice")
            .field("ports", &self.ports)
            .field("control_rx", &self.control_rx)
            .field("control_tx", &self.control_tx)
            .finish_non_exhaustive()
    }
}

impl PortsDevice {
    /// Creates a device whose ports have these names, in this order.
    ///
    /// # Errors
    /// [`PortsError`] if there is no such device.
    pub fn new<N: Into<String>>(names: impl IntoIterator<Item = N>) -> Result<Self, PortsError> {
        let mut ports = Vec::<Port>::new();
        for name in names {
            let name = name.into();
            let is_wrong = |c: char| c == '/' || c.is_control();
            if name.is_empty() || name.len() > MAX_NAME || name.contains(is_wrong) {
                return Err(PortsError::Name { name });
            }
            if ports.iter().any(|port| port.name == name) {
                return Err(PortsError::Twice { name });
            }
            ports.push(Port::new(name));
        }
        let count = ports.len();
        if count == 0 || count > MAX_PORTS {
            return Err(PortsError::Count { count });
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| PortsError::Host(error.into()))?;
        // Columns and rows are not offered; `max_nr_ports` counts port 0, too.
        let mut config = [0; 8];
        if let Some(most) = config.get_mut(4) {
            *most = u8::try_from(count.saturating_add(1)).unwrap_or(u8::MAX);
        }
        Ok(Self {
            ports,
            console: [None, None],
            control_rx: None,
            control_tx: None,
            epoll,
            slices: SpareList::default(),
            config: Arc::new(ConfigSpace::new(config)),
            counters: Arc::default(),
        })
    }

    /// Connects the host's end of a port: the driver is told, and bytes flow while a program in the
    /// guest has the port open. An end that was there before is closed. When the host closes its
    /// end, the driver is told, too.
    ///
    /// # Errors
    /// [`PortsError::NoSuchPort`]; [`PortsError::Host`] if the socket cannot be made non-blocking.
    pub fn connect(&mut self, name: &str, stream: UnixStream) -> Result<(), PortsError> {
        stream.set_nonblocking(true).map_err(PortsError::Host)?;
        self.set_end(name, Some(stream))
    }

    /// Closes the host's end of a port.
    ///
    /// # Errors
    /// [`PortsError::NoSuchPort`].
    pub fn disconnect(&mut self, name: &str) -> Result<(), PortsError> {
        self.set_end(name, None)
    }

    fn set_end(&mut self, name: &str, stream: Option<UnixStream>) -> Result<(), PortsError> {
        let index = self.index(name)?;
        if let Some(port) = self.ports.get_mut(index) {
            port.connect(stream, &self.epoll);
        }
        // A driver that breaks the rules is told by the next notification of its own.
        let _ = self.send_control();
        Ok(())
    }

    /// Returns whether a program in the guest has the port open.
    ///
    /// # Errors
    /// [`PortsError::NoSuchPort`].
    pub fn is_open(&self, name: &str) -> Result<bool, PortsError> {
        let port = self.ports.get(self.index(name)?);
        Ok(port.is_some_and(Port::is_open))
    }

    fn index(&self, name: &str) -> Result<usize, PortsError> {
        let index = self.ports.iter().position(|port| port.name == name);
        index.ok_or_else(|| PortsError::NoSuchPort {
            name: name.to_owned(),
            there: self.ports.iter().map(|port| port.name.clone()).collect(),
        })
    }

    /// Carries out the driver's messages.
    fn receive_control(&mut self) -> Result<Progress, Fault> {
        let Some(tx) = &mut self.control_tx else {
            return Ok(Progress::Idle);
        };
        let ports = &mut self.ports;
        let progress = tx.serve(CONTROL_BUDGET, |tx, chain| {
            let mut bytes = [0; control::LEN];
            chain.read(tx.memory(), 0, &mut bytes)?;
            let Message {
                port,
                event,
                is_set,
            } = Message::decode(bytes);
            let index = usize::try_from(port).ok().and_then(|at| at.checked_sub(1));
            match (event, index.and_then(|at| ports.get_mut(at))) {
                (Some(Event::DeviceReady), _) if is_set => {
                    ports.iter_mut().for_each(Port::on_device_ready);
                }
                (Some(event), Some(port)) => port.on_event(event, is_set),
                // Of port 0, of one that is not there, or of an unknown kind.
                _ => {}
            }
            tx.complete(chain, 0)?;
            Ok(control::LEN)
        })?;
        self.send_control()?;
        for port in &mut self.ports {
            port.watch(&self.epoll);
        }
        Ok(progress)
    }

    /// Tells the driver what it has to know, as long as it has buffers.
    fn send_control(&mut self) -> Result<(), Fault> {
        let Some(rx) = &mut self.control_rx else {
            return Ok(());
        };
        for (number, port) in (1u32..).zip(&mut self.ports) {
            while let Some((event, is_set)) = port.due() {
                let Some(chain) = rx.next_or_enable_kicks()? else {
                    return Ok(rx.notify()?);
                };
                let mut message = [0; control::LEN + MAX_NAME];
                let (head, rest) = message.split_at_mut(control::LEN);
                head.copy_from_slice(&Message::encode(number, event, is_set));
                let name = match event {
                    Event::PortName => port.name.as_bytes(),
                    _ => &[],
                };
                for (to, from) in rest.iter_mut().zip(name) {
                    *to = *from;
                }
                let len = control::LEN.saturating_add(name.len());
                if chain.writable_len() < len {
                    return Err(Fault::protocol(
                        "a control buffer without room for a message",
                    ));
                }
                chain.write(rx.memory(), 0, message.get(..len).unwrap_or(&[]))?;
                rx.complete(chain, u32::try_from(len).unwrap_or(0))?;
                port.told(event);
            }
        }
        Ok(rx.notify()?)
    }

    /// Takes what a driver without support for several ports writes to its console.
    fn drop_console(&mut self) -> Result<Progress, Fault> {
        let [_, Some(tx)] = &mut self.console else {
            return Ok(Progress::Idle);
        };
        let counters = &self.counters;
        tx.serve(CONTROL_BUDGET, |tx, chain| {
            let len = chain.readable_len();
            counters.lost_bytes.add(len as u64);
            tx.complete(chain, 0)?;
            Ok(0)
        })
    }

    fn queue_mut(&mut self, index: u16) -> Option<&mut Option<Queue>> {
        match index {
            CONTROL_RX => Some(&mut self.control_rx),
            CONTROL_TX => Some(&mut self.control_tx),
            0 | CONSOLE_TX => self.console.get_mut(usize::from(index)),
            _ => {
                let (at, is_tx) = of_port(index)?;
                let port = self.ports.get_mut(at)?;
                Some(if is_tx { &mut port.tx } else { &mut port.rx })
            }
        }
    }
}

/// Returns the port of a queue, and whether the driver transmits by it.
fn of_port(index: u16) -> Option<(usize, bool)> {
    let number = index.checked_sub(FIRST)?;
    Some((usize::from(number >> 1), number & 1 == 1))
}

impl VirtioDevice for PortsDevice {
    fn info(&self) -> DeviceInfo {
        let queues = self.ports.len().saturating_add(2).saturating_mul(2);
        DeviceInfo {
            device_type: DeviceType::Console,
            queue_sizes: vec![QUEUE_SIZE; queues],
            features: F_MULTIPORT,
            config: self.config.clone(),
            counters: self.counters.clone(),
        }
    }

    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        let index = queue.index();
        match self.queue_mut(index) {
            Some(place @ None) => *place = Some(queue),
            Some(Some(_)) => return Err(StartError::Running { index }),
            None => return Err(StartError::NoSuchQueue { index }),
        }
        Ok(())
    }

    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        let queue = self.queue_mut(index)?.take();
        if let Some(port) = of_port(index).and_then(|(at, _)| self.ports.get_mut(at)) {
            port.watch(&self.epoll);
        }
        queue
    }

    fn reset(&mut self) {
        for port in &mut self.ports {
            port.reset();
            port.watch(&self.epoll);
        }
    }

    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        match index {
            0 => return Ok(Progress::Idle),
            CONSOLE_TX => return self.drop_console(),
            CONTROL_RX => return self.send_control().map(|()| Progress::Idle),
            CONTROL_TX => return self.receive_control(),
            _ => {}
        }
        let Some((at, is_tx)) = of_port(index) else {
            return Ok(Progress::Idle);
        };
        let Some(port) = self.ports.get_mut(at) else {
            return Ok(Progress::Idle);
        };
        let (counters, slices, epoll) = (&self.counters, &mut self.slices, &self.epoll);
        let progress = if is_tx {
            port.transmit(counters, slices, epoll)?
        } else {
            port.on_buffers();
            port.receive(counters, slices, epoll)?;
            // What remains keeps the backend readable.
            Progress::Idle
        };
        // An end that has failed is closed, of which the driver is told.
        self.send_control()?;
        Ok(progress)
    }

    fn backend(&self) -> Option<BorrowedFd<'_>> {
        Some(self.epoll.as_fd())
    }

    fn on_backend(&mut self) -> Result<Progress, Fault> {
        let (counters, slices, epoll) = (&self.counters, &mut self.slices, &self.epoll);
        let mut progress = Progress::Idle;
        for port in &mut self.ports {
            if port.is_behind() && port.transmit(counters, slices, epoll)? == Progress::More {
                progress = Progress::More;
            }
            port.receive(counters, slices, epoll)?;
        }
        self.send_control()?;
        Ok(progress)
    }

    fn save(&self) -> SavedDevice {
        let sessions = self.ports.iter().map(|port| port.session().bits());
        SavedDevice {
            version: VERSION,
            bytes: sessions.collect(),
        }
    }

    fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreError> {
        let bytes = saved.of_version(VERSION)?;
        let invalid = |what| RestoreError::Invalid { what };
        if bytes.len() != self.ports.len() {
            return Err(invalid("another number of ports"));
        }
        let sessions = bytes.iter().map(|bits| Session::from_bits(*bits));
        let sessions: Option<Vec<_>> = sessions.collect();
        let sessions = sessions.ok_or(invalid("a port in a state that does not exist"))?;
        for (port, session) in self.ports.iter_mut().zip(sessions) {
            port.restore(session);
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
