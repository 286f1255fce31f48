//! Removal: names on request, files when nothing needs them any longer.

use std::cell::Cell;
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::database::{self, Change, Contents};
use super::lookup::{Lookup, find};
use super::work::WorkFile;
use super::{Inner, RemovedImages, private};
use crate::registry::Parsed;
use crate::{Digest, Error, Result};

/// Keeps all files from removal. Removals that were deferred meanwhile are done when it is dropped,
/// unless there is another one.
#[derive(Debug)]
pub(super) struct GcHold {
    inner: Arc<Inner>,
    lock: Option<File>,
}

impl Drop for GcHold {
    fn drop(&mut self) {
        drop(self.lock.take());
        let collected = self
            .inner
            .is_deferred()
            .and_then(|deferred| match deferred {
                true => self.inner.collect(),
                false => Ok(()),
            });
        if let Err(error) = collected {
            tracing::warn!(%error, "cannot remove files that nothing needs any longer");
        }
    }
}

impl Inner {
    /// Keeps all files from removal until the result is dropped. Waits while another process
    /// removes files.
    pub(super) fn hold_files(self: &Arc<Self>) -> Result<GcHold> {
        Ok(GcHold {
            lock: self.gc_lock(FlockOperation::LockShared)?,
            inner: Arc::clone(self),
        })
    }

    fn gc_lock(&self, how: FlockOperation) -> Result<Option<File>> {
        self.layout.create_directories()?;
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

    /// Removes names, and images with their last name. `removed` says what, also where files of it
    /// cannot be removed.
    pub(super) fn remove(&self, name: &str, removed: &mut RemovedImages) -> Result<()> {
        let dropped = Cell::new(None);
        let decide = |contents: &Contents| {
            let found = find(contents, name)?;
            let id = found.id();
            let all: Vec<String> = contents.names_of(&id).map(str::to_owned).collect();
            let tags = all.iter().filter(|name| !name.contains('@')).count();
            // A digest is a secondary name from a pull: it is removed with the last tag.
            let names = match found {
                Lookup::Name(name, _) if !name.contains('@') && tags > 1 => vec![name],
                Lookup::Name(name, _) if name.contains('@') && all.len() > 1 && tags > 0 => {
                    vec![name]
                }
                _ => all.clone(),
            };
            let mut changes: Vec<_> = names.iter().cloned().map(Change::DropName).collect();
            let mut removed = RemovedImages {
                names,
                ..RemovedImages::default()
            };
            let mut disk = None;
            if removed.names.len() == all.len() {
                check_unused(&self.layout.rootfs(&id), id)?;
                changes.push(Change::DropImage(id));
                removed.image = Some(id);
                disk = contents.record(&id).and_then(|record| record.disk);
            }
            dropped.set(removed.image);
            Ok((changes, (removed, disk)))
        };
        let free = || dropped.get().map_or(Ok(0), |id| self.free_rootfs_first(id));
        let ((names, disk), freed) = self.update_or_free(decide, free)?;
        *removed = names;
        removed.bytes = freed;
        self.count_freed(removed)?;
        let mut failures = Failures::default();
        if let Some(id) = removed.image.filter(|_| removed.deferred) {
            removed.bytes += failures.freed(self.free_rootfs(id));
            removed.bytes += disk.map_or(0, |disk| failures.freed(self.free_disk(disk)));
        }
        failures.end()
    }

    /// Changes the database to remove something. That takes some room itself: on a disk that has
    /// none, `free` first removes what the change would make useless. If the change fails all the
    /// same, what is removed is damaged until it is removed or pulled again. Returns also the bytes
    /// that were freed so.
    pub(super) fn update_or_free<T>(
        &self,
        decide: impl Fn(&Contents) -> Result<(Vec<Change>, T)>,
        free: impl FnOnce() -> Result<u64>,
    ) -> Result<(T, u64)> {
        match database::update(&self.layout, &decide) {
            Err(full @ Error::DiskFull { .. }) => match free()? {
                0 => Err(full),
                freed => {
                    tracing::info!(freed, "the disk is full: files are removed before records");
                    let (_, out) = database::update(&self.layout, &decide)?;
                    Ok((out, freed))
                }
            },
            done => done.map(|(_, out)| (out, 0)),
        }
    }

    /// Removes the root file system of a removed image, even while others hold files: it is most of
    /// the image's disk usage, and no other image shares it. If another process is creating the
    /// image again, it is left to the holders of files. Returns the bytes freed.
    fn free_rootfs(&self, id: Digest) -> Result<u64> {
        let Some(_claim) = try_claim(&self.layout.image_claim(&id)) else {
            return Ok(0);
        };
        match database::read(&self.layout)?.record(&id) {
            Some(_) => Ok(0),
            None => self.remove_rootfs(id),
        }
    }

    /// As [`Self::free_rootfs`], of an image that still has its record.
    fn free_rootfs_first(&self, id: Digest) -> Result<u64> {
        match try_claim(&self.layout.image_claim(&id)) {
            Some(_claim) => self.remove_rootfs(id),
            None => Ok(0),
        }
    }

    fn remove_rootfs(&self, id: Digest) -> Result<u64> {
        let directory = self.layout.image(&id);
        match directory.exists() {
            true => remove_unused(&self.layout.rootfs(&id), &directory),
            false => Ok(0),
        }
    }

    /// Frees the files of what was removed, unless they are held.
    pub(super) fn count_freed(&self, removed: &mut RemovedImages) -> Result<()> {
        match removed.image {
            Some(_) => self.collect_into(removed),
            None => Ok(()),
        }
    }

    /// As [`Self::collect_into`], for those who need not know what was freed.
    pub(super) fn collect(&self) -> Result<()> {
        self.collect_into(&mut RemovedImages::default())
    }

    /// Removes files that no image needs, and adds the bytes freed, also where that fails in part.
    /// Deferred while another process holds the files or removes others: that process will remove
    /// them.
    pub(super) fn collect_into(&self, removed: &mut RemovedImages) -> Result<()> {
        let mut is_done = false;
        while let Some(alone) = self.lock_alone()? {
            // A removal that starts from now on sees that the lock is taken, and defers again.
            if self.is_deferred()? {
                self.set_deferred(&alone, false);
            }
            self.remove_unneeded(&mut removed.bytes)
                .inspect_err(|_| self.set_deferred(&alone, true))?;
            is_done = true;
            drop(alone);
            if !self.is_deferred()? {
                break;
            }
        }
        removed.deferred = !is_done;
        Ok(())
    }

    /// Returns the lock for removing files; `None` while others hold it, which then know that there
    /// is something to remove.
    fn lock_alone(&self) -> Result<Option<File>> {
        let exclusive = FlockOperation::NonBlockingLockExclusive;
        if let Some(alone) = self.gc_lock(exclusive)? {
            return Ok(Some(alone));
        }
        self.defer_removal()?;
        // The holder may have ended before it could see that.
        self.gc_lock(exclusive)
    }

    /// Has unneeded files removed when their last holder ends.
    pub(super) fn defer_removal(&self) -> Result<()> {
        let path = self.layout.gc_lock();
        let lock = OpenOptions::new().write(true).open(&path);
        self.set_deferred(
            &lock.map_err(|source| Error::io("open", &path, source))?,
            true,
        );
        Ok(())
    }

    /// Records whether files were left to be removed: the lock file has a length then, which takes
    /// no space on a disk that may be full.
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

    /// Removes files that no image needs, and adds the bytes freed to `freed`.
    fn remove_unneeded(&self, freed: &mut u64) -> Result<()> {
        let contents = database::read(&self.layout)?;
        let mut failures = Failures::default();
        if let Some(needed) = self.needed(&contents) {
            for (digest, path) in failures.listed(entries(&self.layout.blobs())) {
                if !needed.contains(&digest) {
                    *freed += failures.freed(remove_file(&path));
                }
            }
        }
        for (id, directory) in failures.listed(entries(&self.layout.images())) {
            if contents.record(&id).is_none() && !contents.unreadable.contains(&id) {
                *freed += failures.freed(remove_unused(&self.layout.rootfs(&id), &directory));
            }
        }
        self.collect_disks(&contents, freed, &mut failures);
        failures.end()
    }

    /// Blobs that images in the database are made of; `None` when that cannot be told of one whose
    /// manifest is there, or whose record is a later version's.
    fn needed(&self, contents: &Contents) -> Option<HashSet<Digest>> {
        if let Some(image) = contents.unreadable.first() {
            tracing::warn!(%image, "no layers are removed: unreadable record");
            return None;
        }
        let mut needed = HashSet::new();
        for (id, record) in &contents.images {
            needed.insert(*id);
            needed.insert(record.manifest);
            needed.extend(&record.indexes);
            let unknown = |error: &dyn std::error::Error| {
                tracing::warn!(image = %id, %error, "no layers are removed: unreadable manifest");
            };
            let bytes = match fs::read(self.layout.blob(&record.manifest)) {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => {
                    unknown(&error);
                    return None;
                }
            };
            match Parsed::parse(&bytes, "", &self.options.limits) {
                Ok(Parsed::Image(manifest)) => {
                    needed.extend(manifest.layers.iter().map(|layer| layer.digest));
                }
                Ok(Parsed::Index(_)) => {}
                Err(error) => {
                    unknown(&error);
                    return None;
                }
            }
        }
        Some(needed)
    }
}

/// What failed of the removal of several things, of which one that cannot be removed keeps no
/// other.
#[derive(Debug, Default)]
pub(super) struct Failures {
    first: Option<Error>,
}

impl Failures {
    /// Returns the bytes that a removal has freed.
    pub(super) fn freed(&mut self, freed: Result<u64>) -> u64 {
        freed.unwrap_or_else(|error| {
            self.add(error);
            0
        })
    }

    /// Returns the entries of a directory.
    pub(super) fn listed<T>(&mut self, entries: Result<Vec<T>>) -> Vec<T> {
        entries.unwrap_or_else(|error| {
            self.add(error);
            Vec::new()
        })
    }

    /// Keeps the first failure, and logs the others.
    pub(super) fn add(&mut self, error: Error) {
        match self.first {
            None => self.first = Some(error),
            Some(_) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot be removed"
                );
            }
        }
    }

    /// Returns the first failure, if there was one.
    pub(super) fn end(self) -> Result<()> {
        self.first.map_or(Ok(()), Err)
    }
}

/// Takes the claim that keeps others from creating what is to be removed; `None` while one of them
/// has it. If the disk has no room for the claim, nothing is removed yet either.
pub(super) fn try_claim(path: &Path) -> Option<WorkFile> {
    WorkFile::try_acquire(path).unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), %error, "files are removed later");
        None
    })
}

/// Refuses a file that a sandbox runs from: `path` is the file of the image or disk image `id`. A
/// missing file is unused.
pub(super) fn check_unused(path: &Path, id: Digest) -> Result<()> {
    match lock_unused(path) {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(Error::InUse { id }),
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(Error::io("lock", path, source)),
    }
}

/// Removes a file that may be missing and its directory, unless a sandbox runs from it; returns the
/// bytes freed.
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

/// Takes an exclusive lock on a file that sandboxes run from; `None` while it is open somewhere.
fn lock_unused(path: &Path) -> io::Result<Option<File>> {
    lock_by(path, |file| {
        flock(file, FlockOperation::NonBlockingLockExclusive)
    })
}

fn lock_by(
    path: &Path,
    lock: impl Fn(&File) -> rustix::io::Result<()>,
) -> io::Result<Option<File>> {
    let mut file = File::open(path)?;
    let mut locked = lock(&file);
    // NFS has such locks of files that are open for writing alone.
    if locked == Err(Errno::BADF) {
        file = OpenOptions::new().read(true).write(true).open(path)?;
        locked = lock(&file);
    }
    match locked {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Lists the entries of a directory whose names are digests.
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

#[cfg(test)]
mod tests {
    use rustix::fs::{OFlags, fcntl_getfl};

    use super::super::{PullOptions, Store, disk_records};
    use super::*;

    #[test]
    fn a_root_file_system_that_somebody_has_found_stays_until_it_has_its_record() {
        let dir = tempfile::tempdir().unwrap();
        let inner = &Store::open(dir.path()).unwrap().inner;
        let id = Digest::of(b"id");
        let rootfs = inner.layout.rootfs(&id);
        fs::create_dir(inner.layout.image(&id)).unwrap();
        fs::write(&rootfs, [1; 5000]).unwrap();
        let claim = inner.claim_image(&id, &PullOptions::default()).unwrap();
        assert_eq!(inner.free_rootfs(id).unwrap(), 0);
        assert!(rootfs.exists());
        drop(claim);
        assert!(inner.free_rootfs(id).unwrap() > 0);
        assert!(!inner.layout.image(&id).exists());
    }

    #[test]
    fn an_image_whose_record_a_later_version_wrote_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let inner = &Store::open(dir.path()).unwrap().inner;
        let [later, gone] = [b"later", b"gone."].map(|name| Digest::of(name));
        for id in [later, gone] {
            fs::create_dir(inner.layout.image(&id)).unwrap();
            fs::write(inner.layout.rootfs(&id), [1; 5000]).unwrap();
            fs::write(inner.layout.blob(&id), "a layer").unwrap();
        }
        database::put_raw(&inner.layout, later, b"{\"from\": \"the future\"}");
        inner.remove_unneeded(&mut 0).unwrap();
        let has = |id| {
            (
                inner.layout.rootfs(&id).exists(),
                inner.layout.blob(&id).exists(),
            )
        };
        // Of which image a layer is, only the record could say.
        assert_eq!((has(later), has(gone)), ((true, true), (false, true)));
        let drop = |_: &_| Ok((vec![Change::DropImage(later)], ()));
        database::update(&inner.layout, drop).unwrap();
        inner.remove_unneeded(&mut 0).unwrap();
        assert_eq!((has(later), has(gone)), ((false, false), (false, false)));
    }

    #[test]
    fn a_disk_of_which_only_a_later_version_knows_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let inner = &Store::open(dir.path()).unwrap().inner;
        let image = Digest::of(b"image");
        let [later, of_image, gone] = [&b"later"[..], b"of an image", b"gone"].map(Digest::of);
        for id in [later, of_image, gone] {
            fs::create_dir(inner.layout.disk_directory(&id)).unwrap();
            fs::write(inner.layout.disk(&id), [1; 5000]).unwrap();
        }
        database::put_raw(&inner.layout, image, b"{\"from\": \"the future\"}");
        {
            let database = redb::Database::open(inner.layout.database()).unwrap();
            disk_records::put_raw(&database, later, b"{\"from\": \"the future\"}");
            // The one that came with the image.
            let record = br#"{"format":"raw","size":5000,"fetched":1,"used":1,"from_image":true}"#;
            disk_records::put_raw(&database, of_image, record);
        }
        let has = |id| inner.layout.disk(id).exists();
        inner.remove_unneeded(&mut 0).unwrap();
        assert_eq!([&later, &of_image, &gone].map(has), [true, true, false]);
        let drop = |_: &_| Ok((vec![Change::DropImage(image)], ()));
        database::update(&inner.layout, drop).unwrap();
        inner.remove_unneeded(&mut 0).unwrap();
        assert_eq!([&later, &of_image].map(has), [true, false]);
    }

    #[test]
    fn an_image_on_nfs_is_locked_by_a_file_that_is_open_for_writing() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let as_nfs = |file: &File| match fcntl_getfl(file)? & OFlags::ACCMODE {
            OFlags::RDWR => flock(file, FlockOperation::NonBlockingLockExclusive),
            _ => Err(Errno::BADF),
        };
        assert!(lock_by(image.path(), as_nfs).unwrap().is_some());
        let used = File::open(image.path()).unwrap();
        flock(&used, FlockOperation::LockShared).unwrap();
        assert!(lock_by(image.path(), as_nfs).unwrap().is_none());
    }
}
