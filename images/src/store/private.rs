//! Restricts a store to its owner: another user who could open a lock could hold it, and so keep
//! all others from using the store.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::process::geteuid;

const DIR_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// The mode bits of group and others.
const GROUP_OTHER_BITS: u32 = 0o077;

/// Creates a directory and its missing parents, accessible only to the owner.
pub(super) fn create_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(DIR_MODE)
        .create(path)
}

/// Opens a file for writing, creates it if it is missing, and makes it accessible only to the
/// owner.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .write(true)
        .create(true)
        .truncate(false)
        .mode(FILE_MODE);
    let file = options.open(path)?;
    if is_for_others(&file.metadata()?) {
        note(
            path,
            file.set_permissions(Permissions::from_mode(FILE_MODE)),
        );
    }
    Ok(file)
}

/// Makes a directory or a file of an older version accessible only to the owner; a missing one is
/// not an error.
pub(super) fn take_from_others(path: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    let mode = if found.is_dir() { DIR_MODE } else { FILE_MODE };
    if !found.is_symlink() && is_for_others(&found) {
        note(
            path,
            fs::set_permissions(path, Permissions::from_mode(mode)),
        );
    }
    Ok(())
}

/// Returns whether other users may open something that this user owns.
fn is_for_others(found: &fs::Metadata) -> bool {
    found.uid() == geteuid().as_raw() && found.mode() & GROUP_OTHER_BITS != 0
}

/// Logs a failure and ignores it: images on a file system without modes must stay usable.
fn note(path: &Path, done: io::Result<()>) {
    if let Err(error) = done {
        tracing::warn!(
            path = %path.display(),
            %error,
            "failed to restrict permissions; other users may open this"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::Store;
    use super::super::layout::Layout;
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    /// Lists the parts of a store that only its owner may access, with their modes.
    fn parts(root: &Path) -> Vec<(std::path::PathBuf, u32)> {
        let layout = Layout::new(root);
        let blobs = layout.blobs().parent().unwrap().to_owned();
        let directories = layout.directories().into_iter().chain([blobs]);
        let files = [layout.database(), layout.lock(), layout.gc_lock()];
        let directories = directories.map(|path| (path, DIR_MODE));
        directories
            .chain(files.map(|path| (path, FILE_MODE)))
            .collect()
    }

    /// Opens a store, takes both its locks and creates its database.
    fn used(root: &Path) -> Store {
        let store = Store::open(root).unwrap();
        let changed = super::super::database::update(&store.inner.layout, |_| Ok((vec![], ())));
        changed.unwrap();
        store.inner.collect().unwrap();
        store
    }

    #[test]
    fn a_new_store_is_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("above/root");
        drop(used(&root));
        for (path, expected) in parts(&root) {
            assert_eq!(mode(&path), expected, "{}", path.display());
        }
        assert_eq!(mode(&root), DIR_MODE);
    }

    #[test]
    fn what_an_older_version_made_is_taken_from_others_and_the_root_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        drop(used(&root));
        let for_all = |path: &Path, mode| {
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        };
        for_all(&root, 0o755);
        for (path, expected) in parts(&root) {
            for_all(&path, if expected == FILE_MODE { 0o644 } else { 0o755 });
        }
        drop(used(&root));
        for (path, expected) in parts(&root) {
            assert_eq!(mode(&path), expected, "{}", path.display());
        }
        assert_eq!(mode(&root), 0o755);
    }
}
