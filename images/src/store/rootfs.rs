//! The records of the layers of an existing root file system.
//!
//! An image's id is the digest of its configuration, which names its uncompressed layers. Manifests
//! can name the same image with its layers compressed in any way, or with layers that do not belong
//! to it: a manifest is only trusted after its layers were unpacked.

use std::fs::{self, File, Metadata};
use std::thread;
use std::time::Duration;

use super::database::{self, Record};
use super::gc::check_unused;
use super::work::{WorkFile, is_lost, sync_directory_of};
use super::{Inner, PullOptions, private};
use crate::{Digest, Error, PullEvent, Result, erofs};

/// Delay between attempts to claim an image that another process has claimed.
const CLAIM_RETRY_DELAY: Duration = Duration::from_millis(20);

/// An image, and the manifest by which somebody wants it.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) id: Digest,
    /// The digest of what names the layers: of the manifest, or of an index that it is in.
    pub(super) target: Digest,
    /// The digests and sizes of the layers.
    pub(super) layers: Vec<(Digest, u64)>,
}

/// What the store had of an image's root file system, for a manifest of the image.
#[derive(Debug)]
pub(super) enum Rootfs {
    /// Nothing: it was created from the manifest's layers.
    New,
    /// All of it, created from the manifest's layers.
    There,
    /// All of it, with the layers of another manifest, which this record has.
    Other(Record),
}

impl Rootfs {
    pub(super) fn is_new(&self) -> bool {
        matches!(self, Self::New)
    }

    /// Returns the record to store for the image if `record` is the manifest's: a known image keeps
    /// the layers that the store has.
    pub(super) fn record(self, record: Record) -> Record {
        match self {
            Self::New | Self::There => record,
            Self::Other(known) => Record {
                manifest: known.manifest,
                indexes: known.indexes,
                ..record
            },
        }
    }
}

impl Inner {
    /// Protects the image's root file system from removals of this file only (`free_rootfs`): for a
    /// caller that looks for it or gives it its name, until the image has its record. A caller that
    /// has it must wait for no registry. A load has it while it makes the file system: whoever
    /// waits says so, and looks whether it was cancelled.
    pub(super) fn claim_image(&self, id: &Digest, options: &PullOptions) -> Result<WorkFile> {
        let path = self.layout.image_claim(id);
        let mut is_told = false;
        loop {
            let claim = WorkFile::try_acquire(&path);
            if let Some(claim) = claim.map_err(|source| Error::io("create", &path, source))? {
                return Ok(claim);
            }
            options.cancel.check()?;
            if !std::mem::replace(&mut is_told, true) {
                options.emit(PullEvent::RootfsWaiting);
            }
            thread::sleep(CLAIM_RETRY_DELAY);
        }
    }

    /// Looks for an image's root file system and for its layers. `None` if something is missing,
    /// or if it is not known that the manifest's layers belong to the image: whoever names only an
    /// image's id must not get the image. The caller has claimed the image.
    pub(super) fn find_rootfs(&self, wanted: &Wanted) -> Result<Option<Rootfs>> {
        Ok(match self.recorded_rootfs(wanted)? {
            // This very manifest was accepted before, and its layers were unpacked then.
            Some(Rootfs::Other(record)) => {
                let target = format!("@{}", wanted.target);
                let contents = database::read(&self.layout)?;
                let mut names = contents.names_of(&wanted.id);
                let is_known = names.any(|name| name.ends_with(&target));
                is_known.then_some(Rootfs::Other(record))
            }
            found => found,
        })
    }

    /// Looks for an image's root file system and for the layers in its record, whether or not they
    /// are those of the manifest.
    fn recorded_rootfs(&self, wanted: &Wanted) -> Result<Option<Rootfs>> {
        let id = wanted.id;
        if self.whole_rootfs(&id)?.is_none() {
            return Ok(None);
        }
        let contents = database::read(&self.layout)?;
        // Without a record, nothing says from which layers a crashed process created it.
        let (Some(record), Ok(saved)) = (contents.record(&id), self.saved(&contents, id)) else {
            return Ok(None);
        };
        let known = saved.manifest.layers.iter().map(|layer| layer.digest);
        let layers = wanted.layers.iter().map(|(digest, _)| *digest);
        Ok(Some(match known.eq(layers) {
            true => Rootfs::There,
            false => Rootfs::Other(record.clone()),
        }))
    }

    /// Gives a root file system its name that was created from the wanted layers, unless there is
    /// one. The caller has claimed the image, and all layers are here.
    pub(super) fn keep_rootfs(&self, work: WorkFile, wanted: &Wanted) -> Result<Rootfs> {
        let id = wanted.id;
        match self.recorded_rootfs(wanted)? {
            Some(Rootfs::Other(record)) => {
                // The layers have shown that they belong to the image; it has others.
                self.defer_removal()?;
                return Ok(Rootfs::Other(record));
            }
            Some(found) => return Ok(found),
            None if self.whole_rootfs(&id)?.is_some() => return Ok(Rootfs::There),
            None => {}
        }
        let directory = self.layout.image(&id);
        let target = self.layout.rootfs(&id);
        // Whoever runs from one that was cut has locked that very file.
        check_unused(&target, id)?;
        private::create_directory(&directory)
            .and_then(|()| sync_directory_of(&directory))
            .map_err(|source| Error::io("create the directory", &directory, source))?;
        work.publish(&target)
            .map_err(|source| Error::io("store", &target, source))?;
        Ok(Rootfs::New)
    }

    /// Returns the metadata of an image's root file system; `None` if it is missing, cut off or
    /// [lost](is_lost).
    pub(super) fn whole_rootfs(&self, id: &Digest) -> Result<Option<Metadata>> {
        let path = self.layout.rootfs(id);
        match File::open(&path).and_then(|file| erofs::whole(&file)) {
            Err(error) if is_lost(&error) => Ok(None),
            whole => whole.map_err(|source| Error::io("read", &path, source)),
        }
    }

    /// Whether a blob is here.
    pub(super) fn has(&self, digest: &Digest, size: u64) -> bool {
        fs::metadata(self.layout.blob(digest)).is_ok_and(|found| found.len() == size)
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::unbounded_channel;

    use super::super::Store;
    use super::*;

    #[test]
    fn whoever_waits_for_an_image_says_so_once_and_can_be_cancelled() {
        let dir = tempfile::tempdir().unwrap();
        let inner = Store::open(dir.path()).unwrap().inner;
        let id = Digest::of(b"id");
        let theirs = inner.claim_image(&id, &PullOptions::default()).unwrap();
        let (events, mut received) = unbounded_channel();
        let options = PullOptions::default().events(events);
        let cancel = options.cancel.clone();
        let waits = thread::spawn(move || {
            let claim = inner.claim_image(&id, &options);
            drop(options);
            claim.map(drop)
        });
        assert_eq!(received.blocking_recv(), Some(PullEvent::RootfsWaiting));
        cancel.cancel();
        assert!(matches!(waits.join().unwrap(), Err(Error::Cancelled)));
        assert_eq!(received.blocking_recv(), None);
        drop(theirs);
    }
}
