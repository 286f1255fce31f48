//! Why a snapshot could not be written or used.

use std::io;
use std::path::PathBuf;

use podvisor_devices::virtio::RestoreError;

use super::cpu::CpuMismatch;
use super::format::SnapshotFormatError;
use crate::kvm::KvmError;
use crate::memory::MemoryError;

/// Why a snapshot could not be written, or a VM could not be restored from it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// Snapshots never replace anything.
    #[error("{} already exists", path.display())]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// The directory could not be written. Nothing of it remains.
    #[error("failed to write the snapshot {}", path.display())]
    Write {
        /// The directory.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// The state file would be longer than any that can be opened. Nothing of it remains.
    #[error(
        "failed to write the snapshot {}: its state takes {len} bytes, of at most {most}; \
        if it is a differential snapshot, write a full one",
        path.display()
    )]
    StateTooLong {
        /// The directory.
        path: PathBuf,
        /// The length of the state file.
        len: u64,
        /// The maximum length.
        most: u64,
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
        source: SnapshotFormatError,
    },
    /// The full snapshot of a difference has been replaced.
    #[error("{} is not the base snapshot of this differential snapshot", path.display())]
    OtherBase {
        /// The full snapshot's directory.
        path: PathBuf,
    },
    /// A difference was requested of a VM that did not come from a snapshot.
    #[error("a differential snapshot needs a VM that was restored from a snapshot")]
    NoBase,
    /// A second VM was to be made of a VM that has moved here.
    #[error("the migrated VM was restored already, and there is one of it only")]
    Moved,
    /// Memory could not be written, mapped or read.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// KVM failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The processor lacks features that the guest may use.
    #[error("the guest cannot be resumed on this CPU: {0}")]
    Cpu(CpuMismatch),
    /// KVM rejects the guest's CPUID.
    #[error("KVM on this host rejects the snapshot's CPUID leaves")]
    Cpuid(#[source] KvmError),
    /// Its time stamp counter would run at another speed.
    #[error("the guest's TSC runs at {saved} kHz, this host's at {here} kHz, and KVM cannot scale")]
    TscFrequency {
        /// In the snapshot.
        saved: u32,
        /// On this host.
        here: u32,
    },
    /// KVM rejects the value of an MSR of the guest.
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
        /// The names of the builder's devices.
        given: Vec<String>,
    },
    /// A device rejects its state.
    #[error("{device} cannot be restored")]
    Device {
        /// Its name.
        device: String,
        /// Why.
        #[source]
        source: RestoreError,
    },
}

impl SnapshotError {
    /// Returns what makes it of the error of a device that does not take its saved state.
    pub(crate) fn of_device(name: &str) -> impl FnOnce(RestoreError) -> Self {
        let device = name.to_owned();
        move |source| Self::Device { device, source }
    }
}
