//! The threads that serve devices.
//!
//! * [`EventLoop`] owns workers and waits, in one place, for notifications from their drivers, for
//!   the host side of devices and for commands.
//! * `mailbox.rs` carries commands to a loop: those of transports, of handles, and of the VM. A
//!   [`Link`] sends those for one device.
//! * [`Loops`] is all loops of a VM, as their owner sees them; `reserve.rs` adds and removes
//!   devices while they run.
//! * [`DeviceFault`] is what the owner learns of a device that failed.
//!
//! A device is placed on the loop that its VM's devices share or on its own ([`Placement`]). Only
//! the loop's thread calls a device, and no thread waits for one without a limit. Queues that a
//! device serves by separate threads ([`NamedQueue`]) are started and stopped by its loop like
//! others.

mod event_loop;
mod faults;
mod loops;
mod mailbox;
mod reserve;

pub(crate) use event_loop::{EventLoop, Link};
pub use faults::DeviceFault;
pub(crate) use faults::Faults;
pub(crate) use loops::{Loops, LoopsBuilder, NamedQueue, Service};
pub(crate) use reserve::{own_loop, remove};
