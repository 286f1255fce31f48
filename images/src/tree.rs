//! The merged file tree of an image, in memory: names and metadata, no file data.
//!
//! Layers are applied base first. Each operation has the same effect as applying a layer to an
//! empty directory would, so the result is what an unpacking tool would leave on disk; but a name
//! is only ever the key of a map here. Data that no name refers to any longer is returned for reuse
//! ([`Tree::take_freed`]).

mod links;

use std::collections::BTreeMap;

/// Entries that a `BTreeMap` allocates together.
const PIECE: usize = 11;

/// Bytes that an allocation takes in addition to its contents.
const ALLOCATION: usize = 24;

/// Bytes of memory that a node takes: in the tree, and in the plan for writing it.
const NODE: usize = size_of::<Option<Node>>() + 144;

/// Bytes of memory that a directory takes in addition to its node, with its first entry.
const DIR: usize = PIECE * size_of::<(Box<[u8]>, Entry)>() + ALLOCATION;

/// Bytes of memory that an entry takes in addition to its name: in a half-full map, and when the
/// directory is written.
const ENTRY: usize = 3 * size_of::<(Box<[u8]>, Entry)>() + 2 * ALLOCATION;

/// Bytes of memory that extended attributes take in addition to their names and values: the map,
/// and each of them.
const XATTRS: usize = PIECE * size_of::<(Box<[u8]>, Box<[u8]>)>() + ALLOCATION;
const XATTR: usize = 2 * size_of::<(Box<[u8]>, Box<[u8]>)>() + 2 * ALLOCATION;

/// Index of a node in a [`Tree`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(u32);

impl NodeId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Metadata that every kind of file has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Meta {
    /// Permission bits with set-id and sticky bits, no type bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time, seconds since 1970.
    pub mtime: i64,
    /// Nanoseconds of the modification time.
    pub mtime_nsec: u32,
    /// Extended attributes by full name, sorted.
    pub xattrs: BTreeMap<Box<[u8]>, Box<[u8]>>,
}

/// Location of a regular file's data in the file system image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Content {
    /// Length in bytes.
    pub size: u64,
    /// Blocks that hold all of it, or all but the tail.
    pub extent: Option<Extent>,
    /// The last, incomplete block, if it is to be stored next to the inode.
    pub tail: Box<[u8]>,
}

/// A run of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// First block.
    pub start: u32,
    /// Number of blocks, at least 1.
    pub blocks: u32,
}

/// A file that is not a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Leaf {
    /// Regular file.
    File(Content),
    /// Symbolic link and its target.
    Symlink(Box<[u8]>),
    /// Character device.
    Char {
        /// Device number.
        major: u32,
        /// Device number.
        minor: u32,
    },
    /// Block device.
    Block {
        /// Device number.
        major: u32,
        /// Device number.
        minor: u32,
    },
    /// Named pipe.
    Fifo,
}

/// A directory's entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) node: NodeId,
    /// The last layer that named the entry or something below it.
    layer: u32,
}

#[derive(Debug)]
pub(crate) enum NodeKind {
    Dir(BTreeMap<Box<[u8]>, Entry>),
    Leaf(Leaf),
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) meta: Meta,
    pub(crate) kind: NodeKind,
    /// Number of names of a leaf.
    pub(crate) links: u32,
    /// The last layer of which it is known that nothing at any depth below this directory is from a
    /// lower layer: it created the directory, or has hidden what was there. As long as that layer
    /// is being applied, what is added below is its own.
    cleared: u32,
}

/// Why an entry does not fit the tree.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum TreeError {
    /// A parent of the entry is a file of the same layer.
    #[error("its parent {0:?} is not a directory but a file")]
    ParentNotDirectory(String),
    /// Symbolic links of the same layer lead in a circle, or too far.
    #[error("its parent {0:?} leads through too many symbolic links")]
    TooManyLinks(String),
    /// A symbolic link of the same layer that is a parent leads to a name that no file can have.
    #[error("its parent {0:?} is a symbolic link to a name of more than 255 bytes")]
    LinkTarget(String),
    /// A hard link's target is missing.
    #[error("hard link to {0:?}, which does not exist")]
    LinkTargetMissing(String),
    /// A hard link's target is a directory.
    #[error("hard link to {0:?}, which is a directory")]
    LinkToDirectory(String),
    /// The root is given as something other than a directory.
    #[error("the root must be a directory")]
    RootNotDirectory,
    /// More nodes than an image can have.
    #[error("too many files")]
    Full,
}

/// A tree of files; node 0 is the root directory.
#[derive(Debug)]
pub(crate) struct Tree {
    nodes: Vec<Option<Node>>,
    vacant: Vec<NodeId>,
    freed: Vec<Content>,
    layer: u32,
    memory: u64,
}

impl Meta {
    /// Bytes of memory that are not in the node itself.
    fn memory(&self) -> usize {
        let xattrs = self.xattrs.iter();
        let each: usize = xattrs
            .map(|(name, value)| name.len() + value.len() + XATTR)
            .sum();
        if each > 0 { each + XATTRS } else { 0 }
    }
}

impl Node {
    fn memory(&self) -> usize {
        let kind = match &self.kind {
            NodeKind::Dir(_) => DIR,
            NodeKind::Leaf(Leaf::Symlink(target)) => target.len() + ALLOCATION,
            NodeKind::Leaf(_) => 0,
        };
        NODE + kind + self.meta.memory()
    }
}

/// Returns the node for a directory that `layer` has files in but does not describe.
fn implied_directory(layer: u32) -> Node {
    let meta = Meta {
        mode: 0o755,
        ..Meta::default()
    };
    Node {
        meta,
        kind: NodeKind::Dir(BTreeMap::new()),
        links: 1,
        cleared: layer,
    }
}

impl Default for Tree {
    fn default() -> Self {
        Self::new()
    }
}

impl Tree {
    /// The root of a tree.
    pub(crate) const ROOT: NodeId = NodeId(0);

    /// An empty root directory, mode 0755, owner 0:0.
    #[must_use]
    pub(crate) fn new() -> Self {
        Self {
            nodes: vec![Some(implied_directory(0))],
            vacant: Vec::new(),
            freed: Vec::new(),
            layer: 0,
            memory: 0,
        }
    }

    /// Starts the next layer: from now on, whiteouts hide what was there before.
    pub(crate) fn begin_layer(&mut self) {
        self.layer += 1;
    }

    /// Number of nodes, the root included.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// Returns the bytes of memory that names and metadata have taken so far, and will take when
    /// the tree is written. Entries that a later layer replaced count, too.
    #[must_use]
    pub(crate) fn memory(&self) -> u64 {
        self.memory
    }

    /// Returns the contents of files that lost their last name since the last call.
    pub(crate) fn take_freed(&mut self) -> Vec<Content> {
        std::mem::take(&mut self.freed)
    }

    /// Creates the directory at `path`, or gives an existing one new metadata. Missing parents are
    /// created with mode 0755, owner 0:0 and time 0. A file of that name is replaced. Symbolic
    /// links above it are followed if they are this layer's, within the tree.
    ///
    /// # Errors
    /// [`TreeError::ParentNotDirectory`], [`TreeError::TooManyLinks`], [`TreeError::LinkTarget`],
    /// [`TreeError::Full`].
    pub(crate) fn put_dir(&mut self, path: &[&[u8]], meta: Meta) -> Result<(), TreeError> {
        let (parents, last) = path.split_at(path.len().saturating_sub(1));
        let dir = self.make_dirs_through_links(parents, last)?;
        self.memory += meta.memory() as u64;
        self.node_mut(dir).meta = meta;
        Ok(())
    }

    /// Puts a file at `path`; an existing entry of that name is replaced.
    ///
    /// # Errors
    /// As [`Tree::put_dir`], and [`TreeError::RootNotDirectory`] for the empty path. The content of
    /// a file that did not fit is freed.
    pub(crate) fn put_leaf(
        &mut self,
        path: &[&[u8]],
        meta: Meta,
        leaf: Leaf,
    ) -> Result<(), TreeError> {
        let placed = match path.split_last() {
            None => Err(TreeError::RootNotDirectory),
            Some((name, parents)) => self.make_parents(parents).map(|dir| (*name, dir)),
        };
        let placed = placed.and_then(|(name, dir)| Ok((name, dir, self.check_room()?)));
        match placed {
            Ok((name, dir, ())) => {
                let node = self.insert_node(Node {
                    meta,
                    kind: NodeKind::Leaf(leaf),
                    links: 1,
                    cleared: self.layer,
                });
                self.bind(dir, name, node);
                Ok(())
            }
            Err(error) => {
                if let Leaf::File(content) = leaf {
                    self.freed.push(content);
                }
                Err(error)
            }
        }
    }

    /// Gives the file at `target` a second name.
    ///
    /// # Errors
    /// As [`Tree::put_leaf`], and if the target is missing or a directory.
    pub(crate) fn put_link(&mut self, path: &[&[u8]], target: &[&[u8]]) -> Result<(), TreeError> {
        let (name, parents) = path.split_last().ok_or(TreeError::RootNotDirectory)?;
        // First, since one of the new directories may hide the target.
        let dir = self.make_parents(parents)?;
        let node = self
            .find_through_links(target)
            .ok_or_else(|| TreeError::LinkTargetMissing(show(target)))?;
        if matches!(self.node(node).kind, NodeKind::Dir(_)) {
            return Err(TreeError::LinkToDirectory(show(target)));
        }
        // Before the old name is removed: it may be the target's last one.
        self.node_mut(node).links += 1;
        self.bind(dir, name, node);
        Ok(())
    }

    /// Hides `path` of the layers below; entries that this layer put there stay (OCI image-spec,
    /// layer.md, "Whiteouts").
    pub(crate) fn whiteout(&mut self, path: &[&[u8]]) {
        let Some((name, parents)) = path.split_last() else {
            return;
        };
        let Some(dir) = self.find_dir(parents) else {
            return;
        };
        let layer = self.layer;
        let Some(entry) = self
            .children(dir)
            .and_then(|children| children.get(*name))
            .copied()
        else {
            return;
        };
        if entry.layer == layer {
            self.hide_lower(entry.node);
        } else {
            self.children_mut(dir).remove(*name);
            self.unlink(entry.node);
        }
    }

    /// Hides everything in the directory at `path` that the layers below put there.
    pub(crate) fn opaque(&mut self, path: &[&[u8]]) {
        if let Some(dir) = self.find_dir(path) {
            self.hide_lower(dir);
        }
    }

    /// Finds the node at `path`; symbolic links are not followed.
    #[must_use]
    pub(crate) fn find(&self, path: &[&[u8]]) -> Option<NodeId> {
        path.iter().try_fold(Self::ROOT, |dir, name| {
            Some(self.children(dir)?.get(*name)?.node)
        })
    }

    pub(crate) fn node(&self, id: NodeId) -> &Node {
        self.nodes[id.index()]
            .as_ref()
            .expect("entries name live nodes")
    }

    pub(crate) fn children(&self, id: NodeId) -> Option<&BTreeMap<Box<[u8]>, Entry>> {
        match &self.node(id).kind {
            NodeKind::Dir(children) => Some(children),
            NodeKind::Leaf(_) => None,
        }
    }

    /// Returns the size of a table of node ids: one more than the largest index ever used.
    pub(crate) fn capacity(&self) -> usize {
        self.nodes.len()
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id.index()]
            .as_mut()
            .expect("entries name live nodes")
    }

    fn children_mut(&mut self, id: NodeId) -> &mut BTreeMap<Box<[u8]>, Entry> {
        match &mut self.node_mut(id).kind {
            NodeKind::Dir(children) => children,
            NodeKind::Leaf(_) => unreachable!("callers pass directories"),
        }
    }

    fn check_room(&self) -> Result<(), TreeError> {
        if self.vacant.is_empty() && self.nodes.len() >= u32::MAX as usize {
            return Err(TreeError::Full);
        }
        Ok(())
    }

    fn insert_node(&mut self, node: Node) -> NodeId {
        self.memory += node.memory() as u64;
        if let Some(id) = self.vacant.pop() {
            self.nodes[id.index()] = Some(node);
            return id;
        }
        // `check_room` was called before.
        let id = NodeId(u32::try_from(self.nodes.len()).unwrap_or(u32::MAX));
        self.nodes.push(Some(node));
        id
    }

    /// Walks to a directory and marks the path as this layer's; missing directories are created.
    /// `replace` says whether a file at the very end is replaced. A file of a lower layer is always
    /// replaced: on an overlay the directory would hide it.
    fn make_dirs(&mut self, path: &[&[u8]], replace: bool) -> Result<NodeId, TreeError> {
        let layer = self.layer;
        let mut dir = Self::ROOT;
        for (depth, name) in path.iter().enumerate() {
            let last = depth + 1 == path.len();
            let found = self.children_mut(dir).get_mut(*name).map(|entry| {
                let lower = std::mem::replace(&mut entry.layer, layer) != layer;
                (entry.node, lower)
            });
            dir = match found {
                Some((node, _)) if matches!(self.node(node).kind, NodeKind::Dir(_)) => node,
                Some((_, lower)) if !(lower || last && replace) => {
                    return Err(TreeError::ParentNotDirectory(show(&path[..=depth])));
                }
                _ => {
                    self.check_room()?;
                    let node = self.insert_node(implied_directory(layer));
                    self.bind(dir, name, node);
                    node
                }
            };
        }
        Ok(dir)
    }

    /// Gives `node` a name; a node that had the name loses it.
    fn bind(&mut self, dir: NodeId, name: &[u8], node: NodeId) {
        let entry = Entry {
            node,
            layer: self.layer,
        };
        // The directory's names are copied when it is written.
        self.memory += (ENTRY + 2 * name.len()) as u64;
        if let Some(old) = self.children_mut(dir).insert(name.into(), entry) {
            self.unlink(old.node);
        }
    }

    /// Removes what lower layers put below a directory. Each directory is searched once per layer,
    /// however often its layer hides it, so the work is linear in the entries of the layer and in
    /// those that it removes.
    fn hide_lower(&mut self, root: NodeId) {
        let layer = self.layer;
        let mut dirs = vec![root];
        while let Some(dir) = dirs.pop() {
            let node = self.node_mut(dir);
            if std::mem::replace(&mut node.cleared, layer) == layer {
                continue;
            }
            let NodeKind::Dir(children) = &mut node.kind else {
                continue;
            };
            let mut children = std::mem::take(children);
            children.retain(|_, entry| {
                let keep = entry.layer == layer;
                if !keep {
                    self.unlink(entry.node);
                } else if self.is_uncleared_dir(entry.node) {
                    dirs.push(entry.node);
                }
                keep
            });
            *self.children_mut(dir) = children;
        }
    }

    fn is_uncleared_dir(&self, id: NodeId) -> bool {
        let node = self.node(id);
        matches!(node.kind, NodeKind::Dir(_)) && node.cleared != self.layer
    }

    /// Removes one name of a node, and the node with everything below it if that was its last name.
    fn unlink(&mut self, id: NodeId) {
        let mut ids = vec![id];
        while let Some(id) = ids.pop() {
            let node = self.node_mut(id);
            node.links -= 1;
            if node.links > 0 {
                continue;
            }
            let node = self.nodes[id.index()]
                .take()
                .expect("entries name live nodes");
            self.vacant.push(id);
            match node.kind {
                NodeKind::Dir(children) => ids.extend(children.values().map(|entry| entry.node)),
                NodeKind::Leaf(Leaf::File(content)) => self.freed.push(content),
                NodeKind::Leaf(_) => {}
            }
        }
    }
}

/// Formats a path for messages: invalid UTF-8 is replaced, a long path is cut.
pub(crate) fn show(path: &[&[u8]]) -> String {
    let text = path
        .iter()
        .map(|name| String::from_utf8_lossy(name))
        .collect::<Vec<_>>()
        .join("/");
    match text.char_indices().nth(200) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
