//! `--filter`, of commands that show containers or what happens to them.

use std::mem::discriminant;

/// A label's name, and the value that it is to have.
pub(super) type Label = (String, Option<String>);

/// Reads `KEY` or `KEY=VALUE`.
pub(super) fn parse_label(text: &str) -> Label {
    match text.split_once('=') {
        Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
        None => (text.to_owned(), None),
    }
}

/// Whether all filters together take something. As in docker and podman, those of one kind are
/// alternatives and those of several kinds hold together; so do those for which `all_hold`: labels.
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
