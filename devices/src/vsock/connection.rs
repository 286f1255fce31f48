//! One stream between a Unix socket and a port of the guest.
//!
//! A connection knows its socket, its phase and its credit. It reports what it would send to the
//! guest next ([`Connection::next_packet`]) and takes what the guest sends; it does not know
//! queues.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use vm_memory::VolatileSlice;

use super::credit::{Inbound, Outbound};
use super::outlet::{Closed, Outlet};
use super::packet::{Header, Op, Ports, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use crate::GuestRam;
use crate::virtio::{Chain, Fault, SpareList, iovec};

/// The maximum number of receive buffers of the guest that one read from the socket may fill.
pub(super) const MAX_BATCH: usize = 32;

/// The phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The request was sent to the guest, or will be; it has not responded yet.
    Requested,
    /// Both sides have accepted.
    Established,
}

/// The next action of a connection when the guest has a receive buffer for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextPacket {
    /// Send a packet without payload: operation and flags.
    Control(Op, u32),
    /// Read from the socket into the guest's buffers.
    Data,
}

/// The state of a connection after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Outcome {
    /// It continues.
    Lives,
    /// It is over, and the guest must be sent a reset.
    Reset,
    /// It is over, and the guest knows that.
    Gone,
}

/// The result of reading from the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// This number of bytes, at least one.
    Bytes(usize),
    /// Nothing to read now; the connection may have something else to do.
    Nothing,
    /// The socket failed.
    Failed,
}

/// Packets that are due to be sent to the guest.
#[derive(Debug, Default)]
struct Due {
    request: bool,
    response: bool,
    credit_update: bool,
    credit_request: bool,
    /// Shutdown flags.
    shutdown: u32,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Connection {
    ports: Ports,
    phase: Phase,
    outlet: Outlet,
    inbound: Inbound,
    outbound: Outbound,
    due: Due,
    /// Shutdown flags that were sent to the guest or will be.
    announced: u32,
    /// Shutdown flags that the guest has sent.
    guest_shutdown: u32,
    /// There may be data to read in the socket.
    readable: bool,
    /// The host program closed its socket for both directions.
    hung_up: bool,
    /// Nothing more will be read from the socket.
    read_ended: bool,
    /// The host program no longer reads; data from the guest is dropped.
    write_ended: bool,
    /// The guest was asked for its credit, and has not granted any since.
    asked: bool,
    /// It was abandoned when the guest last ran out of time to end it.
    pub(super) overdue: bool,
    /// The connection is in the multiplexer's list of ready ones.
    pub(super) queued: bool,
    /// The number of receive buffers for the next read.
    batch: usize,
    /// The host program does not get a line when the guest has accepted.
    silent: bool,
}

impl Connection {
    /// Creates a connection that a host program opens to the guest.
    pub(super) fn from_host(socket: OwnedFd, ports: Ports, buf_alloc: u32) -> Self {
        let due = Due {
            request: true,
            ..Due::default()
        };
        Self::new(socket, ports, buf_alloc, Phase::Requested, due)
    }

    /// As [`Self::from_host`], for a program that does not expect the line `OK`.
    pub(super) fn from_process(socket: OwnedFd, ports: Ports, buf_alloc: u32) -> Self {
        Self {
            silent: true,
            ..Self::from_host(socket, ports, buf_alloc)
        }
    }

    /// Creates a connection that the guest opened to a host program.
    pub(super) fn from_guest(socket: OwnedFd, ports: Ports, buf_alloc: u32) -> Self {
        let due = Due {
            response: true,
            ..Due::default()
        };
        Self::new(socket, ports, buf_alloc, Phase::Established, due)
    }

    fn new(socket: OwnedFd, ports: Ports, buf_alloc: u32, phase: Phase, due: Due) -> Self {
        Self {
            ports,
            phase,
            outlet: Outlet::new(socket, buf_alloc),
            inbound: Inbound::new(buf_alloc),
            outbound: Outbound::new(),
            due,
            announced: 0,
            guest_shutdown: 0,
            readable: true,
            hung_up: false,
            read_ended: false,
            write_ended: false,
            asked: false,
            overdue: false,
            queued: false,
            batch: 1,
            silent: false,
        }
    }

    pub(super) fn ports(&self) -> Ports {
        self.ports
    }

    pub(super) fn buf_alloc(&self) -> u32 {
        self.inbound.buf_alloc()
    }

    /// Whether nothing was sent to the guest yet: then it need not get a reset either.
    pub(super) fn unknown_to_guest(&self) -> bool {
        self.due.request
    }

    /// Whether the connection has no user on the host any more.
    pub(super) fn abandoned(&self) -> bool {
        self.hung_up && (self.read_ended || self.phase == Phase::Requested)
    }

    /// Returns the remaining output after the connection is over.
    pub(super) fn into_outlet(self) -> Outlet {
        self.outlet
    }

    // ---- The host's side ----

    /// Handles a socket that became readable or writable, or whose other end was closed.
    pub(super) fn on_socket(&mut self, readable: bool, writable: bool, hung_up: bool) -> Outcome {
        self.readable |= readable || hung_up;
        if hung_up {
            self.hung_up = true;
            // A program of this process does not wait for the guest's answer: it may have written
            // everything already.
            if self.phase == Phase::Requested && !self.silent {
                return if self.due.request {
                    Outcome::Gone
                } else {
                    Outcome::Reset
                };
            }
            self.announce_hang_up();
        }
        if writable {
            self.outlet.set_writable();
            self.flush();
        }
        Outcome::Lives
    }

    fn flush(&mut self) {
        let before = self.outlet.pending().len();
        match self.outlet.flush() {
            Ok(sent) => self.forwarded(sent),
            Err(Closed) => {
                self.forwarded(before);
                self.host_receives_no_more();
            }
        }
        self.finish_sending();
    }

    fn forwarded(&mut self, len: usize) {
        // Never more than the guest sent, which is a 32-bit count.
        self.inbound.forward(u32::try_from(len).unwrap_or(u32::MAX));
        if self.inbound.update_due() {
            self.due.credit_update = true;
        }
    }

    fn host_receives_no_more(&mut self) {
        self.write_ended = true;
        self.announce(SHUTDOWN_RECEIVE);
    }

    /// Shuts down the socket for writing if the guest has ended sending and everything before that
    /// was passed on.
    fn finish_sending(&mut self) {
        if self.guest_shutdown & SHUTDOWN_SEND != 0 && self.outlet.is_empty() && !self.write_ended {
            self.write_ended = true;
            // It fails only if the other end is closed, which is also reported as an event.
            let _ = shutdown(self.outlet.socket(), Shutdown::Write);
        }
    }

    /// Ends both directions once the host program is gone and nothing of it is left to send.
    fn announce_hang_up(&mut self) {
        if self.hung_up && self.read_ended {
            self.announce(SHUTDOWN_BOTH);
        }
    }

    /// Schedules a shutdown to the guest: the host side will not receive or send any more.
    fn announce(&mut self, flags: u32) {
        let new = flags & !self.announced;
        self.announced |= new;
        self.due.shutdown |= new;
    }

    // ---- The guest's side ----

    /// Handles a packet of the guest for this connection, other than data.
    pub(super) fn on_control(&mut self, op: Op, header: &Header) -> Outcome {
        if op == Op::Reset {
            return Outcome::Gone;
        }
        if !self.take_credit(header) {
            return Outcome::Reset;
        }
        match (self.phase, op) {
            (Phase::Requested, Op::Response) if !self.due.request => self.established(),
            (Phase::Established, Op::CreditUpdate) => Outcome::Lives,
            (Phase::Established, Op::CreditRequest) => {
                self.due.credit_update = true;
                Outcome::Lives
            }
            (Phase::Established, Op::Shutdown) => self.on_shutdown(header.flags),
            _ => Outcome::Reset,
        }
    }

    /// Applies the guest's credit; `false` if it is inconsistent.
    pub(super) fn take_credit(&mut self, header: &Header) -> bool {
        let update = self.outbound.update(header.buf_alloc, header.fwd_cnt);
        // A guest also answers if nothing has become free. It sends an update when that changes
        // (§5.10.6.3): if asked again immediately, it would answer the same until its program
        // reads.
        if self.outbound.free() > 0 {
            self.asked = false;
            self.due.credit_request = false;
        }
        update.is_ok()
    }

    fn established(&mut self) -> Outcome {
        self.phase = Phase::Established;
        // What its program did before counts from now on.
        self.overdue = false;
        if self.silent {
            return Outcome::Lives;
        }
        let line = format!("OK {}\n", self.ports.host);
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // Nothing was written to this socket before: it takes the whole line, or is closed.
        match rustix::io::retry_on_intr(|| send(self.outlet.socket(), line.as_bytes(), flags)) {
            Ok(sent) if sent == line.len() => Outcome::Lives,
            _ => Outcome::Reset,
        }
    }

    fn on_shutdown(&mut self, flags: u32) -> Outcome {
        self.guest_shutdown |= flags & SHUTDOWN_BOTH;
        if self.guest_shutdown == SHUTDOWN_BOTH {
            // §5.10.6.5: a reset is the answer to the end of both directions.
            return Outcome::Reset;
        }
        if flags & SHUTDOWN_RECEIVE != 0 {
            self.read_ended = true;
            // A host program that is gone is reported again then.
            let _ = shutdown(self.outlet.socket(), Shutdown::Read);
        }
        self.finish_sending();
        Outcome::Lives
    }

    /// Handles data of the guest: `len` bytes of the chain from `offset` on. Its credit was already
    /// counted.
    pub(super) fn on_data(
        &mut self,
        mem: &GuestRam,
        chain: &Chain,
        offset: usize,
        len: u32,
        scratch: &mut SpareList,
    ) -> Result<Outcome, Fault> {
        let ended = self.guest_shutdown & SHUTDOWN_SEND != 0;
        if self.phase != Phase::Established || ended || self.inbound.receive(len).is_err() {
            return Ok(Outcome::Reset);
        }
        let len = len as usize;
        if self.write_ended || len == 0 {
            self.forwarded(len);
            return Ok(Outcome::Lives);
        }
        match self.outlet.send_chain(mem, chain, offset, len, scratch)? {
            Ok(sent) => self.forwarded(sent),
            Err(Closed) => {
                self.forwarded(len);
                self.host_receives_no_more();
            }
        }
        Ok(Outcome::Lives)
    }

    // ---- Towards the guest ----

    /// Returns what the connection would send now. Calling this changes nothing that the guest can
    /// see.
    pub(super) fn next_packet(&mut self) -> Option<NextPacket> {
        let due = &self.due;
        if due.request {
            return Some(NextPacket::Control(Op::Request, 0));
        }
        if self.phase == Phase::Requested {
            return None;
        }
        if due.response {
            return Some(NextPacket::Control(Op::Response, 0));
        }
        if self.readable && !self.read_ended {
            if self.outbound.free() > 0 {
                return Some(NextPacket::Data);
            }
            if self.hung_up && self.is_drained() {
                let _ = self.end_of_file();
            } else if !self.asked {
                self.asked = true;
                self.due.credit_request = true;
            }
        }
        if self.due.credit_request {
            return Some(NextPacket::Control(Op::CreditRequest, 0));
        }
        // Every packet carries the credit: this one is for a stream that has nothing else to send.
        if self.due.credit_update {
            return Some(NextPacket::Control(Op::CreditUpdate, 0));
        }
        if self.due.shutdown != 0 {
            return Some(NextPacket::Control(Op::Shutdown, self.announced));
        }
        None
    }

    /// Returns the header of a packet that is sent now; what it carries is no longer due.
    pub(super) fn header(&mut self, guest_cid: u64, op: Op, flags: u32, len: u32) -> Header {
        match op {
            Op::Request => self.due.request = false,
            Op::Response => self.due.response = false,
            Op::CreditRequest => self.due.credit_request = false,
            Op::Shutdown => self.due.shutdown = 0,
            Op::Data => self.outbound.sent(len),
            Op::CreditUpdate | Op::Reset => {}
        }
        self.due.credit_update = false;
        Header {
            len,
            flags,
            buf_alloc: self.inbound.buf_alloc(),
            fwd_cnt: self.inbound.advertise(),
            ..Header::to_guest(guest_cid, self.ports, op)
        }
    }

    /// Returns the maximum bytes of one read, and how many receive buffers it should be offered.
    pub(super) fn read_quota(&self) -> (usize, usize) {
        (self.outbound.free() as usize, self.batch)
    }

    /// Reads from the socket into `slices`, which hold `room` bytes.
    pub(super) fn read(&mut self, slices: &[VolatileSlice<'_>], room: usize) -> Read {
        match iovec::receive(self.outlet.socket(), slices) {
            Ok(0) => self.end_of_file(),
            Ok(len) => {
                let full = len >= room;
                self.batch = if full {
                    self.batch.saturating_mul(2).min(MAX_BATCH)
                } else {
                    // The next message probably has a similar length.
                    (self.batch / 2).max(1)
                };
                Read::Bytes(len.min(room))
            }
            Err(error) => match error.kind() {
                std::io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    Read::Nothing
                }
                // The host program closed without reading all that was sent to it.
                std::io::ErrorKind::ConnectionReset => {
                    self.hung_up = true;
                    self.end_of_file()
                }
                _ => Read::Failed,
            },
        }
    }

    /// Whether the host program left nothing that the guest would need credit for.
    fn is_drained(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let mut byte = [0u8];
        let peeked =
            rustix::io::retry_on_intr(|| recv(self.outlet.socket(), byte.as_mut_slice(), flags));
        matches!(peeked, Ok((0, _)) | Err(Errno::CONNRESET))
    }

    fn end_of_file(&mut self) -> Read {
        self.read_ended = true;
        self.readable = false;
        self.announce(SHUTDOWN_SEND);
        self.announce_hang_up();
        Read::Nothing
    }
}
