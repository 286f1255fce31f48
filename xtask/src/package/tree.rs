//! A directory with the files to be installed.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process;

#[derive(Debug)]
pub(super) struct Tree {
    root: PathBuf,
}

impl Tree {
    pub(super) fn new(root: &Path) -> Result<Self> {
        let tree = Self {
            root: root.to_owned(),
        };
        fs::create_dir_all(root).with_context(|| format!("{} cannot be made", root.display()))?;
        tree.permit("", 0o755)?;
        Ok(tree)
    }

    /// Creates a directory and its parents, regardless of this process's umask; returns its path.
    pub(super) fn directory(&self, place: &str) -> Result<PathBuf> {
        let mut path = self.root.clone();
        for part in Path::new(place) {
            path.push(part);
            if let Err(error) = fs::create_dir_all(&path) {
                return Err(error).with_context(|| format!("{} cannot be made", path.display()));
            }
            fs::set_permissions(&path, Permissions::from_mode(0o755))?;
        }
        Ok(path)
    }

    pub(super) fn copy(&self, file: &Path, place: &str, mode: u32) -> Result<()> {
        let bytes = fs::read(file).with_context(|| format!("{} is missing", file.display()))?;
        self.put(place, &bytes, mode)
    }

    pub(super) fn write(&self, place: &str, text: &str) -> Result<()> {
        self.put(place, text.as_bytes(), 0o644)
    }

    pub(super) fn permit(&self, place: &str, mode: u32) -> Result<()> {
        Ok(fs::set_permissions(
            self.root.join(place),
            Permissions::from_mode(mode),
        )?)
    }

    fn put(&self, place: &str, bytes: &[u8], mode: u32) -> Result<()> {
        if let Some(parent) = Path::new(place).parent().and_then(Path::to_str) {
            self.directory(parent)?;
        }
        let path = self.root.join(place);
        fs::write(&path, bytes).with_context(|| format!("{} cannot be written", path.display()))?;
        self.permit(place, mode)
    }

    /// Compresses all files of one of its directories, without names and times.
    pub(super) fn compress(&self, directory: &Path) -> Result<()> {
        for path in files(directory)? {
            fs::set_permissions(&path, Permissions::from_mode(0o644))?;
            process::run(process::tied("gzip").args(["-9n"]).arg(&path))?;
        }
        Ok(())
    }

    /// Returns the MD5 of each file, in dpkg's format.
    pub(super) fn checksums(&self) -> Result<String> {
        let mut command = Command::new("md5sum");
        command.current_dir(&self.root);
        for path in files(&self.root)? {
            command.arg(path.strip_prefix(&self.root)?);
        }
        Ok(process::output(&mut command)? + "\n")
    }

    pub(super) fn kib(&self) -> Result<u64> {
        let sizes = files(&self.root)?.into_iter().map(|path| {
            let len = path.metadata()?.len();
            Ok(len.div_ceil(1024))
        });
        sizes.sum()
    }
}

/// Returns all files below a directory, sorted by name.
fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    let mut entries = fs::read_dir(directory)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::path);
    for entry in entries {
        match entry.file_type()?.is_dir() {
            true => all.extend(files(&entry.path())?),
            false => all.push(entry.path()),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_their_modes_and_are_listed_in_order() {
        let root = std::env::temp_dir().join(format!("xtask-tree-{}", std::process::id()));
        let tree = Tree::new(&root).unwrap();
        tree.write("b/two", "2").unwrap();
        tree.write("a", "1").unwrap();
        tree.permit("a", 0o755).unwrap();
        let sums = tree.checksums().unwrap();
        let mode = |place: &str| root.join(place).metadata().unwrap().permissions().mode();
        let modes = [mode("a"), mode("b"), mode("b/two")].map(|mode| mode & 0o7777);
        let kib = tree.kib().unwrap();
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(
            sums,
            "c4ca4238a0b923820dcc509a6f75849b  a\nc81e728d9d4c2f636f067f89cc14862c  b/two\n"
        );
        assert_eq!(modes, [0o755, 0o755, 0o644]);
        assert_eq!(kib, 2);
    }
}
