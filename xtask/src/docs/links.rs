//! Links of a Markdown page, and the anchors of its headings.
//!
//! Inline links and images only (`[text](target)`), which is all that the documentation uses; code
//! is left out.

use std::collections::{BTreeMap, BTreeSet};

/// A link of a page.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Link<'a> {
    /// The line that it stands in, from 1 on.
    pub(super) line: usize,
    pub(super) target: &'a str,
}

/// Returns the lines of a page that are no code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines()
        .enumerate()
        .map(|(number, line)| (number + 1, line))
        .filter(move |(_, line)| {
            let is_fence = line.trim_start().starts_with("```");
            is_code ^= is_fence;
            !is_fence && !is_code
        })
}

/// Returns the links of a page.
pub(super) fn of(text: &str) -> Vec<Link<'_>> {
    let mut links = Vec::new();
    for (line, content) in prose(text) {
        // Every other part is between backticks.
        for part in content.split('`').step_by(2) {
            let mut rest = part;
            while let Some((_, after)) = rest.split_once("](") {
                let Some((target, after)) = after.split_once(')') else {
                    break;
                };
                let target = target.split_whitespace().next().unwrap_or_default();
                links.push(Link { line, target });
                rest = after;
            }
        }
    }
    links
}

/// Returns the anchors of a page's headings, as GitHub and mdBook make them.
pub(super) fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut anchors = BTreeSet::new();
    for (_, line) in prose(text) {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let anchor = anchor(heading.trim());
        let times = seen.entry(anchor.clone()).or_default();
        anchors.insert(match *times {
            0 => anchor,
            times => format!("{anchor}-{times}"),
        });
        *times += 1;
    }
    anchors
}

fn anchor(heading: &str) -> String {
    heading
        .chars()
        .filter_map(|character| match character {
            ' ' => Some('-'),
            '-' | '_' => Some(character),
            _ if character.is_alphanumeric() => Some(character.to_ascii_lowercase()),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_outside_of_code() {
        let page = "See [a](a.md) and [`b`](b.md#x \"title\").\n\
                    `[c](c.md)`\n```\n[d](d.md)\n```\n![e](e.svg)\n";
        let links: Vec<_> = of(page)
            .into_iter()
            .map(|link| (link.line, link.target))
            .collect();
        assert_eq!(links, [(1, "a.md"), (1, "b.md#x"), (6, "e.svg")]);
    }

    #[test]
    fn headings_have_the_anchors_that_readers_link_to() {
        let page = "# The store\n## `podvisor run`, and more\n```\n# code\n```\n## Same\n## Same\n";
        let expected = ["podvisor-run-and-more", "same", "same-1", "the-store"];
        assert_eq!(anchors(page), expected.map(str::to_owned).into());
    }
}
