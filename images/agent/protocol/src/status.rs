//! How a process ended.

use crate::api::{WaitProcessResponse, wait_process_response::Status};

/// How a process ended: by its own exit or by a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExitStatus {
    /// `exit(code)`, 0 to 255.
    Code(u8),
    /// Killed by this signal, 1 to 64.
    Signal(u8),
}

impl ExitStatus {
    /// Returns the code that a shell reports: that of the process, or 128 plus the signal's number.
    #[must_use]
    pub fn shell_code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => signal.saturating_add(128),
        }
    }
}

impl From<ExitStatus> for Status {
    fn from(status: ExitStatus) -> Self {
        match status {
            ExitStatus::Code(code) => Self::ExitCode(code.into()),
            ExitStatus::Signal(signal) => Self::Signal(signal.into()),
        }
    }
}

/// The guest's answer has no exit status, or an impossible one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the guest's agent answered without a valid exit status")]
pub struct MissingExitStatus;

impl TryFrom<&WaitProcessResponse> for ExitStatus {
    type Error = MissingExitStatus;

    fn try_from(answer: &WaitProcessResponse) -> Result<Self, MissingExitStatus> {
        match answer.status {
            Some(Status::ExitCode(code)) => u8::try_from(code).map(Self::Code).ok(),
            Some(Status::Signal(signal @ 1..=64)) => u8::try_from(signal).map(Self::Signal).ok(),
            _ => None,
        }
        .ok_or(MissingExitStatus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: Option<Status>) -> WaitProcessResponse {
        WaitProcessResponse {
            status,
            ..Default::default()
        }
    }

    #[test]
    fn a_status_survives_the_wire() {
        for status in [
            ExitStatus::Code(0),
            ExitStatus::Code(255),
            ExitStatus::Signal(9),
        ] {
            assert_eq!(
                ExitStatus::try_from(&answer(Some(status.into()))),
                Ok(status)
            );
        }
    }

    #[test]
    fn impossible_answers_are_refused() {
        for status in [
            None,
            Some(Status::ExitCode(256)),
            Some(Status::Signal(0)),
            Some(Status::Signal(65)),
            Some(Status::Signal(u32::MAX)),
        ] {
            assert_eq!(
                ExitStatus::try_from(&answer(status)),
                Err(MissingExitStatus)
            );
        }
    }

    #[test]
    fn a_shell_sees_128_and_the_signal() {
        assert_eq!(ExitStatus::Signal(9).shell_code(), 137);
        assert_eq!(ExitStatus::Code(42).shell_code(), 42);
    }
}
