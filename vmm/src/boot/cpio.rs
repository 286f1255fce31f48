//! Builds an initramfs in memory.

use std::io;

use podvisor_cpio::Writer;

use super::{BootError, Initramfs};

/// Collects the files of an initramfs. Everything belongs to root and dates from 1970, so that the
/// same calls give the same bytes. Directories must be added before their contents.
///
/// ```
/// # use podvisor_vmm::InitramfsBuilder;
/// let initramfs = InitramfsBuilder::new()
///     .directory("dev", 0o755)
///     .character_device("dev/console", 0o600, 5, 1)
///     .file("init", 0o755, b"#!/bin/sh\n")
///     .build()?;
/// # Ok::<(), podvisor_vmm::BootError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing happens before `build`"]
pub struct InitramfsBuilder {
    archive: Writer<Vec<u8>>,
    /// The first file that the format cannot hold.
    too_large: Option<String>,
}

impl Default for InitramfsBuilder {
    fn default() -> Self {
        Self {
            archive: Writer::new(Vec::new()),
            too_large: None,
        }
    }
}

impl InitramfsBuilder {
    /// Creates an empty archive.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory.
    pub fn directory(self, path: &str, permissions: u32) -> Self {
        self.with(path, |archive| archive.directory_with(path, permissions))
    }

    /// Adds a regular file of less than 4 GiB.
    pub fn file(self, path: &str, permissions: u32, data: &[u8]) -> Self {
        self.with(path, |archive| archive.file(path, permissions, data))
    }

    /// Adds a symbolic link.
    pub fn symlink(self, path: &str, target: &str) -> Self {
        self.with(path, |archive| archive.symlink(path, target))
    }

    /// Adds a character device, such as `dev/console` (5, 1), without which init has no output.
    pub fn character_device(self, path: &str, permissions: u32, major: u32, minor: u32) -> Self {
        self.with(path, |archive| {
            archive.character_device(path, permissions, (major, minor))
        })
    }

    /// Finishes the archive.
    ///
    /// # Errors
    /// [`BootError::InitramfsFile`] if a file has 4 GiB or more.
    pub fn build(self) -> Result<Initramfs, BootError> {
        match (self.too_large, self.archive.finish()) {
            (None, Ok(archive)) => Initramfs::from_bytes(archive),
            (path, _) => Err(BootError::InitramfsFile {
                path: path.unwrap_or_default(),
            }),
        }
    }

    /// Memory takes all that is written: only the length of a file can be refused.
    fn with(
        mut self,
        path: &str,
        add: impl FnOnce(&mut Writer<Vec<u8>>) -> io::Result<()>,
    ) -> Self {
        if add(&mut self.archive).is_err() {
            self.too_large.get_or_insert_with(|| path.to_owned());
        }
        self
    }
}
