//! The writer: file data as it arrives, then the tree.

use std::collections::HashMap;
use std::fs::File;
use std::io;

use super::BLOCK;
use super::dir::{self, DirEntry};
use super::inode::{encode_xattrs, may_inline, place, xattr_bytes};
use super::layout::{DataLayout, RawInode, SLOT, Superblock, file_type, inode_bytes};
use super::output::Output;
use super::space::Space;
use crate::tree::{Content, Extent, Leaf, Meta, Node, NodeId, NodeKind, Tree};

/// Maximum bytes of file tails kept in memory; beyond it they go to separate blocks.
const MAX_TAILS_MEMORY: usize = 64 << 20;

/// Why a file system could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The file could not be written.
    #[error("cannot write the file system image")]
    Io(#[from] io::Error),
    /// More than EROFS can address (16 TiB), or a directory of more than 2³² bytes.
    #[error("the file system would be larger than EROFS allows")]
    TooLarge,
    /// A file's data did not have the announced length.
    #[error("a file has {actual} bytes of data where {expected} were announced")]
    Length {
        /// Bytes announced.
        expected: u64,
        /// Bytes written.
        actual: u64,
    },
}

/// Writes one file system into one file.
#[derive(Debug)]
pub(crate) struct Writer {
    out: Output,
    space: Space,
    tails: usize,
}

impl Writer {
    /// Starts a file system in `file`, which should be empty.
    #[must_use]
    pub(crate) fn new(file: File) -> Self {
        Self {
            out: Output::new(file),
            space: Space::new(1),
            tails: 0,
        }
    }

    /// Starts a regular file of `size` bytes; `meta` is the metadata that the tree will have for
    /// it.
    ///
    /// # Errors
    /// [`WriteError::TooLarge`].
    pub(crate) fn add_file(
        &mut self,
        size: u64,
        meta: &Meta,
    ) -> Result<FileWriter<'_>, WriteError> {
        let (whole, tail) = (size / BLOCK as u64, (size % BLOCK as u64) as usize);
        let inline = tail > 0
            && may_inline(tail, xattr_bytes(meta))
            && self.tails + tail <= MAX_TAILS_MEMORY;
        let blocks = whole + u64::from(tail > 0 && !inline);
        let (extent, reused) = match u32::try_from(blocks).map_err(|_| WriteError::TooLarge)? {
            0 => (None, false),
            blocks => {
                let (extent, reused) = self.space.take(blocks).ok_or(WriteError::TooLarge)?;
                (Some(extent), reused)
            }
        };
        let tail = Vec::with_capacity(if inline { tail } else { 0 });
        self.tails += tail.capacity();
        Ok(FileWriter {
            size,
            in_blocks: blocks * BLOCK as u64,
            at: 0,
            extent,
            reused,
            tail,
            writer: self,
        })
    }

    /// Frees the space of a file that the tree no longer names.
    pub(crate) fn release(&mut self, content: Content) {
        self.tails -= content.tail.len();
        if let Some(extent) = content.extent {
            self.space.give_back(extent);
        }
    }

    /// Writes the tree, whose contents came from this writer, and returns the image's length in
    /// bytes. Nothing is synced to the disk.
    ///
    /// # Errors
    /// If the file cannot be written or the image would be too large.
    pub(crate) fn finish(mut self, tree: &Tree, uuid: [u8; 16]) -> Result<u64, WriteError> {
        let mut plan = Plan::new(tree)?;
        for index in 0..plan.nodes.len() {
            self.write_dir_blocks(tree, &mut plan, index)?;
        }
        let meta_blocks = u32::try_from(plan.meta_bytes.div_ceil(BLOCK as u64))
            .map_err(|_| WriteError::TooLarge)?;
        let meta = self
            .space
            .take_at_end(meta_blocks)
            .ok_or(WriteError::TooLarge)?;
        let base = u64::from(meta.start) * BLOCK as u64;
        let mut bytes = Vec::new();
        let mut written = 0;
        for (index, planned) in plan.nodes.iter().enumerate() {
            // Gaps between inodes are zero; a reused block never holds inodes.
            bytes.resize((planned.at - written) as usize, 0);
            plan.encode_inode(tree, index, &mut bytes);
            self.out.write_at(base + written, &bytes, true)?;
            written += bytes.len() as u64;
            bytes.clear();
        }
        let end = u64::from(self.space.end()) * BLOCK as u64;
        bytes.resize((end - base - written) as usize, 0);
        self.out.write_at(base + written, &bytes, true)?;
        let superblock = Superblock {
            root_nid: plan.nid(0) as u16,
            inodes: plan.nodes.len() as u64,
            build_time: plan.build_time,
            blocks: self.space.end(),
            meta_block: meta.start,
            uuid,
        };
        self.out.write_at(0, &superblock.encode(), true)?;
        // Data of replaced files must not be readable, nor make two images differ.
        for hole in self.space.holes() {
            self.out.clear(
                u64::from(hole.start) * BLOCK as u64,
                u64::from(hole.blocks) * BLOCK as u64,
            )?;
        }
        self.out.finish(end)?;
        Ok(end)
    }

    fn write_dir_blocks(
        &mut self,
        tree: &Tree,
        plan: &mut Plan,
        index: usize,
    ) -> Result<(), WriteError> {
        let planned = &plan.nodes[index];
        let whole = planned.size / BLOCK as u64 * BLOCK as u64;
        let length = if planned.layout == DataLayout::Plain {
            planned.size
        } else {
            whole
        };
        let is_dir = tree.children(planned.node).is_some();
        if !is_dir || length == 0 {
            return self.write_link_block(tree, plan, index);
        }
        let mut bytes = plan.encode_dir(tree, index);
        bytes.truncate(length as usize);
        let extent = self.write_blocks(bytes)?;
        plan.nodes[index].location = extent.start;
        Ok(())
    }

    /// Writes a symbolic link that is too long to follow its inode.
    fn write_link_block(
        &mut self,
        tree: &Tree,
        plan: &mut Plan,
        index: usize,
    ) -> Result<(), WriteError> {
        let planned = &plan.nodes[index];
        if let NodeKind::Leaf(Leaf::Symlink(target)) = &tree.node(planned.node).kind
            && planned.layout == DataLayout::Plain
            && !target.is_empty()
        {
            plan.nodes[index].location = self.write_blocks(target.to_vec())?.start;
        }
        Ok(())
    }

    fn write_blocks(&mut self, mut bytes: Vec<u8>) -> Result<Extent, WriteError> {
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        let blocks = u32::try_from(bytes.len() / BLOCK).map_err(|_| WriteError::TooLarge)?;
        let (extent, _) = self.space.take(blocks).ok_or(WriteError::TooLarge)?;
        self.out
            .write_at(u64::from(extent.start) * BLOCK as u64, &bytes, true)?;
        Ok(extent)
    }
}

/// Writes one regular file's data, in order.
#[derive(Debug)]
pub(crate) struct FileWriter<'a> {
    writer: &'a mut Writer,
    size: u64,
    /// Bytes that go into blocks; the rest is the tail.
    in_blocks: u64,
    at: u64,
    extent: Option<Extent>,
    /// The blocks hold other files' data, so zeros must be written.
    reused: bool,
    tail: Vec<u8>,
}

impl FileWriter<'_> {
    /// Writes the next bytes of the file.
    ///
    /// # Errors
    /// [`WriteError::Length`] if there are more than announced; or the file cannot be written.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.check(bytes.len() as u64)?;
        let room = self
            .in_blocks
            .saturating_sub(self.at)
            .min(bytes.len() as u64) as usize;
        let (block_bytes, tail) = bytes.split_at(room);
        if !block_bytes.is_empty() {
            self.writer
                .out
                .write_at(self.offset(), block_bytes, self.reused)?;
        }
        self.tail.extend_from_slice(tail);
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Writes a hole: `length` zeros, which take no space on the disk.
    ///
    /// # Errors
    /// As [`FileWriter::write`].
    pub(crate) fn skip(&mut self, length: u64) -> Result<(), WriteError> {
        self.check(length)?;
        let room = self.in_blocks.saturating_sub(self.at).min(length);
        if room > 0 && self.reused {
            self.writer.out.clear(self.offset(), room)?;
        }
        self.tail
            .resize(self.tail.len() + (length - room) as usize, 0);
        self.at += length;
        Ok(())
    }

    /// Ends the file.
    ///
    /// # Errors
    /// [`WriteError::Length`] if bytes are missing.
    pub(crate) fn finish(mut self) -> Result<Content, WriteError> {
        if self.at != self.size {
            return Err(WriteError::Length {
                expected: self.size,
                actual: self.at,
            });
        }
        let padding = self.in_blocks.saturating_sub(self.at) as usize;
        if padding > 0 {
            self.writer
                .out
                .write_at(self.offset(), &[0; BLOCK][..padding], self.reused)?;
        }
        let tail = std::mem::take(&mut self.tail).into_boxed_slice();
        Ok(Content {
            size: self.size,
            extent: self.extent,
            tail,
        })
    }

    fn check(&self, length: u64) -> Result<(), WriteError> {
        let actual = self.at.saturating_add(length);
        if actual > self.size {
            return Err(WriteError::Length {
                expected: self.size,
                actual,
            });
        }
        Ok(())
    }

    fn offset(&self) -> u64 {
        self.extent
            .map_or(0, |extent| u64::from(extent.start) * BLOCK as u64)
            + self.at
    }
}

#[derive(Debug)]
struct Planned {
    node: NodeId,
    /// Index of the directory that it was found in, for `..`.
    parent: usize,
    compact: bool,
    layout: DataLayout,
    size: u64,
    location: u32,
    xattr_bytes: usize,
    /// First byte in the inode area.
    at: u64,
}

/// All inodes in their final order: directory by directory, so that inodes that are listed together
/// are stored together.
#[derive(Debug)]
struct Plan {
    nodes: Vec<Planned>,
    /// Position in `nodes` by node.
    by_node: Vec<u32>,
    build_time: i64,
    meta_bytes: u64,
}

const UNSEEN: u32 = u32::MAX;

impl Plan {
    fn new(tree: &Tree) -> Result<Self, WriteError> {
        let mut plan = Self {
            nodes: Vec::with_capacity(tree.len()),
            by_node: vec![UNSEEN; tree.capacity()],
            build_time: 0,
            meta_bytes: SLOT, // number 0 is not an inode: readdir(3) takes it for a deleted entry
        };
        plan.add(Tree::ROOT, 0, tree)?;
        let mut next = 0;
        while let Some(planned) = plan.nodes.get(next) {
            for entry in tree
                .children(planned.node)
                .into_iter()
                .flat_map(|children| children.values())
            {
                if plan.by_node[entry.node.index()] == UNSEEN {
                    plan.add(entry.node, next, tree)?;
                }
            }
            next += 1;
        }
        plan.build_time = most_common_time(tree, &plan.nodes);
        for index in 0..plan.nodes.len() {
            plan.place(tree, index);
        }
        Ok(plan)
    }

    fn add(&mut self, node: NodeId, parent: usize, tree: &Tree) -> Result<(), WriteError> {
        self.by_node[node.index()] =
            u32::try_from(self.nodes.len()).map_err(|_| WriteError::TooLarge)?;
        let size = match &tree.node(node).kind {
            NodeKind::Dir(_) => dir::plan(dir_names(tree, node).map(|(name, _)| name.len())).1,
            NodeKind::Leaf(Leaf::File(content)) => content.size,
            NodeKind::Leaf(Leaf::Symlink(target)) => target.len() as u64,
            NodeKind::Leaf(_) => 0,
        };
        let xattr_bytes = xattr_bytes(&tree.node(node).meta);
        self.nodes.push(Planned {
            node,
            parent,
            compact: false,
            layout: DataLayout::Plain,
            size,
            location: 0,
            xattr_bytes,
            at: 0,
        });
        Ok(())
    }

    /// Decides on an inode's form and place.
    fn place(&mut self, tree: &Tree, index: usize) {
        let planned = &mut self.nodes[index];
        let node = tree.node(planned.node);
        let rest = (planned.size % BLOCK as u64) as usize;
        let tail = match &node.kind {
            NodeKind::Leaf(Leaf::File(content)) => {
                planned.location = content.extent.map_or(0, |extent| extent.start);
                content.tail.len()
            }
            NodeKind::Leaf(Leaf::Char { major, minor } | Leaf::Block { major, minor }) => {
                planned.location = encode_device(*major, *minor);
                0
            }
            // The kernel reads short links directly from the inode's block, so these have no other
            // limit.
            NodeKind::Leaf(Leaf::Symlink(_))
                if inode_bytes(false) + planned.xattr_bytes + rest <= BLOCK =>
            {
                rest
            }
            NodeKind::Dir(_) if may_inline(rest, planned.xattr_bytes) => rest,
            NodeKind::Dir(_) | NodeKind::Leaf(Leaf::Symlink(_) | Leaf::Fifo) => 0,
        };
        if tail > 0 {
            planned.layout = DataLayout::Inline;
        }
        let meta = &node.meta;
        planned.compact = (meta.mtime, meta.mtime_nsec) == (self.build_time, 0)
            && meta.uid.max(meta.gid).max(links(tree, planned.node)) <= u32::from(u16::MAX)
            && planned.size <= u64::from(u32::MAX);
        planned.at = place(self.meta_bytes, planned.compact, planned.xattr_bytes, tail);
        self.meta_bytes =
            planned.at + (inode_bytes(planned.compact) + planned.xattr_bytes + tail) as u64;
    }

    fn nid(&self, index: usize) -> u64 {
        self.nodes[index].at / SLOT
    }

    fn encode_inode(&self, tree: &Tree, index: usize, out: &mut Vec<u8>) {
        let planned = &self.nodes[index];
        let node = tree.node(planned.node);
        let meta = &node.meta;
        let raw = RawInode {
            layout: planned.layout,
            xattr_bytes: planned.xattr_bytes,
            mode: type_bits(node) | meta.mode & 0o7777,
            links: links(tree, planned.node),
            size: planned.size,
            location: planned.location,
            number: index as u32 + 1,
            uid: meta.uid,
            gid: meta.gid,
            mtime: meta.mtime,
            mtime_nsec: meta.mtime_nsec,
        };
        raw.encode(planned.compact, out);
        encode_xattrs(meta, out);
        if planned.layout == DataLayout::Plain {
            return;
        }
        match &node.kind {
            NodeKind::Dir(_) => {
                let data = self.encode_dir(tree, index);
                out.extend_from_slice(&data[data.len() / BLOCK * BLOCK..]);
            }
            NodeKind::Leaf(Leaf::File(content)) => out.extend_from_slice(&content.tail),
            NodeKind::Leaf(Leaf::Symlink(target)) => out.extend_from_slice(target),
            NodeKind::Leaf(_) => {}
        }
    }

    fn encode_dir(&self, tree: &Tree, index: usize) -> Vec<u8> {
        let planned = &self.nodes[index];
        let entries: Vec<DirEntry<'_>> = dir_names(tree, planned.node)
            .map(|(name, child)| match (name, child) {
                (b".", None) => (name, self.nid(index), file_type::DIR),
                (_, None) => (name, self.nid(planned.parent), file_type::DIR),
                (_, Some(id)) => {
                    let nid = self.nid(self.by_node[id.index()] as usize);
                    (name, nid, dirent_type(tree.node(id)))
                }
            })
            .collect();
        dir::encode(&entries)
    }
}

/// Returns a directory's names in byte order, `.` and `..` (no node) among them.
fn dir_names(tree: &Tree, dir: NodeId) -> impl Iterator<Item = (&[u8], Option<NodeId>)> {
    let mut dots = [b".".as_slice(), b"..".as_slice()].into_iter().peekable();
    let mut names = tree.children(dir).into_iter().flatten().peekable();
    std::iter::from_fn(move || {
        let dot_first = match (dots.peek(), names.peek()) {
            (Some(dot), Some((name, _))) => *dot < &***name,
            (dot, _) => dot.is_some(),
        };
        if dot_first {
            dots.next().map(|dot| (dot, None))
        } else {
            names
                .next()
                .map(|(name, entry)| (&**name, Some(entry.node)))
        }
    })
}

fn links(tree: &Tree, id: NodeId) -> u32 {
    match tree.children(id) {
        Some(children) => {
            let dirs = children
                .values()
                .filter(|entry| tree.children(entry.node).is_some())
                .count();
            u32::try_from(dirs).unwrap_or(u32::MAX - 2) + 2
        }
        None => tree.node(id).links,
    }
}

fn type_bits(node: &Node) -> u16 {
    match &node.kind {
        NodeKind::Dir(_) => 0o040_000,
        NodeKind::Leaf(Leaf::File(_)) => 0o100_000,
        NodeKind::Leaf(Leaf::Symlink(_)) => 0o120_000,
        NodeKind::Leaf(Leaf::Char { .. }) => 0o020_000,
        NodeKind::Leaf(Leaf::Block { .. }) => 0o060_000,
        NodeKind::Leaf(Leaf::Fifo) => 0o010_000,
    }
}

fn dirent_type(node: &Node) -> u8 {
    match &node.kind {
        NodeKind::Dir(_) => file_type::DIR,
        NodeKind::Leaf(Leaf::File(_)) => file_type::REGULAR,
        NodeKind::Leaf(Leaf::Symlink(_)) => file_type::SYMLINK,
        NodeKind::Leaf(Leaf::Char { .. }) => file_type::CHAR,
        NodeKind::Leaf(Leaf::Block { .. }) => file_type::BLOCK,
        NodeKind::Leaf(Leaf::Fifo) => file_type::FIFO,
    }
}

/// Encodes a device number as the kernel's `new_encode_dev`: 12 bits of major, 20 of minor.
fn encode_device(major: u32, minor: u32) -> u32 {
    minor & 0xff | (major & 0xfff) << 8 | (minor & 0xf_ff00) << 12
}

/// Returns the time that small inodes share: the most common one, and among equals the earliest.
fn most_common_time(tree: &Tree, nodes: &[Planned]) -> i64 {
    let mut counts: HashMap<i64, usize> = HashMap::new();
    for planned in nodes {
        let meta = &tree.node(planned.node).meta;
        if meta.mtime_nsec == 0 {
            *counts.entry(meta.mtime).or_default() += 1;
        }
    }
    let best = counts
        .into_iter()
        .max_by_key(|(time, count)| (*count, std::cmp::Reverse(*time)));
    best.map_or(0, |(time, _)| time)
}
