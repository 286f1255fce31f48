//! Walks a directory without ever leaving it.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, fstatfs, openat2, statat,
};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use super::ImportError;
use crate::{Cancel, Limits, Result};

/// How often a directory that is moved meanwhile is opened again.
const MAX_REOPENS: usize = 100;

/// Types of file systems whose content comes from the kernel: proc, sysfs, cgroup, cgroup2, devpts,
/// debugfs, tracefs, securityfs, bpf, pstore, efivarfs, mqueue, configfs, binfmt_misc, fusectl.
const KERNEL: [u32; 15] = [
    0x9fa0,
    0x6265_6572,
    0x27_e0eb,
    0x6367_7270,
    0x1cd1,
    0x6462_6720,
    0x7472_6163,
    0x7363_6673,
    0xcafe_4a11,
    0x6165_676c,
    0xde5e_81e4,
    0x1980_0202,
    0x6265_6570,
    0x4249_4e4d,
    0x6573_5543,
];

/// A file or directory that a walk has reached.
pub(super) struct WalkEntry<'a> {
    /// The directory that it is in, or the directory itself.
    pub(super) directory: &'a OwnedFd,
    /// Its name in that directory; `.` for the directory itself.
    pub(super) name: &'a [u8],
    /// Its path below the root; empty for the root.
    pub(super) path: &'a [u8],
    pub(super) stat: Stat,
}

/// Walks a directory, always in the same order: a directory, its files by name, then its
/// directories.
pub(super) struct Walk<'a> {
    root: &'a Path,
    fd: OwnedFd,
    pub(super) limits: &'a Limits,
    pub(super) cancel: &'a Cancel,
    pub(super) entries: u64,
    /// Hash of everything that changes when a file does.
    pub(super) hasher: Sha256,
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        root: &'a Path,
        limits: &'a Limits,
        cancel: &'a Cancel,
    ) -> Result<Self, ImportError> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(root, flags, Mode::empty()).map_err(|source| {
            let (path, source) = (root.to_owned(), source.into());
            ImportError::Read { path, source }
        })?;
        Ok(Self {
            root,
            fd,
            limits,
            cancel,
            entries: 0,
            hasher: Sha256::new(),
        })
    }

    /// Passes every file to `see`, which returns the file's state when it was done with it.
    pub(super) fn run(
        &mut self,
        mut see: impl FnMut(&Self, &WalkEntry<'_>) -> Result<Stat>,
    ) -> Result<()> {
        let mut directories = vec![Vec::new()];
        while let Some(path) = directories.pop() {
            let directory = self.open(&path)?;
            let stat = fstat(&directory).map_err(|error| self.unreadable(&path, error))?;
            self.show(&mut see, &directory, b".", &path, stat)?;
            if self.is_kernels(&directory, &path)? {
                continue;
            }
            let names = self.names(&directory, &path)?;
            let mut below = Vec::new();
            for name in names {
                let inner = match path.as_slice() {
                    b"" => name.clone(),
                    path => [path, b"/", &name].concat(),
                };
                let stat = statat(&directory, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(|error| self.unreadable(&inner, error))?;
                match FileType::from_raw_mode(stat.st_mode) {
                    FileType::Directory => below.push(inner),
                    FileType::Socket => {
                        tracing::debug!(path = %self.shown(&inner).display(), "a socket is left out");
                    }
                    _ => self.show(&mut see, &directory, &name, &inner, stat)?,
                }
            }
            directories.extend(below.into_iter().rev());
        }
        Ok(())
    }

    fn show(
        &mut self,
        see: &mut impl FnMut(&Self, &WalkEntry<'_>) -> Result<Stat>,
        directory: &OwnedFd,
        name: &[u8],
        path: &[u8],
        stat: Stat,
    ) -> Result<()> {
        self.cancel.check()?;
        self.entries += 1;
        if self.entries > self.limits.entries {
            let (what, limit) = ("entries", self.limits.entries);
            return Err(ImportError::Limit { what, limit }.into());
        }
        let found = WalkEntry {
            directory,
            name,
            path,
            stat,
        };
        let stat = see(self, &found)?;
        self.hasher.update((path.len() as u64).to_le_bytes());
        self.hasher.update(path);
        for number in [
            stat.st_dev,
            stat.st_ino,
            stat.st_mode.into(),
            stat.st_size.cast_unsigned(),
            stat.st_mtime.cast_unsigned(),
            stat.st_mtime_nsec,
            stat.st_ctime.cast_unsigned(),
            stat.st_ctime_nsec,
        ] {
            self.hasher.update(number.to_le_bytes());
        }
        Ok(())
    }

    /// Opens a directory below the root, only through directories.
    fn open(&self, path: &[u8]) -> Result<OwnedFd, ImportError> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let name = if path.is_empty() {
            b".".as_slice()
        } else {
            path
        };
        for _ in 0..MAX_REOPENS {
            match openat2(&self.fd, name, flags, Mode::empty(), resolve) {
                Ok(directory) => return Ok(directory),
                // A directory was moved on the way.
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::NAMETOOLONG) => return Err(self.unfit(path, "has too long a path")),
                Err(error) => return Err(self.unreadable(path, error)),
            }
        }
        let path = self.shown(path);
        Err(ImportError::Changed { path })
    }

    /// Returns the names in a directory, sorted.
    fn names(&self, directory: &OwnedFd, path: &[u8]) -> Result<Vec<Vec<u8>>, ImportError> {
        let fault = |error| self.unreadable(path, error);
        let mut names = Vec::new();
        for entry in Dir::read_from(directory).map_err(fault)? {
            let entry = entry.map_err(fault)?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            names.push(name.to_vec());
            // Only one directory's names are kept in memory.
            if names.len() as u64 > self.limits.entries {
                let (what, limit) = ("entries", self.limits.entries);
                return Err(ImportError::Limit { what, limit });
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn is_kernels(&self, directory: &OwnedFd, path: &[u8]) -> Result<bool, ImportError> {
        let found = fstatfs(directory).map_err(|error| self.unreadable(path, error))?;
        // The type has 32 bits, whatever the width of the field.
        Ok(KERNEL.contains(&(found.f_type as u32)))
    }

    pub(super) fn shown(&self, path: &[u8]) -> PathBuf {
        self.root.join(OsStr::from_bytes(path))
    }

    pub(super) fn unreadable(&self, path: &[u8], error: Errno) -> ImportError {
        let path = self.shown(path);
        match error {
            // It existed when its directory was listed.
            Errno::NOENT | Errno::NOTDIR | Errno::LOOP => ImportError::Changed { path },
            error => ImportError::Read {
                path,
                source: error.into(),
            },
        }
    }

    pub(super) fn unfit(&self, path: &[u8], what: &'static str) -> ImportError {
        let path = self.shown(path);
        ImportError::Unfit { path, what }
    }
}

/// Returns whether a file did not change between two calls of `stat`.
pub(super) fn is_same(a: &Stat, b: &Stat) -> bool {
    let key = |stat: &Stat| {
        (
            (stat.st_dev, stat.st_ino, stat.st_mode, stat.st_size),
            (stat.st_mtime, stat.st_mtime_nsec),
            (stat.st_ctime, stat.st_ctime_nsec),
        )
    };
    key(a) == key(b)
}
