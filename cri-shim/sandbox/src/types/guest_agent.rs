//! What QEMU's guest agent is asked, in a guest with an operating system of its own.

use std::fmt;
use std::time::Duration;

use podvisor_guest_agent::{GuestInfo, Program, ProgramEnd};
use serde::{Deserialize, Serialize};

/// A request to the guest's agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum GuestAgentCall {
    /// Whether it answers.
    Ping,
    /// What the guest says of itself.
    Info,
    /// To run a program to its end.
    Run(Program),
    /// To freeze file systems, for so long at most.
    Freeze(Duration),
    /// To thaw them.
    Thaw,
    /// To set the guest's clock to the host's time.
    SetTime,
    /// To let who has one of these keys log in as a user.
    AddKeys {
        /// The user.
        user: String,
        /// Lines of OpenSSH's `authorized_keys`.
        keys: Vec<String>,
    },
    /// To set a user's password.
    SetPassword {
        /// The user.
        user: String,
        /// The password.
        password: Password,
    },
}

impl GuestAgentCall {
    /// How long frozen file systems stay so at most.
    pub const LONGEST_FREEZE: Duration = Duration::from_secs(600);

    /// Most bytes of each output of a program.
    pub const MAX_OUTPUT: usize = 1 << 20;
}

/// The answer of the guest's agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum GuestAgentAnswer {
    /// It is done.
    Done,
    /// What the guest says of itself.
    Info(Box<GuestInfo>),
    /// The program's end.
    Ended(ProgramEnd),
    /// The number of file systems that were frozen, or thawed.
    FileSystems(u64),
}

/// A password, which no log shows.
#[derive(Clone, Serialize, Deserialize)]
pub struct Password(String);

impl Password {
    /// Takes a password.
    pub fn new(password: impl Into<String>) -> Self {
        Self(password.into())
    }

    /// Returns it.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_not_shown() {
        let call = GuestAgentCall::SetPassword {
            user: "me".to_owned(),
            password: Password::new("secret"),
        };
        assert!(!format!("{call:?}").contains("secret"));
    }
}
