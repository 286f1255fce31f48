//! Errors of a pod's network.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rustix::io::Errno;

/// The reason why a pod has no network, or why its network could not be removed or checked.
#[derive(Debug, thiserror::Error)]
pub enum CniError {
    /// There is no configuration list.
    #[error(
        "no CNI configuration in {}: install a network add-on, or put a *.conflist there",
        .dir.display()
    )]
    NoConfiguration {
        /// The directory.
        dir: PathBuf,
    },
    /// There are configuration files, but none is valid.
    #[error("no valid CNI configuration in {}: {reason}", .dir.display())]
    InvalidConfiguration {
        /// The directory.
        dir: PathBuf,
        /// The first file's error.
        reason: String,
    },
    /// There is no list of this name.
    #[error(
        "no CNI network {name:?} in {}: there {}", .dir.display(), known(.others)
    )]
    UnknownNetwork {
        /// The name.
        name: String,
        /// The directory.
        dir: PathBuf,
        /// The existing networks.
        others: Vec<String>,
    },
    /// A plugin's program is missing.
    #[error("no CNI plugin {name:?} in {searched}; install it there")]
    NoPlugin {
        /// Its type.
        name: String,
        /// The directories that were searched.
        searched: String,
    },
    /// The program with which CNI plugins set rules is missing.
    #[error("no iptables in PATH, /usr/sbin or /sbin, which CNI plugins need")]
    NoIptables,
    /// A plugin's input cannot be written.
    #[error("cannot write the configuration of the CNI plugin {}", .path.display())]
    Configure {
        /// The program.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A plugin's program cannot be executed.
    #[error("cannot execute the CNI plugin {}", .path.display())]
    Execute {
        /// The program.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A plugin hangs.
    #[error("CNI plugin {name:?} did not end its {command} within {} s and was killed", .limit.as_secs())]
    Hangs {
        /// Its type.
        name: String,
        /// The CNI command.
        command: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// A plugin hangs whose parent was killed.
    #[error(
        "an orphaned CNI plugin did not exit within {} s: it still has {} open; find it by \
         fuser(1)",
        .limit.as_secs(), .input.display()
    )]
    StillRuns {
        /// The plugin's input.
        input: PathBuf,
        /// How long it was waited for.
        limit: Duration,
    },
    /// A plugin prints too much.
    #[error("CNI plugin {name:?} printed more than {limit} bytes at {command} and was killed")]
    TooMuchOutput {
        /// Its type.
        name: String,
        /// The CNI command.
        command: &'static str,
        /// The limit in bytes.
        limit: usize,
    },
    /// A plugin reports an error.
    #[error("CNI plugin {name:?} failed to {command}: {message}")]
    Failed {
        /// Its type.
        name: String,
        /// The CNI command.
        command: &'static str,
        /// CNI's error code, 0 if it gave none.
        code: u64,
        /// The plugin's own words.
        message: String,
    },
    /// A plugin reports that it is not ready for pods.
    #[error("CNI plugin {name:?} is not ready: {message}")]
    NotReady {
        /// Its type.
        name: String,
        /// The plugin's own words.
        message: String,
    },
    /// The wait for a plugin was cancelled.
    #[error("CNI plugin {name:?} was cancelled during {command}")]
    Cancelled {
        /// Its type.
        name: String,
        /// The CNI command.
        command: &'static str,
    },
    /// A CHECK was cancelled before a plugin ran.
    #[error("the network check was cancelled")]
    Unchecked,
    /// A plugin's answer is not a valid CNI result, or not usable for a pod.
    #[error("CNI plugin {name:?} gave an invalid result: {reason}")]
    InvalidResult {
        /// Its type, or the network's name.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A part of the pod's identity cannot be passed to plugins.
    #[error("the pod's {field} {value:?} cannot be passed to CNI plugins: it has ';' or '='")]
    InvalidIdentity {
        /// Name, namespace, uid or id.
        field: &'static str,
        /// The value.
        value: String,
    },
    /// The pod has no network here.
    #[error("pod sandbox {id} has no network to check")]
    NotAttached {
        /// The pod's id.
        id: String,
    },
    /// What a newer podvisor noted of the pod's network.
    #[error(
        "the record of the pod's network, {}, has version {version}, newer than this podvisor's \
         {known}: the podvisor that made it can undo the network; install it again",
        .path.display()
    )]
    NewerRecord {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
        /// The newest that is known.
        known: u32,
    },
    /// A file or namespace of the host.
    #[error("cannot {action} {}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// The kernel refused to change the pod's network namespace.
    #[error("cannot {action} in the pod's network namespace")]
    Netlink {
        /// What was tried.
        action: &'static str,
        /// The kernel's answer.
        #[source]
        source: rtnetlink::Error,
    },
    /// A rule for a guest's address is refused.
    #[error("cannot translate the guest's address by `{program} {rule}`: {message}")]
    Rule {
        /// The program.
        program: &'static str,
        /// Its arguments.
        rule: String,
        /// Its own words.
        message: String,
    },
    /// A guest's DHCP server has no socket.
    #[error("the guest gets no DHCP server")]
    DhcpSocket {
        /// Why.
        #[source]
        source: podvisor_dhcp::SocketError,
    },
    /// The plugins created no interface that a guest can have.
    #[error("the CNI plugins left no usable interface {name:?} in the pod's network namespace")]
    NoInterface {
        /// The interface.
        name: String,
    },
}

fn known(names: &[String]) -> String {
    match names {
        [] => "is none".to_owned(),
        [name] => format!("is {name}"),
        names => format!("are {}", names.join(", ")),
    }
}

impl CniError {
    /// Whether the plugin that this is about has certainly not run.
    pub(super) fn has_not_run(&self) -> bool {
        use io::ErrorKind::{NotFound, PermissionDenied};

        match self {
            Self::NoPlugin { .. } | Self::Configure { .. } => true,
            // Other errors may come once the program has begun.
            Self::Execute { source, .. } => {
                matches!(source.kind(), NotFound | PermissionDenied)
                    || Errno::from_io_error(source) == Some(Errno::NOEXEC)
            }
            _ => false,
        }
    }

    pub(super) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }

    pub(super) fn netlink(action: &'static str) -> impl FnOnce(rtnetlink::Error) -> Self {
        move |source| Self::Netlink { action, source }
    }
}
