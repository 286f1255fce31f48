//! `WWW-Authenticate` (RFC 9110, section 11.6.1), as far as registries use it.

/// The authentication that a registry asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Challenge {
    /// User name and password with every request.
    Basic,
    /// A token from another server.
    Bearer {
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

impl Challenge {
    /// Returns the best challenge in a header's value: one for a token if there is one.
    pub(crate) fn parse(header: &str) -> Option<Self> {
        let mut basic = None;
        for (scheme, params) in challenges(header) {
            let get = |key: &str| {
                params
                    .iter()
                    .find(|(name, _)| name.eq_ignore_ascii_case(key))
                    .map(|(_, value)| value.clone())
            };
            if scheme.eq_ignore_ascii_case("bearer")
                && let Some(realm) = get("realm")
            {
                return Some(Self::Bearer {
                    realm,
                    service: get("service"),
                    scope: get("scope"),
                });
            }
            if scheme.eq_ignore_ascii_case("basic") {
                basic = Some(Self::Basic);
            }
        }
        basic
    }
}

type Params = Vec<(String, String)>;

/// Splits `Scheme key="value", key=value, Scheme2 …`. What cannot be read ends the list.
fn challenges(header: &str) -> Vec<(String, Params)> {
    let mut found: Vec<(String, Params)> = Vec::new();
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', ',', '\t']);
        let end = rest.find(['=', ' ', ',']).unwrap_or(rest.len());
        if end == 0 {
            return found;
        }
        let (word, after) = rest.split_at(end);
        match after.strip_prefix('=') {
            Some(value) => {
                let Some((value, after)) = value_of(value) else {
                    return found;
                };
                if let Some((_, params)) = found.last_mut() {
                    params.push((word.to_owned(), value));
                }
                rest = after;
            }
            None => {
                found.push((word.to_owned(), Vec::new()));
                rest = after;
            }
        }
    }
}

/// A token or a quoted string, and what follows it.
fn value_of(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([',', ' ']).unwrap_or(text.len());
        return Some((text[..end].to_owned(), &text[end..]));
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => value.push(chars.next()?.1),
            c => value.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn challenges_of_known_registries_are_understood() {
        let hub = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:library/busybox:pull""#;
        assert_eq!(
            Challenge::parse(hub),
            Some(Challenge::Bearer {
                realm: "https://auth.docker.io/token".into(),
                service: Some("registry.docker.io".into()),
                scope: Some("repository:library/busybox:pull".into()),
            })
        );
        assert_eq!(
            Challenge::parse("Basic realm=\"Registry Realm\""),
            Some(Challenge::Basic)
        );
        assert!(matches!(
            Challenge::parse(r#"Basic realm="a, b", BEARER Realm=https://x/y, service="s\"q""#),
            Some(Challenge::Bearer { realm, service: Some(service), .. }) if realm == "https://x/y" && service == "s\"q"
        ));
        assert_eq!(Challenge::parse("Negotiate"), None);
        assert_eq!(Challenge::parse("Bearer realm=\"unclosed"), None);
    }

    proptest! {
        #[test]
        fn any_header_ends(header in "[ -~]{0,80}") {
            let _ = Challenge::parse(&header);
        }
    }
}
