//! The vsock device: its queues, and the packets on them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

use super::connection::{MAX_BATCH, Read};
use super::error::VsockError;
use super::host::{ListenerHost, VsockHost};
use super::listener::Listener;
use super::mux::{Mux, Work, check_cid};
use super::packet::{HEADER_LEN, Header, Op};
use crate::virtio::{
    Chain, ConfigSpace, DeviceInfo, DeviceType, Fault, MAX_SEGMENTS, Placement, Progress, Queue,
    Queues, RestoreError, SavedDevice, SpareList, StartError, VirtioDevice,
};

/// Index of the event queue; before it come those for receiving and transmitting (§5.10.2).
const EVENT: u16 = 2;

const QUEUE_SIZES: [u16; 3] = [256, 256, 16];

/// `VIRTIO_VSOCK_F_STREAM` (§5.10.3).
const F_STREAM: u64 = 1 << 0;
/// `VIRTIO_VSOCK_F_NO_IMPLIED_STREAM`: a driver that accepts no type of sockets has none.
const F_NO_IMPLIED_STREAM: u64 = 1 << 2;

/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET` (§5.10.6.7).
const TRANSPORT_RESET: [u8; 4] = [0; 4];

/// What is handled in each direction before the event loop gets control back: 512 packets, or fewer
/// if their chains have many descriptors.
const BUDGET: usize = 512 * PACKET_COST;

/// The least that a packet costs, which is the cost of 8 descriptors.
const PACKET_COST: usize = 512;

/// A virtio socket device whose streams are Unix sockets of the host; the module's documentation
/// describes how ports map to them.
#[derive(Debug)]
pub struct VsockDevice {
    mux: Mux,
    reset: Reset,
    config: Arc<ConfigSpace>,
    /// By their index; data flows if the first two run.
    queues: Queues,
    flow: Flow,
    scratch: Scratch,
}

/// Whether the guest was notified that its connections are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reset {
    /// It was, or there was nothing to report.
    Known,
    /// It was not notified yet.
    Due,
    /// It was notified. No data flows until it has made the event's buffer available again, since
    /// it ends all connections that it has until then, including new ones.
    Told {
        /// Number of event buffers that were available before.
        others: u16,
    },
}

/// Conditions that keep data from flowing.
#[derive(Clone, Copy, Debug)]
struct Flow {
    /// The driver was asked to notify of receive buffers.
    rx_kicks: bool,
    /// Packets of the driver wait until resets have been sent in receive buffers.
    tx_stalled: bool,
}

impl Default for Flow {
    fn default() -> Self {
        Self {
            rx_kicks: true,
            tx_stalled: false,
        }
    }
}

/// Lists of one read from a socket, kept for their allocations.
#[derive(Debug, Default)]
struct Scratch {
    /// Receive buffers, and how many bytes of each are read into.
    chains: VecDeque<(Chain, usize)>,
    slices: SpareList,
}

/// The two data queues while they run.
#[derive(Debug)]
struct Running<'a> {
    rx: &'a mut Queue,
    tx: &'a mut Queue,
    flow: &'a mut Flow,
    scratch: &'a mut Scratch,
}

/// Why sending to the driver stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    Everything,
    NoBuffers,
    Budget,
}

impl VsockDevice {
    /// Creates a device for the guest with this CID (3 to 2³²-2), which listens on the Unix socket
    /// `path` immediately. The socket's file is removed when the device is dropped; one that a dead
    /// process left there is replaced.
    ///
    /// # Errors
    /// See [`VsockError`].
    pub fn unix_mux(guest_cid: u64, path: impl AsRef<Path>) -> Result<Self, VsockError> {
        check_cid(guest_cid)?;
        Self::new(guest_cid, Box::new(Listener::bind(path.as_ref())?))
    }

    /// Creates a device for the guest with this CID whose host programs connect to a socket that
    /// listens already. A program in the guest can only reach listeners of this process
    /// ([`Self::listen`]). No paths are used.
    ///
    /// # Errors
    /// See [`VsockError`].
    pub fn from_listener(guest_cid: u64, listener: UnixListener) -> Result<Self, VsockError> {
        listener.set_nonblocking(true).map_err(VsockError::Epoll)?;
        Self::new(guest_cid, Box::new(ListenerHost(Some(listener))))
    }

    /// Creates a device for the guest with this CID that only this process uses, with
    /// [`Self::connect`] and [`Self::listen`].
    ///
    /// # Errors
    /// See [`VsockError`].
    pub fn in_process(guest_cid: u64) -> Result<Self, VsockError> {
        Self::new(guest_cid, Box::new(ListenerHost(None)))
    }

    /// Whether its host side creates sockets and uses paths ([`VsockHost::uses_paths`]).
    #[must_use]
    pub fn uses_paths(&self) -> bool {
        self.mux.uses_paths()
    }

    /// Creates a device for the guest with this CID over any host side.
    ///
    /// # Errors
    /// See [`VsockError`].
    pub fn new(guest_cid: u64, host: Box<dyn VsockHost>) -> Result<Self, VsockError> {
        Ok(Self {
            mux: Mux::new(guest_cid, host)?,
            config: Arc::new(ConfigSpace::new(guest_cid.to_le_bytes())),
            reset: Reset::Known,
            queues: Queues::new(QUEUE_SIZES.len()),
            flow: Flow::default(),
            scratch: Scratch::default(),
        })
    }

    /// Sets how many connections the guest may have at the same time, at most 1024; beyond that it
    /// is refused, and host programs wait. Host programs that have not yet sent their request are
    /// limited to the same number. A connection costs the process one descriptor, and another one
    /// if the program at its other end is this process itself. By default, the socket device has an
    /// eighth of the process's soft limit of open files for connections (8 to 1024), and a
    /// sixteenth for host programs that have not sent their request (4 to 256). That is for one VM
    /// in the process: with several, set this for each.
    #[must_use]
    pub fn max_connections(mut self, limit: usize) -> Self {
        self.mux.limit_connections(limit);
        self
    }

    /// Opens a stream to a port of the guest. Written data waits until the guest accepts; the
    /// stream ends if it refuses.
    ///
    /// # Errors
    /// If descriptors run out, all connections are in use (EMFILE), or the driver has chosen to
    /// have no streams (ESOCKTNOSUPPORT).
    pub fn connect(&mut self, port: u32) -> io::Result<UnixStream> {
        self.mux.connect_guest(port)
    }

    /// Serves a port of the host: `on_connect` receives the streams that programs in the guest open
    /// to it. It is called on the thread that serves the device and must not block.
    pub fn listen(&mut self, port: u32, on_connect: impl FnMut(UnixStream) + Send + 'static) {
        self.mux.listen(port, Box::new(on_connect));
    }

    /// The guest's CID.
    #[must_use]
    pub fn guest_cid(&self) -> u64 {
        self.mux.guest_cid()
    }

    /// Ends all connections, and notifies the driver that they are gone and that its CID may have
    /// changed (§5.10.6.7): for a guest that was restored from a snapshot. It is notified by the
    /// next [`VirtioDevice::on_backend`], or after a pause. A driver that starts anew knows of no
    /// connection.
    pub fn reset_transport(&mut self) {
        self.mux.forget_connections();
        self.reset = Reset::Due;
        // A fault of its event queue is then one of the device, not of this caller.
        self.mux.remind();
    }

    /// Connections, handshakes, sockets with unsent bytes, and resets waiting for buffers.
    #[cfg(any(test, feature = "test-utils"))]
    #[must_use]
    pub fn statistics(&self) -> (usize, usize, usize, usize) {
        self.mux.statistics()
    }

    /// Entries in the list of connections that have something for the guest.
    #[cfg(test)]
    fn waiting_for_buffers(&self) -> usize {
        self.mux.ready_len()
    }

    #[cfg(test)]
    fn connection_limit(&self) -> usize {
        self.mux.max_connections()
    }

    fn serve(&mut self) -> Result<Progress, Fault> {
        if self.reset != Reset::Known && !self.tell_reset()? {
            return Ok(Progress::Idle);
        }
        let [Some(rx), Some(tx), _] = self.queues.places() else {
            return Ok(Progress::Idle);
        };
        let (flow, scratch) = (&mut self.flow, &mut self.scratch);
        let mut running = Running {
            rx,
            tx,
            flow,
            scratch,
        };
        running.serve(&mut self.mux)
    }

    /// Notifies the driver of a reset of the transport, once it has a buffer for that. Returns
    /// `true` if data may flow.
    fn tell_reset(&mut self) -> Result<bool, Fault> {
        let [_, _, Some(event)] = self.queues.places() else {
            // A driver without that queue cannot be notified.
            return Ok(true);
        };
        if self.reset == Reset::Due {
            let Some(chain) = event.next()? else {
                return Ok(true);
            };
            chain.write(event.memory(), 0, &TRANSPORT_RESET)?;
            event.complete(chain, TRANSPORT_RESET.len() as u32)?;
            let others = event.available()?;
            self.reset = Reset::Told { others };
            event.notify()?;
        }
        if let Reset::Told { others } = self.reset {
            // The notification is requested first, so that none in between is lost.
            if event.enable_kicks_for_more()? <= others {
                return Ok(false);
            }
            self.reset = Reset::Known;
        }
        Ok(true)
    }
}

impl Running<'_> {
    /// Takes packets from the driver and sends packets to it, until neither is possible or the
    /// budget is used up.
    fn serve(&mut self, mux: &mut Mux) -> Result<Progress, Fault> {
        let (mut to_receive, mut to_send) = (BUDGET, BUDGET);
        loop {
            self.tx.disable_kicks()?;
            self.receive(mux, &mut to_receive)?;
            // Connections that ended made room for waiting host programs.
            mux.accept();
            let sent = self.send(mux, &mut to_send)?;
            self.tx.notify()?;
            self.rx.notify()?;
            if to_receive == 0 || sent == Sent::Budget {
                return Ok(Progress::More);
            }
            if self.flow.tx_stalled {
                if mux.may_receive() {
                    continue;
                }
                // The driver's notification of receive buffers resumes this.
                return Ok(Progress::Idle);
            }
            if !self.tx.enable_kicks()? {
                return Ok(Progress::Idle);
            }
        }
    }

    /// Takes packets from the driver.
    fn receive(&mut self, mux: &mut Mux, budget: &mut usize) -> Result<(), Fault> {
        self.flow.tx_stalled = false;
        while *budget > 0 {
            if !mux.may_receive() {
                self.flow.tx_stalled = true;
                break;
            }
            let Some(chain) = self.tx.next()? else {
                break;
            };
            *budget = budget.saturating_sub(chain.cost().max(PACKET_COST));
            let mut raw = [0; HEADER_LEN];
            chain.read(self.tx.memory(), 0, &mut raw)?;
            let header = Header::from_bytes(&raw);
            let room = chain.readable_len().saturating_sub(HEADER_LEN);
            if header.len as usize > room {
                return Err(Fault::protocol(
                    "a vsock packet that is longer than its buffer",
                ));
            }
            mux.on_packet(self.tx.memory(), &header, &chain, HEADER_LEN)?;
            self.tx.complete(chain, 0)?;
        }
        Ok(())
    }

    /// Sends the pending packets to the driver.
    fn send(&mut self, mux: &mut Mux, budget: &mut usize) -> Result<Sent, Fault> {
        loop {
            if !mux.has_work() {
                return Ok(Sent::Everything);
            }
            if *budget == 0 {
                return Ok(Sent::Budget);
            }
            let Some(chain) = self.next_buffer(budget)? else {
                return Ok(Sent::NoBuffers);
            };
            match mux.next_work() {
                Some(Work::Packet(header)) => {
                    *budget = budget.saturating_sub(rest_of_cost(&chain));
                    self.finish(mux, chain, &header)?;
                }
                Some(Work::Data(id)) => self.send_data(mux, id, chain, budget)?,
                None => self.rx.undo_pop(chain),
            }
        }
    }

    /// Returns the next receive buffer, whose descriptors count even if it is put back. If there is
    /// none, the driver is asked to notify.
    fn next_buffer(&mut self, budget: &mut usize) -> Result<Option<Chain>, Fault> {
        loop {
            if let Some(chain) = self.rx.next()? {
                *budget = budget.saturating_sub(chain.cost());
                if self.flow.rx_kicks {
                    self.rx.disable_kicks()?;
                    self.flow.rx_kicks = false;
                }
                if chain.writable_len() <= HEADER_LEN {
                    return Err(Fault::protocol(
                        "a vsock receive buffer without room for data",
                    ));
                }
                return Ok(Some(chain));
            }
            self.flow.rx_kicks = true;
            if !self.rx.enable_kicks()? {
                return Ok(None);
            }
        }
    }

    /// Reads from a connection's socket directly into as many receive buffers as one system call
    /// may fill; each becomes a packet.
    fn send_data(
        &mut self,
        mux: &mut Mux,
        id: u64,
        first: Chain,
        budget: &mut usize,
    ) -> Result<(), Fault> {
        let guest_cid = mux.guest_cid();
        let Some(connection) = mux.connection(id) else {
            self.rx.undo_pop(first);
            return Ok(());
        };
        let (quota, batch) = connection.read_quota();
        let batch = batch.min(*budget / PACKET_COST).clamp(1, MAX_BATCH);
        let mem = self.rx.shared_memory();
        let mut chains = std::mem::take(&mut self.scratch.chains);
        let mut slices = self.scratch.slices.take();
        let mut room = 0usize;
        let mut next = Some(first);
        while let Some(chain) = next {
            let data = chain.writable_len().saturating_sub(HEADER_LEN);
            let want = data.min(quota.saturating_sub(room));
            let before = slices.len();
            chain.append_writable_slices(&mem, HEADER_LEN, want, &mut slices)?;
            // A single chain has no more segments than that.
            if slices.len() > MAX_SEGMENTS {
                slices.truncate(before);
                self.rx.undo_pop(chain);
                break;
            }
            room = room.saturating_add(want);
            chains.push_back((chain, want));
            next = if chains.len() < batch && room < quota && *budget > 0 {
                self.next_buffer(budget)?
            } else {
                None
            };
        }

        let read = connection.read(&slices, room);
        self.scratch.slices.put_back(slices);
        let mut rest = match read {
            Read::Bytes(len) => len,
            Read::Nothing | Read::Failed => 0,
        };
        while rest > 0
            && let Some(connection) = mux.connection(id)
            && let Some((chain, want)) = chains.pop_front()
        {
            let len = want.min(rest);
            rest = rest.saturating_sub(len);
            *budget = budget.saturating_sub(rest_of_cost(&chain));
            // A packet is no longer than its segment of guest memory, whose length is a u32.
            let len = u32::try_from(len).unwrap_or(u32::MAX);
            let header = connection.header(guest_cid, Op::Data, 0, len);
            self.finish(mux, chain, &header)?;
        }
        while let Some((chain, _)) = chains.pop_back() {
            self.rx.undo_pop(chain);
        }
        self.scratch.chains = chains;
        mux.end_turn(id, read == Read::Failed);
        Ok(())
    }

    /// Completes a receive buffer whose payload was written.
    fn finish(&mut self, mux: &mut Mux, chain: Chain, header: &Header) -> Result<(), Fault> {
        chain.write(self.rx.memory(), 0, &header.to_bytes())?;
        mux.counters.rx_packets.one();
        mux.counters.rx_bytes.add(u64::from(header.len));
        let written = header.len.saturating_add(HEADER_LEN as u32);
        self.rx.complete(chain, written)?;
        Ok(())
    }
}

/// The cost of a packet to the driver besides that of its chain's descriptors, which count already.
fn rest_of_cost(chain: &Chain) -> usize {
    PACKET_COST.saturating_sub(chain.cost())
}

impl VirtioDevice for VsockDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            device_type: DeviceType::Vsock,
            queue_sizes: QUEUE_SIZES.to_vec(),
            features: F_STREAM | F_NO_IMPLIED_STREAM,
            config: self.config.clone(),
            counters: self.mux.counters.clone(),
        }
    }

    /// A host side that uses paths needs a thread that may make these system calls; other devices
    /// should not run on that thread.
    fn placement(&self) -> Placement {
        match self.uses_paths() {
            true => Placement::Own,
            false => Placement::Shared,
        }
    }

    /// A driver that accepts neither feature has streams (§5.10.3.2).
    fn negotiated(&mut self, features: u64) {
        let without = features & (F_STREAM | F_NO_IMPLIED_STREAM) == F_NO_IMPLIED_STREAM;
        self.mux.set_streams(!without);
    }

    fn start_queue(&mut self, queue: Queue) -> Result<(), StartError> {
        self.queues.start(queue)?;
        self.flow = Flow::default();
        self.mux.restart_close_timer();
        Ok(())
    }

    fn stop_queue(&mut self, index: u16) -> Option<Queue> {
        self.queues.stop(index)
    }

    fn save(&self) -> SavedDevice {
        SavedDevice {
            version: 1,
            bytes: self.mux.next_host_port().to_le_bytes().into(),
        }
    }

    /// Connections do not survive their process: the driver is notified. It forgets them
    /// immediately, but a program of the guest keeps its end until it closes it, and a new
    /// connection with the same ports would be refused: so ports continue where the saved device
    /// was.
    fn restore(&mut self, saved: &SavedDevice) -> Result<(), RestoreError> {
        let port = <[u8; 4]>::try_from(saved.of_version(1)?).map(u32::from_le_bytes);
        if !port.is_ok_and(|port| self.mux.continue_from_host_port(port)) {
            return Err(RestoreError::Invalid {
                what: "a vsock device's state is the port for the next program of the host",
            });
        }
        self.mux.forget_connections();
        self.reset = Reset::Due;
        Ok(())
    }

    fn reset(&mut self) {
        self.mux.forget_connections();
        self.mux.set_streams(true);
        self.reset = Reset::Known;
    }

    fn on_queue(&mut self, index: u16) -> Result<Progress, Fault> {
        if index == EVENT && self.reset == Reset::Known {
            return Ok(Progress::Idle);
        }
        self.serve()
    }

    fn backend(&self) -> Option<BorrowedFd<'_>> {
        Some(self.mux.epoll())
    }

    fn on_backend(&mut self) -> Result<Progress, Fault> {
        self.mux.poll()?;
        let progress = self.serve()?;
        if progress == Progress::More {
            self.mux.remind();
        }
        Ok(progress)
    }
}

#[cfg(test)]
#[path = "device_tests/mod.rs"]
mod tests;
