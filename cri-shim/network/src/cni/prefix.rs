//! An address with its prefix length, as in `10.0.0.2/24`.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An address, and how many of its first bits denote the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Prefix {
    address: IpAddr,
    length: u8,
}

/// A text is not an address with a prefix length.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not an address with a prefix length such as 10.0.0.2/24")]
pub struct PrefixError(String);

impl Prefix {
    /// `None` if the address has fewer bits than that.
    pub fn new(address: IpAddr, length: u8) -> Option<Self> {
        (length <= width(&address)).then_some(Self { address, length })
    }

    /// The address with its full length.
    pub fn host(address: IpAddr) -> Self {
        let length = width(&address);
        Self { address, length }
    }

    /// The address, with the bits behind the prefix.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Number of bits that denote the network.
    pub fn length(&self) -> u8 {
        self.length
    }

    /// The network's prefix: the address with its other bits zero.
    pub fn network(&self) -> Self {
        let address = match self.address {
            IpAddr::V4(address) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.length));
                IpAddr::V4((u32::from(address) & mask.unwrap_or(0)).into())
            }
            IpAddr::V6(address) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.length));
                IpAddr::V6((u128::from(address) & mask.unwrap_or(0)).into())
            }
        };
        Self {
            address,
            length: self.length,
        }
    }
}

fn width(address: &IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

impl FromStr for Prefix {
    type Err = PrefixError;

    fn from_str(text: &str) -> Result<Self, PrefixError> {
        let parse = || {
            let (address, length) = text.split_once('/')?;
            if !length.bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            Self::new(address.parse().ok()?, length.parse().ok()?)
        };
        parse().ok_or_else(|| PrefixError(text.chars().take(64).collect()))
    }
}

impl Serialize for Prefix {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Prefix {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_read_as_they_are_written() {
        for text in [
            "10.0.0.2/24",
            "0.0.0.0/0",
            "fd00::2/64",
            "::/0",
            "10.1.1.1/32",
        ] {
            assert_eq!(text.parse::<Prefix>().unwrap().to_string(), text);
        }
        for bad in [
            "",
            "10.0.0.2",
            "10.0.0.2/33",
            "fd00::/129",
            "10.0.0.2/+4",
            "x/1",
            "1/1",
        ] {
            assert!(bad.parse::<Prefix>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_network_has_no_host_bits() {
        let network = |text: &str| text.parse::<Prefix>().unwrap().network().to_string();
        assert_eq!(network("10.1.2.3/24"), "10.1.2.0/24");
        assert_eq!(network("10.1.2.3/0"), "0.0.0.0/0");
        assert_eq!(network("10.1.2.3/32"), "10.1.2.3/32");
        assert_eq!(network("fd00::1:2/64"), "fd00::/64");
        assert_eq!(network("fd00::1/0"), "::/0");
    }
}
