//! A kernel file, opened and identified.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use linux_loader::bootparam::setup_header;
use podvisor_devices::GuestRam;
use vm_memory::{Bytes, GuestAddress};

use super::bzimage::BzImage;
use super::elf::ElfImage;
use super::identify::{self, Format};
use super::{BootError, Entry, Footprint, KernelFault, Protocol};
use crate::layout;

/// A kernel that a guest boots from: an ELF `vmlinux` or a `bzImage`, for 64-bit x86.
///
/// The file is opened, identified and checked at once; its contents are read when the VM is
/// built. It must not change in between.
///
/// ```no_run
/// # fn main() -> Result<(), podvisor_vmm::BootError> {
/// let kernel = podvisor_vmm::Kernel::open("vmlinux")?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Kernel {
    path: PathBuf,
    /// Behind a lock, because reading moves the file's offset.
    file: Mutex<File>,
    image: Image,
}

#[derive(Debug)]
enum Image {
    Elf(ElfImage),
    BzImage(Box<BzImage>),
}

/// A part of the file that goes into guest memory as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Where it begins in the file.
    pub(super) offset: u64,
    /// Where it goes.
    pub(super) address: u64,
    /// Bytes, never 0.
    pub(super) size: u64,
}

impl Kernel {
    /// Opens the kernel at `path`.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or is not a kernel that can be booted.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, BootError> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|source| BootError::Open {
            path: path.to_owned(),
            source,
        })?;
        Self::new(file, path.to_owned())
    }

    /// Takes a kernel from a file that is open for reading, wherever it comes from.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open); the messages call the file "kernel".
    pub fn from_file(file: File) -> Result<Self, BootError> {
        Self::new(file, PathBuf::from("kernel"))
    }

    fn new(file: File, path: PathBuf) -> Result<Self, BootError> {
        let size = regular_file_size(&file, &path)?;
        let mut head = [0u8; identify::HEAD];
        let len = usize::try_from(size).map_or(head.len(), |size| size.min(head.len()));
        let head = &mut head[..len];
        file.read_exact_at(head, 0)
            .map_err(|source| BootError::Read {
                path: path.clone(),
                source,
            })?;

        let image = match identify::format(head) {
            Ok(Format::Elf) => ElfImage::parse(&file, size, head).map(Image::Elf),
            Ok(Format::BzImage) => {
                BzImage::parse(head, size).map(|image| Image::BzImage(Box::new(image)))
            }
            Err(seems) => return Err(BootError::NotAKernel { path, seems }),
        };
        match image {
            Ok(image) => Ok(Self {
                path,
                file: Mutex::new(file),
                image,
            }),
            Err(fault) => Err(BootError::Kernel { path, fault }),
        }
    }

    /// Bytes of command line that this kernel takes, without the NUL.
    pub(super) fn cmdline_max(&self) -> usize {
        let ours = layout::CMDLINE_MAX - 1;
        match &self.image {
            Image::Elf(_) => ours,
            Image::BzImage(image) => image.cmdline_max().min(ours),
        }
    }

    /// The header that a bzImage wants to find in its zero page.
    pub(super) fn setup_header(&self) -> Option<&setup_header> {
        match &self.image {
            Image::Elf(_) => None,
            Image::BzImage(image) => Some(image.header()),
        }
    }

    /// What the kernel takes of the memory below `low_end`.
    pub(super) fn footprint(&self, low_end: u64) -> Result<Footprint, BootError> {
        let (end, initramfs_end_max) = match &self.image {
            Image::Elf(image) => (image.end(), u64::MAX),
            Image::BzImage(image) => (image.end(), image.initramfs_end_max()),
        };
        if end > low_end {
            return Err(BootError::MemoryTooSmall {
                needed: end,
                available: low_end,
            });
        }
        Ok(Footprint {
            end,
            initramfs_end_max,
        })
    }

    /// Reads the kernel straight from the file into guest memory; `footprint` has been asked.
    pub(super) fn load(&self, mem: &GuestRam) -> Result<Entry, BootError> {
        match &self.image {
            Image::Elf(image) => {
                for piece in image.pieces() {
                    self.read(mem, piece)?;
                }
                Ok(match image.pvh_entry() {
                    Some(address) => Entry {
                        address,
                        protocol: Protocol::Pvh,
                    },
                    None => Entry {
                        address: image.entry(),
                        protocol: Protocol::Linux64,
                    },
                })
            }
            Image::BzImage(image) => {
                self.read(mem, image.piece())?;
                Ok(Entry {
                    address: image.entry(),
                    protocol: Protocol::Linux64,
                })
            }
        }
    }

    fn read(&self, mem: &GuestRam, piece: Piece) -> Result<(), BootError> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        read_into(&mut file, &self.path, mem, piece)
    }
}

/// Copies a piece of `file` into guest memory: one `read` per piece in the usual case, without
/// a buffer in between.
pub(super) fn read_into(
    file: &mut File,
    path: &Path,
    mem: &GuestRam,
    piece: Piece,
) -> Result<(), BootError> {
    let read_error = |source| BootError::Read {
        path: path.to_owned(),
        source,
    };
    file.seek(SeekFrom::Start(piece.offset))
        .map_err(read_error)?;
    let size = usize::try_from(piece.size).map_err(|_| BootError::Kernel {
        path: path.to_owned(),
        fault: KernelFault::Truncated { what: "contents" },
    })?;
    mem.read_exact_volatile_from(GuestAddress(piece.address), file, size)
        .map_err(|source| BootError::GuestMemory {
            what: "a file's contents",
            address: piece.address,
            source,
        })
}

/// The size of `file`, which has to be a regular and not an empty one.
pub(super) fn regular_file_size(file: &File, path: &Path) -> Result<u64, BootError> {
    let metadata = file.metadata().map_err(|source| BootError::Read {
        path: path.to_owned(),
        source,
    })?;
    let seems = match metadata.len() {
        _ if metadata.is_dir() => "a directory",
        _ if !metadata.is_file() => "not a regular file",
        0 => "empty",
        size => return Ok(size),
    };
    Err(BootError::NotAFile {
        path: path.to_owned(),
        seems,
    })
}
