//! Bytes to answers. An answer is a line of JSON; a byte 0xFF before it says that all before is of
//! no meaning.

/// The longest answer in bytes. Output of programs comes in one answer, as base64.
pub const MAX_ANSWER: usize = 8 << 20;

/// What the agent writes before an answer that is in step.
const DELIMITER: u8 = 0xff;

/// A part of what the agent wrote.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Item {
    /// All before is of no meaning.
    Delimiter,
    /// A line, without its end.
    Line(Vec<u8>),
    /// A line that was too long; it is not kept.
    TooLong,
}

/// Takes bytes apart.
#[derive(Debug)]
pub(crate) struct Lines {
    most: usize,
    line: Vec<u8>,
    is_too_long: bool,
}

impl Default for Lines {
    fn default() -> Self {
        Self::of(MAX_ANSWER)
    }
}

impl Lines {
    /// Takes lines of up to so many bytes.
    pub(crate) fn of(most: usize) -> Self {
        Self {
            most,
            line: Vec::new(),
            is_too_long: false,
        }
    }

    /// Takes bytes up to the next item; returns how many, and the item if there is one.
    pub(crate) fn take(&mut self, bytes: &[u8]) -> (usize, Option<Item>) {
        let is_end = |byte: &u8| *byte == b'\n' || *byte == DELIMITER;
        let (part, end) = match bytes.iter().position(is_end) {
            Some(at) => (bytes.get(..at).unwrap_or_default(), bytes.get(at)),
            None => (bytes, None),
        };
        if self.line.len().saturating_add(part.len()) > self.most {
            self.is_too_long = true;
            self.line = Vec::new();
        }
        if !self.is_too_long {
            self.line.extend_from_slice(part);
        }
        let Some(end) = end else {
            return (part.len(), None);
        };
        let line = std::mem::take(&mut self.line);
        let is_too_long = std::mem::take(&mut self.is_too_long);
        let item = match *end {
            DELIMITER => Item::Delimiter,
            _ if is_too_long => Item::TooLong,
            _ => Item::Line(line),
        };
        (part.len().saturating_add(1), Some(item))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn items(lines: &mut Lines, mut bytes: &[u8]) -> Vec<Item> {
        let mut items = Vec::new();
        while !bytes.is_empty() {
            let (count, item) = lines.take(bytes);
            items.extend(item);
            bytes = &bytes[count..];
        }
        items
    }

    #[test]
    fn what_comes_before_a_delimiter_is_dropped() {
        let mut lines = Lines::default();
        let found = items(&mut lines, b"{\"ret\xff{}\nrest");
        assert_eq!(found, [Item::Delimiter, Item::Line(b"{}".to_vec())]);
        assert_eq!(lines.line, b"rest");
    }

    #[test]
    fn a_line_that_is_too_long_is_one_item_and_not_kept() {
        let mut lines = Lines::of(4);
        let found = items(&mut lines, b"12345678");
        assert_eq!(found, []);
        assert_eq!(lines.line.capacity(), 0);
        assert_eq!(
            items(&mut lines, b"9\n1234\n"),
            [Item::TooLong, Item::Line(b"1234".to_vec())]
        );
        // The delimiter ends it, too.
        assert_eq!(
            items(&mut lines, b"12345\xff1\n"),
            [Item::Delimiter, Item::Line(b"1".to_vec())]
        );
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_are_the_same_items(
            bytes in prop::collection::vec(prop_oneof![Just(b'\n'), Just(0xff), Just(b'a')], 0..64),
            size in 1_usize..8,
        ) {
            let whole = items(&mut Lines::of(6), &bytes);
            let mut lines = Lines::of(6);
            let pieces: Vec<_> =
                bytes.chunks(size).flat_map(|piece| items(&mut lines, piece)).collect();
            prop_assert_eq!(whole, pieces);
        }
    }
}
