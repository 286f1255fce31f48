//! Pods and programs in virtual machines: what the binary `podvisor` is made of.
//!
//! * [`machine`]: one virtual machine and what is plugged into it. No containers, no agent.
//! * [`sandbox`]: a machine whose guest runs podvisor's agent: containers, their streams and
//!   logs; the process `podvisor sandbox` that is one pod, and [`sandbox::SandboxClient`], the
//!   way to it.
//! * `cni`: networks of pods by CNI's plugins.
//! * `cri`: the Container Runtime Interface, for a kubelet.
//! * [`streaming`]: exec, attach and port-forward over HTTP, by SPDY or WebSocket.
//! * the command line, which [`main`] is.
//!
//! The sandbox knows nothing of the command line, and nothing here touches KVM: that is
//! `podvisor-vmm`'s.

mod bind;
mod blocking;
mod cli;
mod cni;
mod cri;
pub mod machine;
mod patience;
mod removal;
mod request;
pub mod sandbox;
mod signal;
#[cfg(test)]
mod small_disk;
mod strangers;
pub mod streaming;
mod tap;
mod turns;

pub use cli::main;
