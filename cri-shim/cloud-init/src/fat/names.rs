//! Names of files: as they are, and in eight and three characters for systems that know no others.

/// Most characters of a long name.
const MAX_NAME: usize = 255;
/// Characters of a name in one entry of a directory.
pub(super) const NAME_PART: usize = 13;

/// A name in eight and three characters, padded with spaces.
pub(super) type ShortName = [u8; 11];

/// Tells why `name` is not a name on a volume.
pub(super) fn check(name: &str) -> Result<(), &'static str> {
    let is_forbidden = |c: char| c.is_control() || "\\/:*?\"<>|".contains(c);
    match name {
        "" => Err("a part of it is empty"),
        "." | ".." => Err("it leads out of its directory"),
        _ if name.encode_utf16().count() > MAX_NAME => Err("a name is longer than 255 characters"),
        _ if name.contains(is_forbidden) => Err("a name has characters that FAT does not have"),
        // They are dropped by those who look for a file.
        _ if name.ends_with(['.', ' ']) => Err("a name ends with a dot or a space"),
        _ => Ok(()),
    }
}

/// Returns the parts of `name` for entries of a directory, in order. What is left of the last one
/// is filled up as the format says.
pub(super) fn parts(name: &str) -> Vec<[u16; NAME_PART]> {
    let units: Vec<u16> = name.encode_utf16().collect();
    let fill = |part: &[u16]| {
        let mut filled = [0xffff; NAME_PART];
        for (place, unit) in filled.iter_mut().zip(part) {
            *place = *unit;
        }
        if let Some(end) = filled.get_mut(part.len()) {
            *end = 0;
        }
        filled
    };
    units.chunks(NAME_PART).map(fill).collect()
}

/// The sum by which the entries of a long name belong to a short one.
pub(super) fn checksum(short: &ShortName) -> u8 {
    short
        .iter()
        .fold(0_u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte))
}

/// Returns a short name for `name` that none of `known` is, which are those of its directory so
/// far. A name that cannot be kept gets their number: no name that is kept has a `~`.
pub(super) fn shorten(name: &str, known: &[ShortName]) -> ShortName {
    let (stem, extension) = match name.rsplit_once('.') {
        Some((stem, extension)) if !stem.is_empty() => (stem, extension),
        _ => (name, ""),
    };
    let stem = letters(stem);
    let extension = letters(extension);
    let join = |stem: &[u8]| {
        let mut short = [b' '; 11];
        let parts = [(0, stem, 8), (8, extension.as_slice(), 3)];
        for (start, bytes, most) in parts {
            for (place, byte) in short.iter_mut().skip(start).zip(bytes.iter().take(most)) {
                *place = *byte;
            }
        }
        short
    };
    let plain = join(&stem);
    let is_whole = stem.len() <= 8 && extension.len() <= 3 && !stem.is_empty();
    if is_whole && !known.contains(&plain) {
        return plain;
    }
    let tail = format!("~{}", known.len() + 1);
    let mut numbered = stem;
    numbered.truncate(8_usize.saturating_sub(tail.len()));
    numbered.extend_from_slice(tail.as_bytes());
    join(&numbered)
}

/// Keeps the characters that short names have.
fn letters(text: &str) -> Vec<u8> {
    let short = |c: char| match c {
        ' ' | '.' => None,
        'a'..='z' => Some(c.to_ascii_uppercase() as u8),
        'A'..='Z' | '0'..='9' | '-' | '_' => Some(c as u8),
        _ => Some(b'_'),
    };
    text.chars().filter_map(short).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_are_distinct() {
        let mut known: Vec<ShortName> = Vec::new();
        for (name, expected) in [
            ("user-data", b"USER-D~1   "),
            ("user-date", b"USER-D~2   "),
            ("latest", b"LATEST     "),
            ("meta_data.json", b"META_D~4JSO"),
            (".x", b"X          "),
            ("ä.b", b"_       B  "),
            ("LATEST", b"LATEST~7   "),
        ] {
            let short = shorten(name, &known);
            assert_eq!(&short, expected, "{name}");
            known.push(short);
        }
        for number in 3..3000 {
            let short = shorten(&format!("user-data-{number}"), &known);
            assert!(!known.contains(&short), "{number}");
            known.push(short);
        }
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for bad in [
            "",
            ".",
            "..",
            "a/b",
            "a\\b",
            "a\0",
            "a:b",
            "a.",
            "a ",
            &"a".repeat(256),
        ] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
        for good in ["a", ".a", "a b", "ä", "network-config", &"a".repeat(255)] {
            assert_eq!(check(good), Ok(()), "{good:?}");
        }
    }
}
