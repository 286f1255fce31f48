//! Extended headers: POSIX.1-2001 records, with star's and GNU tar's keys.

use std::collections::BTreeMap;

use super::error::TarError;

/// The fields of extended headers, for the entry that follows them.
#[derive(Clone, Debug, Default)]
pub(super) struct Pax {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link_path: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) mtime: Option<(i64, u32)>,
    pub(super) xattrs: BTreeMap<Box<[u8]>, Box<[u8]>>,
    pub(super) sparse: SparseKeys,
}

/// The keys of GNU tar's three sparse formats.
#[derive(Clone, Debug, Default)]
pub(super) struct SparseKeys {
    /// Formats 0.0 and 0.1: offsets and lengths, alternating.
    pub(super) map: Vec<u64>,
    pub(super) real_size: Option<u64>,
    pub(super) name: Option<Vec<u8>>,
    /// Format 1.0: the map precedes the data.
    pub(super) map_in_data: bool,
}

impl SparseKeys {
    pub(super) fn is_sparse(&self) -> bool {
        self.map_in_data || self.real_size.is_some()
    }
}

impl Pax {
    /// Parses the records of one header; later ones take precedence.
    pub(super) fn parse(&mut self, mut bytes: &[u8]) -> Result<(), TarError> {
        while !bytes.is_empty() {
            let (key, value, rest) = record(bytes).ok_or(TarError::Header("extended header"))?;
            self.set(key, value)
                .ok_or(TarError::Header("extended header value"))?;
            bytes = rest;
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        match key {
            b"path" => self.path = Some(name(value)?),
            b"linkpath" => self.link_path = Some(name(value)?),
            b"size" => self.size = Some(decimal(value)?),
            b"uid" => self.uid = Some(decimal(value)?),
            b"gid" => self.gid = Some(decimal(value)?),
            b"mtime" => self.mtime = Some(time(value)?),
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => {
                self.sparse.real_size = Some(decimal(value)?)
            }
            b"GNU.sparse.name" => self.sparse.name = Some(name(value)?),
            b"GNU.sparse.major" => self.sparse.map_in_data = decimal(value)? == 1,
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => self.sparse.map.push(decimal(value)?),
            b"GNU.sparse.map" => {
                self.sparse.map = value
                    .split(|byte| *byte == b',')
                    .map(decimal)
                    .collect::<Option<_>>()?;
            }
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    self.xattrs.insert(name.into(), value.into());
                }
            }
        }
        Some(())
    }
}

/// Splits off one record, `LENGTH KEY=VALUE\n`, where LENGTH counts all of it.
fn record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = bytes.iter().take(20).position(|byte| *byte == b' ')?;
    let length = usize::try_from(decimal(&bytes[..space])?).ok()?;
    let (record, rest) = bytes.split_at_checked(length)?;
    let record = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=')?;
    Some((&record[..equals], &record[equals + 1..], rest))
}

fn name(value: &[u8]) -> Option<Vec<u8>> {
    (!value.contains(&0)).then(|| value.to_vec())
}

pub(super) fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |value, digit| match digit {
        b'0'..=b'9' => value.checked_mul(10)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}

/// Seconds with a fraction; digits after the ninth are dropped.
fn time(value: &[u8]) -> Option<(i64, u32)> {
    let (negative, digits) = match value.strip_prefix(b"-") {
        Some(digits) => (true, digits),
        None => (false, value),
    };
    let mut parts = digits.splitn(2, |byte| *byte == b'.');
    let seconds = i64::try_from(decimal(parts.next()?)?).ok()?;
    let fraction = parts.next().unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let nanos = (0..9).fold(0, |nanos, index| {
        nanos * 10 + u32::from(fraction.get(index).map_or(0, |digit| digit - b'0'))
    });
    Some(match (negative, nanos) {
        (false, _) => (seconds, nanos),
        (true, 0) => (-seconds, 0),
        (true, _) => (-seconds - 1, 1_000_000_000 - nanos),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_by_their_lengths() {
        let mut pax = Pax::default();
        pax.parse(b"12 path=a\nb\n31 SCHILY.xattr.user.k=v\nw\0x=y\n")
            .unwrap();
        assert_eq!(pax.path.as_deref(), Some(b"a\nb".as_slice()));
        assert_eq!(
            pax.xattrs.get(b"user.k".as_slice()).map(|v| &**v),
            Some(b"v\nw\0x=y".as_slice())
        );
    }

    #[test]
    fn records_that_lie_about_their_length_are_refused() {
        for bad in [
            &b"99 path=a\n"[..],
            b"0 path=a\n",
            b"3 p",
            b"9 path=ab",
            b" a=b\n",
            b"5 abc\n",
            b"18446744073709551616 a=b\n",
        ] {
            assert!(
                Pax::default().parse(bad).is_err(),
                "{:?}",
                String::from_utf8_lossy(bad)
            );
        }
        assert!(Pax::default().parse(b"11 path=a\0\n").is_err());
    }

    #[test]
    fn times_have_fractions_and_signs() {
        assert_eq!(time(b"1.5"), Some((1, 500_000_000)));
        assert_eq!(time(b"-1.25"), Some((-2, 750_000_000)));
        assert_eq!(time(b"-1"), Some((-1, 0)));
        assert_eq!(time(b"7.1234567891"), Some((7, 123_456_789)));
        assert_eq!(time(b"99999999999999999999"), None);
        assert_eq!(time(b"1.x"), None);
    }
}
