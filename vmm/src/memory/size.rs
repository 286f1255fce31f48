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
#[derive(Debug, thiserror::Error)]
#[error("invalid memory size {text:?}: write a number with a unit, such as 512M, 1536MiB or 2G")]
pub struct ParseMemorySizeError {
    text: String,
}

impl FromStr for MemorySize {
    type Err = ParseMemorySizeError;

    /// Parses a number of bytes, or a number with `k`, `M`, `G` or `T` (powers of 1024), as `M`,
    /// `MB` or `MiB`, in upper or lower case.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseMemorySizeError {
            text: text.to_owned(),
        };
        let digits = text
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| error())?;
        let unit = unit.trim_start().to_ascii_lowercase();
        let letter = unit
            .strip_suffix("ib")
            .or_else(|| unit.strip_suffix('b'))
            .unwrap_or(&unit);
        let shift = match letter {
            "" => 0,
            "k" => 10,
            "m" => 20,
            "g" => 30,
            "t" => 40,
            _ => return Err(error()),
        };
        number.checked_mul(1 << shift).map(Self).ok_or_else(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_docker_reads_them() {
        let parse = |text: &str| text.parse::<MemorySize>().map(MemorySize::as_bytes).ok();
        assert_eq!(parse("512M"), Some(512 * MIB));
        assert_eq!(parse("512m"), Some(512 * MIB));
        assert_eq!(parse("512MiB"), Some(512 * MIB));
        assert_eq!(parse("2gb"), Some(2048 * MIB));
        assert_eq!(parse("1048576"), Some(MIB));
        assert_eq!(parse("64 MiB"), Some(64 * MIB));
        for bad in [
            "",
            "M",
            "-1",
            "1.5G",
            "12X",
            "1e3",
            "18446744073709551616",
            "99999999999T",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
