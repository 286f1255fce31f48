//! Why there is no machine, or why it did not do what it was asked.

use std::io;

use podvisor_vmm::{
    AddVcpusError, BlockDeviceError, BootError, BuildError, FsDeviceError, HandleError,
    NetDeviceError, PlugError, SnapshotError, VsockError,
};

use super::UserRange;

/// Why there is no machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// The kernel or the initramfs.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The file of a disk.
    #[error("failed to find the size of the disk {serial:?}")]
    Disk {
        /// The disk's serial number.
        serial: String,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A file that is no disk.
    #[error(transparent)]
    NotADisk(#[from] BlockDeviceError),
    /// A network card's tap.
    #[error(transparent)]
    Net(#[from] NetDeviceError),
    /// Users of a shared directory that no guest can have.
    #[error(
        "invalid user mapping of {} ids starting at {}: give at least one id, between 1 and 4294967293",
        .0.count, .0.first
    )]
    Users(UserRange),
    /// The shared directory.
    #[error(transparent)]
    Share(#[from] FsDeviceError),
    /// A device of the machine does not answer.
    #[error(transparent)]
    Device(#[from] HandleError),
    /// A spare disk got no medium, or a device was not plugged in or out.
    #[error(transparent)]
    Insert(#[from] PlugError),
    /// Nothing can be plugged in.
    #[error("devices cannot be plugged into a machine without a PCI bus")]
    NotPci,
    /// All places for devices are taken.
    #[error("the machine has no free PCI slot; stop containers that use devices")]
    Full,
    /// There are no more vCPUs.
    #[error(transparent)]
    AddCpus(#[from] AddVcpusError),
    /// The host's end of vsock.
    #[error(transparent)]
    Vsock(#[from] VsockError),
    /// The configuration is wrong, or KVM refused.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// It did not start.
    #[error(transparent)]
    Start(#[from] podvisor_vmm::VmError),
    /// A snapshot was not taken.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A spare disk that the machine has not.
    #[error("the machine has no spare disk {0}")]
    NoSpareDisk(usize),
    /// The machine was made without a serial console.
    #[error("the machine was made without a serial console")]
    NoConsole,
    /// The serial console's output cannot go there.
    #[error("the file for the serial console's output cannot be used")]
    ConsoleFile(#[source] io::Error),
    /// Somebody cannot be connected to the console.
    #[error("failed to connect to the console")]
    Console(#[source] io::Error),
    /// The host gives no thread.
    #[error("failed to start a thread that waits for the machine")]
    Thread(#[source] io::Error),
}

/// An error with its causes.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        // Some libraries repeat their cause in their own text.
        if !text.ends_with(&said) {
            text = format!("{text}: {said}");
        }
        next = cause.source();
    }
    text
}
