//! Why a VM does not arrive.

use std::error::Error;
use std::time::Duration;

use super::stream::StreamError;
use crate::kvm::KvmError;
use crate::memory::{MemoryError, MemorySize};
use crate::snapshot::{SnapshotError, SnapshotFormatError};

/// Why a VM did not arrive: it goes on where it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// The connection failed, or the other side broke the rules or gave up.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The machine's state is damaged, or of another version.
    #[error("the state of the migrated VM cannot be used")]
    State(#[source] SnapshotFormatError),
    /// The machine needs more memory than it may have here.
    #[error("the migrated VM has {wanted} of memory, and may have {most} here")]
    Memory {
        /// Its memory, with what may be plugged in.
        wanted: MemorySize,
        /// The limit.
        most: MemorySize,
    },
    /// The machine cannot run on this host.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// KVM failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// Memory could not be allocated or written.
    #[error(transparent)]
    Allocate(#[from] MemoryError),
    /// Pages that the machine does not have.
    #[error(
        "the migration has {len} bytes at the guest's address {address:#x}, which are no pages"
    )]
    NoPages {
        /// Guest physical address.
        address: u64,
        /// Their length.
        len: u64,
    },
    /// The list of disks is damaged.
    #[error("the list of the migrated VM's disks is damaged")]
    DiskList,
    /// What was plugged in is no device of the machine, or is listed twice.
    #[error("the migrated VM has no device {device:?} that was plugged in, or has it twice")]
    Plugged {
        /// The device's name.
        device: String,
    },
    /// Not every disk has a place here.
    #[error("{announced} disks of the migrated VM come with it, and {here} are expected here")]
    Disks {
        /// How many come.
        announced: usize,
        /// How many are expected.
        here: usize,
    },
    /// A disk has another length.
    #[error("the disk {device} of the migrated VM has {theirs} bytes, and {ours} here")]
    DiskLen {
        /// The device's name.
        device: String,
        /// Its length there.
        theirs: u64,
        /// Its length here.
        ours: u64,
    },
    /// Bytes that a disk does not have.
    #[error(
        "the migration has {len} bytes at the offset {offset:#x} of a disk that has none there"
    )]
    NoBlocks {
        /// The offset.
        offset: u64,
        /// Their length.
        len: u64,
    },
    /// A disk cannot be written.
    #[error("failed to write a disk of the migrated VM")]
    DiskWrite(#[source] std::io::Error),
    /// The paused machine is another one than was announced.
    #[error("the migrated VM has other {what} than were announced")]
    Changed {
        /// What differs.
        what: &'static str,
    },
    /// It takes too long.
    #[error("the migration took longer than {limit:?}")]
    Time {
        /// The limit.
        limit: Duration,
    },
    /// The machine was given to this side, and could not be started. The other side was told to go
    /// on with it.
    #[error("the migrated VM could not be started")]
    Start(#[source] Box<dyn Error + Send + Sync>),
}
