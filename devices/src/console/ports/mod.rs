//! Named ports over one virtio console device (§5.3, `VIRTIO_CONSOLE_F_MULTIPORT`): byte streams
//! between programs of the host and programs in the guest, such as QEMU's guest agent, which finds
//! its port by the name `org.qemu.guest_agent.0`.
//!
//! * `device.rs` serves the queues: two for each port, and two on which device and driver agree which
//!   ports there are and who has them open (`control.rs`).
//! * `port.rs` is one port: the host's end is a Unix socket, which may come and go.
//!
//! Port 0 is every driver's console and is not announced: names begin with port 1. What a driver
//! sends while nobody is connected is lost, and counted. What the host's end does not take at once
//! waits here, as one transmission at most, and the driver's others in its ring. What the host sends
//! waits in the socket until a program in the guest has the port open.

mod control;
mod counters;
mod device;
mod port;

pub use device::{MAX_PORTS, PortsDevice, PortsError};
