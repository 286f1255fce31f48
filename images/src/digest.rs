//! Content digests (OCI image-spec, descriptor.md, "Digests").

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

/// A SHA-256 content digest, written `sha256:<64 lower-case hex digits>`.
///
/// Other registered algorithms are refused: every registry in use addresses its content with
/// SHA-256.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

/// Why a string is not a digest that this crate accepts.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DigestError {
    /// The algorithm is missing or not SHA-256.
    #[error("digest {0:?} does not begin with \"sha256:\"; only SHA-256 is supported")]
    Algorithm(String),
    /// What follows the algorithm is not 64 lower-case hexadecimal digits.
    #[error("digest {0:?} does not have 64 lower-case hexadecimal digits")]
    Encoding(String),
}

impl Digest {
    /// The digest of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The 64 hexadecimal digits, without the algorithm.
    #[must_use]
    pub fn hex(&self) -> String {
        use fmt::Write as _;
        self.0
            .iter()
            .fold(String::with_capacity(64), |mut hex, byte| {
                let _ = write!(hex, "{byte:02x}");
                hex
            })
    }

    /// The 32 bytes of the hash.
    #[must_use]
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub(crate) fn finish(hasher: Sha256) -> Self {
        Self(hasher.finalize().into())
    }

    /// Parses only the hexadecimal part, as used in file names of the store.
    pub(crate) fn from_hex(hex: &str) -> Result<Self, DigestError> {
        let fault = || DigestError::Encoding(shorten(hex));
        let digits = hex.as_bytes();
        if digits.len() != 64 {
            return Err(fault());
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let (high, low) = (nibble(pair[0]), nibble(pair[1]));
            *byte = high
                .zip(low)
                .map(|(high, low)| high << 4 | low)
                .ok_or_else(fault)?;
        }
        Ok(Self(bytes))
    }
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

/// Shortens untrusted strings for messages.
fn shorten(text: &str) -> String {
    text.chars().take(80).collect()
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let hex = text
            .strip_prefix("sha256:")
            .ok_or_else(|| DigestError::Algorithm(shorten(text)))?;
        Self::from_hex(hex)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl serde::Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn prints_what_it_parsed() {
        assert_eq!(Digest::of(b"").to_string(), EMPTY);
        assert_eq!(EMPTY.parse::<Digest>(), Ok(Digest::of(b"")));
    }

    #[test]
    fn refuses_other_algorithms_and_sloppy_digits() {
        assert!(matches!(
            "sha512:00".parse::<Digest>(),
            Err(DigestError::Algorithm(_))
        ));
        assert!(matches!(
            EMPTY.to_uppercase().parse::<Digest>(),
            Err(DigestError::Algorithm(_))
        ));
        for bad in [
            &EMPTY[..70],
            &EMPTY.replace('e', "E"),
            "sha256:../../etc/passwd",
            &format!("{EMPTY}0"),
        ] {
            assert!(
                matches!(bad.parse::<Digest>(), Err(DigestError::Encoding(_))),
                "{bad}"
            );
        }
    }
}
