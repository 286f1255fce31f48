//! Disk images inside OCI images (KubeVirt's containerDisk: one file in the directory `/disk`).

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};

use super::database;
use super::disk_records::DiskRecord;
use super::disks::new_record;
use super::work::WorkFile;
use super::{Inner, Store};
use crate::disk::{ConvertError, Failure, Job, convert};
use crate::erofs::{FileSystem, Inode};
use crate::{Digest, Disk, DiskError, Error, Image, Result};

/// The directory of the disk image.
const DIRECTORY: &[u8] = b"disk";

/// Maximum number of names in a message.
const MAX_LISTED_NAMES: usize = 10;

/// The file of a disk image.
struct DiskFile {
    files: FileSystem,
    name: String,
    inode: Inode,
    /// Whether the image contains nothing else.
    alone: bool,
}

impl Store {
    /// Returns the disk image in an OCI image: the only file in its directory `/disk`, whatever its
    /// name, raw or qcow2, as it is or compressed. It is converted at the first call, unless the
    /// pull has done that.
    ///
    /// # Errors
    /// As [`Store::resolve`]; [`DiskError::NoDisk`], [`DiskError::SeveralDisks`],
    /// [`DiskError::Unusable`].
    pub fn container_disk(&self, image: &str) -> Result<Disk> {
        let _stay = self.inner.hold_files()?;
        let image = self.resolve(image)?;
        let contents = database::read(&self.inner.layout)?;
        let known = image.disk().map(|id| self.inner.disk_by_id(&contents, id));
        match known {
            Some(Ok(disk)) => Ok(disk),
            _ => {
                let found = self.inner.find_disk(&image)?;
                self.inner.make_disk(&image, found, &AtomicBool::new(false))
            }
        }
    }
}

impl Inner {
    /// Converts the disk image of an image that evidently contains nothing else, so that errors in
    /// it show before a machine needs it. Other images, and those whose disk image cannot be used,
    /// are returned unchanged.
    pub(super) fn recognise_disk(&self, image: Image, cancelled: &AtomicBool) -> Image {
        let contents = database::read(&self.layout);
        let known = image
            .disk
            .zip(contents.ok())
            .map(|(id, contents)| self.disk_by_id(&contents, id));
        if let Some(Ok(_)) = known {
            return image;
        }
        let made = match self.find_disk(&image) {
            Ok(found) if found.is_evident() => self.make_disk(&image, found, cancelled),
            Ok(_) | Err(Error::Disk(DiskError::NoDisk { .. } | DiskError::SeveralDisks { .. })) => {
                return image;
            }
            Err(error) => Err(error),
        };
        match made {
            Ok(disk) => Image {
                disk: Some(disk.id),
                ..image
            },
            Err(_) if cancelled.load(Ordering::Relaxed) => image,
            Err(error) => {
                tracing::warn!(image = %image.id, %error, "the image's disk cannot be used");
                image
            }
        }
    }

    fn find_disk(&self, image: &Image) -> Result<DiskFile> {
        let shown = || shown(image);
        let path = self.layout.rootfs(&image.id);
        let file = File::open(&path).map_err(|source| Error::io("read", &path, source))?;
        let read = |source| DiskError::FileSystem {
            image: shown(),
            source,
        };
        let files = FileSystem::new(file).map_err(read)?;
        let root = files.list(None).map_err(read)?;
        let mut found = files.list(Some(DIRECTORY)).map_err(read)?;
        found.retain(|(_, inode)| inode.is_file());
        if found.len() > 1 {
            let names: Vec<String> = found
                .iter()
                .take(MAX_LISTED_NAMES)
                .map(|(name, _)| printable(name))
                .collect();
            return Err(DiskError::SeveralDisks {
                image: shown(),
                count: found.len(),
                names: names.join(", "),
            }
            .into());
        }
        let (name, inode) = found
            .pop()
            .ok_or_else(|| DiskError::NoDisk { image: shown() })?;
        Ok(DiskFile {
            files,
            name: printable(&name),
            inode,
            alone: root.len() == 1,
        })
    }

    fn make_disk(&self, image: &Image, found: DiskFile, cancelled: &AtomicBool) -> Result<Disk> {
        let path = self.layout.disk_work(&image.id);
        let write = |source| Error::io("write", &path, source);
        let work = WorkFile::acquire(&path).map_err(write)?;
        // Another process may have converted it meanwhile.
        let contents = database::read(&self.layout)?;
        let known = contents.record(&image.id).and_then(|record| record.disk);
        if let Some(Ok(disk)) = known.map(|id| self.disk_by_id(&contents, id)) {
            return Ok(disk);
        }
        let name = format!("{} in image {}", found.name, shown(image));
        let unusable = |source| DiskError::Unusable {
            name: name.clone(),
            source,
        };
        let input = found.files.open(&found.inode);
        let input = input.map_err(|source| unusable(ConvertError::Read(source)))?;
        let job = Job {
            limits: &self.options.limits,
            cancelled,
        };
        let out = work.handle().map_err(write)?;
        let converted = convert(input, None, out, &job).map_err(|failure| match failure {
            Failure::Convert(ConvertError::Write(source)) => write(source),
            Failure::Convert(source) => unusable(source).into(),
            Failure::Checksum(_) => unreachable!("there is none to keep to"),
        })?;
        let _claim = self.claim_disk(&converted.digest)?;
        self.keep_disk(work, &converted)?;
        let record = DiskRecord {
            from_image: true,
            ..new_record(&converted, None)
        };
        self.commit_disk(converted.digest, record, None, Some(image.id))
    }
}

impl DiskFile {
    fn is_evident(&self) -> bool {
        let name = self.name.as_bytes();
        let ends = |ending: &str| name.to_ascii_lowercase().ends_with(ending.as_bytes());
        self.alone || [".img", ".qcow2", ".raw"].into_iter().any(ends)
    }
}

/// Formats the name of an image for messages.
fn shown(image: &Image) -> String {
    let name = image.tags().iter().chain(image.digests()).next();
    name.cloned()
        .unwrap_or_else(|| Digest::to_string(&image.id))
}

/// Formats a file's name for messages.
fn printable(name: &[u8]) -> String {
    let name = String::from_utf8_lossy(name);
    name.chars().filter(|c| !c.is_control()).take(100).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::ConvertError;
    use crate::{ImportSource, PullOptions};

    #[test]
    fn a_conversion_whose_pull_is_cancelled_ends() {
        let (root, tree) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let store = Store::open(root.path()).unwrap();
        std::fs::create_dir(tree.path().join("disk")).unwrap();
        std::fs::write(tree.path().join("disk/notes"), [b'x'; 4096]).unwrap();
        // The image does not consist of the disk only, so it is not converted yet.
        std::fs::write(tree.path().join("file"), "").unwrap();
        let source = ImportSource::Directory(tree.path().to_owned());
        let options = PullOptions::default();
        let image = store.import(source, Some("vm"), &options).unwrap();
        let make = |is_cancelled| {
            let found = store.inner.find_disk(&image).unwrap();
            let cancelled = AtomicBool::new(is_cancelled);
            store.inner.make_disk(&image, found, &cancelled)
        };
        let cancelled = make(true);
        assert!(
            matches!(
                &cancelled,
                Err(Error::Disk(DiskError::Unusable {
                    source: ConvertError::Cancelled,
                    ..
                }))
            ),
            "{cancelled:?}"
        );
        assert_eq!(make(false).unwrap().virtual_size(), 4096);
    }
}
