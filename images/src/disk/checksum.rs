//! Checksums that the user gives for a file.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256, Sha512};

use crate::Digest;

/// The digest that a file must have as it is served, before any decompression: `sha256:…` or
/// `sha512:…`.
#[derive(Clone, PartialEq, Eq)]
pub struct Checksum(Kind);

#[derive(Clone, PartialEq, Eq)]
enum Kind {
    Sha256(Digest),
    Sha512(Box<[u8; 64]>),
}

/// The string is not a checksum.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is no checksum; write `sha256:` and 64 hexadecimal digits, or `sha512:` and 128")]
pub struct ChecksumError(String);

impl Checksum {
    /// Returns the SHA-256 digest if it is one.
    pub(crate) fn sha256(&self) -> Option<Digest> {
        match self.0 {
            Kind::Sha256(digest) => Some(digest),
            Kind::Sha512(_) => None,
        }
    }
}

impl FromStr for Checksum {
    type Err = ChecksumError;

    /// Hexadecimal digits may be in capitals.
    fn from_str(text: &str) -> Result<Self, ChecksumError> {
        let fault = || ChecksumError(text.chars().take(200).collect());
        let (algorithm, digits) = text.split_once(':').ok_or_else(fault)?;
        let digits = digits.to_ascii_lowercase();
        match algorithm {
            "sha256" => Digest::from_hex(&digits)
                .map(|digest| Self(Kind::Sha256(digest)))
                .map_err(|_| fault()),
            "sha512" => {
                // Two halves, each as long as a SHA-256 digest.
                let halves = digits.split_at_checked(64).ok_or_else(fault)?;
                let half = |hex: &str| Digest::from_hex(hex).map_err(|_| fault());
                let mut bytes = [0; 64];
                bytes[..32].copy_from_slice(half(halves.0)?.bytes());
                bytes[32..].copy_from_slice(half(halves.1)?.bytes());
                Ok(Self(Kind::Sha512(Box::new(bytes))))
            }
            _ => Err(fault()),
        }
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Sha256(digest) => fmt::Display::fmt(digest, f),
            Kind::Sha512(bytes) => {
                f.write_str("sha512:")?;
                bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Hashes a file and compares the digest at its end.
pub(super) struct Hasher {
    sha256: Sha256,
    sha512: Option<Sha512>,
    expected: Option<Checksum>,
}

impl Hasher {
    pub(super) fn new(expected: Option<&Checksum>) -> Self {
        let is_512 = matches!(expected, Some(Checksum(Kind::Sha512(_))));
        Self {
            sha256: Sha256::new(),
            sha512: is_512.then(Sha512::new),
            expected: expected.cloned(),
        }
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.sha256.update(bytes);
        if let Some(hasher) = &mut self.sha512 {
            hasher.update(bytes);
        }
    }

    /// Returns the SHA-256 digest.
    ///
    /// # Errors
    /// The actual checksum, of the same kind as the expected one, if they differ.
    pub(super) fn finish(self) -> Result<Digest, Checksum> {
        let digest = Digest::finish(self.sha256);
        let actual = match self.sha512 {
            Some(hasher) => Kind::Sha512(Box::new(hasher.finalize().into())),
            None => Kind::Sha256(digest),
        };
        match self.expected {
            Some(expected) if expected.0 != actual => Err(Checksum(actual)),
            _ => Ok(digest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_print_as_they_were_given_and_all_else_is_refused() {
        let long = format!("sha512:{}", "0123456789abcdef".repeat(8));
        let short = format!("sha256:{}", "0123456789abcdef".repeat(4));
        for text in [&long, &short] {
            assert_eq!(&text.parse::<Checksum>().unwrap().to_string(), text);
        }
        let capitals = format!("sha256:{}", "0123456789ABCDEF".repeat(4));
        assert_eq!(capitals.parse::<Checksum>().unwrap().to_string(), short);
        for bad in [
            "",
            "sha256:",
            "md5:00",
            &short[1..],
            &short[..70],
            &long[..134],
            "sha512:ä",
        ] {
            assert!(bad.parse::<Checksum>().is_err(), "{bad}");
        }
        assert!(format!("{long}0").parse::<Checksum>().is_err());
        assert!(
            format!("sha512:{}ä{}", "0".repeat(63), "0".repeat(63))
                .parse::<Checksum>()
                .is_err()
        );
    }

    #[test]
    fn a_file_must_have_the_checksum() {
        // FIPS 180-4's example.
        let abc = "sha512:ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a\
                   2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f";
        let check = |expected: &str, data: &[u8]| {
            let mut hasher = Hasher::new(Some(&expected.parse().unwrap()));
            hasher.update(data);
            hasher.finish()
        };
        assert_eq!(check(abc, b"abc"), Ok(Digest::of(b"abc")));
        assert_eq!(
            check(&Digest::of(b"abc").to_string(), b"abc"),
            Ok(Digest::of(b"abc"))
        );
        assert_eq!(
            check(&Digest::of(b"abd").to_string(), b"abc")
                .unwrap_err()
                .to_string(),
            Digest::of(b"abc").to_string()
        );
        assert_eq!(check(abc, b"").unwrap_err().to_string().len(), 7 + 128);
    }
}
