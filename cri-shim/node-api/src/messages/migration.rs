//! The messages of live migrations.

use bytes::Bytes;
use prost::{Enumeration, Message, Oneof};

use super::VmName;

/// A VM's latest migration, as its own node sees it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct VmMigration {
    /// Unique id of the migration.
    #[prost(string, tag = "1")]
    pub migration: String,
    /// Whether the VM leaves this node or comes to it.
    #[prost(enumeration = "MigrationDirection", tag = "2")]
    pub direction: i32,
    /// How far it is.
    #[prost(enumeration = "MigrationState", tag = "3")]
    pub state: i32,
    /// For people: why it is in that state, where that is not its normal course.
    #[prost(string, tag = "4")]
    pub reason: String,
    /// Bytes of memory and local disks.
    #[prost(uint64, tag = "5")]
    pub bytes_total: u64,
    /// Bytes that are still to be sent, as of the end of the last round; known where it is sent.
    #[prost(uint64, tag = "6")]
    pub bytes_left: u64,
    /// The current round; the first one is 0.
    #[prost(uint32, tag = "7")]
    pub round: u32,
    /// For how long the guest stood still, in nanoseconds; known where it came from, at the end.
    #[prost(uint64, tag = "8")]
    pub downtime_ns: u64,
    /// When it began, in nanoseconds since 1970: for one that comes, when it began to wait.
    #[prost(int64, tag = "9")]
    pub started_at_ns: i64,
    /// When it ended, in nanoseconds since 1970; 0 before.
    #[prost(int64, tag = "10")]
    pub ended_at_ns: i64,
}

/// Which way a VM moves, as seen by one of the two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum MigrationDirection {
    /// The node is newer than its client.
    Unknown = 0,
    /// It leaves this node.
    Out = 1,
    /// It comes to this node.
    In = 2,
}

/// How far a migration is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum MigrationState {
    /// The node is newer than its client.
    Unknown = 0,
    /// In: nothing has arrived yet.
    Waiting = 1,
    /// Out: the guest runs, and its memory is sent.
    Sending = 2,
    /// In: memory arrives.
    Receiving = 3,
    /// The guest stands still, and the rest is sent. It may be cancelled until it is given away,
    /// and the source then knows only when the other side says that it runs.
    HandingOver = 4,
    /// Out: the VM was given away, and the other side said nothing more. It is paused until
    /// `ResolveMigration`.
    InDoubt = 5,
    /// The VM runs where it went to.
    Done = 6,
    /// The VM stays where it was, or has ended there.
    Failed = 7,
    /// The same, on request.
    Cancelled = 8,
}

impl MigrationState {
    /// Whether nothing more happens.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }
}

/// What a client sends of a VM that comes to the node.
#[derive(Clone, PartialEq, Message)]
pub struct ReceiveMigrationInput {
    /// The first message opens it; the others are bytes of the other side. The end of the stream
    /// is the end of the connection.
    #[prost(oneof = "ReceiveMigrationMessage", tags = "1, 2")]
    pub message: Option<ReceiveMigrationMessage>,
}

/// What a client sends of a VM that comes to the node.
#[derive(Clone, PartialEq, Eq, Oneof)]
pub enum ReceiveMigrationMessage {
    /// Which VM, and which migration it has to wait for.
    #[prost(message, tag = "1")]
    Open(ReceiveMigrationOpen),
    /// Bytes of the other side.
    #[prost(bytes, tag = "2")]
    Data(Bytes),
}

/// Begins to receive a VM.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ReceiveMigrationOpen {
    /// Which.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// Unique id of the migration, that of the pod's annotation `podvisor.io/migration`.
    #[prost(string, tag = "2")]
    pub migration: String,
}

/// What a client sends of a VM that leaves the node.
#[derive(Clone, PartialEq, Message)]
pub struct SendMigrationInput {
    /// The first message opens it; the others are bytes of the other side. The end of the stream
    /// is the end of the connection.
    #[prost(oneof = "SendMigrationMessage", tags = "1, 2")]
    pub message: Option<SendMigrationMessage>,
}

/// What a client sends of a VM that leaves the node.
#[derive(Clone, PartialEq, Eq, Oneof)]
pub enum SendMigrationMessage {
    /// Which VM, and how.
    #[prost(message, tag = "1")]
    Open(SendMigrationOpen),
    /// Bytes of the other side.
    #[prost(bytes, tag = "2")]
    Data(Bytes),
}

/// Begins to send a VM. Of numbers, 0 means the node's own.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct SendMigrationOpen {
    /// Which.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// Unique id of the migration.
    #[prost(string, tag = "2")]
    pub migration: String,
    /// For how many milliseconds the guest may stand still.
    #[prost(uint32, tag = "3")]
    pub downtime_ms: u32,
    /// After how many rounds it fails, or is forced.
    #[prost(uint32, tag = "4")]
    pub max_rounds: u32,
    /// Whether the guest stands still for as long as it takes after the last round.
    #[prost(bool, tag = "5")]
    pub force: bool,
    /// Most bytes per second while the guest runs; 0 for no limit.
    #[prost(uint64, tag = "6")]
    pub bandwidth_bytes_per_second: u64,
    /// After how many seconds without any byte sent it fails.
    #[prost(uint32, tag = "7")]
    pub progress_timeout_s: u32,
    /// After how many seconds it fails in any case, unless it was given away; 0 for no limit.
    #[prost(uint32, tag = "8")]
    pub completion_timeout_s: u32,
    /// Whether the guest is slowed down if it writes faster than its memory is sent.
    #[prost(bool, tag = "9")]
    pub auto_converge: bool,
}

/// Ends a migration.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CancelMigrationRequest {
    /// Whose.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// Unique id of the migration.
    #[prost(string, tag = "2")]
    pub migration: String,
}

/// Says what becomes of a VM whose migration is `InDoubt`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ResolveMigrationRequest {
    /// Which.
    #[prost(message, optional, tag = "1")]
    pub vm: Option<VmName>,
    /// Unique id of the migration.
    #[prost(string, tag = "2")]
    pub migration: String,
    /// Whether it goes on here; else it ends, since it runs at the other side.
    #[prost(bool, tag = "3")]
    pub run: bool,
}
