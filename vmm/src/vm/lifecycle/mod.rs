//! The life of a VM: its states, its threads, its end, and its snapshots.
//!
//! * `state.rs` is the transition table; `control.rs` is what threads agree on.
//! * `start.rs` starts threads and waits for their end; `threads.rs` is how they are created, and
//!   `seccomp.rs` what they may do.
//! * `exit.rs` says why a VM ended.
//! * `save.rs` gathers a paused VM's state for a snapshot, `restore.rs` sets it in a new VM.
//! * `migrate.rs` moves a running VM to another host, `throttle.rs` slows it down for that.

pub(crate) mod control;
mod exit;
mod migrate;
pub(crate) mod restore;
mod save;
mod seccomp;
pub(crate) mod start;
mod state;
pub(crate) mod threads;
mod throttle;

pub use exit::{Poison, PoisonCause, Registers, VmExit};
pub use migrate::MigrateError;
pub use save::TakeSnapshotError;
pub use seccomp::Seccomp;
pub use state::{Action, State};
