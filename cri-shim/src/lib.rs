//! Pods and programs in virtual machines: the library of the binary `podvisor`.
//!
//! * `cri`: the Container Runtime Interface, for a kubelet.
//! * [`streaming`]: exec, attach and port-forward over HTTP, by SPDY or WebSocket.
//! * the command line: [`main`].
//! * `launch`: a machine that starts while its network is set up, for both.
//!
//! Below this crate are others of their own, none of which knows the Container Runtime Interface or
//! the command line: [`sandbox`] (a pod's process, its machine and what is in its guest),
//! `podvisor-network` (CNI and taps) and `podvisor-host` (threads, time limits, removal). Nothing
//! here uses KVM directly: that is `podvisor-vmm`'s job.

mod boot;
mod cli;
mod connection_limiter;
mod cri;
mod guest_devices;
mod kept_kernels;
mod launch;
mod path_authority;
mod registries;
pub mod streaming;

#[cfg(test)]
use podvisor_host::small_disk;
use podvisor_host::{blocking, removal, request, signal, stall_timeout, turns};
use podvisor_network::cni;
use podvisor_sandbox::bind;

pub use cli::main;
pub use podvisor_sandbox as sandbox;
pub use podvisor_sandbox::machine;
