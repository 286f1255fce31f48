//! Hardware addresses.

use std::fmt;
use std::io;
use std::str::FromStr;

/// A hardware address (EUI-48).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// Creates a random unicast address that is locally administered.
    pub(super) fn random() -> io::Result<Self> {
        let mut bytes = [0; 6];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        let [first, ..] = &mut bytes;
        *first = *first & !1 | 2;
        Ok(Self(bytes))
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// A string that is not a hardware address.
#[derive(Debug, thiserror::Error)]
#[error("{text:?} is not a MAC address: write six bytes, such as 52:54:00:12:34:56")]
pub struct ParseMacAddressError {
    text: String,
}

impl FromStr for MacAddress {
    type Err = ParseMacAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseMacAddressError {
            text: text.to_owned(),
        };
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or_else(error)?;
            if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(error());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| error())?;
        }
        if parts.next().is_some() {
            return Err(error());
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_addresses_are_read_as_they_are_written() {
        let mac: MacAddress = "52:54:00:Ab:cd:0f".parse().unwrap();
        assert_eq!(mac.0, [0x52, 0x54, 0, 0xab, 0xcd, 0x0f]);
        assert_eq!(mac.to_string(), "52:54:00:ab:cd:0f");
        for bad in [
            "",
            "52:54:00:ab:cd",
            "52:54:00:ab:cd:0f:1",
            "52:54:00:ab:cd:+f",
            "5254:00:ab:cd:0f:11",
        ] {
            assert!(bad.parse::<MacAddress>().is_err(), "{bad}");
        }
    }
}
