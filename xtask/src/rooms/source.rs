//! A source file as tokens: enough of Rust to find the paths in it.

/// A token. Comments, texts and numbers are none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Token {
    Name(String),
    /// `::`
    Path,
    Sign(char),
}

/// Returns the tokens of a file, without its unit tests.
pub(crate) fn tokens(text: &str) -> Vec<Token> {
    let text = &text[..unit_tests(text)];
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let len = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if first == '"' {
            quoted(rest)
        } else if first == '\'' {
            letter(rest)
        } else if first.is_alphanumeric() || first == '_' {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
            let name = &rest[..end.unwrap_or(rest.len())];
            let raw = &rest[name.len()..];
            match name {
                "r" | "br" if raw.starts_with(['"', '#']) => name.len() + raw_quoted(raw),
                _ => {
                    tokens.push(Token::Name(name.to_owned()));
                    name.len()
                }
            }
        } else if rest.starts_with("::") {
            tokens.push(Token::Path);
            2
        } else {
            if !first.is_whitespace() {
                tokens.push(Token::Sign(first));
            }
            first.len_utf8()
        };
        rest = &rest[len..];
    }
    tokens
}

/// Returns where the module of unit tests begins, or where the file ends.
fn unit_tests(text: &str) -> usize {
    const MARK: &str = "#[cfg(test)]\n";
    let mut marks = text.match_indices(MARK).map(|(at, _)| at);
    let found = marks.find(|at| {
        let line = text[at + MARK.len()..].lines().next().unwrap_or_default();
        line.contains("mod ") && line.ends_with('{')
    });
    found.unwrap_or(text.len())
}

/// Returns the length of the quoted text at the beginning.
fn quoted(text: &str) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Returns the length of the raw text at the beginning, after its `r`.
fn raw_quoted(text: &str) -> usize {
    let signs = text.len() - text.trim_start_matches('#').len();
    let end = format!("\"{}", "#".repeat(signs));
    let begin = signs + 1;
    let found = text.get(begin..).and_then(|inside| inside.find(&end));
    found.map_or(text.len(), |at| begin + at + end.len())
}

/// Returns the length of the character at the beginning, or 1 if it is a lifetime.
fn letter(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), Some((escaped, c))) => {
            let after = escaped + c.len_utf8();
            text[after..]
                .find('\'')
                .map_or(text.len(), |end| after + end + 1)
        }
        (Some(_), Some((end, '\''))) => end + 1,
        _ => 1,
    }
}
