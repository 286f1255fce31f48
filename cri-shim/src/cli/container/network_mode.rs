//! The kinds of a container's network, as users write them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The networks with names of podvisor's own.
const NONE: &str = "none";
const NAT: &str = "nat";
const USER: &str = "user";

/// A container's network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(in crate::cli) enum NetworkMode {
    /// Loopback only.
    #[default]
    None,
    /// podvisor's own bridge.
    Nat,
    /// Connections of the user's own process, by passt.
    User,
    /// A CNI network of the host.
    Cni(String),
}

impl FromStr for NetworkMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            NONE => Ok(Self::None),
            NAT => Ok(Self::Nat),
            USER => Ok(Self::User),
            "" | "host" => Err(
                "a guest has a network of its own: write none, nat, user, or the \
                                name of a CNI network"
                    .to_owned(),
            ),
            name => Ok(Self::Cni(name.to_owned())),
        }
    }
}

impl fmt::Display for NetworkMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => NONE,
            Self::Nat => NAT,
            Self::User => USER,
            Self::Cni(name) => name,
        })
    }
}

impl TryFrom<String> for NetworkMode {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<NetworkMode> for String {
    fn from(mode: NetworkMode) -> Self {
        mode.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_read_as_they_are_written() {
        for text in ["none", "nat", "user", "my-net"] {
            let mode: NetworkMode = text.parse().unwrap();
            assert_eq!(mode.to_string(), text);
        }
        assert!("host".parse::<NetworkMode>().is_err());
        assert!("".parse::<NetworkMode>().is_err());
    }
}
