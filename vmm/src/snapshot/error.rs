//! Why a snapshot is not written, or not used.

use std::io;
use std::path::PathBuf;

use podvisor_devices::virtio::RestoreError;

use super::cpu::CpuMismatch;
use super::format::FormatError;
use crate::kvm::KvmError;
use crate::memory::MemoryError;
use crate::vm::{HandleError, VmError};

/// Why a snapshot could not be written, or a VM not be restored from it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The VM is not paused, or has ended.
    #[error(transparent)]
    State(#[from] VmError),
    /// Snapshots never replace anything.
    #[error("{} already exists", path.display())]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// The directory could not be written. Nothing is left of it.
    #[error("failed to write the snapshot {}", path.display())]
    Write {
        /// The directory.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A file could not be read.
    #[error("failed to read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// The state file is damaged, or of another version.
    #[error("{} cannot be used", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: FormatError,
    },
    /// A difference whose full snapshot is another one by now.
    #[error("{} is not the base snapshot of this differential snapshot", path.display())]
    OtherBase {
        /// The full snapshot's directory.
        path: PathBuf,
    },
    /// A difference is asked for of a VM that did not come from a snapshot.
    #[error("a differential snapshot needs a VM that was restored from a snapshot")]
    NoBase,
    /// Memory could not be written, mapped or read.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// KVM refused.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The processor lacks what the guest may use.
    #[error("the guest cannot be resumed on this CPU: {0}")]
    Cpu(CpuMismatch),
    /// What the guest was told of its processor is nothing that KVM tells a guest.
    #[error("KVM on this host rejects the snapshot's CPUID leaves")]
    Cpuid(#[source] KvmError),
    /// Its time stamp counter would run at another speed.
    #[error("the guest's TSC runs at {saved} kHz, this host's at {here} kHz, and KVM cannot scale")]
    TscFrequency {
        /// In the snapshot.
        saved: u32,
        /// Of this host.
        here: u32,
    },
    /// An MSR of the guest's.
    #[error("KVM on this host rejects the value {value:#x} for MSR {number:#x}")]
    Msr {
        /// The MSR.
        number: u32,
        /// Its value in the snapshot.
        value: u64,
    },
    /// The builder's devices are not those of the snapshot.
    #[error(
        "the snapshot has the devices [{}], in this order; the builder has [{}]",
        saved.join(", "),
        given.join(", ")
    )]
    Devices {
        /// Their names in the snapshot.
        saved: Vec<String>,
        /// The names of those that were added.
        given: Vec<String>,
    },
    /// A device does not take its state.
    #[error("{device} cannot be restored")]
    Device {
        /// Its name.
        device: String,
        /// Why.
        #[source]
        source: RestoreError,
    },
    /// A device did not answer.
    #[error(transparent)]
    Busy(#[from] HandleError),
}
