//! Domain names as DNS writes them (RFC 1035 §3.1), for the options that list them.

/// Most bytes of a name as text.
const MAX_NAME: usize = 253;
/// Most bytes of a label.
const MAX_LABEL: usize = 63;
/// Marks a pointer to a name that was written before (RFC 1035 §4.1.4).
const POINTER: u16 = 0xc000;
/// Places in an option that a pointer reaches.
const POINTER_PLACES: u16 = 0x4000;

/// Whether `name` is a domain name, with or without the dot of the root at its end.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    name.len() <= MAX_NAME && name.split('.').all(is_label)
}

/// Whether `label` is one part of a domain name, as a host name is.
#[must_use]
pub fn is_label(label: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    (1..=MAX_LABEL).contains(&label.len())
        && label.bytes().all(is_letter)
        && !label.starts_with('-')
        && !label.ends_with('-')
}

/// Encodes `names`, each of which [is one](is_name), in full, as DHCPv6 wants them
/// (RFC 8415 §10).
pub(crate) fn encode(names: &[String]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for name in names {
        for label in labels(name) {
            push_label(&mut bytes, label);
        }
        bytes.push(0);
    }
    bytes
}

/// Encodes `names`, each of which [is one](is_name), and points to what was written before where
/// a name ends like an earlier one (RFC 3397 §2).
pub(crate) fn encode_compressed(names: &[String]) -> Vec<u8> {
    let mut bytes = Vec::new();
    // Where a name with these labels begins.
    let mut known: Vec<(Vec<&str>, u16)> = Vec::new();
    for name in names {
        let mut rest = labels(name).collect::<Vec<_>>();
        loop {
            if rest.is_empty() {
                bytes.push(0);
                break;
            }
            if let Some((_, place)) = known.iter().find(|(labels, _)| *labels == rest) {
                bytes.extend_from_slice(&(POINTER | place).to_be_bytes());
                break;
            }
            if let Ok(place) = u16::try_from(bytes.len())
                && place < POINTER_PLACES
            {
                known.push((rest.clone(), place));
            }
            push_label(&mut bytes, rest.remove(0));
        }
    }
    bytes
}

fn labels(name: &str) -> impl Iterator<Item = &str> {
    name.split('.').filter(|label| !label.is_empty())
}

fn push_label(bytes: &mut Vec<u8>, label: &str) {
    // Names are checked before: a label has at most 63 bytes.
    bytes.push(u8::try_from(label.len()).unwrap_or(0));
    bytes.extend_from_slice(label.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn names_are_told_from_what_is_not_one() {
        for good in [
            "a",
            "a.b",
            "svc.cluster.local.",
            "_x.b-c",
            &"a.".repeat(126),
        ] {
            assert!(is_name(good), "{good}");
        }
        let long_label = "a".repeat(64);
        for bad in [
            "",
            ".",
            "a..b",
            ".a",
            "-a",
            "a-",
            "a b",
            "a\0",
            "ä",
            "a\n",
            &long_label,
            &"a.".repeat(128),
        ] {
            assert!(!is_name(bad), "{bad}");
        }
    }

    #[test]
    fn a_common_ending_is_written_once() {
        // The example of RFC 3397 §2.
        let names = owned(&["eng.apple.com.", "marketing.apple.com."]);
        let mut expected = b"\x03eng\x05apple\x03com\x00\x09marketing".to_vec();
        expected.extend_from_slice(&[0xc0, 0x04]);
        assert_eq!(encode_compressed(&names), expected);
        assert_eq!(
            encode(&names),
            b"\x03eng\x05apple\x03com\x00\x09marketing\x05apple\x03com\x00"
        );
    }

    #[test]
    fn the_same_name_twice_is_a_pointer() {
        let names = owned(&["a.b", "a.b"]);
        assert_eq!(encode_compressed(&names), b"\x01a\x01b\x00\xc0\x00");
    }
}
