//! Why a jail could not be entered, and what it lacks.

use std::fmt;

/// A layer that this host does not support; the others hold without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingLayer {
    /// The host does not allow a user namespace without mapped users.
    UserNamespace,
    /// The host's kernel has no Landlock.
    Landlock,
    /// The host's kernel has an older Landlock ABI.
    PartOfLandlock,
    /// The process serves volumes as the host's root: it was started so, or the host does not map
    /// users.
    MappedUsers,
}

impl fmt::Display for MissingLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::UserNamespace => "user namespace",
            Self::Landlock => "Landlock",
            Self::PartOfLandlock => "part of Landlock",
            Self::MappedUsers => "mapped users",
        })
    }
}

/// The reason why the jail could not be entered. The process must not continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JailError {
    /// The kernel refused a step.
    #[error("failed to {step}")]
    Step {
        /// What was tried.
        step: &'static str,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
    /// The kernel refused a namespace, or a mount in it.
    #[error(
        "failed to {step} (the jail needs CAP_SYS_ADMIN, CAP_SETUID, CAP_SETGID and CAP_SETPCAP, \
         or user namespaces)"
    )]
    Namespaces {
        /// What was tried.
        step: &'static str,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
    /// Landlock refused.
    #[error("failed to restrict the file system with Landlock")]
    Landlock(#[from] landlock::RulesetError),
    /// The kernel refused the filter.
    #[error("failed to install the seccomp filter")]
    Filter(#[source] podvisor_seccomp::Error),
}

/// Returns what makes an error of the kernel's answer to a step.
pub(super) fn step<E: Into<std::io::Error>>(step: &'static str) -> impl FnOnce(E) -> JailError {
    move |source| JailError::Step {
        step,
        source: source.into(),
    }
}
