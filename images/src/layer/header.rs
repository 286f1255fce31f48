//! The 512-byte tar header (POSIX.1-1988 ustar, GNU tar's and star's variants).

use super::error::TarError;

/// Bytes of a header, and the unit that all of a tar is padded to.
pub(crate) const RECORD: usize = 512;

/// A header block, its checksum verified.
#[derive(Clone, Debug)]
pub(super) struct Header(pub(super) [u8; RECORD]);

impl Header {
    /// Parses a header; `None` for a block of zeros, which ends an archive.
    pub(super) fn parse(block: [u8; RECORD]) -> Result<Option<Self>, TarError> {
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let stored = octal(&block[148..156]).ok_or(TarError::Header("checksum"))?;
        // The checksum counts its own field as spaces. Some old tars summed signed bytes.
        let sum = |signed: bool| -> i64 {
            let byte = |(index, byte): (usize, &u8)| match index {
                148..156 => 32,
                _ if signed => i64::from(*byte as i8),
                _ => i64::from(*byte),
            };
            block.iter().enumerate().map(byte).sum()
        };
        if i64::try_from(stored).is_ok_and(|stored| stored == sum(false) || stored == sum(true)) {
            Ok(Some(Self(block)))
        } else {
            Err(TarError::Header("checksum"))
        }
    }

    pub(super) fn typeflag(&self) -> u8 {
        self.0[156]
    }

    pub(super) fn name(&self) -> Vec<u8> {
        let name = until_nul(&self.0[..100]);
        // GNU's variant ("ustar ") stores other data where POSIX has the prefix.
        let prefix = if self.0[257..263] == *b"ustar\0" {
            until_nul(&self.0[345..500])
        } else {
            b""
        };
        if prefix.is_empty() {
            name.to_vec()
        } else {
            [prefix, b"/", name].concat()
        }
    }

    pub(super) fn link_name(&self) -> Vec<u8> {
        until_nul(&self.0[157..257]).to_vec()
    }

    pub(super) fn mode(&self) -> Result<u64, TarError> {
        number(&self.0[100..108]).ok_or(TarError::Header("mode"))
    }

    pub(super) fn uid(&self) -> Result<u64, TarError> {
        number(&self.0[108..116]).ok_or(TarError::Header("uid"))
    }

    pub(super) fn gid(&self) -> Result<u64, TarError> {
        number(&self.0[116..124]).ok_or(TarError::Header("gid"))
    }

    pub(super) fn size(&self) -> Result<u64, TarError> {
        number(&self.0[124..136]).ok_or(TarError::Header("size"))
    }

    pub(super) fn mtime(&self) -> Result<i64, TarError> {
        signed(&self.0[136..148]).ok_or(TarError::Header("mtime"))
    }

    pub(super) fn device(&self) -> Result<(u32, u32), TarError> {
        let part = |field: &[u8]| number(field).and_then(|value| u32::try_from(value).ok());
        part(&self.0[329..337])
            .zip(part(&self.0[337..345]))
            .ok_or(TarError::Header("device number"))
    }
}

pub(super) fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// A number: octal digits, or base 256 when the first bit is set. An empty field is 0.
pub(super) fn number(field: &[u8]) -> Option<u64> {
    signed(field).and_then(|value| u64::try_from(value).ok())
}

fn signed(field: &[u8]) -> Option<i64> {
    match field.first()? {
        first if first & 0x80 != 0 => {
            // Two's complement over the whole field, without the marking bit.
            let negative = first & 0x40 != 0;
            let first = if negative { *first } else { first & 0x7f };
            let mut value = if negative { -1i64 } else { 0 };
            for byte in std::iter::once(&first).chain(&field[1..]) {
                value = value.checked_mul(256)? | i64::from(*byte);
            }
            Some(value)
        }
        _ => octal(field).and_then(|value| i64::try_from(value).ok()),
    }
}

fn octal(field: &[u8]) -> Option<u64> {
    let field = until_nul(field).trim_ascii();
    field.iter().try_fold(0u64, |value, digit| match digit {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_octal_or_base_256() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"  644 \0\0"), Some(0o644));
        assert_eq!(number(b"\0\0\0\0\0\0\0\0"), Some(0));
        assert_eq!(number(b"00009 \0\0"), None);
        assert_eq!(
            number(&[0x80, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 2]),
            Some((1 << 24) + 2)
        );
        assert_eq!(signed(&[0xff; 12]), Some(-1));
        assert_eq!(number(&[0xff; 12]), None);
        assert_eq!(
            number(&[0x80, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255, 255]),
            None
        );
        assert_eq!(number(b"777777777777777777777777"), None);
    }
}
