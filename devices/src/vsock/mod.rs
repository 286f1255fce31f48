//! The socket device (§5.10): packets of the driver on one side, Unix sockets of the host on
//! the other.
//!
//! * `packet.rs` is the header of every packet.
//! * `credit.rs` tracks how much either side may still send (§5.10.6.3).
//! * `connection.rs` is one stream: its socket, its phase, the packets that it has to send to the
//!   guest; `outlet.rs` is what the guest has sent to the socket.
//! * `handshake.rs` reads the line in which a host program names the guest's port.
//! * `host.rs` is the interface of the host's side: [`VsockHost`].
//! * `listener.rs` is a host's side with paths: the socket that host programs connect to.
//! * `mux.rs` owns all sockets of the host, registered in one epoll instance, and decides which
//!   connection sends to the guest next.
//! * `device.rs` owns the three queues and carries packets between them and the multiplexer.
//!
//! # How ports map to sockets
//!
//! A host program connects to the Unix socket PATH, sends `CONNECT <port>\n` and gets
//! `OK <host port>\n` once the guest has accepted; then both sides see a byte stream. A program
//! in the guest that connects to CID 2, port P reaches the host program that listens on the Unix
//! socket `PATH_P`. This is the convention of Firecracker, which other tools support too. A
//! shutdown of either direction (`shutdown(2)`) is passed on.
//!
//! The process that runs the VM needs no path: [`VsockDevice::connect`] and
//! [`VsockDevice::listen`]. For another kind of host side, implement [`VsockHost`].
//!
//! The device supports only streams: neither datagrams nor `SOCK_SEQPACKET`. It does not connect
//! guests with each other.

mod connection;
mod credit;
mod device;
mod error;
mod handshake;
mod host;
mod listener;
mod mux;
mod outlet;
mod packet;

pub use device::VsockDevice;
pub use error::VsockError;
pub use host::VsockHost;

/// The host's context identifier (§5.10.4).
pub const HOST_CID: u64 = 2;
/// The lowest context identifier that a guest may have.
pub const MIN_GUEST_CID: u64 = 3;
/// The highest context identifier that a guest may have; the one above means "any".
pub const MAX_GUEST_CID: u64 = 0xffff_fffe;

/// Maximum bytes of the path: those of a Unix socket's path (107) without those that `_PORT` may
/// take (11).
const MAX_PATH: usize = 107 - 11;
