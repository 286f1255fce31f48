//! Where everything of a volume lies, and its bytes.

use std::io::{self, Write};

use super::names::{self, NAME_PART, ShortName};
use super::{FatError, MAX_FILES, SECTOR, bound};

/// Bytes of an entry in a directory.
const ENTRY: usize = 32;
/// Most clusters of FAT12; with more the same volume is FAT16.
const FAT12_CLUSTERS: usize = 4084;
/// Fewest clusters that are taken for FAT16 by all readers.
const FAT16_FEWEST: usize = 4104;
/// Most clusters of FAT16 that all readers take.
const FAT16_CLUSTERS: usize = 65_500;
/// Most sectors of a cluster.
const MAX_CLUSTER: usize = 64;
/// The first cluster of data has this number.
const FIRST: usize = 2;
/// The kind of medium: a fixed disk.
const MEDIUM: u8 = 0xf8;
/// 1 January 1980, the first day of the format: times are not kept.
const DATE: u16 = 0x0021;

const READ_ONLY: u8 = 0x01;
const VOLUME: u8 = 0x08;
const DIRECTORY: u8 = 0x10;
const LONG_NAME: u8 = 0x0f;
/// Marks the last part of a long name.
const LAST_PART: u8 = 0x40;

/// Files and directories; the first one is the root.
#[derive(Debug)]
pub(super) struct Tree<'a> {
    nodes: Vec<Node<'a>>,
}

/// A file or directory.
#[derive(Debug)]
pub(super) enum Node<'a> {
    File(&'a [u8]),
    Directory(Vec<Child>),
}

/// An entry of a directory.
#[derive(Debug)]
pub(super) struct Child {
    name: String,
    /// By which it is found: case does not count.
    folded: String,
    short: ShortName,
    node: usize,
}

impl<'a> Tree<'a> {
    pub(super) fn new() -> Self {
        Self {
            nodes: vec![Node::Directory(Vec::new())],
        }
    }

    fn children(&self, directory: usize) -> &[Child] {
        match &self.nodes[directory] {
            Node::Directory(children) => children,
            Node::File(_) => &[],
        }
    }

    pub(super) fn is_directory(&self, node: usize) -> bool {
        matches!(self.nodes[node], Node::Directory(_))
    }

    /// Looks for a name, without regard to case.
    pub(super) fn find(&self, directory: usize, name: &str) -> Option<usize> {
        let name = name.to_lowercase();
        let mut children = self.children(directory).iter();
        let found = children.find(|child| child.folded == name);
        found.map(|child| child.node)
    }

    /// Adds a node that is not there yet.
    pub(super) fn add(
        &mut self,
        directory: usize,
        name: &str,
        node: Node<'a>,
    ) -> Result<usize, FatError> {
        let number = self.nodes.len();
        bound(number as u64, "files and directories", MAX_FILES as u64)?;
        let known: Vec<ShortName> = self.children(directory).iter().map(|c| c.short).collect();
        let child = Child {
            name: name.to_owned(),
            folded: name.to_lowercase(),
            short: names::shorten(name, &known),
            node: number,
        };
        if let Node::Directory(children) = &mut self.nodes[directory] {
            children.push(child);
        }
        self.nodes.push(node);
        Ok(number)
    }

    /// How many entries a directory has, without the root's label.
    fn entries(&self, directory: usize) -> usize {
        let of = |child: &Child| names::parts(&child.name).len() + 1;
        let own = if directory == 0 { 0 } else { 2 };
        own + self.children(directory).iter().map(of).sum::<usize>()
    }

    /// Bytes of a node's data.
    fn size(&self, node: usize) -> usize {
        match &self.nodes[node] {
            Node::File(content) => content.len(),
            Node::Directory(_) => self.entries(node) * ENTRY,
        }
    }

    fn parent(&self, node: usize) -> usize {
        let has = |directory: &usize| self.children(*directory).iter().any(|c| c.node == node);
        (0..self.nodes.len()).find(has).unwrap_or(0)
    }
}

/// Where everything lies.
#[derive(Debug)]
pub(super) struct Layout {
    /// Sectors of a cluster.
    cluster: usize,
    clusters: usize,
    /// Sectors of one file allocation table.
    table: usize,
    /// Entries of the root, which fill their sectors.
    root: usize,
    /// The first cluster of each node, and how many it has; the root has none.
    chains: Vec<(usize, usize)>,
    is_fat16: bool,
}

impl Layout {
    pub(super) fn of(tree: &Tree<'_>) -> Result<Self, FatError> {
        let mut cluster = 1;
        let chains = loop {
            let chains = Self::chains(tree, cluster);
            let used: usize = chains.iter().map(|(_, count)| count).sum();
            if used <= FAT16_CLUSTERS || cluster == MAX_CLUSTER {
                bound(used as u64, "clusters", FAT16_CLUSTERS as u64)?;
                break chains;
            }
            cluster *= 2;
        };
        let used: usize = chains.iter().map(|(_, count)| count).sum();
        let is_fat16 = used > FAT12_CLUSTERS - 16;
        let clusters = match is_fat16 {
            true => used.max(FAT16_FEWEST),
            false => used.max(1),
        };
        let entries = clusters + FIRST;
        let table = match is_fat16 {
            true => entries * 2,
            false => (entries * 3).div_ceil(2),
        };
        // The label is an entry, too.
        let root = (tree.entries(0) + 1).next_multiple_of(SECTOR / ENTRY);
        bound(root as u64, "entries of the root directory", 0xffff)?;
        Ok(Self {
            cluster,
            clusters,
            table: table.div_ceil(SECTOR),
            root,
            chains,
            is_fat16,
        })
    }

    fn chains(tree: &Tree<'_>, cluster: usize) -> Vec<(usize, usize)> {
        let mut next = FIRST;
        let place = |node: usize| {
            let count = match node {
                0 => 0,
                _ => tree.size(node).div_ceil(cluster * SECTOR),
            };
            let start = if count == 0 { 0 } else { next };
            next += count;
            (start, count)
        };
        (0..tree.nodes.len()).map(place).collect()
    }

    fn sectors(&self) -> usize {
        1 + 2 * self.table + self.root * ENTRY / SECTOR + self.clusters * self.cluster
    }

    /// Writes the volume, and returns its bytes.
    pub(super) fn write(
        &self,
        tree: &Tree<'_>,
        label: &str,
        to: &mut impl Write,
    ) -> io::Result<u64> {
        let mut padded = [b' '; 11];
        for (place, byte) in padded.iter_mut().zip(label.bytes()) {
            *place = byte;
        }
        to.write_all(&self.boot_sector(tree, &padded))?;
        let table = self.table();
        to.write_all(&table)?;
        to.write_all(&table)?;
        let mut root = entry(&padded, VOLUME, 0, 0).to_vec();
        self.push_children(tree, 0, &mut root);
        root.resize(self.root * ENTRY, 0);
        to.write_all(&root)?;
        let mut used = 0;
        for node in 1..tree.nodes.len() {
            let padding = match &tree.nodes[node] {
                Node::File(content) => {
                    to.write_all(content)?;
                    self.padding(content.len())
                }
                Node::Directory(_) => {
                    let bytes = self.directory(tree, node);
                    to.write_all(&bytes)?;
                    self.padding(bytes.len())
                }
            };
            io::copy(&mut io::Read::take(io::repeat(0), padding as u64), to)?;
            used += self.chains[node].1;
        }
        let free = (self.clusters - used) * self.cluster * SECTOR;
        io::copy(&mut io::Read::take(io::repeat(0), free as u64), to)?;
        to.flush()?;
        Ok((self.sectors() * SECTOR) as u64)
    }

    fn padding(&self, length: usize) -> usize {
        length.next_multiple_of(self.cluster * SECTOR) - length
    }

    /// The boot sector. Where a disk with partitions has its table there are zeros, and so there
    /// are no partitions on this one.
    fn boot_sector(&self, tree: &Tree<'_>, label: &[u8; 11]) -> [u8; SECTOR] {
        let sectors = self.sectors();
        let mut bytes: Vec<u8> = Vec::with_capacity(SECTOR);
        // A jump, as readers look for one; nothing boots from here.
        bytes.extend_from_slice(&[0xeb, 0x3c, 0x90]);
        bytes.extend_from_slice(b"MSWIN4.1");
        bytes.extend_from_slice(&(SECTOR as u16).to_le_bytes());
        bytes.extend_from_slice(&[self.cluster as u8, 1, 0, 2]);
        bytes.extend_from_slice(&(self.root as u16).to_le_bytes());
        let small = u16::try_from(sectors).unwrap_or(0);
        bytes.extend_from_slice(&small.to_le_bytes());
        bytes.push(MEDIUM);
        bytes.extend_from_slice(&(self.table as u16).to_le_bytes());
        // A geometry that nobody uses, and no hidden sectors.
        bytes.extend_from_slice(&[32, 0, 64, 0, 0, 0, 0, 0]);
        let large = if small == 0 { sectors as u32 } else { 0 };
        bytes.extend_from_slice(&large.to_le_bytes());
        bytes.extend_from_slice(&[0x80, 0, 0x29]);
        bytes.extend_from_slice(&serial(tree).to_le_bytes());
        bytes.extend_from_slice(label);
        let kind: &[u8; 8] = if self.is_fat16 {
            b"FAT16   "
        } else {
            b"FAT12   "
        };
        bytes.extend_from_slice(kind);
        let mut sector = [0; SECTOR];
        sector[..bytes.len()].copy_from_slice(&bytes);
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        sector
    }

    /// The file allocation table: files follow each other, so each cluster leads to the next one.
    fn table(&self) -> Vec<u8> {
        let end: u16 = if self.is_fat16 { 0xffff } else { 0x0fff };
        let mut entries = vec![0_u16; self.clusters + FIRST];
        entries[0] = (end & 0xff00) | u16::from(MEDIUM);
        entries[1] = end;
        for (start, count) in &self.chains {
            let chain = entries.iter_mut().enumerate().skip(*start).take(*count);
            for (place, entry) in chain {
                let is_last = place + 1 == start + count;
                *entry = if is_last { end } else { (place + 1) as u16 };
            }
        }
        let mut bytes = Vec::with_capacity(self.table * SECTOR);
        match self.is_fat16 {
            true => bytes.extend(entries.iter().flat_map(|entry| entry.to_le_bytes())),
            false => {
                for pair in entries.chunks(2) {
                    let (one, two) = (pair[0], pair.get(1).copied().unwrap_or(0));
                    let three = [one as u8, (one >> 8 | two << 4) as u8, (two >> 4) as u8];
                    bytes.extend_from_slice(&three);
                }
            }
        }
        bytes.resize(self.table * SECTOR, 0);
        bytes
    }

    fn directory(&self, tree: &Tree<'_>, node: usize) -> Vec<u8> {
        let parent = self.chains[tree.parent(node)].0;
        let mut bytes = Vec::new();
        for (name, cluster) in [(".", self.chains[node].0), ("..", parent)] {
            let mut short = [b' '; 11];
            short[..name.len()].copy_from_slice(name.as_bytes());
            bytes.extend_from_slice(&entry(&short, DIRECTORY, cluster, 0));
        }
        self.push_children(tree, node, &mut bytes);
        bytes
    }

    fn push_children(&self, tree: &Tree<'_>, directory: usize, bytes: &mut Vec<u8>) {
        for child in tree.children(directory) {
            let sum = names::checksum(&child.short);
            let parts = names::parts(&child.name);
            for (number, part) in parts.iter().enumerate().rev() {
                let last = if number + 1 == parts.len() {
                    LAST_PART
                } else {
                    0
                };
                bytes.extend_from_slice(&name_entry((number + 1) as u8 | last, part, sum));
            }
            let (kind, size) = match tree.nodes[child.node] {
                Node::File(content) => (READ_ONLY, content.len() as u32),
                Node::Directory(_) => (DIRECTORY, 0),
            };
            let cluster = self.chains[child.node].0;
            bytes.extend_from_slice(&entry(&child.short, kind, cluster, size));
        }
    }
}

fn entry(short: &ShortName, attributes: u8, cluster: usize, size: u32) -> [u8; ENTRY] {
    let mut bytes = [0; ENTRY];
    bytes[..11].copy_from_slice(short);
    bytes[11] = attributes;
    for place in [16, 18, 24] {
        bytes[place..place + 2].copy_from_slice(&DATE.to_le_bytes());
    }
    bytes[26..28].copy_from_slice(&(cluster as u16).to_le_bytes());
    bytes[28..].copy_from_slice(&size.to_le_bytes());
    bytes
}

fn name_entry(number: u8, part: &[u16; NAME_PART], sum: u8) -> [u8; ENTRY] {
    let mut bytes = [0; ENTRY];
    bytes[0] = number;
    bytes[11] = LONG_NAME;
    bytes[13] = sum;
    let places = (1..11)
        .step_by(2)
        .chain((14..26).step_by(2))
        .chain((28..32).step_by(2));
    for (place, unit) in places.zip(part) {
        bytes[place..place + 2].copy_from_slice(&unit.to_le_bytes());
    }
    bytes
}

/// A number of the volume that changes with its content (FNV-1a).
fn serial(tree: &Tree<'_>) -> u32 {
    let mut hash: u32 = 0x811c_9dc5;
    for node in &tree.nodes {
        let bytes: Vec<u8> = match node {
            Node::File(content) => content.to_vec(),
            Node::Directory(children) => {
                let names = children.iter().flat_map(|child| child.name.bytes());
                names.collect()
            }
        };
        for byte in bytes {
            hash = (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        }
    }
    hash
}
