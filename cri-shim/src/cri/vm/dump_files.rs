//! Dumps of a guest's memory in the directory of a claim.
//!
//! A dump is written under another name, `.NAME.partial`, and gets its own when it is whole and on
//! the disk. What was left by machines and daemons that were killed is removed by the next dump:
//! the file of one that is being written is locked.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, Dir, FlockOperation, Gid, Mode, OFlags, RenameFlags, Uid, fchown, flock, fsync, open,
    openat, renameat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use tracing::debug;

use crate::cri::error::{CriError, Result};

const PARTIAL: &str = ".partial";

/// Most bytes of a dump's name, with room for that.
const MAX_NAME: usize = 240;

/// A claim's directory with dumps.
#[derive(Debug)]
pub(in crate::cri) struct DumpDirectory {
    directory: OwnedFd,
    path: PathBuf,
    /// Whose the files are.
    user: Option<u32>,
}

impl DumpDirectory {
    /// Opens the directory; the files in it will be this user's.
    pub(in crate::cri) fn open(path: &Path, user: Option<u32>) -> Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let directory = open(path, flags, Mode::empty());
        Ok(Self {
            directory: directory.map_err(at(path, "open the claim"))?,
            path: path.to_owned(),
            user,
        })
    }

    /// Refuses a name that a dump cannot have.
    pub(in crate::cri) fn check_name(name: &str) -> Result<()> {
        let is_inner = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'.' | b'_');
        let is_name = (1..=MAX_NAME).contains(&name.len())
            && !name.starts_with('.')
            && name.bytes().all(is_inner);
        match is_name {
            true => Ok(()),
            false => Err(CriError::invalid(
                "file",
                format!(
                    "the name of a dump has 1 to {MAX_NAME} letters, digits, `-`, `_` and `.`, and \
                     begins with another than `.`"
                ),
            )),
        }
    }

    /// Whether a dump of this name is there.
    pub(in crate::cri) fn has(&self, name: &str) -> Result<bool> {
        match statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(self.failed("look for the dump", name)(error)),
        }
    }

    /// Makes the file of a new dump, after what earlier ones have left.
    pub(in crate::cri) fn begin(&self, name: &str) -> Result<File> {
        self.remove_partial()?;
        let partial = partial(name);
        let failed = self.failed("create the dump", name);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR;
        let file = openat(&self.directory, &partial, flags | OFlags::CLOEXEC, mode);
        let file = file.map_err(failed)?;
        if let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            debug!(%error, name, "the file of a dump is not locked");
        }
        if let Some(user) = self.user {
            // A file server may not let root give files away.
            let given = fchown(&file, Some(Uid::from_raw(user)), None::<Gid>);
            if let Err(error) = given {
                debug!(%error, name, "the file of a dump stays root's");
            }
        }
        Ok(file.into())
    }

    /// Gives a dump that is whole its name, unless it has it.
    pub(in crate::cri) fn finish(&self, name: &str) -> Result<()> {
        if self.has(name)? {
            return Ok(());
        }
        let failed = self.failed("name the dump", name);
        let (directory, partial) = (&self.directory, partial(name));
        let named =
            match renameat_with(directory, &partial, directory, name, RenameFlags::NOREPLACE) {
                // A file system that knows no flags; it was looked for above.
                Err(Errno::INVAL | Errno::NOSYS) => renameat(directory, &partial, directory, name),
                named => named,
            };
        named.and_then(|()| fsync(directory)).map_err(failed)
    }

    /// Removes what there is of a dump that failed.
    pub(in crate::cri) fn discard(&self, name: &str) {
        match unlinkat(&self.directory, partial(name), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => debug!(%error, name, "what is left of a dump is not removed"),
        }
    }

    /// Removes what is left of dumps that nobody writes any more.
    fn remove_partial(&self) -> Result<()> {
        let failed = |error| self.failed("look for dumps", "")(error);
        for entry in Dir::read_from(&self.directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let bytes = name.to_bytes();
            let is_partial = bytes.starts_with(b".") && bytes.ends_with(DUMP_PARTIAL.as_bytes());
            if !is_partial {
                continue;
            }
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let locked = openat(&self.directory, name, flags, Mode::empty()).and_then(|file| {
                flock(&file, FlockOperation::NonBlockingLockExclusive)?;
                unlinkat(&self.directory, name, AtFlags::empty())
            });
            if let Err(error) = locked {
                debug!(%error, ?name, "what is left of a dump stays");
            }
        }
        Ok(())
    }

    fn failed(&self, what: &'static str, name: &str) -> impl Fn(Errno) -> CriError {
        at(&self.path.join(name), what)
    }
}

/// What files of dumps end in before they are whole, if they have names as KubeVirt gives them.
const DUMP_PARTIAL: &str = ".memory.dump.partial";

fn partial(name: &str) -> String {
    format!(".{name}{PARTIAL}")
}

fn at(path: &Path, what: &'static str) -> impl Fn(Errno) -> CriError + use<> {
    let path = path.to_owned();
    move |error| CriError::io(what, &path)(error.into())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    const NAME: &str = "web-dumps-20261130-120000.memory.dump";

    fn names(dir: &Path) -> Vec<String> {
        let names = fs::read_dir(dir).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn a_dump_has_its_name_when_it_is_whole_and_not_before() {
        let dir = tempfile::tempdir().unwrap();
        let user = fs::metadata(dir.path()).unwrap().uid();
        let dumps = DumpDirectory::open(dir.path(), Some(user)).unwrap();
        let mut file = dumps.begin(NAME).unwrap();
        file.write_all(b"dump").unwrap();
        assert!(!dumps.has(NAME).unwrap());
        dumps.finish(NAME).unwrap();
        dumps.finish(NAME).unwrap();
        assert!(dumps.has(NAME).unwrap());
        assert_eq!(names(dir.path()), [NAME]);
        let meta = fs::metadata(dir.path().join(NAME)).unwrap();
        assert_eq!((meta.mode() & 0o777, meta.uid()), (0o600, user));
        // What was dumped before stays.
        let next = "web-dumps-20261130-130000.memory.dump";
        drop(dumps.begin(next).unwrap());
        dumps.discard(next);
        dumps.discard(next);
        assert_eq!(names(dir.path()), [NAME]);
        let error = dumps.finish(next).unwrap_err().to_string();
        assert!(error.contains(next), "{error}");
    }

    #[test]
    fn what_was_left_goes_and_what_is_written_or_somebody_elses_stays() {
        let dir = tempfile::tempdir().unwrap();
        let dumps = DumpDirectory::open(dir.path(), None).unwrap();
        let written = dumps.begin("a.memory.dump").unwrap();
        fs::write(dir.path().join(".b.memory.dump.partial"), "left").unwrap();
        fs::write(dir.path().join(".others.partial"), "other").unwrap();
        fs::write(dir.path().join("disk.img"), "disk").unwrap();
        drop(dumps.begin("c.memory.dump").unwrap());
        let left = [
            ".a.memory.dump.partial",
            ".c.memory.dump.partial",
            ".others.partial",
            "disk.img",
        ];
        assert_eq!(names(dir.path()), left);
        drop(written);
        // A link of the same name is not followed.
        symlink("disk.img", dir.path().join(".d.memory.dump.partial")).unwrap();
        let error = dumps.begin("d.memory.dump").unwrap_err().to_string();
        assert!(error.contains("d.memory.dump"), "{error}");
        assert_eq!(fs::read(dir.path().join("disk.img")).unwrap(), b"disk");
    }

    #[test]
    fn names_of_dumps_are_names_of_files_in_the_claim() {
        DumpDirectory::check_name(NAME).unwrap();
        for name in [
            "",
            ".",
            "..",
            ".hidden",
            "a/b",
            "a\0",
            "a b",
            "é",
            &"x".repeat(241),
        ] {
            assert!(DumpDirectory::check_name(name).is_err(), "{name}");
        }
    }
}
