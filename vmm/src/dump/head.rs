//! What is before memory in a dump: ELF header, program headers, notes (System V ABI, chapters 4
//! and 5).

use super::notes::NOTE_ALIGN;
use super::registers::DumpedVcpu;
use crate::memory::PAGE_SIZE;

/// `ELFMAG`, `ELFCLASS64`, `ELFDATA2LSB`, `EV_CURRENT`, System V; the rest is padding.
const IDENTITY: [u8; 16] = [0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const HEADER_LEN: u16 = 64;
const PROGRAM_HEADER_LEN: u16 = 56;

const ET_CORE: u16 = 4;
const EM_X86_64: u16 = 62;
const EV_CURRENT: u32 = 1;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
/// Readable, writable and executable.
const ALL_RIGHTS: u32 = 7;

/// Guest memory that a dump has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    /// Guest physical address.
    pub(crate) start: u64,
    /// In bytes.
    pub(crate) len: u64,
}

/// Returns what a dump begins with: whole pages. The regions' contents follow in their order,
/// without gaps.
pub(crate) fn head(vcpus: &[DumpedVcpu], regions: &[Region]) -> Vec<u8> {
    let mut notes = Vec::new();
    for (number, vcpu) in (0u32..).zip(vcpus) {
        vcpu.note(number, &mut notes);
    }
    let count = regions.len() as u16 + 1;
    let notes_at = u64::from(HEADER_LEN) + u64::from(count) * u64::from(PROGRAM_HEADER_LEN);
    let memory_at = (notes_at + notes.len() as u64).next_multiple_of(PAGE_SIZE);
    let mut head = Vec::with_capacity(memory_at as usize);
    header(count, &mut head);
    let of_notes = Segment {
        kind: PT_NOTE,
        rights: 0,
        offset: notes_at,
        address: 0,
        len: notes.len() as u64,
        align: NOTE_ALIGN as u64,
    };
    of_notes.write(&mut head);
    let mut offset = memory_at;
    for region in regions {
        let of_memory = Segment {
            kind: PT_LOAD,
            rights: ALL_RIGHTS,
            offset,
            address: region.start,
            len: region.len,
            align: PAGE_SIZE,
        };
        of_memory.write(&mut head);
        offset += region.len;
    }
    head.append(&mut notes);
    head.resize(memory_at as usize, 0);
    head
}

fn header(program_headers: u16, to: &mut Vec<u8>) {
    to.extend(IDENTITY);
    to.extend(ET_CORE.to_le_bytes());
    to.extend(EM_X86_64.to_le_bytes());
    to.extend(EV_CURRENT.to_le_bytes());
    // The entry.
    to.extend(0u64.to_le_bytes());
    to.extend(u64::from(HEADER_LEN).to_le_bytes());
    // There are no sections.
    to.extend(0u64.to_le_bytes());
    // Flags.
    to.extend(0u32.to_le_bytes());
    for short in [
        HEADER_LEN,
        PROGRAM_HEADER_LEN,
        program_headers,
        // Length, number, and names of sections.
        0,
        0,
        0,
    ] {
        to.extend(short.to_le_bytes());
    }
}

/// A program header.
struct Segment {
    kind: u32,
    rights: u32,
    offset: u64,
    /// Physical, and virtual as well: a dump knows no page tables.
    address: u64,
    len: u64,
    align: u64,
}

impl Segment {
    fn write(&self, to: &mut Vec<u8>) {
        to.extend(self.kind.to_le_bytes());
        to.extend(self.rights.to_le_bytes());
        for long in [
            self.offset,
            self.address,
            self.address,
            // In the file, and in memory.
            self.len,
            self.len,
            self.align,
        ] {
            to.extend(long.to_le_bytes());
        }
    }
}
