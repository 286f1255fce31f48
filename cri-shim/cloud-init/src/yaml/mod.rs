//! YAML as users write it for cloud-init: read into a tree, merged, and written again.
//!
//! cloud-init reads YAML 1.1 with Python's types, in which `yes` is true, `0644` is octal and
//! `12:30` is a number. To decide about types here would be to change them, so a scalar keeps its
//! text and whether it was quoted, and what cloud-init reads in the end means what was written.

mod parse;
mod write;

use std::collections::HashMap;

use serde_json::{Map, Number, Value};

pub use parse::YamlError;

/// A node of a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// A text, number, truth value or nothing.
    Scalar(Scalar),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping in the order of its keys, each of which is there once.
    Map(Vec<(Scalar, Node)>),
}

/// A scalar by its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scalar {
    text: String,
    kind: Kind,
}

/// What says the type of a scalar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The text itself, in YAML's eyes.
    Plain,
    /// It is a text.
    Quoted,
    /// A tag of YAML, such as `!!binary`.
    Tagged(&'static str),
}

impl Scalar {
    /// A text.
    #[must_use]
    pub fn text(text: &str) -> Self {
        Self {
            text: text.to_owned(),
            kind: Kind::Quoted,
        }
    }

    fn plain(text: &str) -> Self {
        Self {
            text: text.to_owned(),
            kind: Kind::Plain,
        }
    }

    /// Whether it is the same key as `other`.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.text == other.text
    }

    fn is_null(&self) -> bool {
        self.kind == Kind::Plain
            && matches!(self.text.as_str(), "" | "~" | "null" | "Null" | "NULL")
    }

    /// The value by JSON's types, in which more is a text than in YAML 1.1.
    fn to_json(&self) -> Value {
        if self.kind != Kind::Plain {
            return Value::String(self.text.clone());
        }
        let number = || self.text.parse::<Number>().ok().map(Value::Number);
        match self.text.as_str() {
            "true" | "True" | "TRUE" => Value::Bool(true),
            "false" | "False" | "FALSE" => Value::Bool(false),
            _ if self.is_null() => Value::Null,
            text => number().unwrap_or_else(|| Value::String(text.to_owned())),
        }
    }
}

impl Node {
    /// Reads a document.
    ///
    /// # Errors
    ///
    /// The text is not YAML, or is more than a guest's configuration: several documents, other
    /// tags than YAML's own, keys that are no scalars or are there twice, or aliases that refer to
    /// themselves or come to too much.
    pub fn parse(text: &str) -> Result<Self, YamlError> {
        parse::parse(text)
    }

    /// Writes the document in a form that each version of YAML reads in the same way.
    #[must_use]
    pub fn write(&self) -> String {
        write::write(self)
    }

    /// A text.
    #[must_use]
    pub fn text(text: &str) -> Self {
        Self::Scalar(Scalar::text(text))
    }

    /// A mapping of these keys.
    pub fn map<'a>(entries: impl IntoIterator<Item = (&'a str, Node)>) -> Self {
        let entries = entries.into_iter();
        Self::Map(
            entries
                .map(|(key, value)| (Scalar::text(key), value))
                .collect(),
        )
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Scalar(scalar) => scalar.is_null(),
            Self::List(list) => list.is_empty(),
            Self::Map(map) => map.is_empty(),
        }
    }

    /// What there is under a key of a mapping.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Node> {
        let Self::Map(map) = self else { return None };
        let found = map.iter().find(|(known, _)| known.text == key);
        found.map(|(_, value)| value)
    }

    /// What there is under a key of a mapping, to be changed.
    pub(crate) fn get_mut(&mut self, key: &str) -> Option<&mut Node> {
        let Self::Map(map) = self else { return None };
        let found = map.iter_mut().find(|(known, _)| known.text == key);
        found.map(|(_, value)| value)
    }

    /// The text of a scalar.
    pub(crate) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Scalar(scalar) if !scalar.is_null() => Some(&scalar.text),
            _ => None,
        }
    }

    /// Merges `later` over this: mappings key by key, lists one behind the other; of all else the
    /// later one is taken. Nothing in place of a list is an empty one.
    #[must_use]
    pub fn merge(self, later: Self) -> Self {
        match (self, later) {
            (Self::Map(mut map), Self::Map(later)) => {
                let places = map.iter().enumerate();
                let places: HashMap<String, usize> = places
                    .map(|(place, (key, _))| (key.text.clone(), place))
                    .collect();
                for (key, value) in later {
                    match places.get(&key.text).and_then(|place| map.get_mut(*place)) {
                        Some((_, known)) => {
                            let old = std::mem::replace(known, Self::List(Vec::new()));
                            *known = old.merge(value);
                        }
                        None => map.push((key, value)),
                    }
                }
                Self::Map(map)
            }
            (Self::List(mut list), Self::List(mut later)) => {
                list.append(&mut later);
                Self::List(list)
            }
            (Self::List(list), Self::Scalar(later)) if later.is_null() => Self::List(list),
            (_, later) => later,
        }
    }

    /// The document by JSON's types.
    #[must_use]
    pub fn to_json(&self) -> Value {
        match self {
            Self::Scalar(scalar) => scalar.to_json(),
            Self::List(list) => Value::Array(list.iter().map(Self::to_json).collect()),
            Self::Map(map) => {
                let entry = |(key, value): &(Scalar, Node)| (key.text.clone(), value.to_json());
                Value::Object(map.iter().map(entry).collect::<Map<String, Value>>())
            }
        }
    }
}

impl From<Value> for Node {
    fn from(value: Value) -> Self {
        match value {
            Value::Null => Self::Scalar(Scalar::plain("null")),
            Value::Bool(value) => Self::Scalar(Scalar::plain(&value.to_string())),
            Value::Number(number) => Self::Scalar(Scalar::plain(&number.to_string())),
            Value::String(text) => Self::text(&text),
            Value::Array(list) => Self::List(list.into_iter().map(Self::from).collect()),
            Value::Object(map) => {
                let entry = |(key, value): (String, Value)| (Scalar::text(&key), value.into());
                Self::Map(map.into_iter().map(entry).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests;
