//! An error as people read it.

/// Maximum length of an error, in characters: parts of it may come from a registry or a guest.
const ERROR_MAX: usize = 2000;

/// Returns an error and its causes as one line, without control characters.
pub(super) fn message(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        // Some libraries repeat their cause in their own text.
        if text.ends_with(cause.as_str()) {
            continue;
        }
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&cause);
    }
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(clean).take(ERROR_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_bounded_line_without_control_characters() {
        let inner = anyhow::anyhow!("evil \x1b[2J\nname {}", "x".repeat(5000));
        let text = message(&inner.context("cannot pull"));
        assert!(text.starts_with("cannot pull: evil  [2J name xxx"));
        assert_eq!(text.chars().count(), ERROR_MAX);
        assert!(!text.contains(char::is_control));
    }
}
