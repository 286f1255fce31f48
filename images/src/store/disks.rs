//! Disk images in the store: fetched once, found by URL, removed when no longer needed.

use std::cell::Cell;
use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::database::{self, Change, Contents};
use super::disk_records::{DiskChange, DiskName, DiskRecord};
use super::flights::Flight;
use super::gc::{Failures, GcHold, check_unused, entries, remove_unused, try_claim};
use super::pull::{acquire, blocking};
use super::work::{WorkFile, sync_directory_of};
use super::{Inner, Prune, PullOptions, PullPolicy, Pulling, RemovedImages, Store, private};
use crate::disk::{Converted, FetchError, Fetched, Fetcher, Source, Validators};
use crate::{Checksum, Digest, Disk, Error, PullEvent, Result};

/// Minimum number of digits of an id prefix that is accepted as a name.
const MIN_ID_PREFIX: usize = 4;

impl Store {
    /// Fetches the disk image at an `https://` or `http://` URL, raw or qcow2, as it is or
    /// compressed, and stores it as a sparse raw file under its URL. If a checksum is given, the
    /// file must match it, and a file that the store already has by that checksum is not fetched. A
    /// file that the server reports as unchanged is not fetched either. Fetches of one URL, also by
    /// different processes, share the work. Dropping the future stops the fetch and leaves the
    /// store as it was.
    ///
    /// Of `options`, the policy, the events and the connection settings are used. The URL may
    /// contain a user and a password; they are not stored.
    ///
    /// # Errors
    /// [`Error::Disk`] for failures of the URL, the server or the file; the store is then as it was
    /// before.
    pub fn pull_disk<'a>(
        &'a self,
        url: &'a str,
        checksum: Option<&'a Checksum>,
        options: &'a PullOptions,
    ) -> Pulling<'a, Disk> {
        Box::pin(self.fetch(url, checksum, options))
    }

    async fn fetch(
        &self,
        url: &str,
        checksum: Option<&Checksum>,
        options: &PullOptions,
    ) -> Result<Disk> {
        let source = Source::parse(url)?;
        if options.policy == PullPolicy::IfMissing && checksum.is_none() {
            let (store, name) = (self.clone(), source.name());
            match blocking(move || store.resolve_disk(&name)).await {
                Err(Error::NotFound { .. } | Error::Damaged { .. }) => {}
                found => return found,
            }
        }
        let inner = Arc::clone(&self.inner);
        let stay = Arc::new(blocking(move || inner.hold_files()).await?);
        let inner = Arc::clone(&self.inner);
        let fetch = inner.fetch_disk(source, checksum.cloned(), options, &stay);
        let outcome = fetch.await;
        blocking(move || drop(stay)).await;
        // The file may be in its place without a record, and only the record makes it a disk image.
        if let Err(Error::DiskFull { .. } | Error::Io { .. } | Error::Database { .. }) = &outcome {
            let inner = Arc::clone(&self.inner);
            return blocking(move || inner.clear_after(outcome)).await;
        }
        outcome
    }

    /// All disk images, newest first.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn disks(&self) -> Result<Vec<Disk>> {
        let contents = database::read(&self.inner.layout)?;
        let mut disks = Vec::new();
        for (id, record) in &contents.disks.records {
            match self.inner.disk(&contents, *id, record) {
                Ok(disk) => disks.push(disk),
                // One bad disk image must not hide the others; it is reported when it is requested
                // by name.
                Err(error @ Error::Damaged { .. }) => {
                    tracing::warn!(%id, %error, "skipping a damaged disk image");
                }
                Err(error) => return Err(error),
            }
        }
        disks.sort_by_key(|disk| std::cmp::Reverse((disk.fetched, disk.id)));
        Ok(disks)
    }

    /// Finds a disk image by URL, by id, or by a prefix of its id (at least 4 digits).
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Ambiguous`], or the store cannot be read.
    pub fn resolve_disk(&self, name: &str) -> Result<Disk> {
        let contents = database::read(&self.inner.layout)?;
        let id = find(&contents, name)?;
        self.inner.disk_by_id(&contents, id)
    }

    /// As [`Store::pin`] for images.
    pub(super) fn pin_disk(&self, name: &str, pinned: bool) -> Result<()> {
        self.change_disk(name, |record| DiskRecord { pinned, ..record })
    }

    /// As [`Store::touch`] for images.
    pub(super) fn touch_disk(&self, name: &str) -> Result<()> {
        let used = database::now();
        self.change_disk(name, |record| DiskRecord { used, ..record })
    }

    fn change_disk(&self, name: &str, change: impl FnOnce(DiskRecord) -> DiskRecord) -> Result<()> {
        database::update(&self.inner.layout, |contents| {
            let id = find(contents, name)?;
            let record = contents.disks.record(&id).ok_or(Error::Damaged { id })?;
            let change = DiskChange::Put(id, change(record.clone()));
            Ok((vec![Change::Disk(change)], ()))
        })?;
        Ok(())
    }

    /// Returns whether a name is that of a disk image and not of an OCI image.
    pub(super) fn is_disk(&self, name: &str) -> Result<bool> {
        if Source::is_meant(name) {
            return Ok(true);
        }
        let contents = database::read(&self.inner.layout)?;
        let image = super::lookup::find(&contents, name);
        Ok(matches!(image, Err(Error::NotFound { .. })) && find(&contents, name).is_ok())
    }
}

/// Returns the id that a name stands for.
fn find(contents: &Contents, name: &str) -> Result<Digest> {
    if Source::is_meant(name) {
        let source = Source::parse(name)?;
        let found = contents.disks.name(&source.name());
        return found.map(|found| found.id).ok_or_else(|| Error::NotFound {
            name: source.shown(),
        });
    }
    let digits = name.strip_prefix("sha256:").unwrap_or(name);
    let ids = contents.disks.records.iter().map(|(id, _)| *id);
    let fitting: Vec<_> = ids
        .filter(|id| digits.len() >= MIN_ID_PREFIX && id.hex().starts_with(digits))
        .collect();
    match fitting[..] {
        [id] => Ok(id),
        [] => Err(Error::NotFound {
            name: name.chars().take(300).collect(),
        }),
        _ => Err(Error::Ambiguous {
            name: name.to_owned(),
            count: fitting.len(),
        }),
    }
}

impl Inner {
    pub(super) fn disk_by_id(&self, contents: &Contents, id: Digest) -> Result<Disk> {
        let record = contents.disks.record(&id).ok_or(Error::Damaged { id })?;
        self.disk(contents, id, record)
    }

    /// Assembles what is known about a disk image.
    fn disk(&self, contents: &Contents, id: Digest, record: &DiskRecord) -> Result<Disk> {
        let path = self.layout.disk(&id);
        let metadata = fs::metadata(&path).map_err(|_| Error::Damaged { id })?;
        if metadata.len() != record.size {
            return Err(Error::Damaged { id });
        }
        let urls = contents.disks.names_of(&id);
        Ok(Disk {
            id,
            urls: urls.map(str::to_owned).collect(),
            format: record.format.parse().ok(),
            virtual_size: record.size,
            size: metadata.blocks() * 512,
            fetched: database::time(record.fetched),
            pinned: record.pinned,
            path,
        })
    }

    async fn fetch_disk(
        self: Arc<Self>,
        source: Source,
        checksum: Option<Checksum>,
        options: &PullOptions,
        stay: &Arc<GcHold>,
    ) -> Result<Disk> {
        let name = source.name();
        options.emit(PullEvent::Resolving {
            reference: source.shown(),
        });
        if let Some(disk) = self.known_by_checksum(&name, checksum.as_ref()).await? {
            options.emit(PullEvent::Done {
                id: disk.id,
                new: false,
            });
            return Ok(disk);
        }
        let fetcher = blocking({
            let (options, checksum) = (options.clone(), checksum.clone());
            let limits = self.options.limits.clone();
            move || {
                let PullOptions {
                    registries, events, ..
                } = options;
                Fetcher::new(source, checksum, &registries, &limits, events)
            }
        });
        let fetcher = fetcher.await?;
        let before = self.read_contents().await?.disks.name(&name).cloned();
        let key = Digest::of(name.as_bytes());
        let path = self.layout.disk_work(&key);
        let mut waited = false;
        let turn = self
            .flights
            .lock(Flight::Disk(key), || {
                waited = true;
                options.emit(PullEvent::DiskWaiting);
            })
            .await;
        let work = acquire(&path, || {
            waited = true;
            options.emit(PullEvent::DiskWaiting);
        })
        .await?;
        let contents = self.read_contents().await?;
        let now = contents.disks.name(&name).cloned();
        // What another fetch stored while this one waited is new enough, unless a certain file is
        // wanted.
        let shared = waited && now != before;
        if shared
            && checksum.is_none()
            && let Some(found) = &now
            && let Ok(disk) = self.disk_by_id(&contents, found.id)
        {
            options.emit(PullEvent::Done {
                id: disk.id,
                new: false,
            });
            return Ok(disk);
        }
        if shared && let Some(disk) = self.known_by_checksum(&name, checksum.as_ref()).await? {
            options.emit(PullEvent::Done {
                id: disk.id,
                new: false,
            });
            return Ok(disk);
        }
        // A checksum asks for a certain file, and this is another one.
        let known =
            now.filter(|found| checksum.is_none() && self.disk_by_id(&contents, found.id).is_ok());
        let write = |source| Error::io("write", &path, source);
        let out = work.handle().map_err(write)?;
        let fetched = fetcher
            .fetch(known.as_ref().map(|known| &known.validators), &out)
            .await
            .map_err(|error| match error {
                FetchError::Disk(error) => Error::from(error),
                FetchError::Write(source) => write(source),
            })?;
        let stay = Arc::clone(stay);
        let disk = blocking(move || {
            // Held even if the caller no longer waits for this.
            let _held = (turn, stay);
            match (fetched, known) {
                (Fetched::NotModified, Some(known)) => {
                    self.name_disk(&name, known.id, known.validators)
                }
                (Fetched::NotModified, None) => Err(Error::NotFound { name }),
                (Fetched::File(converted, validators), _) => {
                    let _claim = self.claim_disk(&converted.digest)?;
                    self.keep_disk(work, &converted)?;
                    let record = new_record(&converted, checksum.as_ref());
                    self.commit_disk(converted.digest, record, Some((name, validators)), None)
                }
            }
        });
        let disk = disk.await?;
        options.emit(PullEvent::Done {
            id: disk.id,
            new: before.is_none_or(|before| before.id != disk.id),
        });
        Ok(disk)
    }

    async fn read_contents(self: &Arc<Self>) -> Result<Contents> {
        let inner = Arc::clone(self);
        blocking(move || database::read(&inner.layout)).await
    }

    /// Finds a disk image that is known to come from a file of that checksum, and gives it the
    /// name.
    async fn known_by_checksum(
        self: &Arc<Self>,
        name: &str,
        checksum: Option<&Checksum>,
    ) -> Result<Option<Disk>> {
        let Some(checksum) = checksum else {
            return Ok(None);
        };
        let contents = self.read_contents().await?;
        let text = checksum.to_string();
        let known = contents.disks.records.iter().find(|(id, record)| {
            checksum.sha256() == Some(*id) || record.checksums.contains(&text)
        });
        let Some((id, _)) = known else {
            return Ok(None);
        };
        if self.disk_by_id(&contents, *id).is_err() {
            return Ok(None);
        }
        let (inner, name, id) = (Arc::clone(self), name.to_owned(), *id);
        let validators = contents.disks.name(&name).filter(|found| found.id == id);
        let validators = validators.map(|found| found.validators.clone());
        blocking(move || inner.name_disk(&name, id, validators.unwrap_or_default()))
            .await
            .map(Some)
    }

    /// Protects a disk image's file from removals of this file only (`free_disk`): for a caller
    /// that gives it its place, until it has its record.
    pub(super) fn claim_disk(&self, id: &Digest) -> Result<WorkFile> {
        let path = self.layout.disk_claim(id);
        WorkFile::acquire(&path).map_err(|source| Error::io("create", &path, source))
    }

    /// Moves a finished file to its final place, unless there is one already.
    pub(super) fn keep_disk(&self, work: WorkFile, converted: &Converted) -> Result<()> {
        let id = converted.digest;
        let (directory, target) = (self.layout.disk_directory(&id), self.layout.disk(&id));
        if fs::metadata(&target).is_ok_and(|found| found.len() == converted.size) {
            return Ok(());
        }
        private::create_directory(&directory)
            .and_then(|()| sync_directory_of(&directory))
            .map_err(|source| Error::io("create the directory", &directory, source))?;
        work.publish(&target)
            .map_err(|source| Error::io("store", &target, source))
    }

    /// Stores the record of a disk image whose file is in its place: under a URL, or as part of an
    /// OCI image.
    pub(super) fn commit_disk(
        &self,
        id: Digest,
        mut record: DiskRecord,
        name: Option<(String, Validators)>,
        image: Option<Digest>,
    ) -> Result<Disk> {
        let (contents, ()) = database::update(&self.layout, |before| {
            if let Some(old) = before.disks.record(&id) {
                (record.fetched, record.pinned) = (old.fetched, old.pinned);
                record.checksums.extend(old.checksums.iter().cloned());
                record.checksums.sort();
                record.checksums.dedup();
                record.from_image |= old.from_image;
            }
            let mut changes = vec![Change::Disk(DiskChange::Put(id, record))];
            changes.extend(name.map(|(url, validators)| put_name(url, id, validators)));
            if let Some((image, mut record)) =
                image.and_then(|image| Some((image, before.record(&image)?.clone())))
            {
                record.disk = Some(id);
                changes.push(Change::PutImage(image, record));
            }
            Ok((changes, ()))
        })?;
        self.disk_by_id(&contents, id)
    }

    /// Gives a disk image of the store a URL.
    fn name_disk(&self, url: &str, id: Digest, validators: Validators) -> Result<Disk> {
        let (contents, ()) = database::update(&self.layout, |before| {
            let record = before.disks.record(&id).ok_or(Error::Damaged { id })?;
            let used = DiskRecord {
                used: database::now(),
                ..record.clone()
            };
            let changes = vec![
                Change::Disk(DiskChange::Put(id, used)),
                put_name(url.to_owned(), id, validators),
            ];
            Ok((changes, ()))
        })?;
        self.disk_by_id(&contents, id)
    }

    /// Removes a URL, or by id all of them; the disk image is removed with the last one.
    pub(super) fn remove_disk(&self, name: &str, removed: &mut RemovedImages) -> Result<()> {
        let dropped = Cell::new(None);
        let decide = |contents: &Contents| {
            let id = find(contents, name)?;
            let all: Vec<String> = contents.disks.names_of(&id).map(str::to_owned).collect();
            let names = match Source::is_meant(name) {
                true => vec![Source::parse(name)?.name()],
                false => all.clone(),
            };
            let mut changes: Vec<_> = names
                .iter()
                .map(|name| Change::Disk(DiskChange::DropName(name.clone())))
                .collect();
            let mut removed = RemovedImages {
                names,
                ..RemovedImages::default()
            };
            let last = removed.names.len() == all.len();
            let in_image = contents
                .images
                .iter()
                .any(|(_, image)| image.disk == Some(id));
            if last && !in_image {
                check_unused(&self.layout.disk(&id), id)?;
                changes.push(Change::Disk(DiskChange::Drop(id)));
                removed.image = Some(id);
            }
            dropped.set(removed.image);
            Ok((changes, removed))
        };
        let free = || dropped.get().map_or(Ok(0), |id| self.free_disk_first(id));
        let (names, freed) = self.update_or_free(decide, free)?;
        *removed = names;
        removed.bytes = freed;
        self.count_freed(removed)
    }

    /// Removes disk images whose OCI image was removed, and files that belong to no disk image, and
    /// adds the bytes freed to `freed`. For [`Inner::collect`], which has made sure that no other
    /// work is running.
    pub(super) fn collect_disks(
        &self,
        contents: &Contents,
        freed: &mut u64,
        failures: &mut Failures,
    ) {
        let orphans = orphans(contents);
        if !orphans.is_empty() {
            let dropped = database::update(&self.layout, |contents| {
                let drop = |id| Change::Disk(DiskChange::Drop(id));
                Ok((self::orphans(contents).into_iter().map(drop).collect(), ()))
            });
            if let Err(error) = dropped {
                return failures.add(error);
            }
        }
        for (id, _) in failures.listed(entries(&self.layout.disks())) {
            let disks = &contents.disks;
            let is_known = disks.record(&id).is_some() || disks.unreadable.contains(&id);
            if is_known && !orphans.contains(&id) {
                continue;
            }
            *freed += failures.freed(self.remove_disk_files(&id));
        }
    }

    /// Removes the disk image of an OCI image that was removed, even while others hold files;
    /// returns the bytes freed. If another process is just giving it its place, it is left to the
    /// holders of files.
    pub(super) fn free_disk(&self, id: Digest) -> Result<u64> {
        let Some(_claim) = try_claim(&self.layout.disk_claim(&id)) else {
            return Ok(0);
        };
        let (_, is_orphan) = database::update(&self.layout, |contents| {
            let is_orphan = orphans(contents).contains(&id);
            let change = is_orphan.then_some(Change::Disk(DiskChange::Drop(id)));
            Ok((change.into_iter().collect(), is_orphan))
        })?;
        match is_orphan {
            true => self.remove_disk_files(&id),
            false => Ok(0),
        }
    }

    /// Removes a disk image's file, and what was derived from it, unless it is open somewhere;
    /// returns the bytes freed.
    fn remove_disk_files(&self, id: &Digest) -> Result<u64> {
        let (path, directory) = (self.layout.disk(id), self.layout.disk_directory(id));
        let derived = Disk::derived_directory_of(&path);
        // Who derives something has the disk image open.
        if check_unused(&path, *id).is_ok() {
            match fs::remove_dir_all(&derived) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::io("remove", &derived, source));
                }
                _ => {}
            }
        }
        remove_unused(&path, &directory)
    }

    /// Removes the file of a disk image that still has its record; returns the bytes freed.
    fn free_disk_first(&self, id: Digest) -> Result<u64> {
        match try_claim(&self.layout.disk_claim(&id)) {
            Some(_claim) if self.layout.disk_directory(&id).exists() => self.remove_disk_files(&id),
            _ => Ok(0),
        }
    }

    /// Removes disk images that are not needed, longest unused first, by the rules for images: a
    /// URL counts as a tag.
    pub(super) fn prune_disks(
        &self,
        prune: &Prune,
        removed: &mut Vec<RemovedImages>,
        failures: &mut Failures,
    ) -> Result<()> {
        let contents = database::read(&self.layout)?;
        let in_images: HashSet<Digest> = contents
            .images
            .iter()
            .filter_map(|(_, image)| image.disk)
            .collect();
        let idle = |record: &DiskRecord| {
            SystemTime::now()
                .duration_since(database::time(record.used))
                .unwrap_or_default()
        };
        let mut candidates: Vec<_> = contents
            .disks
            .records
            .iter()
            .filter(|(id, record)| {
                let named = contents.disks.names_of(id).next().is_some();
                !record.pinned
                    && !in_images.contains(id)
                    && (prune.tagged || !named)
                    && prune.unused_for.is_none_or(|limit| idle(record) >= limit)
            })
            .map(|(id, record)| (record.used, *id))
            .collect();
        candidates.sort_unstable();
        for (_, id) in candidates {
            if let Some(keep) = prune.keep_bytes
                && self.usage()?.bytes <= keep
            {
                break;
            }
            let mut done = RemovedImages::default();
            let outcome = self.remove_disk(&id.to_string(), &mut done);
            if done != RemovedImages::default() {
                removed.push(done);
            }
            match outcome {
                Ok(()) => {}
                // Another process removed it first, or needs it.
                Err(Error::InUse { .. } | Error::NotFound { .. }) => {}
                Err(error) => failures.add(error),
            }
        }
        Ok(())
    }
}

/// Disk images that came with an OCI image that was removed. None while there are images of a later
/// version, which cannot be asked for theirs.
fn orphans(contents: &Contents) -> Vec<Digest> {
    if !contents.unreadable.is_empty() {
        return Vec::new();
    }
    let disks = contents.disks.records.iter();
    disks
        .filter(|(id, record)| {
            record.from_image
                && contents.disks.names_of(id).next().is_none()
                && !contents
                    .images
                    .iter()
                    .any(|(_, image)| image.disk == Some(*id))
        })
        .map(|(id, _)| *id)
        .collect()
}

pub(super) fn new_record(converted: &Converted, checksum: Option<&Checksum>) -> DiskRecord {
    let now = database::now();
    let checksum = checksum.filter(|checksum| checksum.sha256().is_none());
    DiskRecord {
        format: converted.format.to_string(),
        size: converted.size,
        checksums: checksum.map(ToString::to_string).into_iter().collect(),
        fetched: now,
        used: now,
        pinned: false,
        from_image: false,
    }
}

fn put_name(url: String, id: Digest, validators: Validators) -> Change {
    let asked = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let name = DiskName {
        id,
        validators,
        // Enough until the year 2554.
        asked: u64::try_from(asked.as_nanos()).unwrap_or(u64::MAX),
    };
    Change::Disk(DiskChange::PutName(url, name))
}
