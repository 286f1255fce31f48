//! GRUB's `test` and `[`.

use super::run::Run;

/// Evaluates an expression: `-a` before `-o`, `!` before both. What is no expression is false.
pub(super) fn test(run: &Run<'_>, arguments: &[String]) -> bool {
    let mut rest: &[String] = arguments;
    let mut any = false;
    let mut all = true;
    let mut is_negated = false;
    while let Some((first, tail)) = rest.split_first() {
        match first.as_str() {
            "!" if !tail.is_empty() => {
                is_negated = !is_negated;
                rest = tail;
                continue;
            }
            "-a" => {
                rest = tail;
                continue;
            }
            "-o" => {
                any |= all;
                all = true;
                rest = tail;
                continue;
            }
            _ => {}
        }
        let (value, used) = term(run, rest);
        all &= value != is_negated;
        is_negated = false;
        rest = rest.get(used..).unwrap_or_default();
    }
    !arguments.is_empty() && (any || all)
}

/// Evaluates one term; returns its value and the number of its words.
fn term(run: &Run<'_>, words: &[String]) -> (bool, usize) {
    if let [left, operator, right, ..] = words
        && let Some(value) = compare(left, operator, right)
    {
        return (value, 3);
    }
    if let [operator, operand, ..] = words {
        let value = match operator.as_str() {
            "-z" => Some(operand.is_empty()),
            "-n" => Some(!operand.is_empty()),
            "-e" => Some(run.size_of(operand).is_some()),
            "-f" => Some(run.size_of(operand).is_some_and(|size| size.is_some())),
            "-s" => Some(run.size_of(operand).flatten().is_some_and(|size| size > 0)),
            "-d" => Some(run.size_of(operand).is_some_and(|size| size.is_none())),
            _ => None,
        };
        if let Some(value) = value {
            return (value, 2);
        }
    }
    match words {
        // `[ -z $x ]` of an empty variable.
        [operator] if operator == "-z" => (true, 1),
        [operator] if operator == "-n" => (false, 1),
        [word, ..] => (!word.is_empty(), 1),
        [] => (false, 0),
    }
}

fn compare(left: &str, operator: &str, right: &str) -> Option<bool> {
    let number = |text: &str| {
        let text = text.trim();
        let digits = text.strip_prefix('-').unwrap_or(text);
        let end = digits.find(|letter: char| !letter.is_ascii_digit());
        let value: i64 = digits.get(..end.unwrap_or(digits.len()))?.parse().ok()?;
        Some(if text.starts_with('-') { -value } else { value })
    };
    let (a, b) = (number(left).unwrap_or(0), number(right).unwrap_or(0));
    Some(match operator {
        "=" | "==" => left == right,
        "!=" => left != right,
        "<" => left < right,
        ">" => left > right,
        "-eq" => a == b,
        "-ne" => a != b,
        "-lt" => a < b,
        "-le" => a <= b,
        "-gt" => a > b,
        "-ge" => a >= b,
        _ => return None,
    })
}
