//! A directory in memory, to which everything that is measured is copied: no boot waits for a disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// A tmpfs on every Linux.
const MEMORY: &str = "/dev/shm";

/// The directory; it is removed when dropped.
#[derive(Debug)]
pub(crate) struct Stage {
    path: PathBuf,
}

impl Stage {
    pub(crate) fn new() -> Result<Self> {
        let path = Path::new(MEMORY).join(format!("podvisor-bench-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("{} cannot be made", path.display()))?;
        Ok(Self { path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Copies a file, with its permissions; returns its new path.
    pub(crate) fn copy(&self, file: &Path) -> Result<PathBuf> {
        let name = file
            .file_name()
            .with_context(|| format!("{} is no file", file.display()))?;
        let copy = self.path.join(name);
        fs::copy(file, &copy).with_context(|| format!("{} cannot be copied", file.display()))?;
        Ok(copy)
    }

    /// Writes a file; returns its path.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        fs::write(&path, text).with_context(|| format!("{} cannot be written", path.display()))?;
        Ok(path)
    }

    /// Copies the shared libraries of `program` to a directory for `LD_LIBRARY_PATH`; returns
    /// `None` if it has none.
    pub(crate) fn copy_libraries(&self, program: &Path) -> Result<Option<PathBuf>> {
        let output = Command::new("ldd")
            .arg(program)
            .output()
            .context("`ldd` cannot be started")?;
        // `ldd` fails for static programs.
        let text = String::from_utf8_lossy(&output.stdout);
        let libraries: Vec<&str> = text.lines().filter_map(library).collect();
        if libraries.is_empty() {
            return Ok(None);
        }
        let name = program.file_name().unwrap_or_default();
        let directory = self
            .path
            .join(format!("{}.libraries", name.to_string_lossy()));
        fs::create_dir(&directory)
            .with_context(|| format!("{} cannot be made", directory.display()))?;
        for library in libraries {
            let Some(name) = Path::new(library).file_name() else {
                bail!("`ldd` names {library:?}, which is no file");
            };
            fs::copy(library, directory.join(name))
                .with_context(|| format!("{library} cannot be copied"))?;
        }
        Ok(Some(directory))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Returns the path in a line of `ldd` such as `libz.so.1 => /lib/x86_64-linux-gnu/libz.so.1
/// (0x7f…)`.
fn library(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once("=> ")?;
    rest.split_whitespace()
        .next()
        .filter(|path| path.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_the_paths_that_ldd_resolved() {
        let line = "\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f0000000000)";
        assert_eq!(library(line), Some("/lib/x86_64-linux-gnu/libz.so.1"));
        assert_eq!(library("\tlinux-vdso.so.1 (0x00007ffd0b5f4000)"), None);
        assert_eq!(library("\tlibx.so => not found"), None);
        assert_eq!(library("\tstatically linked"), None);
    }

    #[test]
    fn the_directory_goes_with_its_contents() {
        let stage = Stage::new().unwrap();
        let path = stage.path().to_owned();
        stage.write("x", "y").unwrap();
        drop(stage);
        assert!(!path.exists());
    }
}
