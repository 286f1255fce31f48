//! Disk images from files of this host.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use super::disks::new_record;
use super::work::WorkFile;
use super::{Inner, Store};
use crate::disk::{ConvertError, Failure, Job, convert};
use crate::{Digest, Disk, DiskError, Error, Result};

impl Store {
    /// Stores the disk image in a file of this host, raw or qcow2, as it is or compressed, as a
    /// sparse raw file. The file itself is not needed any more after that. The image has no URL: it
    /// is found by its id.
    ///
    /// # Errors
    /// [`DiskError::Unusable`] if it is not a disk image, [`Error::Io`] if it cannot be read or
    /// stored; the store is then as it was before.
    pub fn import_disk(&self, file: &Path) -> Result<Disk> {
        let _stay = self.inner.hold_files()?;
        let outcome = self.inner.import_disk(file);
        match outcome {
            Err(Error::DiskFull { .. } | Error::Io { .. } | Error::Database { .. }) => {
                self.inner.clear_after(outcome)
            }
            outcome => outcome,
        }
    }
}

impl Inner {
    fn import_disk(&self, file: &Path) -> Result<Disk> {
        let read = |source| Error::io("read", file, source);
        let unusable = |source| DiskError::Unusable {
            name: file.display().to_string(),
            source,
        };
        // A pipe would be waited for.
        if !file.metadata().map_err(read)?.is_file() {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
            return Err(read(source));
        }
        let input = File::open(file).map_err(read)?;
        let key = Digest::of(file.as_os_str().as_encoded_bytes());
        let path = self.layout.disk_work(&key);
        let write = |source| Error::io("write", &path, source);
        let work = WorkFile::acquire(&path).map_err(write)?;
        let job = Job {
            limits: &self.options.limits,
            cancelled: &AtomicBool::new(false),
        };
        let out = work.handle().map_err(write)?;
        let converted = convert(input, None, out, &job).map_err(|failure| match failure {
            Failure::Convert(ConvertError::Write(source)) => write(source),
            Failure::Convert(source) => unusable(source).into(),
            Failure::Checksum(_) => unreachable!("there is none to keep to"),
        })?;
        let _claim = self.claim_disk(&converted.digest)?;
        self.keep_disk(work, &converted)?;
        let record = new_record(&converted, None);
        self.commit_disk(converted.digest, record, None, None)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_is_stored_once_and_not_needed_any_more() {
        let (root, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let store = Store::open(root.path()).unwrap();
        let file = dir.path().join("disk.img");
        fs::write(&file, [b'x'; 4096]).unwrap();
        let disk = store.import_disk(&file).unwrap();
        assert_eq!(store.import_disk(&file).unwrap().id(), disk.id());
        fs::remove_file(&file).unwrap();
        let found = store.resolve_disk(&disk.id().to_string()).unwrap();
        assert_eq!(fs::read(found.path()).unwrap(), [b'x'; 4096]);
        assert_eq!(store.disks().unwrap().len(), 1);

        // What was derived from it goes with it, and not while it is open.
        let derived = found.derived_directory();
        fs::create_dir_all(derived.join("kernel")).unwrap();
        fs::write(derived.join("kernel/file"), "x").unwrap();
        let open = found.open().unwrap();
        assert!(matches!(
            store.remove(&disk.id().to_string()),
            Err(Error::InUse { .. })
        ));
        assert!(derived.exists());
        drop(open);
        store.remove(&disk.id().to_string()).unwrap();
        assert!(!derived.parent().unwrap().exists());
    }

    #[test]
    fn what_is_no_disk_image_leaves_nothing() {
        let (root, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let store = Store::open(root.path()).unwrap();
        let empty = dir.path().join("empty");
        fs::write(&empty, "").unwrap();
        let error = store.import_disk(&empty).unwrap_err();
        assert!(
            matches!(&error, Error::Disk(DiskError::Unusable { name, .. }) if name.ends_with("empty")),
            "{error}"
        );
        for other in [dir.path().to_owned(), dir.path().join("missing")] {
            let error = store.import_disk(&other).unwrap_err();
            assert!(matches!(error, Error::Io { .. }), "{error}");
        }
        assert!(store.disks().unwrap().is_empty());
    }
}
