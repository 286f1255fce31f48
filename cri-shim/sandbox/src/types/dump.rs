//! A dump of a machine's memory, and how far it is.

use std::fs::File;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How the memory of a machine is dumped.
#[derive(Debug)]
pub struct DumpMachine {
    /// The name of the dump, by which it is told from others: at most
    /// [`MAX_NAME`](Self::MAX_NAME) bytes.
    pub name: String,
    /// An empty file that is open for reading and writing.
    pub file: File,
    /// How long the guest may stand still.
    pub limit: Duration,
}

impl DumpMachine {
    /// Most bytes of a name.
    pub const MAX_NAME: usize = 255;

    /// The longest limit.
    pub const LONGEST: Duration = Duration::from_secs(3600);
}

/// How far a dump is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DumpState {
    /// The guest stands still, and its memory is written.
    Writing,
    /// The file is whole, and on the disk.
    Done,
    /// There is nothing in the file.
    Failed,
    /// Another one, which only a newer podvisor knows.
    #[serde(other)]
    Unknown,
}

/// What a sandbox's process says of the latest dump of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DumpInfo {
    /// The name that it was given.
    pub name: String,
    /// How far it is.
    pub state: DumpState,
    /// Why it failed.
    pub reason: String,
    /// Bytes of memory that were passed.
    pub done: u64,
    /// Bytes of all memory; 0 before it is known.
    pub total: u64,
}
