//! The guest side of podvisor: PID 1, which mounts images and runs containers.
//!
//! The host's requests come in over vsock ([`server`]), are checked and translated by [`service`],
//! and carried out: by [`guest`] for what all containers share (including the [`network`]), by
//! [`container`], which starts processes through [`launcher`] and connects their streams to the
//! host's with [`stdio`], and by [`forward`]. [`init`] does the duties of PID 1: mounts,
//! reaping ([`reaper`]), [`power`]-off.
//!
//! Everything runs on one thread. The only other processes are the containers' and, while one is
//! being created, the launcher: this same binary, executed again, because `libcontainer` forks and
//! forking is only safe in a single-threaded process.
//!
//! The agent knows nothing about pods, images' manifests or networks beyond the guest.

mod causes;
pub mod cgroup;
pub mod container;
pub mod forward;
pub mod guest;
pub mod init;
pub mod launcher;
mod log;
pub mod network;
pub mod owner;
pub mod power;
pub mod reaper;
pub mod seccomp;
pub mod server;
pub mod service;
pub mod stdio;
mod sys;
mod uevent;
