//! Maintenance of a store: additional names, pins, times of use, pruning, disk usage.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

use super::database::{self, Change, Contents, Name, Record};
use super::gc::Failures;
use super::lookup::{canonical, find};
use super::{Inner, RemovedImages, Store};
use crate::error::parse_reference;
use crate::{Digest, Error, Image, Result};

/// A use that follows another within this time need not be recorded.
const LAST_USED_RESOLUTION: Duration = Duration::from_secs(3600);

/// Which images [`Store::prune`] removes. Pinned images and those in use always stay.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Prune {
    /// Also images that still have a tag; otherwise only those that lost all tags.
    pub tagged: bool,
    /// Only images that have not been used for this long.
    pub unused_for: Option<Duration>,
    /// Stop as soon as the store takes no more than this many bytes; images are removed longest
    /// unused first.
    pub keep_bytes: Option<u64>,
}

impl Prune {
    /// Removes tagged images too.
    #[must_use]
    pub fn tagged(mut self) -> Self {
        self.tagged = true;
        self
    }

    /// Removes only images that were not used for this long.
    #[must_use]
    pub fn unused_for(mut self, time: Duration) -> Self {
        self.unused_for = Some(time);
        self
    }

    /// Stops when the store takes no more than `bytes`.
    #[must_use]
    pub fn keep_bytes(mut self, bytes: u64) -> Self {
        self.keep_bytes = Some(bytes);
        self
    }
}

/// Disk usage of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreUsage {
    /// Bytes on the disk.
    pub bytes: u64,
    /// Files and directories.
    pub inodes: u64,
}

impl Store {
    /// Gives an image another name; an image that had the name loses it.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Reference`], also for a new name with a digest, which only a
    /// pull can give.
    pub fn tag(&self, image: &str, name: &str) -> Result<()> {
        let reference = parse_reference(name)?;
        if reference.digest().is_some() {
            let source = oci_spec::distribution::ParseError::TagInvalidFormat;
            return Err(Error::Reference {
                input: name.chars().take(300).collect(),
                source,
            });
        }
        self.change(image, |_, id| {
            vec![Change::PutName(Name {
                name: canonical(&reference),
                id,
            })]
        })
    }

    /// Protects an image or a disk image from pruning, or ends the protection.
    ///
    /// # Errors
    /// [`Error::NotFound`], or the store cannot be written.
    pub fn pin(&self, image: &str, pinned: bool) -> Result<()> {
        if self.is_disk(image)? {
            return self.pin_disk(image, pinned);
        }
        self.change(image, |record, id| {
            vec![Change::PutImage(id, Record { pinned, ..record })]
        })
    }

    /// Records that an image or a disk image is used now; pruning depends on it.
    ///
    /// # Errors
    /// [`Error::NotFound`], or the store cannot be written.
    pub fn touch(&self, image: &str) -> Result<()> {
        if self.is_disk(image)? {
            return self.touch_disk(image);
        }
        let used = database::now();
        self.change(image, |record, id| {
            vec![Change::PutImage(id, Record { used, ..record })]
        })
    }

    /// As [`Self::touch`], for callers that use an image frequently: because `touch` writes to the
    /// disk, it is skipped if, according to `image`, a use was recorded within the last hour.
    ///
    /// # Errors
    /// As [`Self::touch`].
    pub fn note_use(&self, image: &Image) -> Result<()> {
        match is_noted(image.used()) {
            true => Ok(()),
            false => self.touch(&image.id().to_string()),
        }
    }

    fn change(
        &self,
        image: &str,
        change: impl FnOnce(Record, Digest) -> Vec<Change>,
    ) -> Result<()> {
        database::update(&self.inner.layout, |contents| {
            let id = find(contents, image)?.id();
            let record = contents.record(&id).ok_or(Error::Damaged { id })?;
            Ok((change(record.clone(), id), ()))
        })?;
        Ok(())
    }

    /// Removes images that are not needed, longest unused first, and files that no image needs.
    /// While a pull, load or save is running, the images are removed with their root file systems,
    /// but files that images may share stay until it ends ([`RemovedImages::deferred`]).
    ///
    /// # Errors
    /// If the store cannot be read or written. If something cannot be removed, all the rest is.
    pub fn prune(&self, prune: &Prune) -> Result<Vec<RemovedImages>> {
        let mut removed = Vec::new();
        self.prune_into(prune, &mut removed)?;
        Ok(removed)
    }

    /// As [`Self::prune`]; what was removed is added to `removed`, also where that fails in part.
    ///
    /// # Errors
    /// As [`Self::prune`].
    pub fn prune_into(&self, prune: &Prune, removed: &mut Vec<RemovedImages>) -> Result<()> {
        let mut failures = Failures::default();
        let mut orphans = RemovedImages::default();
        if let Err(error) = self.inner.collect_into(&mut orphans) {
            failures.add(error);
        }
        if orphans != RemovedImages::default() {
            removed.push(orphans);
        }
        let contents = database::read(&self.inner.layout)?;
        for id in candidates(&contents, prune) {
            if let Some(keep) = prune.keep_bytes
                && self.usage()?.bytes <= keep
            {
                break;
            }
            let mut done = RemovedImages::default();
            let outcome = self.inner.remove(&id.to_string(), &mut done);
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
        if let Err(error) = self.inner.prune_disks(prune, removed, &mut failures) {
            failures.add(error);
        }
        failures.end()
    }

    /// Returns the store's disk usage.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn usage(&self) -> Result<StoreUsage> {
        self.inner.usage()
    }
}

/// Returns whether a recorded use is recent enough to stand for one now. A use in the future was
/// recorded before the clock was set back.
fn is_noted(used: SystemTime) -> bool {
    used.elapsed().is_ok_and(|age| age < LAST_USED_RESOLUTION)
}

fn candidates(contents: &Contents, prune: &Prune) -> Vec<Digest> {
    let tagged: HashSet<Digest> = contents
        .names
        .iter()
        .filter(|name| !name.name.contains('@'))
        .map(|name| name.id)
        .collect();
    let unused = |record: &Record| {
        let idle = SystemTime::now()
            .duration_since(database::time(record.used))
            .unwrap_or_default();
        prune.unused_for.is_none_or(|limit| idle >= limit)
    };
    let mut found: Vec<_> = contents
        .images
        .iter()
        .filter(|(id, record)| {
            !record.pinned && (prune.tagged || !tagged.contains(id)) && unused(record)
        })
        .map(|(id, record)| (record.used, *id))
        .collect();
    found.sort_unstable();
    found.into_iter().map(|(_, id)| id).collect()
}

impl Inner {
    pub(super) fn usage(&self) -> Result<StoreUsage> {
        let mut usage = StoreUsage::default();
        let mut directories = vec![self.layout.root().to_owned()];
        while let Some(directory) = directories.pop() {
            // Files and directories that disappear while we count are not counted.
            let entries = match fs::read_dir(&directory) {
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound
                        && directory != self.layout.root() =>
                {
                    continue;
                }
                entries => entries.map_err(|source| Error::io("list", &directory, source))?,
            };
            for entry in entries {
                let Ok(entry) = entry else { continue };
                let Ok(metadata) = entry.metadata() else {
                    continue;
                };
                usage.bytes += metadata.blocks() * 512;
                usage.inodes += 1;
                if metadata.is_dir() {
                    directories.push(entry.path());
                }
            }
        }
        Ok(usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_is_noted_once_an_hour() {
        let now = SystemTime::now();
        assert!(is_noted(now) && is_noted(now - LAST_USED_RESOLUTION / 2));
        assert!(!is_noted(now - LAST_USED_RESOLUTION) && !is_noted(now + LAST_USED_RESOLUTION));
    }
}
