//! From a tree to text. Collections are written as JSON writes them, which is YAML, too.

use std::fmt::Write as _;

use super::{Kind, Node, Scalar};

pub(super) fn write(node: &Node) -> String {
    let mut text = String::new();
    push(&mut text, node, 0);
    text.push('\n');
    text
}

fn push(text: &mut String, node: &Node, depth: usize) {
    match node {
        Node::Scalar(scalar) => push_scalar(text, scalar),
        Node::List(list) => push_all(text, ('[', ']'), depth, list, |text, node| {
            push(text, node, depth + 1);
        }),
        Node::Map(map) => push_all(text, ('{', '}'), depth, map, |text, (key, value)| {
            push_scalar(text, key);
            text.push_str(": ");
            push(text, value, depth + 1);
        }),
    }
}

fn push_all<T>(
    text: &mut String,
    brackets: (char, char),
    depth: usize,
    parts: &[T],
    mut push: impl FnMut(&mut String, &T),
) {
    text.push(brackets.0);
    for (number, part) in parts.iter().enumerate() {
        text.push_str(if number == 0 { "\n" } else { ",\n" });
        indent(text, depth + 1);
        push(text, part);
    }
    if !parts.is_empty() {
        text.push('\n');
        indent(text, depth);
    }
    text.push(brackets.1);
}

fn indent(text: &mut String, depth: usize) {
    text.extend(std::iter::repeat_n("  ", depth));
}

fn push_scalar(text: &mut String, scalar: &Scalar) {
    match scalar.kind {
        Kind::Plain if scalar.text.is_empty() => text.push_str("null"),
        Kind::Plain if is_plain(&scalar.text) => text.push_str(&scalar.text),
        Kind::Plain | Kind::Quoted => push_quoted(text, &scalar.text),
        Kind::Tagged(tag) => {
            // Writing to a string cannot fail.
            let _ = write!(text, "!!{tag} ");
            push_quoted(text, &scalar.text);
        }
    }
}

/// Whether a plain scalar can be written without quotes between brackets. This holds for all that
/// is not a text in YAML 1.1: numbers, truth values, dates, `~`, `<<` and `=`. Others are texts
/// with quotes as well as without.
fn is_plain(text: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b"_+.~=<-".contains(&byte);
    let is_time = |byte: u8| byte.is_ascii_alphanumeric() || b"_+.-: ".contains(&byte);
    let starts_a_number = text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    let is_marker = text == "-" || text.starts_with("---") || text.starts_with("...");
    let is_safe = text.bytes().all(is_word)
        || (starts_a_number
            && text.bytes().all(is_time)
            && !text.contains(": ")
            && !text.starts_with("- ")
            && !text.ends_with([':', ' ']));
    is_safe && !is_marker
}

/// Writes a text in double quotes. What some version of YAML does not take as it is is escaped:
/// controls, line breaks of all kinds, marks of byte order and what is no character.
fn push_quoted(text: &mut String, value: &str) {
    text.push('"');
    for c in value.chars() {
        match c {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\t' => text.push_str("\\t"),
            '\r' => text.push_str("\\r"),
            '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
                let _ = write!(text, "\\u{:04x}", u32::from(c));
            }
            c if c.is_control() => {
                let _ = write!(text, "\\u{:04x}", u32::from(c));
            }
            c => text.push(c),
        }
    }
    text.push('"');
}
