//! Processes of containers: their users and streams.

use std::os::fd::OwnedFd;

use oci_spec::runtime::Process;
use serde::{Deserialize, Serialize};

/// Who a container's process is, as the guest resolved it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerUser {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// All supplementary group ids, the group's own among them.
    pub groups: Vec<u32>,
}

/// Which supplementary groups a process gets beside those of its specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum SupplementalGroups {
    /// Those of the image's `/etc/group` that list the user, unless `user` names a group.
    #[default]
    Default,
    /// Those of the image's `/etc/group` that list the user, in any case.
    Merge,
    /// None.
    Strict,
}

/// A further process in a running container.
#[derive(Debug)]
pub struct Exec {
    /// Names the process within its container; as long as a container's id may be.
    pub exec_id: String,
    /// What to run.
    pub process: Process,
    /// `user[:group]` as names or numbers of the image; empty: as `process` says.
    pub user: String,
    /// Which of the image's groups the process gets.
    pub supplemental_groups: SupplementalGroups,
    /// The process gets a terminal of this size.
    pub tty: Option<TerminalSize>,
    /// Where its streams come from and go to. With a terminal, stderr is not used.
    pub stdio: StdioFds,
}

/// Files for a process's standard streams; what is missing is `/dev/null`.
#[derive(Debug, Default)]
pub struct StdioFds {
    /// Read for the process's stdin.
    pub stdin: Option<OwnedFd>,
    /// Written with the process's stdout, or all that its terminal shows.
    pub stdout: Option<OwnedFd>,
    /// Written with the process's stderr.
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
