//! The type of a command's output path on the host.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// How to write to it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// An existing directory, for commands that write into one.
    Directory,
    /// A device, pipe or socket, which is written as it is and never replaced.
    Special,
    /// A file that is replaced or created. For a link, it is the link's target, not the link.
    File(PathBuf),
}

impl Destination {
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        Ok(match fs::metadata(path) {
            Ok(found) if found.is_dir() => Self::Directory,
            Ok(found) if !found.is_file() => Self::Special,
            Ok(_) => Self::File(fs::canonicalize(path)?),
            Err(_) => Self::File(path.to_owned()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_links_point_to_is_written_and_what_is_no_file_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let dir = fs::canonicalize(dir.path()).unwrap();
        let of = |name: &str| Destination::of(&dir.join(name)).unwrap();
        fs::write(dir.join("file"), "").unwrap();
        for (to, link) in [
            ("file", "to-file"),
            ("/dev/null", "to-null"),
            ("no", "to-none"),
        ] {
            symlink(to, dir.join(link)).unwrap();
        }
        let file = |name: &str| Destination::File(dir.join(name));
        assert_eq!((of("file"), of("to-file")), (file("file"), file("file")));
        assert_eq!((of("new"), of("to-none")), (file("new"), file("to-none")));
        assert_eq!(
            (of(""), of("to-null")),
            (Destination::Directory, Destination::Special)
        );
    }
}
