//! What is copied, by its path.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// The source of a copy: a member of a directory.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) dir: PathBuf,
    /// `.` means all members of the directory.
    pub(super) name: String,
}

impl Source {
    pub(super) fn of(path: &str) -> anyhow::Result<Self> {
        if path == "." || path == "/" || path.ends_with("/.") {
            return Ok(Self {
                dir: PathBuf::from(path),
                name: ".".to_owned(),
            });
        }
        let (dir, name) = split(Path::new(path))?;
        Ok(Self { dir, name })
    }

    pub(super) fn is_contents(&self) -> bool {
        self.name == "."
    }
}

/// Returns the directory and the name of a path.
pub(super) fn split(path: &Path) -> anyhow::Result<(PathBuf, String)> {
    let name = path
        .file_name()
        .and_then(OsStr::to_str)
        .with_context(|| format!("`{}` names no file", path.display()))?;
    let dir = match path.parent() {
        Some(dir) if dir.as_os_str().is_empty() => PathBuf::from("."),
        Some(dir) => dir.to_owned(),
        None => PathBuf::from("/"),
    };
    Ok((dir, name.to_owned()))
}
