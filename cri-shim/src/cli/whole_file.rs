//! A file of the host that gets its name once it is complete.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, OFlags, linkat};
use tempfile::{Builder, NamedTempFile};

/// Permissions of a new file, of which the umask takes some.
const MODE: u32 = 0o666;

/// A file that is being written. Dropped before its end, it is removed.
#[derive(Debug)]
pub(super) enum WholeFile {
    /// Without a name (`O_TMPFILE`): nothing is left of it either if this process is killed.
    Unnamed(File),
    /// With a hidden name, where the file system has no such files.
    Hidden(NamedTempFile),
}

impl WholeFile {
    /// Creates one in the directory in which it is to have its name.
    pub(super) fn create_in(directory: &Path) -> io::Result<Self> {
        match Self::unnamed_in(directory) {
            Ok(file) => Ok(Self::Unnamed(file)),
            // NFS and some others have none. Where nothing can be created, the next step says so.
            Err(_) => Self::hidden_in(directory).map(Self::Hidden),
        }
    }

    fn unnamed_in(directory: &Path) -> io::Result<File> {
        let file = OpenOptions::new()
            .write(true)
            .custom_flags(OFlags::TMPFILE.bits().cast_signed())
            .mode(MODE)
            .open(directory)?;
        // By this path it gets its name.
        fs::metadata(path_of(&file))?;
        Ok(file)
    }

    fn hidden_in(directory: &Path) -> io::Result<NamedTempFile> {
        let mode = fs::Permissions::from_mode(MODE);
        hidden().permissions(mode).tempfile_in(directory)
    }

    /// The open file.
    pub(super) fn file(&self) -> &File {
        match self {
            Self::Unnamed(file) => file,
            Self::Hidden(file) => file.as_file(),
        }
    }

    /// Syncs the file to the disk, and gives it its name; a file that has it is replaced.
    pub(super) fn finish(self, path: &Path) -> io::Result<()> {
        self.file().sync_all()?;
        let file = match self {
            Self::Unnamed(file) => file,
            Self::Hidden(file) => return Ok(file.persist(path).map(drop)?),
        };
        let link = |name: &Path| -> io::Result<()> {
            let flags = AtFlags::SYMLINK_FOLLOW;
            Ok(linkat(CWD, path_of(&file), CWD, name, flags)?)
        };
        let Err(error) = link(path) else {
            return Ok(());
        };
        let directory = path.parent().filter(|parent| *parent != Path::new(""));
        let directory = directory.unwrap_or(Path::new("."));
        if error.kind() == io::ErrorKind::AlreadyExists {
            // No call puts a file without a name in the place of another: it gets a hidden one
            // first, for a moment.
            return Ok(hidden().make_in(directory, link)?.persist(path)?);
        }
        // Some file systems make such files, and refuse them a name.
        let mut named = Self::hidden_in(directory)?;
        io::copy(&mut File::open(path_of(&file))?, &mut named)?;
        named.as_file().sync_all()?;
        Ok(named.persist(path).map(drop)?)
    }
}

fn hidden() -> Builder<'static, 'static> {
    let mut builder = Builder::new();
    builder.prefix(".podvisor-save-");
    builder
}

/// The path of an open file that may have no other.
fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap().flatten();
        let mut names: Vec<_> = entries
            .map(|entry| entry.file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// The ways of creating one in a directory.
    fn ways(dir: &Path) -> [WholeFile; 2] {
        [
            WholeFile::create_in(dir).unwrap(),
            WholeFile::Hidden(WholeFile::hidden_in(dir).unwrap()),
        ]
    }

    #[test]
    fn a_file_has_its_name_when_it_is_complete_and_the_permissions_of_any_other() {
        let dir = tempfile::tempdir().unwrap();
        let mode = |name: &str| {
            let found = fs::metadata(dir.path().join(name)).unwrap();
            found.permissions().mode()
        };
        fs::write(dir.path().join("other"), "").unwrap();
        for name in ["new", "other"] {
            for file in ways(dir.path()) {
                let path = dir.path().join(name);
                let before = fs::read(&path).unwrap_or_default();
                file.file().write_all(b"whole").unwrap();
                assert_eq!(fs::read(&path).unwrap_or_default(), before);
                file.finish(&path).unwrap();
                assert_eq!(fs::read(&path).unwrap(), b"whole");
                assert_eq!(mode(name), mode("other"));
            }
        }
        assert_eq!(names(dir.path()), ["new", "other"]);
    }

    #[test]
    fn nothing_is_left_of_a_file_whose_process_is_killed() {
        // The kernel's own file system in memory has had such files for long.
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = WholeFile::create_in(dir.path()).unwrap();
        file.file().write_all(b"half").unwrap();
        assert!(names(dir.path()).is_empty());
        drop(file);
        drop(ways(dir.path()));
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn a_directory_in_which_nothing_can_be_created_is_an_error() {
        let error = WholeFile::create_in(Path::new("/no/such")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn what_cannot_be_replaced_stays_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("directory");
        fs::create_dir(&path).unwrap();
        for file in ways(dir.path()) {
            file.finish(&path).unwrap_err();
        }
        assert_eq!(names(dir.path()), ["directory"]);
    }
}
