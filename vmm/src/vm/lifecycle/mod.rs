//! The life of a VM: its handle, its threads, its snapshots and dumps, and its way to another host.
//!
//! * `vm.rs` is the handle, and how a VM is paused, resumed and ended.
//! * `start.rs` starts threads and waits for their end.
//! * `save.rs` gathers a paused VM's state for a snapshot.
//! * `dump.rs` writes a paused VM's memory and registers for debuggers.
//! * `migrate.rs` moves a running VM to another host, `throttle.rs` slows it down for that.

mod dump;
mod migrate;
mod save;
pub(crate) mod start;
mod throttle;
mod vm;

pub use dump::{DumpError, DumpProgress};
pub use migrate::MigrateError;
pub use save::TakeSnapshotError;
pub(crate) use vm::StartParts;
pub use vm::{Vm, VmError};
