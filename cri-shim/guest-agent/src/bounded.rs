//! Texts and lists of limited size, which are cut off while they are read: nothing larger is ever
//! in memory.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, SeqAccess, Visitor};

/// The longest text in characters.
const MAX_TEXT: usize = 512;

/// The longest list.
pub(crate) const MAX_LIST: usize = 128;

/// A text that can be shown.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Text(pub(crate) String);

impl Text {
    pub(crate) fn new(said: &str) -> Self {
        let shown = |c: char| if c.is_control() { ' ' } else { c };
        Self(said.chars().take(MAX_TEXT).map(shown).collect())
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Said;
        impl Visitor<'_> for Said {
            type Value = Text;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_str<E: Error>(self, said: &str) -> Result<Text, E> {
                Ok(Text::new(said))
            }
        }
        from.deserialize_str(Said)
    }
}

/// The first items of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

impl<T> Default for List<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Items<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Items<T> {
            type Value = List<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<List<T>, A::Error> {
                let mut list = Vec::new();
                while list.len() < MAX_LIST {
                    match items.next_element()? {
                        Some(item) => list.push(item),
                        None => return Ok(List(list)),
                    }
                }
                while items.next_element::<IgnoredAny>()?.is_some() {}
                Ok(List(list))
            }
        }
        from.deserialize_seq(Items(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_and_lists_are_cut_off() {
        let text = format!("\"{}\"", "x".repeat(2 * MAX_TEXT));
        let text: Text = serde_json::from_str(&text).unwrap();
        assert_eq!(text.0.len(), MAX_TEXT);
        let numbers: Vec<usize> = (0..2 * MAX_LIST).collect();
        let numbers = serde_json::to_string(&numbers).unwrap();
        let list: List<usize> = serde_json::from_str(&numbers).unwrap();
        assert_eq!(list.0.len(), MAX_LIST);
    }

    #[test]
    fn a_terminals_escapes_do_not_come_through() {
        let text: Text = serde_json::from_str(r#""a\u001b[2Jb\n\u009b""#).unwrap();
        assert_eq!(text.0, "a [2Jb  ");
    }
}
