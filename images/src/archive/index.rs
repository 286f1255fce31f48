//! Index of the members of a tar.

use std::collections::HashMap;
use std::fs::{self, File};
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::{ArchiveError, Held, Member, Place};
use crate::Limits;
use crate::decompress::Compression;
use crate::layer::{EntryKind, TarError, TarReader, components};

/// Bytes of memory that a member takes in addition to its names.
const MEMBER: usize = 96;

/// Links that are followed from one member to another.
const MAX_LINK_DEPTH: usize = 4;

/// The members of a tar by name.
#[derive(Debug, Default)]
pub(crate) struct TarIndex {
    files: HashMap<Vec<u8>, (u64, u64)>,
    /// Old versions of Docker store layers that occur twice as links.
    links: HashMap<Vec<u8>, Vec<u8>>,
}

impl TarIndex {
    /// Indexes `file`; returns the file that the index refers to, decompressed if necessary.
    pub(super) fn read(
        mut file: File,
        scratch: &Path,
        limits: &Limits,
    ) -> Result<(File, Self), ArchiveError> {
        let is_file = file.metadata().map_err(TarError::Read)?.is_file();
        let mut head = [0; 6];
        let plain = is_file && {
            let got = file.read_at(&mut head, 0).map_err(TarError::Read)?;
            Compression::detect(&head[..got]) == Compression::None
        };
        if !plain {
            file = decompress(file, scratch, limits)?;
        }
        let handle = file.try_clone().map_err(TarError::Read)?;
        let input = BufReader::with_capacity(256 << 10, Range::new(&handle, 0, u64::MAX));
        let mut tar = TarReader::new(Counting { input, count: 0 });
        let mut index = Self::default();
        let mut entries = 0;
        let mut held = Held::new(limits);
        while let Some(entry) = tar.next_entry()? {
            entries += 1;
            if entries > limits.entries {
                return Err(ArchiveError::Limit {
                    what: "members",
                    limit: limits.entries,
                });
            }
            let Ok(parts) = components(&entry.path, limits) else {
                continue;
            };
            let name = parts.join(&b'/');
            held.add(name.len() + entry.link.len() + MEMBER)?;
            match entry.kind {
                EntryKind::File => {
                    index.files.insert(name, (tar.input().count, entry.size));
                }
                EntryKind::Symlink => {
                    index
                        .links
                        .insert(name.clone(), resolve(&parts, &entry.link));
                }
                EntryKind::Hardlink => {
                    index.links.insert(name, entry.link);
                }
                _ => {}
            }
        }
        Ok((file, index))
    }

    /// Finds a member by name.
    pub(super) fn find(&self, name: &[u8]) -> Option<Member> {
        let mut name = name;
        for _ in 0..=MAX_LINK_DEPTH {
            if let Some((start, size)) = self.files.get(name) {
                return Some(Member {
                    place: Place::Range(*start),
                    size: *size,
                    digest: None,
                });
            }
            name = self.links.get(name)?;
        }
        None
    }
}

/// Resolves a relative link to a name within the archive. A link that leads outside names nothing.
fn resolve(from: &[&[u8]], target: &[u8]) -> Vec<u8> {
    let mut parts = from[..from.len().saturating_sub(1)].to_vec();
    for part in target.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join(&b'/')
}

/// Decompresses into an unnamed file, which is deleted when it is closed.
fn decompress(file: File, scratch: &Path, limits: &Limits) -> Result<File, ArchiveError> {
    let limit = limits.unpacked_bytes;
    let unpack = || -> io::Result<(File, bool)> {
        let mut out = nameless(scratch, |path, flags| {
            rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)
        })?;
        let mut input = Compression::open(file)?;
        io::copy(&mut (&mut input).take(limit), &mut out)?;
        out.flush()?;
        let more = input.read(&mut [0])? > 0;
        Ok((out, more))
    };
    match unpack().map_err(TarError::Read)? {
        (_, true) => Err(ArchiveError::Limit {
            what: "bytes",
            limit,
        }),
        (out, false) => Ok(out),
    }
}

/// A file without a name in `scratch`, by `open`. Where the file system makes none (NFS, 9p, vfat),
/// one whose name is removed at once.
fn nameless(
    scratch: &Path,
    open: impl Fn(&Path, OFlags) -> rustix::io::Result<OwnedFd>,
) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    match open(scratch, flags | OFlags::TMPFILE) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR) => {}
        done => return Ok(done?.into()),
    }
    let name = format!(".unpacked-{:016x}", RandomState::new().hash_one(()));
    let path = scratch.join(name);
    let file = open(&path, flags | OFlags::CREATE | OFlags::EXCL)?;
    match fs::remove_file(&path) {
        // The store's collector was faster.
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(file.into()),
    }
}

/// A part of a file, read without moving the file's own position.
#[derive(Debug)]
pub(super) struct Range<'a> {
    file: &'a File,
    at: u64,
    left: u64,
}

impl<'a> Range<'a> {
    pub(super) fn new(file: &'a File, at: u64, left: u64) -> Self {
        Self { file, at, left }
    }
}

impl Read for Range<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = self.left.min(buffer.len() as u64) as usize;
        let got = self.file.read_at(&mut buffer[..want], self.at)?;
        self.at += got as u64;
        self.left -= got as u64;
        Ok(got)
    }
}

#[derive(Debug)]
struct Counting<R> {
    input: R,
    count: u64,
}

impl<R: Read> Read for Counting<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.input.read(buffer)?;
        self.count += got as u64;
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_without_nameless_files_gets_one_whose_name_is_removed() {
        let scratch = tempfile::tempdir().unwrap();
        let mut file = nameless(scratch.path(), |path, flags| {
            match flags.contains(OFlags::TMPFILE) {
                true => Err(Errno::OPNOTSUPP),
                false => rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR),
            }
        })
        .unwrap();
        file.write_all(b"unpacked").unwrap();
        let mut read = [0; 8];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(&read, b"unpacked");
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    }
}
