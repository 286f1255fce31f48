//! Pods and programs in virtual machines: the library of the binary `podvisor`.
//!
//! * [`machine`]: one virtual machine and what is plugged into it. No containers, no agent.
//! * [`sandbox`]: a machine whose guest runs podvisor's agent: containers, their streams and logs;
//!   the process `podvisor sandbox`, which is one pod, and [`sandbox::SandboxClient`], its client.
//! * `cni`: pods' networks by CNI plugins.
//! * `cri`: the Container Runtime Interface, for a kubelet.
//! * [`streaming`]: exec, attach and port-forward over HTTP, by SPDY or WebSocket.
//! * the command line: [`main`].
//!
//! The sandbox does not depend on the command line, and nothing here uses KVM directly: that is
//! `podvisor-vmm`'s job.

mod bind;
mod blocking;
mod cli;
mod cni;
mod connection_limiter;
mod cri;
mod guest_devices;
pub mod machine;
mod registries;
mod removal;
mod request;
pub mod sandbox;
mod signal;
#[cfg(test)]
mod small_disk;
mod stall_timeout;
pub mod streaming;
mod tap;
mod turns;

pub use cli::main;
