//! Handles packets of the guest.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;

use super::Mux;
use crate::GuestRam;
use crate::virtio::{Chain, Fault};
use crate::vsock::HOST_CID;
use crate::vsock::connection::{Connection, Outcome};
use crate::vsock::packet::{Header, Op, TYPE_STREAM};

impl Mux {
    /// Handles a packet of the guest: its header, and the chain that has the payload from `offset`
    /// on.
    pub(in crate::vsock) fn on_packet(
        &mut self,
        mem: &GuestRam,
        header: &Header,
        chain: &Chain,
        offset: usize,
    ) -> Result<(), Fault> {
        self.counters.tx_packets.one();
        if header.src_cid != self.guest_cid {
            // The guest may not use another CID, and an answer would go to that one.
            self.counters.invalid_packets.one();
            return Ok(());
        }
        let op = Op::from_raw(header.op);
        if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM || !self.streams {
            self.counters.invalid_packets.one();
            self.refuse(header, op);
            return Ok(());
        }
        let id = self.by_ports.get(&header.ports()).copied();
        match (op, id) {
            (Some(Op::Request), None) => self.on_request(header),
            (Some(Op::Data), Some(id)) => {
                self.counters.tx_bytes.add(u64::from(header.len));
                let Some(connection) = self.connections.get_mut(&id) else {
                    return Ok(());
                };
                let outcome = if connection.take_credit(header) {
                    connection.on_data(mem, chain, offset, header.len, &mut self.scratch)?
                } else {
                    Outcome::Reset
                };
                if outcome == Outcome::Reset {
                    self.counters.protocol_errors.one();
                }
                self.apply_outcome(id, outcome);
            }
            (Some(op), Some(id)) => {
                if op == Op::Reset {
                    self.counters.resets_received.one();
                }
                if let Some(connection) = self.connections.get_mut(&id) {
                    let outcome = connection.on_control(op, header);
                    if outcome == Outcome::Reset && op != Op::Shutdown {
                        self.counters.protocol_errors.one();
                    }
                    self.apply_outcome(id, outcome);
                }
            }
            (op, None) => self.refuse(header, op),
            (None, Some(id)) => {
                self.counters.protocol_errors.one();
                self.apply_outcome(id, Outcome::Reset);
            }
        }
        Ok(())
    }

    fn refuse(&mut self, header: &Header, op: Option<Op>) {
        if op != Some(Op::Reset) {
            self.resets.push_back(Header::reset_for(header));
        }
    }

    /// Handles a request: a program in the guest connects to a port of the host.
    fn on_request(&mut self, header: &Header) {
        let connected = if self.has_room() {
            self.connect_host(header)
        } else {
            Err(Errno::MFILE.into())
        };
        if let Err(error) = connected {
            self.counters.refused.one();
            tracing::debug!(port = header.dst_port, %error, "vsock: no such listener");
            self.refuse(header, Some(Op::Request));
        }
    }

    fn connect_host(&mut self, header: &Header) -> io::Result<()> {
        let port = header.dst_port;
        let (socket, ours) = if self.listeners.contains_key(&port) {
            let (socket, ours) = UnixStream::pair()?;
            (socket.into(), Some(ours))
        } else {
            (self.host.connect(port)?, None)
        };
        let id = self.new_id();
        self.watch(id, socket.as_fd())?;
        let mut connection = Connection::from_guest(socket, header.ports(), self.buffer_size());
        if !connection.take_credit(header) {
            self.counters.protocol_errors.one();
            return Err(Errno::PROTO.into());
        }
        self.counters.from_guest.one();
        self.insert(id, connection);
        if let (Some(stream), Some(listener)) = (ours, self.listeners.get_mut(&port)) {
            (listener.0)(stream);
        }
        Ok(())
    }
}
