//! Errors of a sandbox. They state facts; advice for the user is left to the command line.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use podvisor_agent_protocol::InvalidId;

use super::agent::LinkError;
use super::cgroup::IoLimitError;
use super::jail::JailError;
use super::spec::SpecError;
use super::stdio::StdioError;
use super::types::{JailLayer, RefusalKind, SandboxExit};
use super::wire::FrameError;
use crate::boot_timeout::BOOT_TIMEOUT_VARIABLE;
use crate::machine::{AssetError, KernelPanic, MachineError, MachineExit, causes};

/// An error of a sandbox: it was not started, it is gone, or it refused a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SandboxError {
    /// The virtual machine failed.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The agent failed, or the connection to it.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The jail of the sandbox's process was not set up.
    #[error("failed to set up the sandbox's jail")]
    Jail(#[from] JailError),
    /// The process would lack a layer of its confinement that it must have.
    #[error("the sandbox would have no {layer}, which is required: {}", .layer.remedy())]
    MissingLayer {
        /// The layer.
        layer: JailLayer,
    },
    /// The clone of a template ended or did not answer.
    #[error(transparent)]
    Clone(Box<SandboxError>),
    /// A process's standard streams failed.
    #[error(transparent)]
    Stdio(#[from] StdioError),
    /// The guest's agent did not answer in time.
    #[error(
        "the guest's agent did not answer within {} s; to give it more time on a busy host, set \
         {BOOT_TIMEOUT_VARIABLE}=SECONDS for podvisor (for `podvisor serve`: in its unit)",
        .0.as_secs()
    )]
    Silent(Duration),
    /// The agent reported that it cannot work.
    #[error("the guest's agent failed to start")]
    GaveUp,
    /// The guest ended unexpectedly.
    #[error("{}", ended(.0))]
    Ended(MachineExit),
    /// The guest's files are missing.
    #[error(transparent)]
    Assets(#[from] AssetError),
    /// The requested container cannot be specified.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The id in a [`LaunchConfig`](super::LaunchConfig) is not a valid id of a sandbox.
    #[error("cannot launch the sandbox")]
    Id(#[source] InvalidId),
    /// The directory in a [`LaunchConfig`](super::LaunchConfig) cannot hold sockets.
    #[error(
        "cannot launch the sandbox: {} is not an absolute path of at most {most} bytes",
        .dir.display()
    )]
    Dir {
        /// The directory.
        dir: PathBuf,
        /// Longest path, in bytes.
        most: usize,
    },
    /// A [`LaunchConfig`](super::LaunchConfig) has more network cards than can be passed on.
    #[error("cannot launch the sandbox: {count} network cards, but at most {most} are possible")]
    TooManyNics {
        /// The number of cards.
        count: usize,
        /// The largest possible number.
        most: usize,
    },
    /// A file that the sandbox's process needs cannot be opened or created.
    #[error("cannot {action} {}", .path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// The I/O of the sandbox's process cannot be limited as wanted.
    #[error(transparent)]
    IoLimit(#[from] IoLimitError),
    /// The process cannot be started.
    #[error("cannot start the sandbox's process {}", .program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// The process ended before its guest was up.
    #[error("the sandbox's process failed while starting: {0}")]
    Launch(String),
    /// The guest's kernel panicked before the guest was up.
    #[error("the sandbox's process failed while starting: the guest ended by a kernel panic: {0}")]
    Panicked(KernelPanic),
    /// The process ended before its guest was up: the host does not let it enter its jail.
    #[error("the sandbox's process failed while starting: {0}")]
    JailRefused(String),
    /// The control socket carried an invalid message.
    #[error("invalid message on the control socket of the sandbox in {}", .dir.display())]
    Control {
        /// The sandbox's directory.
        dir: PathBuf,
        /// What was wrong with it.
        #[source]
        source: FrameError,
    },
    /// The other side speaks another version of the control protocol.
    #[error("the sandbox in {} speaks version {theirs} of the control protocol, not {ours}", .dir.display())]
    Version {
        /// The sandbox's directory.
        dir: PathBuf,
        /// The version that the process speaks.
        theirs: u32,
        /// The version that is spoken here.
        ours: u32,
    },
    /// The sandbox's process exists but does not answer: it is stopped, or hangs.
    #[error("the sandbox in {} does not answer: {} said nothing for {} s", .dir.display(), process(*.pid), .waited.as_secs())]
    Unresponsive {
        /// Its directory.
        dir: PathBuf,
        /// The process, if it could be found.
        pid: Option<u32>,
        /// How long an answer was waited for.
        waited: Duration,
    },
    /// The sandbox's process is gone; only its directory is left.
    #[error("the sandbox in {} is gone{}", .dir.display(), why(.exit.as_ref()))]
    Gone {
        /// Its directory.
        dir: PathBuf,
        /// How it ended, if that is known.
        exit: Option<SandboxExit>,
    },
    /// The guest has an operating system of its own, and the request needs an agent in it.
    #[error(
        "cannot {request}: the guest has an operating system of its own, without podvisor's agent\
         {}", .advice
    )]
    NoAgent {
        /// What was requested.
        request: &'static str,
        /// What to do instead, after its separator; may be empty.
        advice: &'static str,
    },
    /// The sandbox refused a request.
    #[error("{message}")]
    Refused {
        /// The reason, for programs.
        kind: RefusalKind,
        /// The reason, for people.
        message: String,
    },
}

fn ended(exit: &MachineExit) -> String {
    match exit {
        MachineExit::Failed(why) => why.clone(),
        exit => format!("the guest {exit}"),
    }
}

fn process(pid: Option<u32>) -> String {
    pid.map_or_else(|| "its process".to_owned(), |pid| format!("process {pid}"))
}

fn why(exit: Option<&SandboxExit>) -> String {
    exit.map_or_else(String::new, |exit| format!(": {exit}"))
}

impl From<MachineExit> for SandboxError {
    fn from(exit: MachineExit) -> Self {
        Self::Ended(exit)
    }
}

impl SandboxError {
    /// The machine is not in the state that a request needs.
    pub(crate) fn wrong_state(error: MachineError) -> Self {
        Self::refused(RefusalKind::WrongState, causes(&error))
    }

    /// Why the sandbox refused, if it did.
    #[must_use]
    pub fn kind(&self) -> Option<RefusalKind> {
        match self {
            Self::Refused { kind, .. } => Some(*kind),
            Self::NoAgent { .. } => Some(RefusalKind::NoAgent),
            Self::Link(LinkError::Agent(error)) => Some(error.kind.into()),
            _ => None,
        }
    }

    /// Whether the sandbox has ended.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. } | Self::Ended(_))
    }

    /// How the guest's kernel panicked, if it is what went wrong.
    #[must_use]
    pub fn panic(&self) -> Option<&KernelPanic> {
        match self {
            Self::Panicked(panic) | Self::Ended(MachineExit::Panicked(panic)) => Some(panic),
            Self::Clone(error) => error.panic(),
            _ => None,
        }
    }

    /// Whether the guest could not be reached, for example because it is just ending.
    pub(super) fn is_of_a_lost_guest(&self) -> bool {
        match self {
            Self::Link(error) | Self::Stdio(StdioError::Link(error)) => error.is_lost(),
            _ => false,
        }
    }

    /// Whether a machine that has just started has no working guest, as opposed to an error that
    /// its guest or the host reported.
    pub(super) fn is_of_no_guest(&self) -> bool {
        match self {
            Self::Silent(_) | Self::GaveUp | Self::Ended(_) => true,
            Self::Link(error) => error.is_lost() || matches!(error, LinkError::Unanswered(_)),
            _ => false,
        }
    }

    pub(super) fn refused(kind: RefusalKind, message: impl Into<String>) -> Self {
        Self::Refused {
            kind,
            message: message.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_agent_is_told_with_what_prolongs_the_wait() {
        let told = SandboxError::Silent(Duration::from_secs(60)).to_string();
        for part in ["60 s", BOOT_TIMEOUT_VARIABLE, "podvisor serve"] {
            assert!(told.contains(part), "{told}");
        }
    }
}
