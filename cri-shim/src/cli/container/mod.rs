//! Containers without a daemon: each is a sandbox with its own process, `podvisor sandbox`, which
//! any command finds by its directory in the state.
//!
//! `record` is the stored description of a container, `containers` all of a root, `claim` the lock
//! on changing it, `state` its current state, `volumes`, `network`, `passt` and `ports` its
//! resources on the host, `clear` the removal of all that, `events` what is recorded of what
//! happens to them, `filter` flags of several commands; the other files are commands. Every
//! command first cleans up after commands that were killed.

pub(super) mod attach;
pub(super) mod claim;
pub(super) mod clear;
pub(super) mod console;
mod containers;
pub(super) mod copy;
pub(super) mod debug;
pub(super) mod events;
pub(super) mod exec;
mod filter;
pub(super) mod foreground;
mod host_memory;
pub(super) mod inspect;
pub(super) mod lifecycle;
pub(super) mod logs;
mod merge;
pub(super) mod metrics;
pub(super) mod network;
mod network_mode;
mod passt;
pub(super) mod port;
pub(super) mod ports;
pub(super) mod ps;
mod record;
mod restart;
pub(super) mod show_events;
pub(super) mod state;
pub(super) mod stats;
mod tar_rename;
pub(super) mod volumes;

pub(super) use clear::{Sweep, sweep};
pub(super) use containers::Containers;
pub(super) use network::{Attached, NetworkArgs};
pub(super) use network_mode::NetworkMode;
#[cfg(test)]
pub(super) use record::sample as sample_record;
pub(super) use record::{AttachedDisk, Entry, Record, VmRecord, Volume};
pub(super) use restart::RestartArg;
pub(super) use state::State;
pub(super) use volumes::parse as parse_volume;
