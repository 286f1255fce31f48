//! The user's own configuration, and what is added to it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::SeedError;
use crate::yaml::Node;

/// What the first line of a configuration says.
pub(crate) const HEADER: &str = "#cloud-config";

/// What else user-data begins with: comments that name a form, MIME, Ignition, tags of Windows, and
/// what gzip writes.
const OTHERS: [&[u8]; 7] = [
    b"#",
    b"Content-Type:",
    b"MIME-Version:",
    b"{",
    b"<",
    b"rem ",
    &[0x1f, 0x8b],
];

/// A user's configuration, by where it comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UserData {
    /// There is none.
    #[default]
    None,
    /// Parts of a configuration, which are merged.
    Merged {
        /// Keys of the configuration with YAML as their values, as in a ConfigMap.
        source: BTreeMap<String, String>,
        /// A whole configuration, in YAML.
        inline: Option<String>,
        /// Whether the inline one replaces the other one.
        overwrite: bool,
    },
    /// A script that is run as it is, but for `@virtlet-mount-script@` in it.
    Script(String),
    /// A document of any kind that cloud-init knows.
    Document(Vec<u8>),
}

/// User-data as cloud-init gets it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Parsed {
    /// A configuration to which others can be added; with the document that it was, if it was one.
    Config(Node, Option<Vec<u8>>),
    /// Something else, beside which others stand.
    Verbatim(Vec<u8>),
    /// A script into which others can be put.
    Script(String),
}

impl UserData {
    pub(crate) fn parse(&self, errors: &mut Vec<SeedError>) -> Parsed {
        match self {
            Self::None => Parsed::Config(empty(), None),
            Self::Script(script) => Parsed::Script(script.clone()),
            Self::Merged {
                source,
                inline,
                overwrite,
            } => {
                let inline = inline
                    .as_deref()
                    .map(|text| map(text, "the user-data", errors));
                let config = match inline {
                    Some(inline) if *overwrite => inline,
                    Some(inline) => self::source(source, errors).merge(inline),
                    None => self::source(source, errors),
                };
                Parsed::Config(config, None)
            }
            Self::Document(bytes) => document(bytes, errors),
        }
    }
}

fn empty() -> Node {
    Node::Map(Vec::new())
}

fn source(source: &BTreeMap<String, String>, errors: &mut Vec<SeedError>) -> Node {
    let mut entries = Vec::new();
    for (key, text) in source {
        match Node::parse(text) {
            Ok(node) => entries.push((key.as_str(), node)),
            Err(error) => errors.push(SeedError::Yaml {
                what: format!("the key {key:?} of the user-data"),
                error,
            }),
        }
    }
    Node::map(entries)
}

/// Reads a mapping; nothing is an empty one.
pub(crate) fn map(text: &str, what: &str, errors: &mut Vec<SeedError>) -> Node {
    let what = || what.to_owned();
    match Node::parse(text) {
        Ok(node @ Node::Map(_)) => return node,
        Ok(node) if node.is_empty() => {}
        Ok(_) => errors.push(SeedError::NotAMap(what())),
        Err(error) => errors.push(SeedError::Yaml {
            what: what(),
            error,
        }),
    }
    empty()
}

fn document(bytes: &[u8], errors: &mut Vec<SeedError>) -> Parsed {
    let first = bytes
        .split(|byte| *byte == b'\n')
        .next()
        .unwrap_or_default();
    if first.trim_ascii_end() == HEADER.as_bytes() {
        let Ok(text) = std::str::from_utf8(bytes) else {
            errors.push(SeedError::NotText);
            return Parsed::Config(empty(), None);
        };
        let config = map(text, "the user-data", errors);
        return Parsed::Config(config, Some(bytes.to_vec()));
    }
    let is_known = OTHERS.iter().any(|start| bytes.starts_with(start));
    if !bytes.is_empty() && !is_known {
        errors.push(SeedError::UnknownUserData);
    }
    Parsed::Verbatim(bytes.to_vec())
}
