//! The forms that names have in Kubernetes.

/// Whether this is a DNS-1123 label: at most 63 lower-case letters, digits and `-`.
#[must_use]
pub fn is_dns_label(name: &str) -> bool {
    let alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = name.as_bytes();
    (1..=63).contains(&bytes.len())
        && bytes.iter().all(|byte| alphanumeric(byte) || *byte == b'-')
        && bytes.first().is_some_and(alphanumeric)
        && bytes.last().is_some_and(alphanumeric)
}

/// Whether this is a DNS-1123 subdomain: labels with dots between them, at most 253 characters.
#[must_use]
pub fn is_dns_subdomain(name: &str) -> bool {
    let part = |label: &str| label.len() > 63 || is_dns_label(label);
    name.len() <= 253
        && !name.is_empty()
        && name
            .split('.')
            .all(|label| part(label) && ends_alphanumeric(label))
        && name.bytes().all(|byte| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'.'
        })
}

fn ends_alphanumeric(label: &str) -> bool {
    let alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = label.as_bytes();
    bytes.first().is_some_and(alphanumeric) && bytes.last().is_some_and(alphanumeric)
}

/// Whether this is the name of a port: at most 15 lower-case letters, digits and single `-`,
/// with a letter among them.
#[must_use]
pub fn is_port_name(name: &str) -> bool {
    name.len() <= 15
        && is_dns_label(name)
        && !name.contains("--")
        && name.bytes().any(|byte| byte.is_ascii_lowercase())
}

/// Whether this is an absolute path without `..`, `.`, empty steps and control characters.
#[must_use]
pub fn is_clean_absolute_path(path: &str) -> bool {
    let Some(steps) = path.strip_prefix('/') else {
        return false;
    };
    path.len() <= 4096
        && !path.chars().any(char::is_control)
        && steps
            .split('/')
            .all(|step| !step.is_empty() && step != "." && step != "..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels() {
        for name in ["a", "a-b", "0", &"x".repeat(63)] {
            assert!(is_dns_label(name), "{name}");
        }
        for name in [
            "",
            "-a",
            "a-",
            "A",
            "a.b",
            "a_b",
            "a\n",
            "..",
            "é",
            &"x".repeat(64),
        ] {
            assert!(!is_dns_label(name), "{name:?}");
        }
    }

    #[test]
    fn subdomains() {
        for name in ["a", "a.b-c.d", "1.2"] {
            assert!(is_dns_subdomain(name), "{name}");
        }
        for name in [
            "",
            ".",
            "a..b",
            ".a",
            "a.",
            "a.-b",
            "A.b",
            "a/b",
            "a\nb",
            &"a.".repeat(150),
        ] {
            assert!(!is_dns_subdomain(name), "{name:?}");
        }
    }

    #[test]
    fn port_names() {
        for name in ["http", "a-1", "1a"] {
            assert!(is_port_name(name), "{name}");
        }
        for name in ["", "80", "a--b", "A", "longer-than-fifteen"] {
            assert!(!is_port_name(name), "{name:?}");
        }
    }

    #[test]
    fn paths_that_leave_their_root_are_unclean() {
        assert!(is_clean_absolute_path("/boot/vmlinuz"));
        for path in [
            "", "/", "boot", "/a/../b", "/..", "/a//b", "/./a", "/a/", "/a\nb", "/a\0",
        ] {
            assert!(!is_clean_absolute_path(path), "{path:?}");
        }
    }
}
