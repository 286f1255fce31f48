//! Files whose contents go into guest memory: opened once, checked, read when the VM is built.
//!
//! They are read, not mapped: if a mapped file is truncated meanwhile, the process gets SIGBUS, and
//! building and removing page tables was measured to cost more than `read`'s copy.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use podvisor_devices::GuestRam;
use vm_memory::{Bytes, GuestAddress};

use super::{BootError, KernelFault};

/// A regular file, open for reading.
#[derive(Debug)]
pub(super) struct Source {
    path: PathBuf,
    /// Locked, because reading moves the file's offset.
    file: Mutex<File>,
    size: u64,
}

/// A part of a file that is copied into guest memory unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileRange {
    /// The offset in the file.
    pub(super) offset: u64,
    /// The guest address.
    pub(super) address: u64,
    /// The number of bytes, never 0.
    pub(super) size: u64,
}

impl Source {
    /// Opens the file at `path`, which must be regular and not empty.
    pub(super) fn open(path: &Path) -> Result<Self, BootError> {
        let file = File::open(path).map_err(|source| BootError::Open {
            path: path.to_owned(),
            source,
        })?;
        Self::new(file, path.to_owned())
    }

    /// Takes an open file; messages call it `path`.
    pub(super) fn new(file: File, path: PathBuf) -> Result<Self, BootError> {
        let metadata = match file.metadata() {
            Ok(metadata) => metadata,
            Err(source) => return Err(BootError::Read { path, source }),
        };
        let seems = match metadata.len() {
            _ if metadata.is_dir() => "a directory",
            _ if !metadata.is_file() => "not a regular file",
            0 => "empty",
            size => {
                let file = Mutex::new(file);
                return Ok(Self { path, file, size });
            }
        };
        Err(BootError::NotAFile { path, seems })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of bytes when the file was opened, never 0.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Calls `look` with the file and its size.
    pub(super) fn inspect<T>(&self, look: impl FnOnce(&File, u64) -> T) -> T {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        look(&file, self.size)
    }

    /// Reads `pieces` of the file into guest memory: one `read` each in the usual case, without a
    /// buffer in between.
    pub(super) fn load(
        &self,
        mem: &GuestRam,
        pieces: impl Iterator<Item = FileRange>,
    ) -> Result<(), BootError> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        for piece in pieces {
            let size = usize::try_from(piece.size).map_err(|_| self.cut_short())?;
            file.seek(SeekFrom::Start(piece.offset))
                .map_err(|source| BootError::Read {
                    path: self.path.clone(),
                    source,
                })?;
            mem.read_exact_volatile_from(GuestAddress(piece.address), &mut *file, size)
                .map_err(|source| BootError::GuestMemory {
                    what: "a file's contents",
                    address: piece.address,
                    source,
                })?;
        }
        Ok(())
    }

    fn cut_short(&self) -> BootError {
        BootError::Kernel {
            path: self.path.clone(),
            fault: KernelFault::Truncated { what: "contents" },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dir: &tempfile::TempDir, size: usize) -> PathBuf {
        let path = dir.path().join("file");
        let bytes: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn memory() -> GuestRam {
        GuestRam::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap()
    }

    fn pieces() -> [FileRange; 2] {
        let piece = |offset, address, size| FileRange {
            offset,
            address,
            size,
        };
        [piece(100, 0x1001, 5000), piece(400_000, 0x20_0000, 100_000)]
    }

    fn loaded(mem: &GuestRam) -> bool {
        pieces().iter().all(|piece| {
            let mut bytes = vec![0; piece.size as usize];
            mem.read_slice(&mut bytes, GuestAddress(piece.address))
                .unwrap();
            let expected = |i: usize| ((piece.offset as usize + i) % 251) as u8;
            bytes.iter().enumerate().all(|(i, &b)| b == expected(i))
        })
    }

    #[test]
    fn pieces_go_where_they_belong() {
        let dir = tempfile::tempdir().unwrap();
        let mem = memory();
        let source = Source::open(&file(&dir, 500_000)).unwrap();
        source.load(&mem, pieces().into_iter()).unwrap();
        assert!(loaded(&mem));
    }

    #[test]
    fn a_file_that_was_cut_short_meanwhile_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(&dir, 500_000);
        let source = Source::open(&path).unwrap();
        let writer = File::options().write(true).open(&path).unwrap();
        writer.set_len(300_000).unwrap();
        let error = source.load(&memory(), pieces().into_iter()).unwrap_err();
        assert!(matches!(error, BootError::GuestMemory { .. }), "{error:?}");
    }
}
