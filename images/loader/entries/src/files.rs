//! Bounded access to the files of [`Volumes`].

use std::cell::Cell;

use thiserror::Error;

use crate::limits;
use crate::volumes::{FileError, FileKind, FileStat, Volume, VolumeId, Volumes};

/// A path that is not followed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PathError {
    /// It would leave the directory that it is in.
    #[error("the path {0:?} has a part `..`, which is refused")]
    Parent(String),
    /// It cannot be a path of Linux.
    #[error("the path {0:?} has a NUL byte")]
    Nul(String),
    /// It is longer than paths are.
    #[error("a path has {0} bytes, {max} are the most", max = limits::PATH_BYTES)]
    Long(usize),
}

/// Returns a path from the root without leading `/`, `.` and empty parts.
///
/// # Errors
///
/// If it has a part `..`, a NUL byte, or too many bytes.
pub fn normalize(path: &str) -> Result<String, PathError> {
    if path.len() > limits::PATH_BYTES {
        return Err(PathError::Long(path.len()));
    }
    if path.contains('\0') {
        return Err(PathError::Nul(path.to_owned()));
    }
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => return Err(PathError::Parent(path.to_owned())),
            part => parts.push(part),
        }
    }
    Ok(parts.join("/"))
}

/// [`Volumes`] with a quota of reads.
pub struct Files<'a> {
    volumes: &'a dyn Volumes,
    lookups: Cell<usize>,
    bytes: Cell<usize>,
}

impl std::fmt::Debug for Files<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Files")
            .field("lookups", &self.lookups)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl<'a> Files<'a> {
    /// Begins with a full quota.
    #[must_use]
    pub fn new(volumes: &'a dyn Volumes) -> Self {
        Self {
            volumes,
            lookups: Cell::new(limits::LOOKUPS),
            bytes: Cell::new(limits::TOTAL_BYTES),
        }
    }

    /// The file systems.
    #[must_use]
    pub fn volumes(&self) -> &'a [Volume] {
        self.volumes.volumes()
    }

    /// The volume with this number.
    #[must_use]
    pub fn volume(&self, id: VolumeId) -> Option<&'a Volume> {
        self.volumes().get(id.0)
    }

    fn count(&self, path: &str) -> Result<(), FileError> {
        let left = self.lookups.get().checked_sub(1);
        self.lookups.set(left.unwrap_or(0));
        left.map(drop).ok_or_else(|| FileError {
            path: path.to_owned(),
            reason: format!("more than {} files were looked up", limits::LOOKUPS),
        })
    }

    /// Returns what a path leads to.
    ///
    /// # Errors
    ///
    /// If the file system cannot tell, or the quota is used up.
    pub fn stat(&self, volume: VolumeId, path: &str) -> Result<Option<FileStat>, FileError> {
        self.count(path)?;
        self.volumes.stat(volume, path)
    }

    /// Returns whether a path leads to a regular file, with more than no bytes.
    #[must_use]
    pub fn is_file(&self, volume: VolumeId, path: &str) -> bool {
        let stat = self.stat(volume, path).ok().flatten();
        stat.is_some_and(|stat| stat.kind == FileKind::Regular && stat.size > 0)
    }

    /// Reads a configuration file; `None` if there is no such file.
    ///
    /// # Errors
    ///
    /// If it is not a regular file, too large, cannot be read, or the quota is used up.
    pub fn read(&self, volume: VolumeId, path: &str) -> Result<Option<String>, FileError> {
        let fails = |reason: String| FileError {
            path: path.to_owned(),
            reason,
        };
        let Some(stat) = self.stat(volume, path)? else {
            return Ok(None);
        };
        if stat.kind != FileKind::Regular {
            return Err(fails("not a regular file".to_owned()));
        }
        if stat.size > limits::FILE_BYTES as u64 {
            let (size, max) = (stat.size, limits::FILE_BYTES);
            return Err(fails(format!(
                "it has {size} bytes, {max} are the most of a configuration"
            )));
        }
        let bytes = self.read_part(volume, path, 0, limits::FILE_BYTES)?;
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Reads a part of a file, which counts like a configuration.
    ///
    /// # Errors
    ///
    /// If it cannot be read, or the quota is used up.
    pub fn read_part(
        &self,
        volume: VolumeId,
        path: &str,
        offset: u64,
        len: usize,
    ) -> Result<Vec<u8>, FileError> {
        self.count(path)?;
        let mut bytes = self.volumes.read_at(volume, path, offset, len)?;
        bytes.truncate(len);
        let left = self.bytes.get().checked_sub(bytes.len());
        self.bytes.set(left.unwrap_or(0));
        if left.is_none() {
            let reason = format!("more than {} bytes were read", limits::TOTAL_BYTES);
            let path = path.to_owned();
            return Err(FileError { path, reason });
        }
        Ok(bytes)
    }

    /// Lists a directory, sorted; nothing if there is none.
    ///
    /// # Errors
    ///
    /// If it cannot be read, has too many names, or the quota is used up.
    pub fn list(&self, volume: VolumeId, directory: &str) -> Result<Vec<String>, FileError> {
        self.count(directory)?;
        let max = limits::DIRECTORY_NAMES;
        let mut names = self
            .volumes
            .list(volume, directory, max.saturating_add(1))?;
        if names.len() > max {
            return Err(FileError {
                path: directory.to_owned(),
                reason: format!("the directory has more than {max} names"),
            });
        }
        names.retain(|name| !name.contains(['/', '\0']) && name != "." && name != "..");
        names.sort_unstable();
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lose_what_says_nothing_and_never_go_up() {
        assert_eq!(normalize("//boot/./vmlinuz").unwrap(), "boot/vmlinuz");
        assert_eq!(normalize("/").unwrap(), "");
        for path in ["..", "/../etc", "boot/../../x", "a/.."] {
            assert!(
                matches!(normalize(path), Err(PathError::Parent(_))),
                "{path}"
            );
        }
        assert_eq!(normalize("a/..b/c..").unwrap(), "a/..b/c..");
        assert!(matches!(normalize("a\0b"), Err(PathError::Nul(_))));
        let long = "a/".repeat(600);
        assert_eq!(normalize(&long), Err(PathError::Long(1200)));
    }
}
