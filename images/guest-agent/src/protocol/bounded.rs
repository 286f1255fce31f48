//! Texts, lists and bytes of limited size, which are refused while they are read: nothing larger is
//! ever in memory but the request itself.

use std::fmt;
use std::marker::PhantomData;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};

/// Most items of a list.
const MAX_LIST: usize = 4096;

/// Reads a list of at most [`MAX_LIST`] items.
pub(super) fn list<'de, D, T>(from: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Items<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Items<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX_LIST} items")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
            let mut list = Vec::new();
            while let Some(item) = items.next_element()? {
                if list.len() >= MAX_LIST {
                    return Err(A::Error::invalid_length(MAX_LIST + 1, &self));
                }
                list.push(item);
            }
            Ok(list)
        }
    }
    from.deserialize_seq(Items(PhantomData))
}

/// Reads a list that may be missing.
pub(super) fn some_list<'de, D, T>(from: D) -> Result<Option<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    list(from).map(Some)
}

/// Reads a text that goes to the system as it is: without the byte that would end it.
pub(super) fn text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = String::deserialize(from)?;
    match text.contains('\0') {
        true => Err(D::Error::custom("a text has a zero byte")),
        false => Ok(text),
    }
}

/// Texts as [`text`].
pub(super) fn texts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let texts: Vec<String> = list(from)?;
    match texts.iter().any(|text| text.contains('\0')) {
        true => Err(D::Error::custom("a text has a zero byte")),
        false => Ok(texts),
    }
}

/// Reads bytes, as base64.
pub(super) fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    struct Encoded;
    impl Visitor<'_> for Encoded {
        type Value = Vec<u8>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("bytes as base64")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Vec<u8>, E> {
            BASE64.decode(text).map_err(E::custom)
        }
    }
    from.deserialize_str(Encoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_a_bound() {
        let of = |count: usize| {
            let text = serde_json::to_string(&vec![0_u8; count]).unwrap();
            let mut from = serde_json::Deserializer::from_str(&text);
            list::<_, u8>(&mut from).map(|list| list.len())
        };
        assert_eq!(of(MAX_LIST).unwrap(), MAX_LIST);
        let error = of(MAX_LIST + 1).unwrap_err().to_string();
        assert!(error.contains("at most 4096"), "{error}");
    }
}
