//! A snapshot that is being made: it gets its name when nothing is missing, as whoever finds the
//! name uses what is there.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::{io, process};

use podvisor_host::removal::without_replacing;
use rustix::fs::{CWD, renameat_with};
use tempfile::TempDir;

use super::{TemplateError, file};

/// A directory beside the place of a snapshot, with the snapshot in it; removed on drop. What a
/// killed process leaves is a leftover for [`Snapshot::remove_partial`].
///
/// [`Snapshot::remove_partial`]: crate::machine::Snapshot::remove_partial
#[derive(Debug)]
pub(super) struct Unfinished {
    dir: TempDir,
    place: PathBuf,
}

impl Unfinished {
    /// Creates one for the snapshot that is to be at `place`.
    pub(super) fn beside(place: &Path) -> Result<Self, TemplateError> {
        let mut prefix = OsString::from(".");
        prefix.push(place.file_name().unwrap_or_default());
        prefix.push(format!(".{}.", process::id()));
        let parent = place.parent().unwrap_or(Path::new("/"));
        let made = tempfile::Builder::new()
            .prefix(&prefix)
            .suffix(".partial")
            .tempdir_in(parent);
        Ok(Self {
            dir: made.map_err(file("create a directory in", parent))?,
            place: place.to_owned(),
        })
    }

    /// Where the snapshot is until then.
    pub(super) fn snapshot(&self) -> PathBuf {
        self.dir.path().join("snapshot")
    }

    /// Gives the snapshot its name, which nothing may have yet, and syncs that to disk.
    pub(super) fn finish(self) -> Result<(), TemplateError> {
        let from = self.snapshot();
        let rename = |flags| renameat_with(CWD, &from, CWD, &self.place, flags);
        let named = without_replacing(rename).map_err(io::Error::from);
        let parent = self.place.parent().unwrap_or(Path::new("/"));
        named
            .and_then(|()| File::open(parent)?.sync_all())
            .map_err(file("create", &self.place))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::machine::Snapshot;
    use crate::template::remove_abandoned_templates;

    fn names(dir: &Path) -> Vec<OsString> {
        let entries = fs::read_dir(dir).unwrap().flatten();
        entries.map(|entry| entry.file_name()).collect()
    }

    #[test]
    fn a_snapshot_has_its_name_when_it_is_finished_and_leaves_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("a.name");
        let begin = || {
            let unfinished = Unfinished::beside(&place).unwrap();
            fs::create_dir(unfinished.snapshot()).unwrap();
            fs::write(unfinished.snapshot().join("state"), "state").unwrap();
            unfinished
        };
        drop(begin());
        assert!(names(dir.path()).is_empty());
        let [first, second] = [begin(), begin()];
        assert!(!place.exists());
        first.finish().unwrap();
        let error = second.finish().unwrap_err();
        assert!(error.to_string().contains("a.name"), "{error}");
        assert_eq!(names(dir.path()), ["a.name"]);
        assert_eq!(fs::read(place.join("state")).unwrap(), b"state");
    }

    #[test]
    fn what_a_killed_process_leaves_is_removed_by_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("name");
        let killed = || std::mem::forget(Unfinished::beside(&place).unwrap());
        killed();
        Snapshot::remove_partial(&place, Some(process::id()));
        assert!(names(dir.path()).is_empty());
        killed();
        remove_abandoned_templates(dir.path());
        assert!(names(dir.path()).is_empty());
    }
}
