//! What processes and guests say, as people may see it.

/// Makes a process's words printable for people: at most `most` characters, and none that a
/// terminal or a log would interpret.
pub(crate) fn printable(said: &str, most: usize) -> String {
    let shown = |c: char| if c.is_control() { ' ' } else { c };
    said.chars().take(most).map(shown).collect()
}
