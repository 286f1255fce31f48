//! Parsing of image references, docker's short forms included (distribution-spec, "Pulling
//! manifests"; the grammar is that of github.com/distribution/reference).
//!
//! `oci-spec` parses with a regular expression whose compilation takes longer than everything else
//! that finding an image needs. This parser walks the text once, and a property test holds it to
//! the same results, with three exceptions: tags are ASCII here, as the grammar says, capital
//! letters in the first part of a repository's name (`Team/app`) are refused as in all other parts,
//! and a registry may be an IPv6 address in brackets, as the grammar says too.

use std::net::Ipv6Addr;

use oci_spec::distribution::{ParseError, Reference};

/// Bytes of a repository's name.
const NAME_MAX: usize = 255;
/// Bytes of a tag.
const TAG_MAX: usize = 128;
/// Hexadecimal digits of the shortest digest.
const HEX_MIN: usize = 32;

const HUB: &str = "docker.io";
const HUB_LEGACY: &str = "index.docker.io";

/// Parses `[REGISTRY/]NAME[:TAG][@DIGEST]`; `busybox` is `docker.io/library/busybox:latest`.
///
/// # Errors
/// The rule that `input` breaks.
pub(crate) fn parse(input: &str) -> Result<Reference, ParseError> {
    if input.is_empty() {
        return Err(ParseError::NameEmpty);
    }
    let (named, digest) = match input.split_once('@') {
        Some((named, digest)) => (named, Some(digest)),
        None => (input, None),
    };
    // A colon before the last slash is a port's.
    let last = named.rfind('/').map_or(0, |slash| slash + 1);
    let (name, tag) = match named[last..].find(':') {
        Some(colon) => (&named[..last + colon], Some(&named[last + colon + 1..])),
        None => (named, None),
    };
    check_name(name)?;
    if tag.is_some_and(|tag| !is_tag(tag)) {
        return Err(ParseError::TagInvalidFormat);
    }
    if let Some(digest) = digest {
        check_digest(digest)?;
    }
    let (registry, repository) = split_registry(name);
    // The first part could have been a registry by its letters, but turned out not to be one.
    if repository.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Err(ParseError::NameContainsUppercase);
    }
    if repository.len() > NAME_MAX {
        return Err(ParseError::NameTooLong);
    }
    Ok(match (tag, digest) {
        (None, None) => Reference::with_tag(registry, repository, "latest".to_owned()),
        (Some(tag), None) => Reference::with_tag(registry, repository, tag.to_owned()),
        (None, Some(digest)) => Reference::with_digest(registry, repository, digest.to_owned()),
        (Some(tag), Some(digest)) => {
            Reference::with_tag_and_digest(registry, repository, tag.to_owned(), digest.to_owned())
        }
    })
}

fn check_name(name: &str) -> Result<(), ParseError> {
    let (first, rest) = match name.split_once('/') {
        Some((first, rest)) => (first, Some(rest)),
        None => (name, None),
    };
    // Whether the first part is a registry is decided later; it has to be valid as one of the two.
    let sound_first = is_component(first) || (rest.is_some() && is_registry(first));
    let sound_rest = rest.is_none_or(|rest| rest.split('/').all(is_component));
    if sound_first && sound_rest {
        return Ok(());
    }
    let lower = |part: &str| is_component(&part.to_ascii_lowercase());
    if (sound_first || lower(first)) && rest.is_none_or(|rest| rest.split('/').all(lower)) {
        return Err(ParseError::NameContainsUppercase);
    }
    Err(ParseError::ReferenceInvalidFormat)
}

/// Lower-case letters and digits, with `.`, `_`, `__` or any number of `-` between them.
fn is_component(part: &str) -> bool {
    let is_word = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let mut rest = part.as_bytes();
    loop {
        let word = rest.iter().take_while(|byte| is_word(byte)).count();
        if word == 0 {
            return false;
        }
        rest = &rest[word..];
        rest = match rest {
            [] => return true,
            [b'_', b'_', after @ ..] | [b'.' | b'_', after @ ..] => after,
            _ => {
                let dashes = rest.iter().take_while(|byte| **byte == b'-').count();
                &rest[dashes..]
            }
        };
    }
}

/// Parts of letters, digits and inner `-`, separated by dots, or an IPv6 address in brackets, and
/// optionally a port.
fn is_registry(text: &str) -> bool {
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    if let Some((address, rest)) = text.strip_prefix('[').and_then(|text| text.split_once(']')) {
        // Of the ways to write one, the grammar has only that by hexadecimal digits.
        let is_address = !address.contains('.') && address.parse::<Ipv6Addr>().is_ok();
        return is_address && (rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port));
    }
    let (host, port) = match text.split_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (text, None),
    };
    let is_part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('-')
            && !part.ends_with('-')
            && part
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    host.split('.').all(is_part) && port.is_none_or(is_port)
}

fn is_tag(tag: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let mut bytes = tag.bytes();
    tag.len() <= TAG_MAX
        && bytes.next().is_some_and(is_word)
        && bytes.all(|byte| is_word(byte) || matches!(byte, b'.' | b'-'))
}

fn check_digest(digest: &str) -> Result<(), ParseError> {
    let (algorithm, hex) = digest
        .split_once(':')
        .ok_or(ParseError::DigestInvalidFormat)?;
    let is_part = |part: &str| {
        part.starts_with(|first: char| first.is_ascii_alphabetic())
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric())
    };
    let is_hex = hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !algorithm.split(['-', '_', '+', '.']).all(is_part) || !is_hex || hex.len() < HEX_MIN {
        return Err(ParseError::DigestInvalidFormat);
    }
    let expected = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return Err(ParseError::DigestUnsupported),
    };
    if hex.len() == expected {
        Ok(())
    } else {
        Err(ParseError::DigestInvalidLength)
    }
}

/// Splits a valid name into the registry and the repository, as Docker does.
fn split_registry(name: &str) -> (String, String) {
    let is_registry = |first: &str| first.contains(['.', ':']) || first == "localhost";
    let (registry, repository) = match name.split_once('/') {
        Some((first, rest)) if is_registry(first) => (first, rest),
        _ => (HUB, name),
    };
    let registry = if registry == HUB_LEGACY {
        HUB
    } else {
        registry
    };
    if registry == HUB && !repository.contains('/') {
        (registry.to_owned(), format!("library/{repository}"))
    } else {
        (registry.to_owned(), repository.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn agrees(input: &str) {
        match (parse(input), input.parse::<Reference>()) {
            (Ok(ours), Ok(theirs)) => assert_eq!(ours, theirs, "{input:?}"),
            (Err(_), Err(_)) => {}
            (Err(ParseError::NameContainsUppercase), Ok(theirs)) => {
                assert!(
                    theirs
                        .repository()
                        .bytes()
                        .any(|byte| byte.is_ascii_uppercase())
                );
            }
            (Ok(ours), Err(_)) if ours.registry().starts_with('[') => {}
            (ours, theirs) => panic!("{input:?}: {ours:?} but {theirs:?}"),
        }
    }

    fn hex(length: usize) -> String {
        "0123456789abcdefABCDEF"
            .chars()
            .cycle()
            .take(length)
            .collect()
    }

    #[test]
    fn short_forms_are_docker_s() {
        for (input, full) in [
            ("busybox", "docker.io/library/busybox:latest"),
            ("index.docker.io/a/b:c", "docker.io/a/b:c"),
            ("localhost/a", "localhost/a:latest"),
            ("host:5000/a", "host:5000/a:latest"),
            ("host:5000", "docker.io/library/host:5000"),
            (
                "Example.org/a__b/c---d.e:T-1",
                "Example.org/a__b/c---d.e:T-1",
            ),
        ] {
            assert_eq!(parse(input).unwrap().to_string(), full);
            agrees(input);
        }
    }

    #[test]
    fn the_broken_rule_is_named() {
        let name = "a".repeat(256);
        let sha256 = |length| format!("a@sha256:{}", hex(length));
        for (input, rule) in [
            ("", ParseError::NameEmpty),
            ("A", ParseError::NameContainsUppercase),
            ("host.example/Name", ParseError::NameContainsUppercase),
            ("Team/app", ParseError::NameContainsUppercase),
            ("a b", ParseError::ReferenceInvalidFormat),
            ("a/", ParseError::ReferenceInvalidFormat),
            ("-a", ParseError::ReferenceInvalidFormat),
            ("a:", ParseError::TagInvalidFormat),
            ("a:-b", ParseError::TagInvalidFormat),
            ("a:é", ParseError::TagInvalidFormat),
            ("a:b\n", ParseError::TagInvalidFormat),
            (&name, ParseError::NameTooLong),
            ("a@b", ParseError::DigestInvalidFormat),
            (&sha256(31), ParseError::DigestInvalidFormat),
            (&sha256(63), ParseError::DigestInvalidLength),
            (&format!("a@md5:{}", hex(32)), ParseError::DigestUnsupported),
        ] {
            assert_eq!(parse(input), Err(rule), "{input:?}");
        }
    }

    #[test]
    fn a_registry_may_be_an_ipv6_address_in_brackets() {
        for (input, registry, rest) in [
            ("[fd00::1]:5000/app:1", "[fd00::1]:5000", "app:1"),
            (
                "[FD00:0:0:0:0:0:0:1]/a/b",
                "[FD00:0:0:0:0:0:0:1]",
                "a/b:latest",
            ),
            ("[::]/a:b", "[::]", "a:b"),
        ] {
            let parsed = parse(input).unwrap();
            assert_eq!(parsed.registry(), registry);
            assert_eq!(parsed.to_string(), format!("{registry}/{rest}"));
            assert_eq!(parse(&parsed.to_string()), Ok(parsed));
        }
        for input in [
            "[fd00::1/a",
            "fd00::1]/a",
            "[x]/a",
            "[]/a",
            "[fd00]/a",
            "[1:2]/a",
            "[fe80::1%eth0]/a",
            "[::ffff:10.0.0.1]/a",
            "[::1]x/a",
            "[::1]:/a",
            "[::1]:x/a",
            "[::1]",
            "[::1]:5000",
            "a/[::1]/b",
            "[[::1]]/a",
        ] {
            let refused = Err(ParseError::ReferenceInvalidFormat);
            let by_tag = Err(ParseError::TagInvalidFormat);
            let parsed = parse(input);
            assert!(parsed == refused || parsed == by_tag, "{input}: {parsed:?}");
        }
        let capital = Err(ParseError::NameContainsUppercase);
        assert_eq!(parse("[::1]/App"), capital);
    }

    /// Pieces of references, valid and invalid.
    fn piece() -> impl Strategy<Value = String> {
        let fixed = [
            "/",
            ":",
            "@",
            ".",
            "_",
            "__",
            "-",
            "--",
            "a",
            "b1",
            "X",
            "localhost",
            "docker.io",
            "index.docker.io",
            "host.example:5000",
            "[::1]",
            "[fd00::1]:5000",
            "[",
            "]",
            "sha256:",
            "sha384:",
            "sha512:",
            "md5:",
            "a+b:",
            "1",
            "é",
            " ",
            "\n",
        ];
        prop_oneof![
            10 => prop::sample::select(fixed.to_vec()).prop_map(str::to_owned),
            1 => prop::sample::select(vec![31, 32, 63, 64, 65, 96, 128, 129, 255]).prop_map(hex),
            1 => (120usize..260).prop_map(|length| "a".repeat(length)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn the_results_are_those_of_oci_spec(pieces in prop::collection::vec(piece(), 1..9)) {
            let text = pieces.concat();
            // `oci-spec` allows letters of any script in tags, which no registry accepts.
            if text.is_ascii() {
                agrees(&text);
            } else {
                prop_assert!(parse(&text).is_err());
            }
        }

        #[test]
        fn sound_references_are_read_alike(
            text in "([a-zA-Z0-9.-]{1,8}(:[0-9]{1,4})?/)?[a-z0-9._-]{1,8}(/[a-z0-9._-]{1,6}){0,2}(:[A-Za-z0-9_.-]{1,9})?",
            digest in prop::option::of("@sha256:[0-9a-fA-F]{64}"),
        ) {
            agrees(&format!("{text}{}", digest.unwrap_or_default()));
        }
    }
}
