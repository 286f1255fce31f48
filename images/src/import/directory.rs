//! Reads a directory as a tar.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, SeekFrom, Stat, fstat, openat, readlinkat};
use rustix::io::Errno;
use sha2::Digest as _;
use tar::EntryType;

use super::ImportError;
use super::entry::{self, Entry};
use super::walk::{Walk, WalkEntry, is_same};
use crate::erofs::storable_xattr;
use crate::{Cancel, Error, Limits, Result};

/// Extended attributes by full name.
type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

const CHUNK: usize = 256 << 10;
/// Minimum bytes of holes that are worth a map, and maximum number of ranges in a map.
const HOLES: u64 = 64 << 10;
const RANGES: usize = 1 << 16;

/// Writes the directory at `root` to `out` as a tar; returns the newest modification time in it. A
/// change meanwhile is an error. Sockets and the kernel's file systems (proc, sysfs, …) are left
/// out.
pub(crate) fn write(
    root: &Path,
    out: &mut impl Write,
    limits: &Limits,
    cancel: &Cancel,
) -> Result<i64> {
    let mut walk = Walk::new(root, limits, cancel)?;
    let mut writer = Writer {
        out,
        linked: HashMap::new(),
        buffer: vec![0; CHUNK],
        newest: 0,
        bytes: limits.unpacked_bytes,
    };
    walk.run(|walk, found| writer.write(walk, found))?;
    if walk.entries <= 1 {
        return Err(ImportError::Empty.into());
    }
    entry::finish(writer.out).map_err(ImportError::Write)?;
    let newest = writer.newest;
    // A second walk, which detects changes after the first one.
    let before = walk.hasher.finalize();
    let mut again = Walk::new(root, limits, cancel)?;
    again.run(|_, found| Ok(found.stat))?;
    if again.hasher.finalize() != before {
        let path = root.to_owned();
        return Err(ImportError::Changed { path }.into());
    }
    Ok(newest)
}

/// Writes the files that a walk finds.
struct Writer<'a, W> {
    out: &'a mut W,
    /// Files with several names, by device and inode, with their first name.
    linked: HashMap<(u64, u64), Vec<u8>>,
    buffer: Vec<u8>,
    newest: i64,
    /// Bytes that files may still have in total.
    bytes: u64,
}

impl<W: Write> Writer<'_, W> {
    fn write(&mut self, walk: &Walk<'_>, found: &WalkEntry<'_>) -> Result<Stat> {
        let (path, stat) = (found.path, found.stat);
        if path.len() > walk.limits.path_bytes {
            return Err(walk.unfit(path, "has too long a path").into());
        }
        let last = path.rsplit(|byte| *byte == b'/').next();
        if last.is_some_and(|name| name.starts_with(b".wh.")) {
            let what = "has a name that means a removed file in a layer; rename it";
            return Err(walk.unfit(path, what).into());
        }
        self.newest = self.newest.max(stat.st_mtime);
        let file_type = FileType::from_raw_mode(stat.st_mode);
        if file_type != FileType::Directory && stat.st_nlink > 1 {
            let key = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.linked.get(&key) {
                let entry = new_entry(EntryType::Link, path, first, &stat);
                entry.write(self.out).map_err(ImportError::Write)?;
                return Ok(stat);
            }
            self.linked.insert(key, path.to_vec());
        }
        let xattrs = xattrs(walk, found)?;
        let mut link = Vec::new();
        let kind = match file_type {
            FileType::RegularFile => return self.file(walk, found, &xattrs),
            FileType::Directory => EntryType::Directory,
            FileType::Symlink => {
                link = readlinkat(found.directory, found.name, Vec::new())
                    .map_err(|error| walk.unreadable(path, error))?
                    .into_bytes();
                EntryType::Symlink
            }
            FileType::CharacterDevice => EntryType::Char,
            FileType::BlockDevice => EntryType::Block,
            FileType::Fifo => EntryType::Fifo,
            _ => {
                return Err(walk
                    .unfit(path, "is of a kind that images do not have")
                    .into());
            }
        };
        let with_slash = [path, b"/"].concat();
        let path = match kind {
            EntryType::Directory if path.is_empty() => b"./",
            EntryType::Directory => with_slash.as_slice(),
            _ => path,
        };
        let mut entry = new_entry(kind, path, &link, &stat);
        entry.xattrs = &xattrs;
        entry.write(self.out).map_err(ImportError::Write)?;
        Ok(stat)
    }

    fn file(
        &mut self,
        walk: &Walk<'_>,
        found: &WalkEntry<'_>,
        xattrs: &[(Vec<u8>, Vec<u8>)],
    ) -> Result<Stat> {
        let path = found.path;
        let unreadable = |error| walk.unreadable(path, error);
        let changed = || ImportError::Changed {
            path: walk.shown(path),
        };
        // A file that has since become a pipe or device must not block or have side effects.
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = openat(found.directory, found.name, flags, Mode::empty()).map_err(unreadable)?;
        let stat = fstat(&file).map_err(unreadable)?;
        if !is_same(&stat, &found.stat) {
            return Err(changed().into());
        }
        let size = stat.st_size.cast_unsigned();
        self.bytes = self.bytes.checked_sub(size).ok_or(ImportError::Limit {
            what: "bytes",
            limit: walk.limits.unpacked_bytes,
        })?;
        let ranges = data_ranges(&file, size);
        let mut entry = new_entry(EntryType::Regular, path, b"", &stat);
        entry.size = size;
        entry.xattrs = xattrs;
        entry.sparse = ranges.as_deref();
        let data = entry.write(self.out).map_err(ImportError::Write)?;
        let mut file = File::from(file);
        let whole = [(0, size)];
        for (offset, length) in ranges.as_deref().unwrap_or(&whole) {
            io::Seek::seek(&mut file, io::SeekFrom::Start(*offset))
                .and_then(|_| self.copy(&mut file, *length, walk.cancel))
                .map_err(|source| ImportError::Read {
                    path: walk.shown(path),
                    source,
                })?
                .map_err(|stopped| match stopped {
                    Stopped::Short => changed().into(),
                    Stopped::Write(error) => Error::from(ImportError::Write(error)),
                    Stopped::Cancelled => Error::Cancelled,
                })?;
        }
        entry::pad(self.out, data).map_err(ImportError::Write)?;
        let after = fstat(&file).map_err(unreadable)?;
        if is_same(&after, &stat) {
            Ok(after)
        } else {
            Err(changed().into())
        }
    }

    /// Copies `left` bytes; the outer error is of reading.
    fn copy(
        &mut self,
        file: &mut File,
        mut left: u64,
        cancel: &Cancel,
    ) -> io::Result<Result<(), Stopped>> {
        while left > 0 {
            if cancel.is_cancelled() {
                return Ok(Err(Stopped::Cancelled));
            }
            let want = left.min(CHUNK as u64) as usize;
            let got = match file.read(&mut self.buffer[..want]) {
                Ok(0) => return Ok(Err(Stopped::Short)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                got => got?,
            };
            if let Err(error) = self.out.write_all(&self.buffer[..got]) {
                return Ok(Err(Stopped::Write(error)));
            }
            left -= got as u64;
        }
        Ok(Ok(()))
    }
}

/// Why a file was not copied to its end.
enum Stopped {
    Short,
    Write(io::Error),
    Cancelled,
}

fn new_entry<'a>(kind: EntryType, path: &'a [u8], link: &'a [u8], stat: &Stat) -> Entry<'a> {
    Entry {
        kind,
        path,
        link,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: (stat.st_mtime, stat.st_mtime_nsec as u32),
        device: match kind {
            EntryType::Char | EntryType::Block => (
                rustix::fs::major(stat.st_rdev),
                rustix::fs::minor(stat.st_rdev),
            ),
            _ => (0, 0),
        },
        size: 0,
        xattrs: &[],
        sparse: None,
    }
}

/// Returns the ranges of a file that are not holes; `None` if a map of them is not worth it or the
/// file system has none.
fn data_ranges(file: impl AsFd, size: u64) -> Option<Vec<(u64, u64)>> {
    let mut ranges = Vec::new();
    let (mut at, mut data) = (0, 0);
    while at < size {
        let start = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start.min(size),
            // No data to the end.
            Err(Errno::NXIO) => size,
            Err(_) => return None,
        };
        at = match start < size {
            true => rustix::fs::seek(&file, SeekFrom::Hole(start))
                .ok()?
                .min(size),
            false => size,
        };
        if at > start {
            ranges.push((start, at - start));
            data += at - start;
        } else if start < size {
            return None;
        }
        if ranges.len() > RANGES {
            return None;
        }
    }
    // GNU tar's maps end with an empty range at the end of the file.
    ranges.push((size, 0));
    (size - data >= HOLES).then_some(ranges)
}

/// Returns the extended attributes that an image keeps, sorted by name.
fn xattrs(walk: &Walk<'_>, found: &WalkEntry<'_>) -> Result<Xattrs, ImportError> {
    // The only way that also reaches those of symbolic links and devices without following or
    // opening them.
    let directory = format!("/proc/self/fd/{}/", found.directory.as_raw_fd());
    let path = [directory.as_bytes(), found.name].concat();
    let fault = |error| walk.unreadable(found.path, error);
    let mut list = Vec::with_capacity(64 << 10);
    match rustix::fs::llistxattr(path.as_slice(), rustix::buffer::spare_capacity(&mut list)) {
        Ok(_) => {}
        Err(Errno::NOTSUP) => return Ok(Vec::new()),
        Err(error) => return Err(fault(error)),
    }
    let mut xattrs = Xattrs::new();
    let mut bytes = 0;
    for name in list.split(|byte| *byte == 0) {
        // SELinux labels belong to this machine's policy; overlayfs in the guest would obey its own
        // attributes.
        let is_ours = name == b"security.selinux" || name.starts_with(b"trusted.overlay.");
        if is_ours || !storable_xattr(name) {
            continue;
        }
        if name.contains(&b'=') {
            let what = "has an extended attribute with a `=` in its name";
            return Err(walk.unfit(found.path, what));
        }
        let mut value = Vec::with_capacity(64 << 10);
        let spare = rustix::buffer::spare_capacity(&mut value);
        rustix::fs::lgetxattr(path.as_slice(), name, spare).map_err(fault)?;
        bytes += name.len() + value.len() + 8;
        if bytes > walk.limits.xattr_bytes {
            let what = "has more extended attributes than allowed";
            return Err(walk.unfit(found.path, what));
        }
        xattrs.push((name.to_vec(), value));
    }
    xattrs.sort();
    Ok(xattrs)
}
