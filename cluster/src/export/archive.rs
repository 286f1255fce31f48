//! The files of a volume that has no disk, as an archive: dumps of memory.
//!
//! Whoever has the volume puts files there: none is followed elsewhere, and none that becomes
//! shorter while it is read is taken for whole.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{Dir, Mode, OFlags, open, openat};
use tar::{Builder, EntryType, Header};

/// Most files of an archive.
const MAX_FILES: usize = 256;

/// A file of an archive.
#[derive(Debug)]
pub(super) struct Entry {
    name: String,
    file: File,
    len: u64,
    /// Seconds since 1970.
    changed: u64,
}

/// Opens the files of a directory, by name: those of its own, whose names do not begin with a dot.
pub(super) fn entries(directory: &Path) -> io::Result<Vec<Entry>> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let directory: OwnedFd = open(directory, flags, Mode::empty())?;
    let mut entries = Vec::new();
    for found in Dir::read_from(&directory)? {
        let found = found?;
        let name = found.file_name();
        let Ok(text) = name.to_str() else { continue };
        if text.starts_with('.') {
            continue;
        }
        // A FIFO holds up nobody.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&directory, name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            // A link, or a socket.
            Err(rustix::io::Errno::LOOP | rustix::io::Errno::NXIO) => continue,
            Err(error) => return Err(error.into()),
        };
        let meta = file.metadata()?;
        if !meta.is_file() {
            continue;
        }
        if entries.len() == MAX_FILES {
            let why = format!("there are more than {MAX_FILES} files");
            return Err(io::Error::other(why));
        }
        entries.push(Entry {
            name: text.to_owned(),
            file,
            len: meta.len(),
            changed: u64::try_from(meta.mtime()).unwrap_or(0),
        });
    }
    entries.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(entries)
}

/// Writes an archive of files.
pub(super) fn write(entries: Vec<Entry>, to: impl Write) -> io::Result<()> {
    let mut archive = Builder::new(to);
    for entry in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(0o600);
        header.set_mtime(entry.changed);
        header.set_size(entry.len);
        let content = Exactly {
            file: entry.file,
            left: entry.len,
        };
        archive.append_data(&mut header, &entry.name, content)?;
    }
    archive.into_inner()?.flush()
}

/// So many bytes of a file, or an error.
struct Exactly {
    file: File,
    left: u64,
}

impl Read for Exactly {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX);
        let most = bytes.len().min(most);
        let Some(wanted) = bytes.get_mut(..most).filter(|wanted| !wanted.is_empty()) else {
            return Ok(0);
        };
        match self.file.read(wanted)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.left -= count as u64;
                Ok(count)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, FileType, mknodat};
    use tar::Archive;

    use super::*;

    #[test]
    fn an_archive_has_the_files_of_a_directory_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let long = format!("{}.memory.dump", "v".repeat(200));
        std::fs::write(at("b.memory.dump"), vec![7; 70_000]).unwrap();
        std::fs::write(at(&long), "dump").unwrap();
        std::fs::write(at(".c.memory.dump.partial"), "half").unwrap();
        std::fs::create_dir(at("lost+found")).unwrap();
        symlink("/etc/passwd", at("link")).unwrap();
        mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        let mut packed = Vec::new();
        write(entries(directory.path()).unwrap(), &mut packed).unwrap();
        let mut archive = Archive::new(packed.as_slice());
        let mut found = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            let name = entry.path().unwrap().display().to_string();
            found.push((name, content));
        }
        let expected = [
            ("b.memory.dump".to_owned(), vec![7; 70_000]),
            (long, b"dump".to_vec()),
        ];
        assert!(
            found == expected,
            "{:?}",
            found.iter().map(|(name, _)| name)
        );
    }

    #[test]
    fn a_file_that_became_shorter_is_no_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        std::fs::write(&path, "dump").unwrap();
        let entries = entries(directory.path()).unwrap();
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(2)
            .unwrap();
        let error = write(entries, Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_directory_with_too_many_files_and_one_that_is_none_are_errors() {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..=MAX_FILES {
            std::fs::write(directory.path().join(number.to_string()), "").unwrap();
        }
        assert!(entries(directory.path()).is_err());
        assert!(entries(&directory.path().join("0")).is_err());
    }
}
