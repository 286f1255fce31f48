//! A machine whose guest has an operating system of its own, saved in files.

use std::fs::File;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

/// Where a machine is saved, in files that are empty and open for reading and writing. Its memory
/// and its devices are saved always, its disks if there are files for them.
#[derive(Debug)]
pub struct SaveMachine {
    /// The state of vCPUs and devices. It counts as a saved machine from the moment when all is
    /// written ([`Snapshot::is_finished`](crate::machine::Snapshot::is_finished)).
    pub state: File,
    /// The memory.
    pub memory: File,
    /// For each disk that the guest may write, in their order, the file for a copy of its own file;
    /// or none, and no disk is copied. Those that were plugged in follow the others.
    pub disks: Vec<OwnedFd>,
    /// The serial numbers of the disks that were plugged in, in the order in which they were:
    /// whoever continues the machine gives the same ones. A machine with others is not saved.
    pub plugged: Vec<String>,
    /// What becomes of the machine.
    pub then: AfterSave,
}

/// What becomes of a machine that is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum AfterSave {
    /// It goes on, or stays paused if it was.
    GoOn,
    /// It ends as if it had been powered off, and is to be continued from the files.
    End,
}
