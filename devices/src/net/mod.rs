//! The network device (§5.1): Ethernet frames between the driver's queues and a [`Nic`].
//!
//! # How data enters and leaves
//!
//! A frame that the driver sends is a chain: a header of 12 bytes, which is copied and checked
//! (`header`), and the frame itself, which goes to the backend from guest memory directly, with one
//! vectored write. A frame that arrives is read straight into the driver's buffers, over several
//! chains if necessary (`MRG_RXBUF`); the header is written last, with their number. Offloads pass
//! through: work that the driver leaves to the device (checksums, segmentation) is left to the
//! backend, and the backend leaves to the driver the work that the driver accepted.
//!
//! A device has one pair of queues or several (`MQ`), each with its own queue of the backend.
//!
//! # Modules
//!
//! * `nic`: the trait of backends; `tap`: a tap; `stream`: a stream socket, for networks in user
//!   space; `segments`: how frames in guest memory are passed to the kernel; `memory`: a backend
//!   for tests.
//! * `feature`: the features that are offered and negotiated.
//! * `filter`: which frames the driver wants, by their destination.
//! * `header`: the header before each frame and its rules.
//! * `control`: commands of the control queue; `config`: configuration space; `counters`:
//!   statistics.
//! * `receive`, `transmit`: one direction of a queue pair each; `pair`: a pair, and how queues are
//!   numbered; `vhost`: a pair that the kernel serves, if `device/kernel` says so; `host`: the
//!   backend's queues, and which pair receives the frames of each.
//! * `events`: the events that wake up the device; `saved`: its state in a snapshot; `device`: the
//!   device itself, which ties them together.
//!
//! # What it must not know
//!
//! Names of interfaces, namespaces, addresses of the network layer: its owner opens the tap or
//! connects the socket.

mod config;
mod control;
mod counters;
mod device;
mod error;
mod events;
mod feature;
mod filter;
mod header;
mod host;
mod mac;
#[cfg(any(test, feature = "test-utils"))]
mod memory;
mod nic;
mod offloads;
mod pair;
mod receive;
mod saved;
mod segments;
mod stream;
mod tap;
mod transmit;
mod vhost;

pub use config::{LinkState, MIN_MTU};
pub use device::NetDevice;
pub use error::NetDeviceError;
pub use filter::{Multicast, ReceiveFilter};
pub use header::{HEADER_LEN, MAX_FRAME};
pub use mac::{MacAddress, ParseMacAddressError};
#[cfg(any(test, feature = "test-utils"))]
pub use memory::{MemoryNic, MemoryWire};
pub use nic::Nic;
pub use offloads::Offloads;
pub use pair::MAX_QUEUE_PAIRS;
pub use stream::{FrameStream, StreamError};
pub use tap::{Tap, TapError};
pub use vhost::VhostError;
