//! Entries below symbolic links of their own layer: `lib -> usr/lib`, then `lib/x.so`. They go to
//! where the link leads, as with containerd, Docker and umoci, and never out of the tree: its root
//! is its own parent, and targets that begin with a slash begin there.
//!
//! Links of lower layers are not followed: on an overlay the new directory hides them.

use super::{Leaf, NodeId, NodeKind, Tree, TreeError, show};

/// Links that may be followed for one path; Linux' own limit.
const MAX_LINKS: usize = 40;

/// Parts of the links' targets that may be walked for one path, so that a small entry of a hostile
/// layer is little work.
const MAX_TARGET_PARTS: usize = 255;

impl Tree {
    /// Walks to the directory at `path` and creates what is missing, through links.
    pub(super) fn make_parents(&mut self, path: &[&[u8]]) -> Result<NodeId, TreeError> {
        self.make_dirs_through_links(path, &[])
    }

    /// As [`Tree::make_dirs`] of `parents` and `last`, through links in `parents`. `last` is empty
    /// or the name of a directory, which replaces a file or link.
    pub(super) fn make_dirs_through_links(
        &mut self,
        parents: &[&[u8]],
        last: &[&[u8]],
    ) -> Result<NodeId, TreeError> {
        let replace = !last.is_empty();
        match self.make_dirs(&[parents, last].concat(), replace) {
            // Nothing was created so far.
            Err(TreeError::ParentNotDirectory(_)) => {
                let parents = self.resolve(parents)?;
                let parents = parents.iter().map(Box::as_ref);
                let path: Vec<&[u8]> = parents.chain(last.iter().copied()).collect();
                self.make_dirs(&path, replace)
            }
            made => made,
        }
    }

    /// Finds the directory at `path`, through links.
    pub(super) fn find_dir(&self, path: &[&[u8]]) -> Option<NodeId> {
        let is_dir = |id: &NodeId| self.children(*id).is_some();
        self.find(path).filter(is_dir).or_else(|| {
            let path = self.resolve(path).ok()?;
            let path: Vec<&[u8]> = path.iter().map(Box::as_ref).collect();
            self.find(&path).filter(is_dir)
        })
    }

    /// Finds the node at `path` through links; one at its end is not followed.
    pub(super) fn find_through_links(&self, path: &[&[u8]]) -> Option<NodeId> {
        let Some((name, parents)) = path.split_last() else {
            return Some(Self::ROOT);
        };
        let dir = self.find_dir(parents)?;
        Some(self.children(dir)?.get(*name)?.node)
    }

    /// Returns the path without links of this layer. Parts that do not exist stay as they are.
    fn resolve(&self, path: &[&[u8]]) -> Result<Vec<Box<[u8]>>, TreeError> {
        let mut pending: Vec<Box<[u8]>> = path.iter().rev().map(|name| (*name).into()).collect();
        let mut resolved: Vec<(Box<[u8]>, Option<NodeId>)> = Vec::new();
        let (mut links, mut parts) = (0, 0);
        while let Some(name) = pending.pop() {
            if *name == *b".." {
                // At the root it stays there.
                resolved.pop();
                continue;
            }
            let dir = resolved.last().map_or(Some(Self::ROOT), |(_, node)| *node);
            let entry = dir
                .and_then(|dir| self.children(dir))
                .and_then(|children| children.get(&name).copied());
            let own = entry.filter(|entry| entry.layer == self.layer);
            let link = own.map(|entry| &self.node(entry.node).kind);
            let Some(NodeKind::Leaf(Leaf::Symlink(target))) = link else {
                resolved.push((name, entry.map(|entry| entry.node)));
                continue;
            };
            links += 1;
            if target.starts_with(b"/") {
                resolved.clear();
            }
            for part in target.rsplit(|byte| *byte == b'/') {
                match part {
                    b"" | b"." => continue,
                    part if part.len() > 255 => {
                        return Err(TreeError::LinkTarget(show(path)));
                    }
                    part => pending.push(part.into()),
                }
                parts += 1;
                if links > MAX_LINKS || parts > MAX_TARGET_PARTS {
                    return Err(TreeError::TooManyLinks(show(path)));
                }
            }
        }
        Ok(resolved.into_iter().map(|(name, _)| name).collect())
    }
}
