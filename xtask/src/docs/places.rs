//! Places in the tree that the page on the architecture names in its table of what to change where.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The heading above the table.
const HEADING: &str = "## Where do I …";

/// Directories without sources of this tree.
const SKIPPED: [&str; 2] = ["target", ".git"];

/// A place that the table names.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Place<'a> {
    /// The line that it stands in, from 1 on.
    pub(super) line: usize,
    /// A path from the root, or the end of one.
    pub(super) path: &'a str,
}

/// Returns the places that a page's table names: what stands there as code and has a slash or a
/// file's extension.
pub(super) fn of(text: &str) -> Vec<Place<'_>> {
    let lines = (1..).zip(text.lines());
    let table = lines
        .skip_while(|(_, line)| *line != HEADING)
        .skip(1)
        .take_while(|(_, line)| !line.starts_with('#'));
    table
        .flat_map(|(line, row)| {
            row.split('`')
                .skip(1)
                .step_by(2)
                .map(move |code| (line, code))
        })
        .filter(|(_, code)| is_path(code))
        .map(|(line, path)| Place { line, path })
        .collect()
}

fn is_path(code: &str) -> bool {
    let is_file = Path::new(code).extension().is_some();
    !code.contains(' ') && (code.contains('/') || is_file)
}

/// All files and directories of the tree, relative to its root.
#[derive(Debug)]
pub(super) struct Tree(BTreeSet<PathBuf>);

impl Tree {
    /// Reads the tree below `root`.
    pub(super) fn read(root: &Path) -> io::Result<Self> {
        let mut found = BTreeSet::new();
        let mut directories = vec![PathBuf::new()];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(root.join(&directory))? {
                let entry = entry?;
                let path = directory.join(entry.file_name());
                if SKIPPED.iter().any(|skipped| path == Path::new(skipped)) {
                    continue;
                }
                if entry.file_type()?.is_dir() {
                    directories.push(path.clone());
                }
                found.insert(path);
            }
        }
        Ok(Self(found))
    }

    /// Checks that a place is one path of the tree, and only one. The last part may be `*` with an
    /// extension.
    pub(super) fn resolve(&self, path: &str) -> Result<(), String> {
        let directory = match path.rsplit_once('/') {
            Some((directory, name)) if name.starts_with('*') => directory,
            _ => path,
        };
        if self.0.contains(Path::new(directory)) {
            return Ok(());
        }
        let ends: Vec<_> = self
            .0
            .iter()
            .filter(|all| all.ends_with(directory))
            .collect();
        match ends.as_slice() {
            [_] => Ok(()),
            [] => Err(format!("there is no {path}")),
            [first, second, ..] => Err(format!(
                "{path} may be {} or {}: name more of it",
                first.display(),
                second.display()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_paths_are_found_and_other_words_are_not() {
        let page = "`before/it.rs`\n## Where do I …\n| a | b |\n\
                    | x | `cri/vm/`: `honour.rs`, `decide` and `image:` |\n\
                    | y | `a b/c` in `kernel/*.config` |\n## After\n`after/it.rs`\n";
        let found = of(page);
        let found: Vec<_> = found.iter().map(|place| (place.line, place.path)).collect();
        let expected = [(4, "cri/vm/"), (4, "honour.rs"), (5, "kernel/*.config")];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_place_is_one_path_or_the_end_of_one() {
        let paths = [
            "a",
            "a/src",
            "a/src/one.rs",
            "a/src/two.rs",
            "b",
            "b/two.rs",
        ];
        let tree = Tree(paths.map(PathBuf::from).into());
        for known in [
            "a/",
            "a/src/one.rs",
            "src/one.rs",
            "one.rs",
            "src/two.rs",
            "a/src/*.rs",
        ] {
            assert_eq!(tree.resolve(known), Ok(()), "{known}");
        }
        for unknown in ["c/", "three.rs", "b/one.rs", "ne.rs", "c/*.rs"] {
            let error = tree.resolve(unknown).unwrap_err();
            assert!(error.starts_with("there is no"), "{error}");
        }
        let error = tree.resolve("two.rs").unwrap_err();
        assert!(error.contains("a/src/two.rs or b/two.rs"), "{error}");
    }
}
