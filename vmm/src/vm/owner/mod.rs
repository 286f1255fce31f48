//! What the owner of a VM does with it while it lives, besides what `lifecycle` has: each file has
//! a part of [`Vm`](crate::vm::Vm).
//!
//! * `devices.rs` finds devices; `plug.rs` adds and removes them.
//! * `add_vcpus.rs` adds vCPUs.
//! * `power_button.rs` presses the power button.
//! * `memory.rs` and `serial.rs` access guest memory and the serial port.

mod add_vcpus;
mod devices;
mod memory;
mod plug;
mod power_button;
mod serial;

pub use add_vcpus::AddVcpusError;
pub use devices::DeviceCounters;
pub use plug::{PlugError, PluggedDevice};
pub use power_button::PowerButtonError;
