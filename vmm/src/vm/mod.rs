//! A virtual machine: its configuration, its threads and its lifecycle.
//!
//! [`Vm`] is the handle: every call takes `&self`, from any thread. From the top to the bottom, a
//! room imports only those below it:
//!
//! * `builder` validates a configuration and creates everything ([`VmBuilder`]).
//! * `owner` is what the owner of a VM does with it while it lives: its devices, its vCPUs, its
//!   power button, its memory.
//! * `lifecycle` is the handle itself: start, pause, end, snapshots, dumps, migration.
//! * `vcpu`: one thread per vCPU runs guest code and handles its exits on the bus.
//! * `devices` attaches devices to a transport, and has the owner's handles of them
//!   ([`DeviceHandle`]).
//! * `hardware` is what devices are attached to: bus, interrupt lines, PCI, and the event loops
//!   that serve devices.
//! * `control.rs` is what all threads agree on, by the transition table of `state.rs`, and `exit.rs`
//!   says why a VM ended. vCPUs synchronize through it; loops take commands.
//! * `threads.rs` is how threads are created, and `seccomp.rs` what they may do.
//! * `error.rs` says why a VM cannot be built.
//!
//! Nothing here waits without a limit for a guest, a device or a disk.
//!
//! A VM must not know pods, containers or images, and a library must not print, exit, install
//! signal handlers, or panic at what a guest does.

mod builder;
mod control;
mod devices;
mod error;
mod exit;
mod hardware;
mod lifecycle;
mod lock;
mod owner;
mod seccomp;
mod state;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod threads;
mod vcpu;

pub use builder::{Boot, EarlyVm, Restore, RestoreBuilder, VmBuilder};
pub use devices::{
    BalloonHandle, BlockHandle, ConsoleHandle, DeviceHandle, FsHandle, HandleError, MemHandle,
    NetHandle, PmemHandle, PortsHandle, VsockHandle,
};
pub use error::{BuildError, ConfigError, ConfigErrors};
pub use exit::{Poison, PoisonCause, Registers, VmExit};
pub use hardware::events::UnplugRequest;
pub use hardware::io::DeviceFault;
pub use lifecycle::{DumpError, DumpProgress, MigrateError, TakeSnapshotError, Vm, VmError};
pub use owner::{AddVcpusError, DeviceCounters, PlugError, PluggedDevice, PowerButtonError};
pub use seccomp::Seccomp;
pub use state::{Action, State};

pub(crate) use threads::SignalsBlocked;
pub(crate) use vcpu::kick::{KICK, Pending, take_pending};
