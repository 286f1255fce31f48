//! What can go wrong with a pod's network.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a pod has no network, or keeps it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CniError {
    /// No configuration list.
    #[error(
        "no CNI configuration in {}: install a network add-on, or put a *.conflist there",
        .dir.display()
    )]
    NoConfiguration {
        /// The directory.
        dir: PathBuf,
    },
    /// Files are there, and none is valid.
    #[error("no valid CNI configuration in {}: {reason}", .dir.display())]
    InvalidConfiguration {
        /// The directory.
        dir: PathBuf,
        /// What is wrong with the first one.
        reason: String,
    },
    /// No list of this name.
    #[error(
        "no CNI network {name:?} in {}: there {}", .dir.display(), known(.others)
    )]
    UnknownNetwork {
        /// The name.
        name: String,
        /// The directory.
        dir: PathBuf,
        /// The networks that are there.
        others: Vec<String>,
    },
    /// A plugin's program is missing.
    #[error("no CNI plugin {name:?} in {searched}; install it there")]
    NoPlugin {
        /// Its type.
        name: String,
        /// Where it was looked for.
        searched: String,
    },
    /// What CNI's plugins set rules by.
    #[error("no iptables in PATH, /usr/sbin or /sbin, which CNI plugins need")]
    NoIptables,
    /// A plugin's program cannot be executed.
    #[error("cannot execute the CNI plugin {}", .path.display())]
    Execute {
        /// The program.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A plugin hangs.
    #[error("CNI plugin {name:?} did not end its {command} within {} s and was killed", .limit.as_secs())]
    Hangs {
        /// Its type.
        name: String,
        /// What it was asked to do.
        command: &'static str,
        /// How long it had.
        limit: Duration,
    },
    /// A plugin of somebody who was killed hangs.
    #[error(
        "an orphaned CNI plugin did not exit within {} s: it still has {} open",
        .limit.as_secs(), .input.display()
    )]
    StillRuns {
        /// What it reads.
        input: PathBuf,
        /// How long it was waited for.
        limit: Duration,
    },
    /// A plugin prints without end.
    #[error("CNI plugin {name:?} printed more than {limit} bytes at {command} and was killed")]
    TooMuchOutput {
        /// Its type.
        name: String,
        /// What it was asked to do.
        command: &'static str,
        /// How much it may print.
        limit: usize,
    },
    /// A plugin says why it failed.
    #[error("CNI plugin {name:?} failed to {command}: {message}")]
    Failed {
        /// Its type.
        name: String,
        /// What it was asked to do.
        command: &'static str,
        /// CNI's error code, 0 when it gave none.
        code: u64,
        /// Its own words.
        message: String,
    },
    /// A plugin says that it takes no pods by now.
    #[error("CNI plugin {name:?} is not ready: {message}")]
    NotReady {
        /// Its type.
        name: String,
        /// Its own words.
        message: String,
    },
    /// A plugin was not waited for any longer.
    #[error("CNI plugin {name:?} was cancelled during {command}")]
    Cancelled {
        /// Its type.
        name: String,
        /// What it was asked to do.
        command: &'static str,
    },
    /// CHECK was not waited for any longer, before a plugin ran.
    #[error("the network check was cancelled")]
    Unchecked,
    /// What a plugin answered is not a result of CNI, or nothing that a pod can have.
    #[error("CNI plugin {name:?} gave an invalid result: {reason}")]
    InvalidResult {
        /// Its type, or the network's name.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A name that plugins cannot be told.
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
        /// The pod.
        id: String,
    },
    /// A file or namespace of the host.
    #[error("cannot {action} {}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The kernel refused to change the pod's network namespace.
    #[error("cannot {action} in the pod's network namespace")]
    Netlink {
        /// What was tried.
        action: &'static str,
        #[source]
        source: rtnetlink::Error,
    },
    /// The plugins made nothing that a guest can have.
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
