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
