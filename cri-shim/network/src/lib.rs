//! The networks of podvisor's pods, from the host's side.
//!
//! | module | subject |
//! | --- | --- |
//! | [`cni`] | a pod's network by CNI plugins: namespaces, plugins, their results, traffic counters |
//! | [`tap`] | the host's ends of a guest's cards |
//! | [`guest`] | what a machine and its guest are told of the network |
//!
//! A pod comes in by its id and the node's configuration, and leaves as the cards and the
//! [`guest::GuestNetwork`] that a machine is started with. Nothing here starts a machine, or knows
//! how one is made: whoever starts it does so while the plugins run.

pub mod cni;
pub mod guest;
pub mod tap;
