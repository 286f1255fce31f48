//! The states of a container.

use serde::{Deserialize, Serialize};

use super::health::Health;

/// The start of a container's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// The process in the guest's PID namespace.
    pub pid: u32,
    /// Nanoseconds since 1970-01-01 UTC by the guest's clock.
    pub started_at_ns: u64,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessExit {
    /// Its exit code, 0 to 255; 128 and the signal's number for one that a signal killed.
    pub code: i32,
    /// Nanoseconds since 1970-01-01 UTC by the guest's clock.
    pub exited_at_ns: u64,
    /// Whether the kernel's OOM killer killed a process in its container.
    pub oom_killed: bool,
    /// It ended with its machine, whose own exit says why.
    #[serde(default)]
    pub of_machine: bool,
}

/// The state of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ContainerState {
    /// Its process waits for the start.
    Created,
    /// Its process runs.
    Running,
    /// Its process has ended and will be restarted.
    Restarting,
    /// Its process has ended permanently.
    Exited,
    /// Another one, which only a newer podvisor knows.
    #[serde(other)]
    Unknown,
}

/// A container of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerInfo {
    /// Its id.
    pub id: String,
    /// Its state.
    pub state: ContainerState,
    /// Its process in the guest's PID namespace.
    pub pid: u32,
    /// Nanoseconds since 1970-01-01 UTC; 0: not started.
    pub started_at_ns: u64,
    /// How its process ended, if it has; after a restart, how it ended last.
    pub exit: Option<ProcessExit>,
    /// How often its process was restarted.
    #[serde(default)]
    pub restarts: u32,
    /// Its start was requested, and the guest has not answered yet: it may run at any time.
    #[serde(default)]
    pub is_starting: bool,
    /// What its exit code does not say about its end.
    #[serde(default)]
    pub message: Option<String>,
    /// It waited for a machine from elsewhere, which never came: nothing of it has run here.
    #[serde(default)]
    pub never_came: bool,
    /// Its health, if it is checked.
    #[serde(default)]
    pub health: Option<Health>,
}
