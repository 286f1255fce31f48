//! A kernel file, opened and identified.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use linux_loader::bootparam::setup_header;
use podvisor_devices::GuestRam;

use super::bzimage::BzImage;
use super::elf::ElfImage;
use super::identify::{self, Format};
use super::source::Source;
use super::{BootError, Entry, Footprint, Protocol};
use crate::layout;

/// A kernel that a guest boots from: an ELF `vmlinux` or a `bzImage`, for 64-bit x86.
///
/// The file is opened, identified and checked immediately; its contents are read when the VM is
/// built. It must not change in between.
///
/// ```no_run
/// # fn main() -> Result<(), podvisor_vmm::BootError> {
/// let kernel = podvisor_vmm::Kernel::open("vmlinux")?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Kernel {
    source: Source,
    image: Image,
}

#[derive(Debug)]
enum Image {
    Elf(ElfImage),
    BzImage(Box<BzImage>),
}

impl Kernel {
    /// Opens the kernel at `path`.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read or is not a kernel that can be booted.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, BootError> {
        Source::open(path.as_ref()).and_then(Self::new)
    }

    /// Creates a kernel from a file that is open for reading, wherever it comes from.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open); the messages call the file "kernel".
    pub fn from_file(file: File) -> Result<Self, BootError> {
        Source::new(file, PathBuf::from("kernel")).and_then(Self::new)
    }

    pub(super) fn new(source: Source) -> Result<Self, BootError> {
        let image = source.inspect(|file, size| identify(file, size, source.path()))?;
        Ok(Self { source, image })
    }

    /// Returns the maximum number of bytes of this kernel's command line, without the NUL.
    pub(super) fn cmdline_max(&self) -> usize {
        let ours = layout::CMDLINE_MAX - 1;
        match &self.image {
            Image::Elf(_) => ours,
            Image::BzImage(image) => image.cmdline_max().min(ours),
        }
    }

    /// Returns how an ELF kernel is entered.
    pub(super) fn elf_protocol(&self) -> Option<Protocol> {
        match &self.image {
            Image::Elf(image) => Some(image.entry().protocol),
            Image::BzImage(_) => None,
        }
    }

    /// Returns the header that a bzImage expects in its zero page.
    pub(super) fn setup_header(&self) -> Option<&setup_header> {
        match &self.image {
            Image::Elf(_) => None,
            Image::BzImage(image) => Some(image.header()),
        }
    }

    /// Returns which memory below `low_end` the kernel needs.
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

    /// Copies the kernel from its file into guest memory; `footprint` has been called before.
    pub(super) fn load(&self, mem: &GuestRam) -> Result<Entry, BootError> {
        match &self.image {
            Image::Elf(image) => {
                self.source.load(mem, image.pieces())?;
                Ok(image.entry())
            }
            Image::BzImage(image) => {
                self.source.load(mem, std::iter::once(image.piece()))?;
                Ok(Entry {
                    address: image.entry(),
                    protocol: Protocol::Linux64,
                })
            }
        }
    }
}

/// Identifies the kind of kernel in `file` of `size` bytes; errors call it `path`.
fn identify(file: &File, size: u64, path: &Path) -> Result<Image, BootError> {
    let path = || path.to_owned();
    let mut head = [0u8; identify::SNIFF_LEN];
    let len = usize::try_from(size).map_or(head.len(), |size| size.min(head.len()));
    let head = &mut head[..len];
    file.read_exact_at(head, 0)
        .map_err(|source| BootError::Read {
            path: path(),
            source,
        })?;
    let image = match identify::format(head) {
        Ok(Format::Elf) => ElfImage::parse(file, size, head).map(Image::Elf),
        Ok(Format::BzImage) => {
            BzImage::parse(head, size).map(|image| Image::BzImage(Box::new(image)))
        }
        Err(seems) => {
            return Err(BootError::NotAKernel {
                path: path(),
                seems,
            });
        }
    };
    image.map_err(|fault| BootError::Kernel {
        path: path(),
        fault,
    })
}
