//! From text to a tree, with bounds for all that a text can make of itself.

use std::collections::{HashMap, HashSet};

use granit_parser::{Event, Options, Parser, ScalarStyle, Tag};

use super::{Kind, Node, Scalar};

/// Most bytes of a document.
const MAX_TEXT: usize = 4 << 20;
/// Most nodes of a document, with those that aliases repeat.
const MAX_NODES: usize = 100_000;
/// Most bytes of all texts, with those that aliases repeat.
const MAX_BYTES: usize = 16 << 20;
/// Most mappings and lists within each other.
const MAX_DEPTH: usize = 64;

/// YAML's own tags for scalars.
const TAGS: [&str; 6] = ["binary", "bool", "float", "int", "null", "str"];
/// YAML's own tags for mappings and lists, which say nothing new.
const COLLECTIONS: [&str; 2] = ["map", "seq"];

/// Why a text is not the YAML of a guest's configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum YamlError {
    /// It is not YAML.
    #[error("line {line}: it is not YAML: {reason}")]
    Syntax {
        /// Line in the text.
        line: usize,
        /// What the parser says.
        reason: String,
    },
    /// It is longer than a document may be.
    #[error("{0} bytes: a document has at most {MAX_TEXT}")]
    TooLong(usize),
    /// It comes to too much, for example by aliases of aliases.
    #[error("line {line}: it comes to more than {most} {what}")]
    TooLarge {
        /// Line in the text.
        line: usize,
        /// Of what.
        what: &'static str,
        /// How many there may be.
        most: usize,
    },
    /// It is more than one document.
    #[error("line {0}: a second document begins: only one is read")]
    SecondDocument(usize),
    /// A key is there twice in one mapping.
    #[error("line {line}: the key {key:?} is there twice")]
    DuplicateKey {
        /// Line in the text.
        line: usize,
        /// The key.
        key: String,
    },
    /// A key is a mapping or a list.
    #[error("line {0}: a key is not a scalar")]
    Key(usize),
    /// A tag for a type that cloud-init does not know.
    #[error("line {line}: the tag {tag:?} is not one of YAML's own")]
    Tag {
        /// Line in the text.
        line: usize,
        /// The tag.
        tag: String,
    },
    /// An alias refers to what it is part of.
    #[error("line {0}: an alias refers to itself")]
    Cycle(usize),
}

pub(super) fn parse(text: &str) -> Result<Node, YamlError> {
    if text.len() > MAX_TEXT {
        return Err(YamlError::TooLong(text.len()));
    }
    let mut options = Options::default();
    options.emit_comments = false;
    let mut builder = Builder::default();
    for event in Parser::new_from_str_with_options(text, options) {
        let (event, span) = event.map_err(|error| YamlError::Syntax {
            line: error.marker().line(),
            reason: error.info(),
        })?;
        builder.line = span.start.line();
        builder.take(event)?;
    }
    Ok(builder.document.unwrap_or_else(null))
}

fn null() -> Node {
    Node::Scalar(Scalar::plain("null"))
}

/// A mapping or a list that is not at its end.
#[derive(Debug)]
enum Open {
    List(Vec<Node>),
    Map {
        map: Vec<(Scalar, Node)>,
        /// The key whose value comes next.
        key: Option<Scalar>,
        /// All keys so far.
        known: HashSet<String>,
    },
}

/// How much a node is.
#[derive(Debug, Clone, Copy, Default)]
struct Size {
    nodes: usize,
    bytes: usize,
    depth: usize,
}

#[derive(Debug, Default)]
struct Builder {
    line: usize,
    document: Option<Node>,
    documents: usize,
    open: Vec<(Open, usize)>,
    /// Nodes that aliases can refer to, by the parser's number for them.
    anchors: HashMap<usize, (Node, Size)>,
    size: Size,
}

impl Builder {
    fn take(&mut self, event: Event<'_>) -> Result<(), YamlError> {
        match event {
            Event::DocumentStart(..) => {
                self.documents += 1;
                if self.documents > 1 {
                    return Err(YamlError::SecondDocument(self.line));
                }
                Ok(())
            }
            Event::Scalar(text, style, anchor, tag) => {
                let kind = self.kind(style, tag.as_deref())?;
                let text = text.into_owned();
                self.grow(Size {
                    nodes: 1,
                    bytes: text.len(),
                    depth: 0,
                })?;
                self.put(Node::Scalar(Scalar { text, kind }), anchor)
            }
            Event::SequenceStart(_, anchor, tag) => {
                self.begin(Open::List(Vec::new()), anchor, tag.as_deref())
            }
            Event::MappingStart(_, anchor, tag) => {
                let open = Open::Map {
                    map: Vec::new(),
                    key: None,
                    known: HashSet::new(),
                };
                self.begin(open, anchor, tag.as_deref())
            }
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some((Open::List(list), anchor)) => self.put(Node::List(list), anchor),
                Some((Open::Map { map, .. }, anchor)) => self.put(Node::Map(map), anchor),
                None => Ok(()),
            },
            Event::Alias(anchor) => {
                let Some((node, size)) = self.anchors.get(&anchor) else {
                    return Err(YamlError::Cycle(self.line));
                };
                let (node, size) = (node.clone(), *size);
                self.check_depth(size.depth)?;
                self.grow(size)?;
                self.put(node, 0)
            }
            _ => Ok(()),
        }
    }

    fn begin(&mut self, open: Open, anchor: usize, tag: Option<&Tag>) -> Result<(), YamlError> {
        if let Some(tag) = tag {
            self.own_tag(tag, &COLLECTIONS)?;
        }
        self.check_depth(1)?;
        self.grow(Size {
            nodes: 1,
            ..Size::default()
        })?;
        self.open.push((open, anchor));
        Ok(())
    }

    fn check_depth(&self, more: usize) -> Result<(), YamlError> {
        match self.open.len() + more > MAX_DEPTH {
            true => Err(self.too_large("mappings and lists within each other", MAX_DEPTH)),
            false => Ok(()),
        }
    }

    fn grow(&mut self, more: Size) -> Result<(), YamlError> {
        self.size.nodes += more.nodes;
        self.size.bytes += more.bytes;
        if self.size.nodes > MAX_NODES {
            return Err(self.too_large("nodes", MAX_NODES));
        }
        match self.size.bytes > MAX_BYTES {
            true => Err(self.too_large("bytes", MAX_BYTES)),
            false => Ok(()),
        }
    }

    fn too_large(&self, what: &'static str, most: usize) -> YamlError {
        let line = self.line;
        YamlError::TooLarge { line, what, most }
    }

    /// Puts a node that is complete where it belongs.
    fn put(&mut self, node: Node, anchor: usize) -> Result<(), YamlError> {
        if anchor != 0 {
            // What is kept for aliases counts as well.
            let size = size(&node);
            self.grow(size)?;
            self.anchors.insert(anchor, (node.clone(), size));
        }
        let line = self.line;
        match self.open.last_mut() {
            None => self.document = Some(node),
            Some((Open::List(list), _)) => list.push(node),
            Some((Open::Map { map, key, known }, _)) => match (key.take(), node) {
                (Some(key), node) => map.push((key, node)),
                (None, Node::Scalar(scalar)) => {
                    if !known.insert(scalar.text.clone()) {
                        let key = scalar.text;
                        return Err(YamlError::DuplicateKey { line, key });
                    }
                    *key = Some(scalar);
                }
                (None, _) => return Err(YamlError::Key(line)),
            },
        }
        Ok(())
    }

    fn kind(&self, style: ScalarStyle, tag: Option<&Tag>) -> Result<Kind, YamlError> {
        match tag {
            None if style == ScalarStyle::Plain => Ok(Kind::Plain),
            None => Ok(Kind::Quoted),
            Some(tag) => match self.own_tag(tag, &TAGS)? {
                "str" => Ok(Kind::Quoted),
                name => Ok(Kind::Tagged(name)),
            },
        }
    }

    fn own_tag(&self, tag: &Tag, known: &[&'static str]) -> Result<&'static str, YamlError> {
        let own = known.iter().find(|name| tag.is_yaml_core_schema_tag(name));
        let binary = || {
            let is_binary = tag.handle() == "tag:yaml.org,2002:" && tag.suffix() == "binary";
            (is_binary && known.contains(&"binary")).then_some("binary")
        };
        own.copied().or_else(binary).ok_or_else(|| YamlError::Tag {
            line: self.line,
            tag: tag.original(),
        })
    }
}

fn size(node: &Node) -> Size {
    let sum = |parts: &mut dyn Iterator<Item = Size>| {
        let start = Size {
            nodes: 1,
            ..Size::default()
        };
        let mut sum = parts.fold(start, |sum, part| Size {
            nodes: sum.nodes + part.nodes,
            bytes: sum.bytes + part.bytes,
            depth: sum.depth.max(part.depth),
        });
        sum.depth += 1;
        sum
    };
    match node {
        Node::Scalar(scalar) => Size {
            nodes: 1,
            bytes: scalar.text.len(),
            depth: 0,
        },
        Node::List(list) => sum(&mut list.iter().map(size)),
        Node::Map(map) => sum(&mut map.iter().map(|(key, value)| {
            let value = size(value);
            Size {
                nodes: value.nodes + 1,
                bytes: value.bytes + key.text.len(),
                depth: value.depth,
            }
        })),
    }
}
