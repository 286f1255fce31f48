//! Why a VM could not be built.

use std::fmt;
use std::io;

use podvisor_devices::blk::BlockDeviceError;

use crate::boot::BootError;
use crate::kvm::KvmError;
use crate::memory::{MemoryError, MemorySize};
use crate::snapshot::SnapshotError;
use crate::transport::Transport;

/// One thing that is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// [`VmBuilder::kernel`](crate::vm::VmBuilder::kernel) was not called.
    #[error("there is no kernel: add `.kernel(Kernel::open(path)?)`")]
    NoKernel,
    /// A firmware takes all it boots from disks.
    #[error("a firmware and a {what}: a firmware boots from disks alone, leave out one of them")]
    FirmwareAndKernel {
        /// What was given besides the firmware.
        what: &'static str,
    },
    /// Firmware finds devices on PCI.
    #[error("a firmware needs devices on PCI: add `.transport(Transport::Pci)`")]
    FirmwareTransport,
    /// Outside the range that the host's KVM supports.
    #[error("{vcpus} vCPUs: this host takes 1 to {max}")]
    Vcpus {
        /// The requested number.
        vcpus: u8,
        /// The host's limit.
        max: u8,
    },
    /// Fewer than the VM starts with, or more than the host's KVM supports.
    #[error("at most {max_vcpus} vCPUs: it must be {vcpus} to {max}")]
    MaxVcpus {
        /// The requested number.
        max_vcpus: u8,
        /// Those that the VM starts with.
        vcpus: u8,
        /// The host's limit.
        max: u8,
    },
    /// Too little for a kernel to unpack itself in, or not a multiple of the page size.
    #[error(
        "{size} of memory: at least {} and a multiple of 4 KiB is needed",
        MemorySize::MIN
    )]
    Memory {
        /// The requested size.
        size: MemorySize,
    },
    /// Not a multiple of Linux's memory block size.
    #[error("{size} of memory to plug in: it must be a multiple of 128 MiB")]
    HotplugMemory {
        /// The requested size.
        size: MemorySize,
    },
    /// More than the host has, or than the control group of this process allows.
    #[error("{size} of memory: this process may have {host} in all")]
    MoreMemoryThanHost {
        /// The requested size.
        size: MemorySize,
        /// What is available.
        host: MemorySize,
    },
    /// More than the guest's processor can address.
    #[error(
        "memory and images up to {end:#x}: the guest's physical addresses have {bits} bits; use \
        less memory, less memory to plug in, or fewer images"
    )]
    AddressSpace {
        /// The end of the last one.
        end: u64,
        /// The number of bits of a physical address.
        bits: u32,
    },
    /// The transport has no room for them.
    #[error("{count} virtio devices: at most {} fit on {transport:?}", .transport.max_devices())]
    TooManyDevices {
        /// How many were added.
        count: usize,
        /// The transport.
        transport: Transport,
    },
    /// The guest in the snapshot has no serial port.
    #[error("the VM in the snapshot has no serial port: leave out `.serial(…)`")]
    NoSerial,
    /// A string of the SMBIOS tables that they cannot hold.
    #[error("the {field} of the SMBIOS tables: {why}")]
    Smbios {
        /// Which one.
        field: &'static str,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A disk cannot do what it claims.
    #[error("invalid disk")]
    Disk(#[source] BlockDeviceError),
    /// The region of a memory device is laid out with the guest's memory.
    #[error("a virtio-mem device cannot be added: call `.hotplug_memory(…)` instead")]
    MemoryDevice,
    /// An id that a device cannot have.
    #[error("a device cannot have the id {id:?}: {why}")]
    DeviceId {
        /// The id.
        id: String,
        /// What is wrong with it, and what would be right.
        why: &'static str,
    },
    /// A guest has one context identifier.
    #[error("{count} socket devices: a guest accepts one, leave out the others")]
    SocketDevices {
        /// How many were added.
        count: usize,
    },
    /// The command line, without the parameters that the builder adds, cannot be passed to the
    /// kernel.
    #[error("invalid command line")]
    Cmdline(#[source] BootError),
}

/// Everything that is wrong with a configuration.
#[derive(Debug)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { "; " };
            let error: &dyn std::error::Error = match error {
                ConfigError::Disk(disk) => disk,
                ConfigError::Cmdline(cmdline) => cmdline,
                other => other,
            };
            write!(f, "{separator}{error}")?;
            // The list has no single source, so the causes of each are included here.
            let mut cause = error.source();
            while let Some(error) = cause {
                write!(f, ": {error}")?;
                cause = error.source();
            }
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

/// Why a VM could not be built. Nothing remains of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(ConfigErrors),
    /// KVM failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// Guest memory could not be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel or initramfs could not be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The snapshot cannot be restored.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// Two devices claim the same addresses.
    #[error("failed to lay out the guest's physical address space")]
    Addresses(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// All device numbers of the PCI bus are taken.
    #[error("there is no free slot on the PCI bus")]
    NoPciSlot,
    /// An eventfd or epoll instance could not be created.
    #[error("failed to create {what}")]
    Descriptor {
        /// What it is for.
        what: &'static str,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
}
