//! Processes of containers: their users and streams.

use std::os::fd::OwnedFd;

use oci_spec::runtime::Process;
use serde::{Deserialize, Serialize};

/// The user of a container's process, as the guest resolved it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerUser {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// All supplementary group ids, including the process's own group.
    pub groups: Vec<u32>,
}

/// Which supplementary groups a process gets in addition to those of its specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum SupplementalGroups {
    /// Those of the image's `/etc/group` that list the user, unless `user` names a group.
    #[default]
    Default,
    /// Those of the image's `/etc/group` that list the user, whether or not `user` names a group.
    Merge,
    /// None.
    Strict,
}

/// An additional process in a running container.
#[derive(Debug)]
pub struct Exec {
    /// Names the process within its container; as long as a container's id at most.
    pub exec_id: String,
    /// The process to run.
    pub process: Process,
    /// `user[:group]` as names or numbers of the image; empty: as `process` says.
    pub user: String,
    /// Which of the image's groups the process gets.
    pub supplemental_groups: SupplementalGroups,
    /// The process gets a terminal of this size.
    pub tty: Option<TerminalSize>,
    /// The files of its streams. With a terminal, stderr is not used.
    pub stdio: StdioFds,
}

/// Files for a process's standard streams; missing ones are `/dev/null`.
#[derive(Debug, Default)]
pub struct StdioFds {
    /// Read for the process's stdin.
    pub stdin: Option<OwnedFd>,
    /// Gets the process's stdout, or all output of its terminal.
    pub stdout: Option<OwnedFd>,
    /// Gets the process's stderr.
    pub stderr: Option<OwnedFd>,
}

/// Size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}
