//! `--filter` of commands that show containers or their events.

use std::mem::discriminant;

/// A label's name, and the required value.
pub(super) type Label = (String, Option<String>);

/// Parses `KEY` or `KEY=VALUE`.
pub(super) fn parse_label(text: &str) -> Label {
    match text.split_once('=') {
        Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
        None => (text.to_owned(), None),
    }
}

/// A part of a name, or its beginning, its end, or all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Name {
    text: String,
    is_beginning: bool,
    is_end: bool,
}

/// Parses `TEXT`, `^TEXT`, `TEXT$` or `^TEXT$`: as much of docker's regular expressions as scripts
/// use for names. Docker's names begin with a slash.
pub(super) fn parse_name(pattern: &str) -> Result<Name, String> {
    let text = pattern.strip_prefix('^').unwrap_or(pattern);
    let text = text.strip_prefix('/').unwrap_or(text);
    let is_beginning = text.len() < pattern.len();
    let (text, is_end) = match text.strip_suffix('$') {
        Some(text) => (text, true),
        None => (text, false),
    };
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    if !text.chars().all(is_of_name) {
        return Err(format!(
            "`{pattern}` is no part of a name: write TEXT, with ^ before it for names that begin \
             so, and $ after it for those that end so"
        ));
    }
    Ok(Name {
        text: text.to_owned(),
        is_beginning,
        is_end,
    })
}

impl Name {
    pub(super) fn takes(&self, name: &str) -> bool {
        let text = self.text.as_str();
        match (self.is_beginning, self.is_end) {
            (false, false) => name.contains(text),
            (true, false) => name.starts_with(text),
            (false, true) => name.ends_with(text),
            (true, true) => name == text,
        }
    }
}

/// Returns whether all filters together accept an item. As in docker and podman, those of one kind
/// are alternatives, and all kinds have to match; filters for which `all_hold` is true (labels) all
/// have to match.
pub(super) fn takes<F>(
    filters: &[F],
    all_hold: impl Fn(&F) -> bool,
    takes: impl Fn(&F) -> bool,
) -> bool {
    filters.iter().all(|one| match all_hold(one) {
        true => takes(one),
        false => filters
            .iter()
            .any(|other| discriminant(other) == discriminant(one) && takes(other)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_for_as_docker_does_in_scripts() {
        let names = ["web", "web-2", "old-web", "db"];
        for (pattern, taken) in [
            ("web", &["web", "web-2", "old-web"][..]),
            ("^web", &["web", "web-2"]),
            ("web$", &["web", "old-web"]),
            ("^web$", &["web"]),
            ("^/web$", &["web"]),
            ("/web", &["web", "web-2"]),
            ("", &names),
        ] {
            let name = parse_name(pattern).unwrap();
            let found: Vec<_> = names.into_iter().filter(|one| name.takes(one)).collect();
            assert_eq!(found, taken, "{pattern}");
        }
        for pattern in ["web|db", "we.*b", "^(web)$", "w?b", "a b"] {
            assert!(parse_name(pattern).is_err(), "{pattern}");
        }
    }
}
