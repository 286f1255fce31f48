//! A DHCP server for one virtual machine.
//!
//! [`Server`] is a pure function: an Ethernet frame of the guest goes in, the frame that answers it
//! comes out. It knows its guest's MAC address and leases by [`Config`] and answers nobody else.
//! It speaks DHCP (RFC 2131), DHCPv6 (RFC 8415), router advertisements for solicitations
//! (RFC 4861), and ARP for its own address. All that a guest sends is hostile: it is bounded in
//! size and rate, and what does not follow the protocol gets no answer.
//!
//! [`open_socket`] gives a packet socket of a tap that receives only frames for the server, and
//! [`serve`] answers on it. After `open_socket` nothing but reading and writing that descriptor is
//! needed, so that the server can run in a jail.
//!
//! This crate must not know pods, networks' plugins or virtual machines.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects
    )
)]

mod arp;
mod config;
mod frame;
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
mod limit;
mod names;
mod read;
mod refusal;
mod router;
mod serve;
mod server;
mod socket;
mod v4;
mod v6;

pub use config::{
    Config, ConfigError, InvalidConfig, Ipv4Lease, Ipv4Neighbour, Ipv4Option, Ipv4Route,
    Ipv6Address, Ipv6Lease, Ipv6Router, MacAddress, SERVER_ADDRESS,
};
pub use names::{is_label as is_host_name, is_name as is_domain_name};
pub use refusal::Refusal;
pub use serve::serve;
pub use server::{Counters, Frame, Server};
pub use socket::{SocketError, open_socket};
