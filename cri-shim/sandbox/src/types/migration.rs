//! Live migration of a machine to a sandbox of another host, and its states.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Which way a machine moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MigrationDirection {
    /// It leaves this sandbox.
    Out,
    /// It comes to this sandbox.
    In,
    /// Another one, which only a newer podvisor knows.
    #[serde(other)]
    Unknown,
}

/// How far a migration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MigrationState {
    /// Nothing has arrived yet.
    Waiting,
    /// The guest runs, and its memory is sent.
    Sending,
    /// Memory arrives.
    Receiving,
    /// The guest stands still, and the rest is sent.
    HandingOver,
    /// It was given away, and the other side said nothing more. It is paused until somebody who
    /// has asked the other side decides.
    InDoubt,
    /// The machine runs where it went to.
    Done,
    /// The machine stays where it was, or has ended there.
    Failed,
    /// The same, on request.
    Cancelled,
    /// Another one, which only a newer podvisor knows.
    #[serde(other)]
    Unknown,
}

impl MigrationState {
    /// Whether nothing more happens.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }
}

/// What a sandbox's process says of the latest migration of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationInfo {
    /// Increases with each change.
    pub version: u64,
    /// The id of the migration.
    pub migration: String,
    /// Which way the machine moves.
    pub direction: MigrationDirection,
    /// How far it is.
    pub state: MigrationState,
    /// Why it is in that state, where that is not its normal course.
    pub reason: String,
    /// Bytes of memory and local disks.
    pub bytes_total: u64,
    /// Bytes that are still to be sent, as far as is known; of a machine that leaves.
    pub bytes_left: u64,
    /// The current round.
    pub round: u32,
    /// For how long the guest stood still; of a machine that has left.
    pub downtime_ns: u64,
    /// When it began, in nanoseconds since 1970.
    pub started_at_ns: u64,
    /// When it ended, in nanoseconds since 1970; 0 before.
    pub ended_at_ns: u64,
}

/// How a machine is sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SendMachine {
    /// The id of the migration, at most [`MAX_ID`](Self::MAX_ID) printable characters of ASCII.
    pub migration: String,
    /// For how long the guest may stand still.
    pub downtime: Duration,
    /// After how many rounds it fails, or is forced.
    pub max_rounds: u32,
    /// The guest stands still for as long as it takes after the last round.
    pub force: bool,
    /// The guest is slowed down if it writes faster than its memory is sent.
    pub throttle: bool,
    /// Most bytes per second while the guest runs.
    pub bandwidth: Option<u64>,
    /// It fails when no byte was sent for so long.
    pub progress_timeout: Duration,
    /// It fails after this time in any case, unless it was given away.
    pub completion_timeout: Option<Duration>,
}

impl SendMachine {
    /// Most characters of a migration's id.
    pub const MAX_ID: usize = 128;

    /// Describes a migration with the defaults: 300 ms of downtime, 30 rounds, 150 s without
    /// progress.
    pub fn new(migration: impl Into<String>) -> Self {
        Self {
            migration: migration.into(),
            downtime: Duration::from_millis(300),
            max_rounds: 30,
            force: false,
            throttle: false,
            bandwidth: None,
            progress_timeout: Duration::from_secs(150),
            completion_timeout: None,
        }
    }

    /// Whether a text can be the id of a migration.
    #[must_use]
    pub fn is_id(text: &str) -> bool {
        let len = 1..=Self::MAX_ID;
        len.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
    }
}

impl Default for SendMachine {
    fn default() -> Self {
        Self::new(String::new())
    }
}

/// A machine that is not booted: it comes from another sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingMachine {
    /// The id of the migration that is waited for.
    pub migration: String,
    /// How long it is waited for.
    pub limit: Duration,
}

impl IncomingMachine {
    /// A limit that is long enough for a cluster to find both nodes ready.
    pub const LIMIT: Duration = Duration::from_secs(300);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migrations_id_is_short_and_can_be_shown() {
        for id in ["7c0e", "5d307ca9-b3ef-428c-8861-06e72d69f223"] {
            assert!(SendMachine::is_id(id), "{id}");
        }
        for id in ["", "a b", "a\n", "é", &"x".repeat(129)] {
            assert!(!SendMachine::is_id(id), "{id}");
        }
    }

    #[test]
    fn states_that_a_newer_process_knows_are_read() {
        let state: MigrationState = serde_json::from_str("\"Teleporting\"").unwrap();
        assert_eq!(state, MigrationState::Unknown);
        assert!(!state.is_final() && !MigrationState::InDoubt.is_final());
    }
}
