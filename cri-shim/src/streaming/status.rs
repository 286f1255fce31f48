//! The outcome of a command, as the error channel reports it.

use bytes::Bytes;
use serde_json::json;

/// The version of the channel protocol that client and server agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Version {
    /// Text on the error channel; no terminal sizes before `V3`.
    V1,
    V2,
    V3,
    /// A `metav1.Status` as JSON on the error channel.
    V4,
    /// Channels can be closed one by one (WebSocket only).
    V5,
}

/// The outcome of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CommandStatus {
    /// It ended with this code.
    Exit(i32),
    /// It did not run, or its exit is unknown.
    Failed(String),
}

impl CommandStatus {
    /// The contents of the error channel; for old clients, nothing at all means success.
    pub(super) fn message(&self, version: Version) -> Bytes {
        let text = match (self, version < Version::V4) {
            (Self::Exit(0), true) => String::new(),
            (Self::Exit(code), true) => {
                format!("command terminated with non-zero exit code: exit status {code}")
            }
            (Self::Failed(why), true) => why.clone(),
            (Self::Exit(0), false) => json!({ "metadata": {}, "status": "Success" }).to_string(),
            (Self::Exit(code), false) => json!({
                "metadata": {},
                "status": "Failure",
                "message": format!("command terminated with exit code {code}"),
                "reason": "NonZeroExitCode",
                "details": { "causes": [{ "reason": "ExitCode", "message": code.to_string() }] },
            })
            .to_string(),
            (Self::Failed(why), false) => json!({
                "metadata": {},
                "status": "Failure",
                "message": why,
                "reason": "InternalError",
                "code": 500,
            })
            .to_string(),
        };
        Bytes::from(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_told_in_each_versions_way() {
        assert_eq!(CommandStatus::Exit(0).message(Version::V2), "");
        assert!(!CommandStatus::Exit(0).message(Version::V4).is_empty());
        let text = CommandStatus::Exit(42).message(Version::V4);
        let status: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(status["reason"], "NonZeroExitCode");
        assert_eq!(status["details"]["causes"][0]["message"], "42");
        let text = CommandStatus::Failed("no \"such\" thing".to_owned()).message(Version::V5);
        let status: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(status["message"], "no \"such\" thing");
    }
}
