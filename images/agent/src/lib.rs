//! The guest side of podvisor: PID 1, which mounts images and runs containers.
//!
//! The host's requests come in over vsock ([`server`]), are checked and translated by
//! [`service`], and carried out: by [`guest`] for what all containers share (the [`network`]
//! among it), by [`container`], which starts processes through [`launcher`] and joins their
//! streams to the host's by [`stdio`], and by [`forward`]. [`init`] is what a
//! PID 1 owes its kernel: mounts, reaping, power-off.
//!
//! Everything runs on one thread. The only other processes are the containers' and, for
//! the moment of creating one, the launcher: this same binary, executed anew, because
//! `libcontainer` forks and forking is only safe where there is nothing else.
//!
//! The agent knows nothing of pods, images' manifests or networks beyond the guest.

pub mod container;
pub mod forward;
pub mod guest;
pub mod init;
pub mod launcher;
mod log;
pub mod network;
pub mod seccomp;
pub mod server;
pub mod service;
pub mod stdio;
mod sys;
mod uevent;
