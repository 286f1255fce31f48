//! The syntax of `grub.cfg`: text to commands. Nothing is executed here.

use std::rc::Rc;

use super::GrubErrorKind;
use crate::limits;

/// A list of commands.
pub(super) type Block = Rc<[Command]>;

/// A command, with the line that it begins on.
#[derive(Debug)]
pub(super) struct Command {
    pub(super) line: usize,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    /// Words, and the block that follows those of `menuentry` and `submenu`.
    Simple {
        words: Vec<Word>,
        block: Option<Block>,
    },
    /// Conditions with what follows each, and what follows none.
    If {
        arms: Vec<(Block, Block)>,
        otherwise: Block,
    },
    /// A function's definition.
    Function { name: String, body: Block },
    /// `while`, `until` or `for`: an error when it is executed.
    Loop { keyword: String },
}

/// A word before its variables are replaced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Word(pub(super) Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Text as it is; the quoted one makes a word even if it is empty.
    Text { text: String, quoted: bool },
    /// A variable; unquoted, its value is split at white space.
    Variable { name: String, quoted: bool },
}

impl Word {
    /// The word if nothing in it is quoted or a variable.
    pub(super) fn bare(&self) -> Option<&str> {
        match self.0.as_slice() {
            [
                Part::Text {
                    text,
                    quoted: false,
                },
            ] => Some(text),
            _ => None,
        }
    }
}

#[derive(Debug)]
enum Token {
    Word(Word),
    Separator,
}

/// An error with its line.
pub(super) type At = (usize, GrubErrorKind);

/// Parses a whole file.
pub(super) fn parse(text: &str) -> Result<Block, At> {
    let mut parser = Parser {
        tokens: tokens(text)?,
        next: 0,
        depth: 0,
    };
    let block = parser.block(&[])?;
    match parser.peek() {
        None => Ok(block),
        Some((line, _)) => Err((line, GrubErrorKind::Syntax("a block ends that never began"))),
    }
}

fn tokens(text: &str) -> Result<Vec<(usize, Token)>, At> {
    let mut tokens = Vec::new();
    let mut letters = text.chars().peekable();
    let mut line = 1;
    while let Some(letter) = letters.peek().copied() {
        match letter {
            '\n' | ';' => {
                letters.next();
                tokens.push((line, Token::Separator));
                line += usize::from(letter == '\n');
            }
            letter if letter.is_whitespace() => {
                letters.next();
            }
            '#' => while letters.next_if(|letter| *letter != '\n').is_some() {},
            _ => {
                let begin = line;
                if let Some(word) = word(&mut letters, &mut line)? {
                    tokens.push((begin, Token::Word(word)));
                }
            }
        }
    }
    Ok(tokens)
}

type Letters<'a> = std::iter::Peekable<std::str::Chars<'a>>;

/// Reads one word; `None` if only a line continuation was there.
fn word(letters: &mut Letters<'_>, line: &mut usize) -> Result<Option<Word>, At> {
    let begin = *line;
    let mut parts = Vec::new();
    let mut plain = String::new();
    let flush = |plain: &mut String, parts: &mut Vec<Part>| {
        if !plain.is_empty() {
            let text = std::mem::take(plain);
            parts.push(Part::Text {
                text,
                quoted: false,
            });
        }
    };
    while let Some(letter) = letters.peek().copied() {
        match letter {
            '\n' | ';' => break,
            letter if letter.is_whitespace() => break,
            '\\' => {
                letters.next();
                match letters.next() {
                    Some('\n') => *line += 1,
                    Some(escaped) => {
                        flush(&mut plain, &mut parts);
                        parts.push(Part::Text {
                            text: escaped.to_string(),
                            quoted: true,
                        });
                    }
                    None => {}
                }
            }
            '\'' => {
                letters.next();
                flush(&mut plain, &mut parts);
                let mut text = String::new();
                loop {
                    match letters.next() {
                        Some('\'') => break,
                        Some(letter) => {
                            *line += usize::from(letter == '\n');
                            text.push(letter);
                        }
                        None => return Err((begin, GrubErrorKind::Syntax("a quote has no end"))),
                    }
                }
                parts.push(Part::Text { text, quoted: true });
            }
            '"' => {
                letters.next();
                flush(&mut plain, &mut parts);
                double_quoted(letters, line, &mut parts)?;
            }
            '$' => {
                letters.next();
                match variable(letters) {
                    Some(name) => {
                        flush(&mut plain, &mut parts);
                        parts.push(Part::Variable {
                            name,
                            quoted: false,
                        });
                    }
                    None => plain.push('$'),
                }
            }
            letter => {
                letters.next();
                plain.push(letter);
            }
        }
    }
    flush(&mut plain, &mut parts);
    Ok((!parts.is_empty()).then_some(Word(parts)))
}

/// Reads up to the closing `"`, whose opening one was read.
fn double_quoted(
    letters: &mut Letters<'_>,
    line: &mut usize,
    parts: &mut Vec<Part>,
) -> Result<(), At> {
    let begin = *line;
    let mut text = String::new();
    loop {
        let Some(letter) = letters.next() else {
            return Err((begin, GrubErrorKind::Syntax("a quote has no end")));
        };
        match letter {
            '"' => {
                parts.push(Part::Text { text, quoted: true });
                return Ok(());
            }
            '\\' => match letters.next() {
                Some('\n') => *line += 1,
                Some(escaped @ ('"' | '\\' | '$')) => text.push(escaped),
                Some(other) => text.extend(['\\', other]),
                None => {}
            },
            '$' => match variable(letters) {
                Some(name) => {
                    let text = std::mem::take(&mut text);
                    parts.push(Part::Text { text, quoted: true });
                    parts.push(Part::Variable { name, quoted: true });
                }
                None => text.push('$'),
            },
            letter => {
                *line += usize::from(letter == '\n');
                text.push(letter);
            }
        }
    }
}

/// Reads a variable's name after `$`; `None` if none is there.
fn variable(letters: &mut Letters<'_>) -> Option<String> {
    let mut name = String::new();
    match letters.peek().copied()? {
        '{' => {
            letters.next();
            while let Some(letter) = letters.next_if(|letter| !matches!(letter, '}' | '\n')) {
                name.push(letter);
            }
            letters.next_if_eq(&'}');
        }
        letter @ ('?' | '@' | '#' | '*') => {
            letters.next();
            name.push(letter);
        }
        letter if letter.is_ascii_digit() => {
            letters.next();
            name.push(letter);
        }
        _ => {
            let is_name = |letter: &char| letter.is_ascii_alphanumeric() || *letter == '_';
            while let Some(letter) = letters.next_if(is_name) {
                name.push(letter);
            }
        }
    }
    (!name.is_empty()).then_some(name)
}

struct Parser {
    tokens: Vec<(usize, Token)>,
    next: usize,
    depth: usize,
}

impl Parser {
    fn peek(&self) -> Option<(usize, Option<&Word>)> {
        let (line, token) = self.tokens.get(self.next)?;
        let word = match token {
            Token::Word(word) => Some(word),
            Token::Separator => None,
        };
        Some((*line, word))
    }

    /// The next word if it is bare.
    fn keyword(&self) -> Option<&str> {
        self.peek()?.1?.bare()
    }

    fn line(&self) -> usize {
        let last = self.tokens.last().map_or(1, |(line, _)| *line);
        self.peek().map_or(last, |(line, _)| line)
    }

    fn expect(&mut self, keyword: &str, error: &'static str) -> Result<(), At> {
        self.skip_separators();
        if self.keyword() != Some(keyword) {
            return Err((self.line(), GrubErrorKind::Syntax(error)));
        }
        self.next += 1;
        Ok(())
    }

    fn skip_separators(&mut self) {
        while let Some((_, None)) = self.peek() {
            self.next += 1;
        }
    }

    /// Reads commands up to one of these words, which is left, or the end.
    fn block(&mut self, ends: &[&str]) -> Result<Block, At> {
        if self.depth >= limits::NESTING {
            return Err((self.line(), GrubErrorKind::Nesting));
        }
        self.depth += 1;
        let mut commands = Vec::new();
        loop {
            self.skip_separators();
            let Some((line, _)) = self.peek() else { break };
            if let Some(keyword) = self.keyword() {
                if ends.contains(&keyword) {
                    break;
                }
                if matches!(
                    keyword,
                    "}" | "fi" | "else" | "elif" | "then" | "done" | "do"
                ) {
                    let error = GrubErrorKind::Syntax("a block ends that never began");
                    return Err((line, error));
                }
            }
            let what = self.command()?;
            commands.push(Command { line, what });
        }
        self.depth -= 1;
        Ok(commands.into())
    }

    fn command(&mut self) -> Result<What, At> {
        match self.keyword() {
            Some("if") => {
                self.next += 1;
                self.condition()
            }
            Some("function") => {
                self.next += 1;
                let name = match self.keyword() {
                    Some(name) => name.to_owned(),
                    None => {
                        let error = GrubErrorKind::Syntax("a function has no name");
                        return Err((self.line(), error));
                    }
                };
                self.next += 1;
                self.expect("{", "a function has no `{`")?;
                let body = self.block(&["}"])?;
                self.expect("}", "a function's block has no end")?;
                Ok(What::Function { name, body })
            }
            Some(keyword @ ("while" | "until" | "for")) => {
                let keyword = keyword.to_owned();
                self.next += 1;
                while self.peek().is_some() && self.keyword() != Some("do") {
                    self.next += 1;
                }
                self.expect("do", "a loop has no `do`")?;
                self.block(&["done"])?;
                self.expect("done", "a loop has no `done`")?;
                Ok(What::Loop { keyword })
            }
            _ => self.simple(),
        }
    }

    fn condition(&mut self) -> Result<What, At> {
        let mut arms = Vec::new();
        loop {
            let condition = self.block(&["then"])?;
            self.expect("then", "an `if` has no `then`")?;
            let body = self.block(&["elif", "else", "fi"])?;
            arms.push((condition, body));
            if self.keyword() != Some("elif") {
                break;
            }
            self.next += 1;
        }
        let mut otherwise: Block = Rc::from([]);
        if self.keyword() == Some("else") {
            self.next += 1;
            otherwise = self.block(&["fi"])?;
        }
        self.expect("fi", "an `if` has no `fi`")?;
        Ok(What::If { arms, otherwise })
    }

    fn simple(&mut self) -> Result<What, At> {
        let mut words: Vec<Word> = Vec::new();
        let mut block = None;
        while let Some((_, Some(word))) = self.peek() {
            match word.bare() {
                Some("{") => {
                    self.next += 1;
                    block = Some(self.block(&["}"])?);
                    self.expect("}", "a block has no end")?;
                    break;
                }
                Some("}") => break,
                _ => {
                    words.push(word.clone());
                    self.next += 1;
                }
            }
        }
        Ok(What::Simple { words, block })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> At {
        parse(text).unwrap_err()
    }

    #[test]
    fn words_keep_their_quotes_and_variables_apart() {
        let text = |text: &str, quoted| Part::Text {
            text: text.to_owned(),
            quoted,
        };
        let variable = |name: &str, quoted| Part::Variable {
            name: name.to_owned(),
            quoted,
        };
        let block = parse("a'b c'$d\"e ${f}\"\\ g # no word\n").unwrap();
        let What::Simple { words, .. } = &block[0].what else {
            panic!("{block:?}")
        };
        let parts = [
            text("a", false),
            text("b c", true),
            variable("d", false),
            text("e ", true),
            variable("f", true),
            text("", true),
            text(" ", true),
            text("g", false),
        ];
        assert_eq!(words, &[Word(parts.to_vec())]);
    }

    #[test]
    fn blocks_conditions_and_functions_nest() {
        let text = "function f {\n echo 1; }\nif [ a = b ]; then\n x\nelif y; then z; else\n w\nfi\n\
                    submenu s { menuentry 't' --id u {\n linux /k\n}\n}\n";
        let block = parse(text).unwrap();
        let lines: Vec<usize> = block.iter().map(|command| command.line).collect();
        assert_eq!(lines, [1, 3, 8]);
        let What::If { arms, otherwise } = &block[1].what else {
            panic!("{block:?}")
        };
        assert_eq!((arms.len(), otherwise.len()), (2, 1));
        let What::Simple {
            block: Some(inner), ..
        } = &block[2].what
        else {
            panic!("{block:?}")
        };
        assert_eq!(inner.len(), 1);
    }

    #[test]
    fn broken_syntax_names_its_line() {
        for (text, line) in [
            ("\n'abc", 2),
            ("set a=\"x\n", 1),
            ("if true; then\n echo\n", 3),
            ("menuentry x {\n linux /k\n", 3),
            ("echo\nfi\n", 2),
            ("}\n", 1),
            ("function {\n}\n", 1),
        ] {
            let (at, kind) = error(text);
            let lines = text.lines().count();
            assert!(at == line || at == lines, "{text:?} at {at}: {kind:?}");
            assert!(
                matches!(kind, GrubErrorKind::Syntax(_)),
                "{text:?}: {kind:?}"
            );
        }
    }

    #[test]
    fn blocks_end_before_the_stack_does() {
        let text = "if true; then\n".repeat(5000);
        assert_eq!(error(&text).1, GrubErrorKind::Nesting);
        let text = "submenu x {\n".repeat(5000);
        assert_eq!(error(&text).1, GrubErrorKind::Nesting);
    }
}
