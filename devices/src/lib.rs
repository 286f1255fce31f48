//! The devices of a podvisor guest: a virtio core, the virtio devices on it, and the two
//! legacy devices a microVM still needs; and a minimal PCI bus.
//!
//! # How data enters and leaves
//!
//! A vCPU's MMIO or port exit becomes a `read` or `write` on a transport
//! ([`virtio::transport`]) or on a [`legacy`] device. A notification of the driver arrives as an
//! eventfd, on which the owner calls [`virtio::VirtioDevice::on_queue`]; work for the host side (a
//! socket, a file completion) as readiness of [`virtio::VirtioDevice::backend`]. Interrupts leave
//! through [`virtio::Interrupt`].
//!
//! # What this crate must not know
//!
//! KVM, vCPUs, address spaces and event loops: nothing here opens `/dev/kvm`, so that every
//! device runs, is tested and is fuzzed inside an ordinary process, with guest memory that is
//! an ordinary mapping.
//!
//! # The guest is hostile
//!
//! Whatever a driver writes into rings, descriptors, buffers and registers, the answer is a
//! [`virtio::Fault`] and `DEVICE_NEEDS_RESET`, never a panic, an endless loop or an access
//! outside guest memory.
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects
    )
)]

pub mod balloon;
pub mod blk;
pub mod console;
mod descriptors;
pub mod fs;
pub mod legacy;
pub mod mem;
pub mod net;
pub mod pci;
pub mod pmem;
mod restore;
pub mod rng;
pub mod virtio;
pub mod vsock;
mod write_log;

#[cfg(test)]
mod allocations;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod logged;
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;

pub use write_log::WriteLog;

/// Crates whose types appear in this crate's traits: implement a disk, a NIC or a device with
/// these re-exports to get the matching versions.
pub use {vm_memory, vmm_sys_util};

/// Guest memory as every device sees it: one or more anonymous or file-backed mappings.
///
/// One alias for the whole workspace, so that dirty tracking can be added in one place.
pub type GuestRam = vm_memory::GuestMemoryMmap<()>;
