//! ELF kernels (`vmlinux`): which parts of the file are loaded where, and where they are entered.
//!
//! `docs/adr/0020-elf-loader.md` says why this is not `linux-loader`'s loader, whose ELF structures
//! it uses.

use std::fs::File;
use std::os::unix::fs::FileExt;

use linux_loader::elf::{self, Elf64_Ehdr, Elf64_Nhdr, Elf64_Phdr};
use vm_memory::ByteValued;

use super::source::FileRange;
use super::{Entry, KernelFault, Protocol};
use crate::layout;

const EHDR_SIZE: usize = size_of::<Elf64_Ehdr>();
const PHDR_SIZE: usize = size_of::<Elf64_Phdr>();
const NHDR_SIZE: usize = size_of::<Elf64_Nhdr>();

/// Linux has 4 or 5; a file with more than this is not a kernel.
const PHDRS_MAX: usize = 128;
/// Linux's notes take a few hundred bytes; anything beyond this is ignored.
const NOTES_MAX: u64 = 64 * 1024;

const EI_CLASS: usize = 4;
const PT_INTERP: u32 = 3;
const EM_386: u16 = 3;
const EM_X86_64: u16 = 62;
const ET_EXEC: u16 = 2;
const ET_DYN: u16 = 3;
/// `XEN_ELFNOTE_PHYS32_ENTRY`, of the vendor "Xen".
const PHYS32_ENTRY: u32 = 18;

const OTHER_PROCESSOR: &str = "file of another processor";

/// A checked ELF kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ElfImage {
    entry: Entry,
    /// Ascending by address, without overlaps.
    segments: Vec<Segment>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segment {
    piece: FileRange,
    /// Bytes in memory: at least those of the piece, the rest is zero.
    mem_size: u64,
}

impl Segment {
    /// Cannot overflow: checked when it was created.
    fn end(&self) -> u64 {
        self.piece.address + self.mem_size
    }

    fn holds_code_at(&self, address: u64) -> bool {
        address
            .checked_sub(self.piece.address)
            .is_some_and(|offset| offset < self.piece.size)
    }
}

impl ElfImage {
    /// Checks the ELF file of `size` bytes that starts with `head`.
    pub(super) fn parse(file: &File, size: u64, head: &[u8]) -> Result<Self, KernelFault> {
        let header = head
            .get(..EHDR_SIZE)
            .and_then(Elf64_Ehdr::from_slice_copy)
            .ok_or(KernelFault::Truncated { what: "ELF header" })?;
        check_kind(&header)?;

        let mut segments = Vec::new();
        let mut notes = Notes::default();
        for (index, phdr) in program_headers(file, size, &header)?.iter().enumerate() {
            match phdr.p_type {
                elf::PT_LOAD => segments.extend(segment(index, phdr, size)?),
                elf::PT_NOTE => notes.find(file, size, index, phdr)?,
                PT_INTERP => {
                    return Err(KernelFault::ElfKind {
                        what: "program for user space",
                    });
                }
                _ => {}
            }
        }
        segments.sort_by_key(|s| s.piece.address);
        if let Some(pair) = segments
            .windows(2)
            .find(|pair| pair[1].piece.address < pair[0].end())
        {
            return Err(KernelFault::SegmentsOverlap {
                address: pair[1].piece.address,
            });
        }

        let entry = notes.entry(header.e_entry);
        // EDK2's firmware says so: its entry is 32-bit code.
        if header.e_machine == EM_386 && entry.protocol != Protocol::Pvh {
            return Err(KernelFault::ElfKind {
                what: OTHER_PROCESSOR,
            });
        }
        if !segments.iter().any(|s| s.holds_code_at(entry.address)) {
            return Err(KernelFault::Entry {
                entry: entry.address,
            });
        }
        Ok(Self { entry, segments })
    }

    /// Returns where and how the kernel is entered.
    pub(super) fn entry(&self) -> Entry {
        self.entry
    }

    /// Returns the end of its memory, BSS included.
    pub(super) fn end(&self) -> u64 {
        self.segments.iter().map(Segment::end).max().unwrap_or(0)
    }

    /// Returns the pieces to be read into guest memory.
    pub(super) fn pieces(&self) -> impl Iterator<Item = FileRange> {
        self.segments
            .iter()
            .map(|s| s.piece)
            .filter(|piece| piece.size > 0)
    }
}

fn check_kind(header: &Elf64_Ehdr) -> Result<(), KernelFault> {
    const CLASS_64: u8 = 2;
    const LITTLE_ENDIAN: u8 = 1;
    let what = if header.e_ident[EI_CLASS] != CLASS_64 {
        "file of a 32-bit machine"
    } else if header.e_ident[elf::EI_DATA as usize] != LITTLE_ENDIAN {
        "file of a big-endian machine"
    } else if !matches!(header.e_machine, EM_X86_64 | EM_386) {
        OTHER_PROCESSOR
    } else if !matches!(header.e_type, ET_EXEC | ET_DYN) {
        "object file or core dump"
    } else {
        return Ok(());
    };
    Err(KernelFault::ElfKind { what })
}

fn program_headers(
    file: &File,
    size: u64,
    header: &Elf64_Ehdr,
) -> Result<Vec<Elf64_Phdr>, KernelFault> {
    let count = usize::from(header.e_phnum);
    if count == 0 || count > PHDRS_MAX || usize::from(header.e_phentsize) != PHDR_SIZE {
        return Err(KernelFault::ProgramHeaders);
    }
    let table = read(
        file,
        size,
        header.e_phoff,
        count * PHDR_SIZE,
        "program headers",
    )?;
    Ok(table
        .chunks_exact(PHDR_SIZE)
        .filter_map(Elf64_Phdr::from_slice_copy)
        .collect())
}

/// Converts a `PT_LOAD` header to a segment; `None` if it uses no memory.
fn segment(index: usize, phdr: &Elf64_Phdr, size: u64) -> Result<Option<Segment>, KernelFault> {
    if phdr.p_memsz == 0 && phdr.p_filesz == 0 {
        return Ok(None);
    }
    let impossible = KernelFault::Segment { index };
    if phdr.p_filesz > phdr.p_memsz || phdr.p_paddr.checked_add(phdr.p_memsz).is_none() {
        return Err(impossible);
    }
    match phdr.p_offset.checked_add(phdr.p_filesz) {
        None => return Err(impossible),
        Some(end) if end > size && phdr.p_filesz > 0 => {
            return Err(KernelFault::Truncated { what: "segments" });
        }
        Some(_) => {}
    }
    if phdr.p_paddr < layout::HIMEM_START {
        return Err(KernelFault::SegmentTooLow {
            index,
            address: phdr.p_paddr,
        });
    }
    Ok(Some(Segment {
        piece: FileRange {
            offset: phdr.p_offset,
            address: phdr.p_paddr,
            size: phdr.p_filesz,
        },
        mem_size: phdr.p_memsz,
    }))
}

/// A kernel's notes about how to enter it.
#[derive(Debug, Default)]
struct Notes {
    pvh_entry: Option<u64>,
    /// Whether it is a Linux kernel, whose 64-bit entry is the ELF file's.
    linux: bool,
}

impl Notes {
    /// Reads a `PT_NOTE` segment.
    fn find(
        &mut self,
        file: &File,
        size: u64,
        index: usize,
        phdr: &Elf64_Phdr,
    ) -> Result<(), KernelFault> {
        let len = usize::try_from(phdr.p_filesz.min(NOTES_MAX))
            .map_err(|_| KernelFault::Segment { index })?;
        let notes = read(file, size, phdr.p_offset, len, "notes")?;
        let mut rest = notes.as_slice();
        // Each iteration takes at least a note's header off `rest`.
        while let Some((header, body)) = rest.split_at_checked(NHDR_SIZE) {
            let Some(note) = Elf64_Nhdr::from_slice_copy(header) else {
                break;
            };
            let (name_len, desc_len) = (note.n_namesz as usize, note.n_descsz as usize);
            let Some((name, body)) = take_aligned(body, name_len) else {
                break;
            };
            let Some((desc, body)) = take_aligned(body, desc_len) else {
                break;
            };
            match (name, note.n_type) {
                (b"Xen\0", PHYS32_ENTRY) if self.pvh_entry.is_none() => {
                    // Its size differs between kernels (4 or 8 bytes); the address has 32 bits.
                    let entry = desc.first_chunk::<4>().ok_or(KernelFault::PvhNote)?;
                    self.pvh_entry = Some(u32::from_le_bytes(*entry).into());
                }
                (b"Linux\0", _) => self.linux = true,
                _ => {}
            }
            rest = body;
        }
        Ok(())
    }

    /// Linux is entered in 64-bit mode: after its PVH entry it would look for Xen first, which
    /// costs 256 CPUID exits.
    fn entry(&self, elf_entry: u64) -> Entry {
        match self.pvh_entry {
            Some(address) if !self.linux => Entry {
                address,
                protocol: Protocol::Pvh,
            },
            _ => Entry {
                address: elf_entry,
                protocol: Protocol::Linux64,
            },
        }
    }
}

/// Splits off `len` bytes, and the padding to a multiple of 4 after them.
fn take_aligned(bytes: &[u8], len: usize) -> Option<(&[u8], &[u8])> {
    let taken = bytes.get(..len)?;
    let padded = len.checked_next_multiple_of(4)?.min(bytes.len());
    Some((taken, bytes.get(padded..)?))
}

fn read(
    file: &File,
    size: u64,
    offset: u64,
    len: usize,
    what: &'static str,
) -> Result<Vec<u8>, KernelFault> {
    let truncated = KernelFault::Truncated { what };
    match offset.checked_add(len as u64) {
        Some(end) if end <= size => {}
        _ => return Err(truncated),
    }
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, offset)
        .map_err(|_| truncated)?;
    Ok(bytes)
}

/// Reads a structure from bytes of any alignment.
trait FromSliceCopy: ByteValued + Default {
    fn from_slice_copy(bytes: &[u8]) -> Option<Self> {
        let mut value = Self::default();
        (bytes.len() == size_of::<Self>()).then(|| {
            value.as_mut_slice().copy_from_slice(bytes);
            value
        })
    }
}

impl<T: ByteValued + Default> FromSliceCopy for T {}

#[cfg(test)]
#[path = "elf_tests.rs"]
mod tests;
