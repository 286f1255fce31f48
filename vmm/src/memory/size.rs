//! Memory sizes, and their parser.

use std::fmt;
use std::str::FromStr;

const MIB: u64 = 1 << 20;

/// An amount of guest memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemorySize(u64);

impl MemorySize {
    /// The minimum for a guest: with less, no Linux kernel unpacks itself.
    pub const MIN: Self = Self(16 * MIB);

    /// `count` MiB.
    #[must_use]
    pub const fn mib(count: u64) -> Self {
        Self(count.saturating_mul(MIB))
    }

    /// `count` GiB.
    #[must_use]
    pub const fn gib(count: u64) -> Self {
        Self(count.saturating_mul(1024 * MIB))
    }

    /// `count` bytes.
    #[must_use]
    pub const fn bytes(count: u64) -> Self {
        Self(count)
    }

    /// Returns the size in bytes.
    #[must_use]
    pub const fn as_bytes(self) -> u64 {
        self.0
    }
}

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_multiple_of(MIB) {
            write!(f, "{} MiB", self.0 / MIB)
        } else {
            write!(f, "{} bytes", self.0)
        }
    }
}

/// An invalid memory size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseMemorySizeError {
    /// Not a number with a known unit.
    #[error("`{0}` is no size; write a number and a unit, such as 512M, 1536MiB or 1.5G")]
    Malformed(String),
    /// More bytes than fit 64 bits.
    #[error("`{0}` is more than any machine has")]
    TooLarge(String),
}

impl FromStr for MemorySize {
    type Err = ParseMemorySizeError;

    /// Parses a size such as `512M` or `1.5g`: units b, k, m, g and t in either case, powers of
    /// 1024, optionally followed by `B` or `iB`. Without a unit the number is bytes, as in docker.
    /// Parts of a byte are left out.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || ParseMemorySizeError::Malformed(text.to_owned());
        let (number, rest) = digits(text);
        let (fraction, unit) = match rest.strip_prefix('.') {
            Some(rest) => digits(rest),
            None => ("0", rest),
        };
        if number.is_empty() || fraction.is_empty() {
            return Err(malformed());
        }
        let too_large = || ParseMemorySizeError::TooLarge(text.to_owned());
        let number: u64 = number.parse().map_err(|_| too_large())?;
        let unit = unit.strip_prefix(' ').unwrap_or(unit).to_ascii_lowercase();
        let shift = match unit.as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(malformed()),
        };
        let whole = number.checked_mul(1 << shift).ok_or_else(too_large)?;
        let bytes = whole.checked_add(part(fraction, shift));
        bytes.map(Self).ok_or_else(too_large)
    }
}

/// Splits a text after its first digits.
fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

/// Returns the decimal fraction with these digits of `1 << shift`, rounded down. Digits beyond the
/// eighteenth are less than a byte of any unit.
fn part(fraction: &str, shift: u32) -> u64 {
    let (mut number, mut of) = (0_u128, 1_u128);
    for digit in fraction.bytes().take(18) {
        number = number * 10 + u128::from(digit.wrapping_sub(b'0'));
        of *= 10;
    }
    u64::try_from((number << shift) / of).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_docker_reads_them() {
        for (text, bytes) in [
            ("512M", 512 << 20),
            ("512m", 512 << 20),
            ("512MiB", 512 << 20),
            ("64 MiB", 64 << 20),
            ("2g", 2 << 30),
            ("1GiB", 1 << 30),
            ("1kb", 1 << 10),
            ("3T", 3 << 40),
            ("65536", 65536),
            ("65536b", 65536),
            ("1.5g", 3 << 29),
            ("0.25KiB", 256),
            ("1.99", 1),
            ("0.9999999999999999999999999t", (1 << 40) - 1),
        ] {
            assert_eq!(text.parse(), Ok(MemorySize(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_shown_is_read_again() {
        for bytes in [0, 1 << 20, 3 << 30] {
            let size = MemorySize::bytes(bytes);
            assert_eq!(size.to_string().parse(), Ok(size));
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in [
            "", "M", "-1M", ".5G", "1.G", "1.2.3G", "1  G", "1X", "1e3", "1MM", "0x10", "١M",
        ] {
            let refused = text.parse::<MemorySize>().unwrap_err();
            assert!(
                matches!(refused, ParseMemorySizeError::Malformed(_)),
                "{text}"
            );
        }
        for text in [
            "99999999999999999999",
            "18446744073709551615k",
            "99999999999T",
        ] {
            let refused = text.parse::<MemorySize>().unwrap_err();
            assert!(
                matches!(refused, ParseMemorySizeError::TooLarge(_)),
                "{text}"
            );
        }
    }
}
