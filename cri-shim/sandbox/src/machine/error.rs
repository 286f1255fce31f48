//! Errors of a virtual machine.

use std::io;

use podvisor_vmm::{
    AddVcpusError, BlockDeviceError, BootError, BuildError, DumpError, FsDeviceError, HandleError,
    KvmError, NetDeviceError, PlugError, PortsError, PowerButtonError, SnapshotError,
    TakeSnapshotError, VsockError,
};

use super::user_range::UserRange;

/// An error of a virtual machine: it was not built, or could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// The kernel or the initramfs is unfit.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The size of a disk's file is unknown.
    #[error("failed to find the size of the disk {serial:?}")]
    Disk {
        /// The disk's serial number.
        serial: String,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A file is not a disk.
    #[error(transparent)]
    NotADisk(#[from] BlockDeviceError),
    /// A network card's tap is unfit.
    #[error(transparent)]
    Net(#[from] NetDeviceError),
    /// Users of a shared directory that no guest can have.
    #[error(
        "invalid user mapping of {} ids starting at {}: give at least one id, between 1 and \
         4294967293",
        .0.count, .0.first
    )]
    Users(UserRange),
    /// The shared directory is unfit.
    #[error(transparent)]
    Share(#[from] FsDeviceError),
    /// A directory for the guest is not where it should be, or is something else.
    #[error("failed to open the shared directory with the tag {tag:?}")]
    OpenShare {
        /// Its tag.
        tag: String,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// Directories cannot be shared.
    #[error("failed to open /proc/self/fd, which sharing directories takes: mount /proc")]
    ShareProcess(#[source] io::Error),
    /// A device of the machine does not answer.
    #[error(transparent)]
    Device(#[from] HandleError),
    /// A medium was not inserted into a spare disk, or a device was not plugged or unplugged.
    #[error(transparent)]
    Insert(#[from] PlugError),
    /// Devices cannot be plugged in.
    #[error("devices cannot be plugged into a machine without a PCI bus")]
    NotPci,
    /// All slots for devices are in use.
    #[error("the machine has no free PCI slot; stop containers that use devices, or unplug disks")]
    Full,
    /// KVM is not usable.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A descriptor cannot be duplicated.
    #[error("failed to duplicate a file of the machine")]
    Duplicate(#[source] io::Error),
    /// The serial port has no descriptors or threads.
    #[error("failed to set up the serial port")]
    SerialPort(#[source] io::Error),
    /// The power button is not there, or nobody is there who could notice it.
    #[error(transparent)]
    PowerButton(#[from] PowerButtonError),
    /// vCPUs were not added.
    #[error(transparent)]
    AddCpus(#[from] AddVcpusError),
    /// The port for an agent in the guest cannot be had.
    #[error(transparent)]
    Ports(#[from] PortsError),
    /// The host's end of vsock failed.
    #[error(transparent)]
    Vsock(#[from] VsockError),
    /// The configuration is invalid, or KVM refused it.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The machine did not start, or is not in the state that a call needs.
    #[error(transparent)]
    Start(#[from] podvisor_vmm::VmError),
    /// A snapshot cannot be used.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A snapshot of the machine was not taken.
    #[error(transparent)]
    TakeSnapshot(#[from] TakeSnapshotError),
    /// The machine's memory was not dumped.
    #[error(transparent)]
    Dump(#[from] DumpError),
    /// The saved machine has another shape.
    #[error("the saved machine has {saved}, and {wanted} were asked for: give it as many")]
    OtherShape {
        /// What the files say.
        saved: String,
        /// What was asked for.
        wanted: String,
    },
    /// The state of a machine that goes on only once cannot be emptied.
    #[error("failed to empty the state of the saved machine, which must not be continued twice")]
    Spend(#[source] io::Error),
    /// The machine has no such spare disk.
    #[error("the machine has no spare disk {0}")]
    NoSpareDisk(usize),
    /// The machine was built without a serial console.
    #[error("the machine was made without a serial console")]
    NoConsole,
    /// The file for the serial console's output is unfit.
    #[error("the file for the serial console's output cannot be used")]
    ConsoleFile(#[source] io::Error),
    /// A client cannot be connected to the console.
    #[error("failed to connect to the console")]
    Console(#[source] io::Error),
    /// The machine has no disk with this serial number.
    #[error("the machine has no disk with the serial number {0:?}")]
    NoDisk(String),
    /// A disk did not grow.
    #[error("failed to grow the disk {serial:?}")]
    Grow {
        /// The disk's serial number.
        serial: String,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A disk was not made ready for another host.
    #[error("failed to make the disk {serial:?} ready for another host")]
    Sync {
        /// The disk's serial number.
        serial: String,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// No thread can be started.
    #[error("failed to start a thread that waits for the machine")]
    Thread(#[source] io::Error),
}

/// Formats an error with its causes.
pub fn causes(error: &dyn std::error::Error) -> String {
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
