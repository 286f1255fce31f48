//! Removing: names by request, files when nothing needs them any longer.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::database::{self, Change, Contents};
use super::lookup::{Found, find};
use super::work::WorkFile;
use super::{Inner, Removed, private};
use crate::registry::Parsed;
use crate::{Digest, Error, Result};

/// Keeps all files from removal. What was to be removed meanwhile goes when it is dropped, unless
/// another has one, too.
#[derive(Debug)]
pub(super) struct Stay {
    inner: Arc<Inner>,
    lock: Option<File>,
}

impl Drop for Stay {
    fn drop(&mut self) {
        drop(self.lock.take());
        let collected = self.inner.is_deferred().and_then(|deferred| {
            deferred
                .then(|| self.inner.collect())
                .transpose()
                .map(|_| ())
        });
        if let Err(error) = collected {
            tracing::warn!(%error, "cannot remove files that nothing needs any longer");
        }
    }
}

impl Inner {
    /// Keeps all files from removal until the result is dropped. Waits while another removes.
    pub(super) fn hold_files(self: &Arc<Self>) -> Result<Stay> {
        Ok(Stay {
            lock: self.gc_lock(FlockOperation::LockShared)?,
            inner: Arc::clone(self),
        })
    }

    fn gc_lock(&self, how: FlockOperation) -> Result<Option<File>> {
        let path = self.layout.gc_lock();
        let lock = || -> io::Result<Option<File>> {
            let file = private::open(&path)?;
            match flock(&file, how) {
                Ok(()) => Ok(Some(file)),
                Err(Errno::WOULDBLOCK) => Ok(None),
                Err(error) => Err(error.into()),
            }
        };
        lock().map_err(|source| Error::io("lock", &path, source))
    }

    /// Takes names away, and images with their last name.
    pub(super) fn remove(&self, name: &str) -> Result<Removed> {
        let (_, (mut removed, disk)) = database::update(&self.layout, |contents| {
            let found = find(contents, name)?;
            let id = found.id();
            let all: Vec<String> = contents.names_of(&id).map(str::to_owned).collect();
            let tags = all.iter().filter(|name| !name.contains('@')).count();
            // A digest is a by-name of a pull: with the last tag it goes too.
            let names = match found {
                Found::Name(name, _) if !name.contains('@') && tags > 1 => vec![name],
                Found::Name(name, _) if name.contains('@') && all.len() > 1 && tags > 0 => {
                    vec![name]
                }
                _ => all.clone(),
            };
            let mut changes: Vec<_> = names.iter().cloned().map(Change::DropName).collect();
            let mut removed = Removed {
                names,
                ..Removed::default()
            };
            let mut disk = None;
            if removed.names.len() == all.len() {
                check_unused(&self.layout.rootfs(&id), id)?;
                changes.push(Change::DropImage(id));
                removed.image = Some(id);
                disk = contents.record(&id).and_then(|record| record.disk);
            }
            Ok((changes, (removed, disk)))
        })?;
        self.count_freed(&mut removed)?;
        if let Some(id) = removed.image.filter(|_| removed.deferred) {
            removed.bytes += self.free_rootfs(id)?;
            removed.bytes += disk.map_or(Ok(0), |disk| self.free_disk(disk))?;
        }
        Ok(removed)
    }

    /// Removes the root file system of an image that is gone, though others hold files: it is most
    /// of what the image takes, and no other image's. Where somebody makes the image anew, it is
    /// left to those who hold files. Bytes freed.
    fn free_rootfs(&self, id: Digest) -> Result<u64> {
        let Some(_claim) = try_claim(&self.layout.image_claim(&id)) else {
            return Ok(0);
        };
        if database::read(&self.layout)?.record(&id).is_some() {
            return Ok(0);
        }
        let directory = self.layout.image(&id);
        match directory.exists() {
            true => remove_unused(&self.layout.rootfs(&id), &directory),
            false => Ok(0),
        }
    }

    /// Frees the files of what was removed, unless somebody holds them.
    pub(super) fn count_freed(&self, removed: &mut Removed) -> Result<()> {
        if removed.image.is_some() {
            let freed = self.collect()?;
            removed.bytes = freed.unwrap_or(0);
            removed.deferred = freed.is_none();
        }
        Ok(())
    }

    /// Removes files that no image needs; bytes freed. `None` while somebody holds the files, or
    /// removes others: whoever does will remove them.
    pub(super) fn collect(&self) -> Result<Option<u64>> {
        let mut freed = None;
        while let Some(alone) = self.lock_alone()? {
            // Whoever removes something from now on sees that it is locked, and defers anew.
            if self.is_deferred()? {
                self.set_deferred(&alone, false);
            }
            let bytes = self
                .remove_unneeded()
                .inspect_err(|_| self.set_deferred(&alone, true))?;
            *freed.get_or_insert(0) += bytes;
            drop(alone);
            if !self.is_deferred()? {
                break;
            }
        }
        Ok(freed)
    }

    /// The lock to remove files under; `None` while somebody holds them, who knows then that there
    /// is something to remove.
    fn lock_alone(&self) -> Result<Option<File>> {
        let exclusive = FlockOperation::NonBlockingLockExclusive;
        if let Some(alone) = self.gc_lock(exclusive)? {
            return Ok(Some(alone));
        }
        self.defer_removal()?;
        // The holder may have ended before that was to be seen.
        self.gc_lock(exclusive)
    }

    /// Has files that nothing needs removed when the last one ends who holds them.
    pub(super) fn defer_removal(&self) -> Result<()> {
        let path = self.layout.gc_lock();
        let lock = OpenOptions::new().write(true).open(&path);
        self.set_deferred(
            &lock.map_err(|source| Error::io("open", &path, source))?,
            true,
        );
        Ok(())
    }

    /// Notes whether files were left to be removed: the lock file has a length then, which takes no
    /// space of a disk that may be full.
    fn set_deferred(&self, lock: &File, deferred: bool) {
        if let Err(error) = lock.set_len(deferred.into()) {
            tracing::warn!(%error, deferred, "cannot note whether files are to be removed");
        }
    }

    fn is_deferred(&self) -> Result<bool> {
        let path = self.layout.gc_lock();
        match fs::metadata(&path) {
            Ok(lock) => Ok(lock.len() > 0),
            Err(source) => Err(Error::io("look at", &path, source)),
        }
    }

    fn remove_unneeded(&self) -> Result<u64> {
        let contents = database::read(&self.layout)?;
        let needed = self.needed(&contents);
        let mut freed = 0;
        for (digest, path) in entries(&self.layout.blobs())? {
            if !needed.contains(&digest) {
                freed += remove_file(&path)?;
            }
        }
        for (id, directory) in entries(&self.layout.images())? {
            if contents.record(&id).is_none() {
                freed += remove_unused(&self.layout.rootfs(&id), &directory)?;
            }
        }
        Ok(freed + self.collect_disks(&contents)?)
    }

    /// Blobs that images in the database are made of.
    fn needed(&self, contents: &Contents) -> HashSet<Digest> {
        let mut needed = HashSet::new();
        for (id, record) in &contents.images {
            needed.insert(*id);
            needed.insert(record.manifest);
            needed.extend(&record.indexes);
            let manifest = fs::read(self.layout.blob(&record.manifest)).ok();
            let parsed =
                manifest.and_then(|bytes| Parsed::parse(&bytes, "", &self.options.limits).ok());
            if let Some(Parsed::Image(manifest)) = parsed {
                needed.extend(manifest.layers.iter().map(|layer| layer.digest));
            }
        }
        needed
    }
}

/// What keeps others from making what is to be removed; `None` while one of them does. Where there
/// is no room for it on the disk, nothing is removed yet either.
pub(super) fn try_claim(path: &Path) -> Option<WorkFile> {
    WorkFile::try_acquire(path).unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), %error, "files are removed later");
        None
    })
}

/// Refuses what some sandbox runs from: `path` is the file of the image or disk image `id`. A file
/// that is not there is unused.
pub(super) fn check_unused(path: &Path, id: Digest) -> Result<()> {
    match lock_unused(path) {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(Error::InUse { id }),
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(Error::io("lock", path, source)),
    }
}

/// Removes a file that may be missing and its directory, unless a sandbox runs from it; bytes
/// freed.
pub(super) fn remove_unused(path: &Path, directory: &Path) -> Result<u64> {
    let freed = match lock_unused(path) {
        Ok(Some(_lock)) => remove_file(path)?,
        Ok(None) => return Ok(0),
        Err(source) if source.kind() == io::ErrorKind::NotFound => 0,
        Err(source) => return Err(Error::io("lock", path, source)),
    };
    fs::remove_dir(directory).map_err(|source| Error::io("remove", directory, source))?;
    Ok(freed)
}

/// An exclusive lock on a file that sandboxes run from; `None` while it is open somewhere.
fn lock_unused(path: &Path) -> io::Result<Option<File>> {
    let file = File::open(path)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Entries of a directory whose names are digests.
pub(super) fn entries(directory: &Path) -> Result<Vec<(Digest, PathBuf)>> {
    let read = || -> io::Result<Vec<_>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            if let Some(digest) = entry
                .file_name()
                .to_str()
                .and_then(|hex| Digest::from_hex(hex).ok())
            {
                found.push((digest, entry.path()));
            }
        }
        Ok(found)
    };
    read().map_err(|source| Error::io("list", directory, source))
}

pub(super) fn remove_file(path: &Path) -> Result<u64> {
    let remove = || {
        let bytes = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(path)?) * 512;
        fs::remove_file(path).map(|()| bytes)
    };
    remove().map_err(|source| Error::io("remove", path, source))
}
