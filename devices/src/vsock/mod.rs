//! The socket device (§5.10): packets of the driver on one side, Unix sockets of the host on
//! the other.
//!
//! * `packet.rs` is the header that every packet starts with.
//! * `credit.rs` counts what either side may still send (§5.10.6.3).
//! * `connection.rs` is one stream: its socket, its phase, what it owes the guest.
//! * `handshake.rs` reads the line by which a host program names the guest's port.
//! * `host.rs` says what the host's side is: [`VsockHost`].
//! * `listener.rs` is the host's side by paths: the socket that host programs connect to.
//! * `mux.rs` owns all sockets of the host behind one epoll instance and decides which
//!   connection speaks to the guest next.
//! * `device.rs` owns the three queues and carries packets between them and the multiplexer.
//!
//! # Which socket leads where
//!
//! A host program connects to the Unix socket PATH, sends `CONNECT <port>\n` and gets
//! `OK <host port>\n` once the guest has accepted; then both sides see a byte stream. A program
//! in the guest that connects to CID 2, port P reaches whoever listens on the Unix socket
//! `PATH_P`. It is the convention of Firecracker, which its tools know too. The end of either
//! direction (`shutdown(2)`) is carried over.
//!
//! Within the process that has the VM no path is needed: [`VsockDevice::connect`] and
//! [`VsockDevice::listen`]. A host side of another kind implements [`VsockHost`].
//!
//! The device knows streams only: neither datagrams nor `SOCK_SEQPACKET`, nor other guests.

mod connection;
mod credit;
mod device;
mod error;
mod handshake;
mod host;
mod listener;
mod mux;
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

/// Bytes of a Unix socket's path (107) without those that `_PORT` may take (11).
const MAX_PATH: usize = 107 - 11;
