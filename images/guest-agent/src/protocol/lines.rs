//! Bytes to lines.

/// Most bytes of a request: a program's input of 1 MiB as base64, with words of a third of that.
pub const MAX_REQUEST: usize = 4 << 20;

/// What makes the agent forget a request that it has a part of.
const FORGET: u8 = 0xff;

/// A part of what the host wrote.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Item {
    /// A line, without its end.
    Line(Vec<u8>),
    /// A line that was too long; it is not kept.
    TooLong,
}

/// Takes bytes apart.
#[derive(Debug)]
pub(super) struct Lines {
    most: usize,
    line: Vec<u8>,
    is_too_long: bool,
}

impl Lines {
    /// Takes lines of up to so many bytes.
    pub(super) fn of(most: usize) -> Self {
        Self {
            most,
            line: Vec::new(),
            is_too_long: false,
        }
    }

    /// Returns the most bytes of a line.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Forgets the line that has begun.
    pub(super) fn forget(&mut self) {
        *self = Self::of(self.most);
    }

    /// Takes bytes up to the end of the next line; returns how many, and the line if it has ended.
    pub(super) fn take(&mut self, bytes: &[u8]) -> (usize, Option<Item>) {
        let is_end = |byte: &u8| matches!(*byte, b'\n' | FORGET);
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
            FORGET => None,
            _ if is_too_long => Some(Item::TooLong),
            _ if line.trim_ascii().is_empty() => None,
            _ => Some(Item::Line(line)),
        };
        (part.len().saturating_add(1), item)
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
    fn a_part_before_the_delimiter_is_forgotten_and_so_are_empty_lines() {
        let mut lines = Lines::of(8);
        let found = items(&mut lines, b"{\"exe\xff{}\r\n\n \nrest");
        assert_eq!(found, [Item::Line(b"{}\r".to_vec())]);
        lines.forget();
        assert_eq!(items(&mut lines, b"1\n"), [Item::Line(b"1".to_vec())]);
    }

    #[test]
    fn a_line_that_is_too_long_is_one_item_and_not_kept() {
        let mut lines = Lines::of(4);
        assert_eq!(items(&mut lines, b"12345678"), []);
        assert_eq!(lines.line.capacity(), 0);
        assert_eq!(
            items(&mut lines, b"9\n1234\n"),
            [Item::TooLong, Item::Line(b"1234".to_vec())]
        );
        // Forgotten as any other.
        assert_eq!(
            items(&mut lines, b"12345\xff1\n"),
            [Item::Line(b"1".to_vec())]
        );
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_are_the_same_lines(
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
