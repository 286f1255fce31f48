//! An in-process virtual machine monitor for Linux guests on KVM.

mod boot;
mod cpuid;
mod kvm;
mod layout;
mod memory;
mod vm;

pub use boot::{BootError, Initramfs, InitramfsBuilder, Kernel, KernelFault};
pub use kvm::KvmError;
pub use memory::{MemoryError, MemorySize, ParseMemorySizeError};
pub use podvisor_devices::blk::{BlockDevice, BlockDeviceError};
pub use vm::{
    Action, BuildError, ConfigError, ConfigErrors, DeviceCounters, DeviceFault, Exit, Poison,
    PoisonCause, Registers, State, Vm, VmBuilder, VmError,
};
