//! `--restart`: whether a container's program is restarted when it has ended.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::sandbox::RestartPolicy;

/// The policies by docker's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(in crate::cli) enum RestartArg {
    #[default]
    No,
    OnFailure {
        max_restarts: Option<u32>,
    },
    Always,
    /// Equal to `Always` here: containers are not started at boot.
    UnlessStopped,
}

impl RestartArg {
    pub(in crate::cli) fn is_no(self) -> bool {
        self == Self::No
    }

    pub(in crate::cli) fn policy(self) -> RestartPolicy {
        match self {
            Self::No => RestartPolicy::Never,
            Self::OnFailure { max_restarts } => RestartPolicy::OnFailure { max_restarts },
            Self::Always | Self::UnlessStopped => RestartPolicy::Always,
        }
    }

    /// Returns the name only.
    pub(in crate::cli) fn name(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::OnFailure { .. } => "on-failure",
            Self::Always => "always",
            Self::UnlessStopped => "unless-stopped",
        }
    }

    /// Returns the maximum number of restarts; 0 for no limit.
    pub(in crate::cli) fn max_restarts(self) -> u32 {
        match self {
            Self::OnFailure {
                max_restarts: Some(max),
            } => max,
            _ => 0,
        }
    }
}

impl FromStr for RestartArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let usage = "write no, on-failure, on-failure:TIMES, always or unless-stopped";
        let (name, times) = match text.split_once(':') {
            Some((name, times)) => (name, Some(times.parse().map_err(|_| usage)?)),
            None => (text, None),
        };
        match (name, times) {
            ("no", None) => Ok(Self::No),
            // As in docker, 0 means no limit.
            ("on-failure", times) => Ok(Self::OnFailure {
                max_restarts: times.filter(|times| *times > 0),
            }),
            ("always", None) => Ok(Self::Always),
            ("unless-stopped", None) => Ok(Self::UnlessStopped),
            _ => Err(usage.to_owned()),
        }
    }
}

impl fmt::Display for RestartArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self.max_restarts() {
            0 => Ok(()),
            max => write!(f, ":{max}"),
        }
    }
}

impl TryFrom<String> for RestartArg {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<RestartArg> for String {
    fn from(policy: RestartArg) -> Self {
        policy.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_as_they_are_written() {
        for text in [
            "no",
            "on-failure",
            "on-failure:3",
            "always",
            "unless-stopped",
        ] {
            let policy: RestartArg = text.parse().unwrap();
            assert_eq!(policy.to_string(), text);
        }
        assert_eq!(
            "on-failure:0".parse::<RestartArg>().unwrap().to_string(),
            "on-failure"
        );
        for bad in ["", "yes", "always:3", "on-failure:", "on-failure:-1"] {
            assert!(bad.parse::<RestartArg>().is_err(), "{bad}");
        }
    }
}
