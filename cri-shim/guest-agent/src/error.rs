//! What goes wrong with a command.

use std::io;
use std::time::Duration;

/// Why a command was not carried out, or its answer is not known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestAgentError {
    /// Nobody answers: the agent is not installed, does not run, or hangs.
    #[error(
        "the guest's agent did not answer {command} within {} ms; is qemu-guest-agent running in \
         the guest?", .limit.as_millis()
    )]
    Unanswered {
        /// The command.
        command: &'static str,
        /// How long an answer was waited for.
        limit: Duration,
    },
    /// The stream to the guest failed or has ended.
    #[error("lost the port of the guest's agent during {command}")]
    Port {
        /// The command.
        command: &'static str,
        /// What failed.
        #[source]
        source: io::Error,
    },
    /// The agent does not have this command, or its configuration blocks it.
    #[error(
        "the guest's agent does not allow {command} ({reason}); a newer qemu-guest-agent may have \
         it, and the guest's configuration may block it"
    )]
    NotAllowed {
        /// The command.
        command: &'static str,
        /// The agent's words.
        reason: String,
    },
    /// The agent refused.
    #[error("the guest's agent refused {command}: {reason}")]
    Refused {
        /// The command.
        command: &'static str,
        /// The agent's words.
        reason: String,
    },
    /// The answer is not what the command has.
    #[error("the guest's agent answered {command} with something else")]
    Answer {
        /// The command.
        command: &'static str,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// The answer is too long.
    #[error("the guest's agent answered {command} with more than {most} bytes")]
    TooLong {
        /// The command.
        command: &'static str,
        /// The longest answer.
        most: usize,
    },
    /// The answer has data that are not base64.
    #[error("the guest's agent answered {command} with data that are not base64")]
    Data {
        /// The command.
        command: &'static str,
        /// What is wrong with it.
        #[source]
        source: base64::DecodeError,
    },
    /// The request itself is too long for the agent.
    #[error("{what} of {size} bytes: the guest's agent gets at most {most}")]
    Request {
        /// What is too long.
        what: &'static str,
        /// Its size.
        size: usize,
        /// The largest size.
        most: usize,
    },
}

impl GuestAgentError {
    /// Whether there seems to be no agent.
    #[must_use]
    pub fn is_no_agent(&self) -> bool {
        matches!(self, Self::Unanswered { .. } | Self::Port { .. })
    }
}
