//! The pod's network, by the Container Network Interface.
//!
//! Configuration lists come from a directory (`config`); `chain` runs their plugins, one at a
//! time for each pod, even after the process that ran them was killed (`input`), and stores their
//! results on the disk (`cache`); `netns` is the network namespace that they work in. The result is
//! an [`Attachment`]: for each interface that the plugins created, a tap joined to it (`join`) or
//! connected with it by translation (`masquerade`), and the addresses, routes and static
//! neighbours for the guest's own card, as the kernel has them (`links`). Plugins and their output
//! are not trusted: they are limited in time and size, and results are checked (`result`) before
//! they are used. `networks` does all this for the pods of a node.
//!
//! `status` asks the node's plugins whether they are ready for pods, if they support it. The caller
//! chooses the network: the node's, another one of the directory by its name, or podvisor's own
//! ([`nat`]). `dhcp` prepares the servers of guests that ask for their addresses by themselves.
//! `guest` converts all this for a sandbox, and [`resolver`] writes files of `/etc`. Nothing here
//! depends on the Container Runtime Interface or the command line.

mod cache;
mod card;
mod chain;
mod config;
mod counters;
mod dhcp;
mod error;
mod guest;
mod input;
mod join;
mod links;
mod masquerade;
pub mod nat;
mod netns;
mod networks;
mod options;
mod plugin;
mod pod;
mod prefix;
pub mod resolver;
mod result;
mod status;

#[cfg(test)]
mod tests;

pub use card::{CardForm, ForwardedPorts, PortProtocol};
pub use config::List;
pub use counters::{Direction, InterfaceCounters};
pub use dhcp::{DhcpServer, GuestNames};
pub use error::CniError;
pub use join::Attachment;
pub use networks::{Cni, Prepared, find};
pub use options::{CniOptions, PLUGIN_DIRS, PUBLIC_NETNS_DIR};
pub use pod::{Capabilities, INTERFACE, PodIdentity, PortMapping, port_mappings};
pub use podvisor_dhcp::Ipv4Option;
pub use prefix::Prefix;
pub use result::{Dns, Endpoint};
