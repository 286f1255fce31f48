//! Live migration: a running VM moves to another process, or another host.
//!
//! * `stream.rs` is what both sides say: messages with a kind, a length and an address.
//! * `send.rs` sends pages of memory, within a bandwidth.
//! * `disks.rs` moves disks that the two hosts do not share.
//! * `incoming.rs` is the side that the VM moves to ([`IncomingMigration`]); `ahead.rs` is what it
//!   makes of the VM while the guest still runs; `error.rs` says why it does not arrive.
//!
//! The side that it moves from is part of a VM's lifecycle: `vm/lifecycle/migrate.rs`. Machine
//! state travels as a snapshot's state file, and memory's log of writes is the
//! [memory](crate::memory) module's.
//!
//! A stream is untrusted input, as a snapshot is: whoever can write one controls what the guest
//! does, but nothing in it makes this process panic, hang, or access what is not the guest's.

mod ahead;
mod disks;
mod error;
mod incoming;
mod send;
mod stream;
#[cfg(any(test, feature = "test-utils"))]
#[allow(unreachable_pub)] // reached with the feature alone
pub mod testing;

use std::time::Duration;

pub(crate) use ahead::VmAhead;
pub use disks::{MovingDisk, PluggedIdentity};
pub(crate) use disks::{RunningLog, SECTOR, SourceDisk, encode as encode_disks, encode_plugged};
pub use error::ReceiveError;
pub use incoming::{ArrivedMigration, IncomingMigration, MigrationLimits};
pub(crate) use send::{SendEnd, Sender, Zeroes};
pub use stream::StreamError;
pub(crate) use stream::{MessageKind, Stream};

/// What a migration may cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationOptions {
    /// For how long the guest may stand still, from the pause here until it runs there. 300 ms by
    /// default. It is an aim: what is left at the pause is estimated from the bandwidth so far.
    pub downtime: Duration,
    /// The number of rounds after which the migration is given up, because the guest writes faster
    /// than its memory is sent. 30 by default.
    pub max_rounds: u32,
    /// In the last of these rounds, stop the guest for as long as it takes instead of giving up.
    /// Off by default.
    pub force: bool,
    /// Bytes per second that are sent at most while the guest runs; `None` for no limit.
    pub bandwidth: Option<u64>,
    /// Slow the vCPUs down, more with each round, while the guest writes faster than its memory is
    /// sent. Off by default.
    pub throttle: bool,
    /// Disks whose contents move, too. None by default.
    pub disks: Vec<MovingDisk>,
    /// What was plugged in since the VM was built: the other side hears what each of them is. None
    /// by default.
    pub plugged: Vec<PluggedIdentity>,
}

impl Default for MigrationOptions {
    fn default() -> Self {
        Self {
            downtime: Duration::from_millis(300),
            max_rounds: 30,
            force: false,
            bandwidth: None,
            throttle: false,
            disks: Vec::new(),
            plugged: Vec::new(),
        }
    }
}

/// What the side that a VM leaves does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MigrationStep {
    /// The guest runs, and its memory is sent.
    Sending,
    /// The guest stands still, and the rest is about to be sent: what the owner has to make durable
    /// for the other side is made so now.
    HandingOver,
    /// The other side has built the VM, and it is about to be given away. It cannot be cancelled
    /// after this.
    GivingAway,
}

/// How far a migration has got: told some times per second, at the end of each round, and at each
/// step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MigrationProgress {
    /// What is done now.
    pub step: MigrationStep,
    /// The round, from 0 on: all of the memory, then what was written since.
    pub round: u32,
    /// Bytes of memory and disks that were sent so far, in all rounds.
    pub sent: u64,
    /// Bytes of memory and disks that are left, as far as is known.
    pub left: u64,
    /// For how much of the time the vCPUs stand still, in percent.
    pub throttle: u8,
}

/// What a migration cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MigrationReport {
    /// For how long the guest stood still.
    pub downtime: Duration,
    /// From the first byte to the other side's word that the guest runs there.
    pub total: Duration,
    /// Rounds in which memory was sent, the last one with the guest paused.
    pub rounds: u32,
    /// Bytes of memory that were sent.
    pub sent: u64,
}
