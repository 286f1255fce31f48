//! Removes the padding from a kernel: pages without reachable instructions or data.
//!
//! Linux aligns parts of its text to 2 MiB, for its own page tables, and the linker fills the gaps
//! with `int3`; data has pages of zeroes. A monitor that loads the file copies both at each boot.
//! From an ELF file, this creates one whose segments omit runs of such pages; the omitted parts are
//! zero in fresh memory.

use anyhow::{Context, Result, bail};

const EHDR: usize = 64;
const PHDR: usize = 56;
const PAGE: usize = 4096;
/// Shorter runs are not worth a separate segment: loading one costs two system calls.
const RUN: usize = 16;
/// The linker's padding between functions.
const INT3: u8 = 0xcc;

pub(crate) const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;

/// A program header, with the fields that matter here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: u32,
    flags: u32,
    pub(crate) offset: usize,
    pub(crate) virtual_address: u64,
    address: u64,
    pub(crate) file_size: usize,
    pub(crate) mem_size: u64,
}

/// Returns `elf` without its padding and its section headers. Addresses, entry and notes are
/// unchanged.
pub(crate) fn remove(elf: &[u8]) -> Result<Vec<u8>> {
    let mut headers = Vec::new();
    for header in read_headers(elf)? {
        match header.kind {
            PT_LOAD => headers.extend(split(elf, &header)?),
            PT_NOTE => headers.push(header),
            _ => {}
        }
    }

    let mut out = elf.get(..EHDR).context("no ELF header")?.to_vec();
    out[32..40].copy_from_slice(&(EHDR as u64).to_le_bytes()); // e_phoff
    out[40..48].fill(0); // e_shoff
    out[56..58].copy_from_slice(&u16::try_from(headers.len())?.to_le_bytes()); // e_phnum
    out[60..64].fill(0); // e_shnum, e_shstrndx
    let mut contents = Vec::new();
    let start = (EHDR + headers.len() * PHDR).next_multiple_of(PAGE);
    for header in &headers {
        let offset = start + contents.len();
        contents.extend(contents_of(elf, header)?);
        contents.resize(contents.len().next_multiple_of(PAGE), 0);
        out.extend(header.kind.to_le_bytes());
        out.extend(header.flags.to_le_bytes());
        let align = if header.kind == PT_NOTE {
            4
        } else {
            PAGE as u64
        };
        for field in [
            offset as u64,
            header.virtual_address,
            header.address,
            header.file_size as u64,
            header.mem_size,
            align,
        ] {
            out.extend(field.to_le_bytes());
        }
    }
    out.resize(start, 0);
    out.extend(contents);
    Ok(out)
}

pub(crate) fn read_headers(elf: &[u8]) -> Result<Vec<Header>> {
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        bail!("not a 64-bit ELF file");
    }
    let half = |at: usize| -> Result<usize> {
        let bytes = elf.get(at..at + 2).context("ELF header cut off")?;
        Ok(usize::from(u16::from_le_bytes(bytes.try_into()?)))
    };
    let table = usize::try_from(word(elf, 32)?)?;
    if half(54)? != PHDR {
        bail!("program headers of an unknown size");
    }
    (0..half(56)?)
        .map(|i| {
            let at = table + i * PHDR;
            let first = word(elf, at)?;
            Ok(Header {
                kind: first as u32,
                flags: (first >> 32) as u32,
                offset: usize::try_from(word(elf, at + 8)?)?,
                virtual_address: word(elf, at + 16)?,
                address: word(elf, at + 24)?,
                file_size: usize::try_from(word(elf, at + 32)?)?,
                mem_size: word(elf, at + 40)?,
            })
        })
        .collect()
}

fn word(elf: &[u8], at: usize) -> Result<u64> {
    let bytes = elf.get(at..at + 8).context("ELF file cut off")?;
    Ok(u64::from_le_bytes(bytes.try_into()?))
}

fn contents_of<'a>(elf: &'a [u8], header: &Header) -> Result<&'a [u8]> {
    elf.get(header.offset..header.offset + header.file_size)
        .context("a segment reaches beyond the file")
}

/// Returns the parts of a segment between runs of padding, in order. BSS is added to the last one.
fn split(elf: &[u8], header: &Header) -> Result<Vec<Header>> {
    let contents = contents_of(elf, header)?;
    let mut kept: Vec<std::ops::Range<usize>> = Vec::new();
    let mut padding = 0;
    for (index, page) in contents.chunks(PAGE).enumerate() {
        let is_padding = [0, INT3].iter().any(|f| page.iter().all(|b| b == f));
        if is_padding {
            padding += 1;
            continue;
        }
        let end = index * PAGE + page.len();
        match kept.last_mut() {
            Some(last) if padding < RUN => last.end = end,
            _ => kept.push(index * PAGE..end),
        }
        padding = 0;
    }
    if kept.is_empty() {
        kept.push(0..0);
    }
    let last = kept.len() - 1;
    Ok(kept
        .into_iter()
        .enumerate()
        .map(|(i, part)| Header {
            offset: header.offset + part.start,
            virtual_address: header.virtual_address.wrapping_add(part.start as u64),
            address: header.address + part.start as u64,
            file_size: part.len(),
            mem_size: if i == last {
                header.mem_size - part.start as u64
            } else {
                part.len() as u64
            },
            ..*header
        })
        .collect())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const BASE: u64 = 0x100_0000;

    /// Returns an ELF file with one segment of `contents` and `bss`, and a note.
    pub(crate) fn elf(contents: &[u8], bss: u64) -> Vec<u8> {
        let mut elf = b"\x7fELF\x02\x01".to_vec();
        elf.resize(EHDR, 0);
        elf[32..40].copy_from_slice(&64u64.to_le_bytes());
        elf[54..56].copy_from_slice(&56u16.to_le_bytes());
        elf[56..58].copy_from_slice(&2u16.to_le_bytes());
        let size = contents.len() as u64;
        for (kind, fields) in [
            (
                PT_LOAD,
                [0x1000, u64::MAX << 31, BASE, size, size + bss, 1 << 21],
            ),
            (PT_NOTE, [0x1000 + 8, 0, 0, 16, 16, 4]),
        ] {
            elf.extend(kind.to_le_bytes());
            elf.extend(7u32.to_le_bytes());
            elf.extend(fields.into_iter().flat_map(u64::to_le_bytes));
        }
        elf.resize(0x1000, 0);
        elf.extend(contents);
        elf
    }

    /// Returns memory as a monitor would fill it, from `BASE`.
    fn loaded(elf: &[u8]) -> Vec<u8> {
        let mut memory = Vec::new();
        for header in read_headers(elf).unwrap() {
            if header.kind == PT_LOAD {
                let at = (header.address - BASE) as usize;
                memory.resize(memory.len().max(at + header.mem_size as usize), 0);
                let contents = contents_of(elf, &header).unwrap();
                memory[at..at + contents.len()].copy_from_slice(contents);
            }
        }
        memory
    }

    fn pages(pattern: &[(u8, usize)]) -> Vec<u8> {
        pattern
            .iter()
            .flat_map(|&(byte, count)| vec![byte; count * PAGE])
            .collect()
    }

    #[test]
    fn everything_but_padding_is_where_it_was() {
        let contents = pages(&[
            (1, 3),
            (INT3, 40),
            (2, 5),
            (INT3, 3),
            (3, 1),
            (0, 100),
            (4, 1),
        ]);
        let before = elf(&contents, 0x3000);
        let after = remove(&before).unwrap();
        assert!(after.len() < 20 * PAGE, "{}", after.len());
        let (was, is) = (loaded(&before), loaded(&after));
        assert_eq!(was.len(), is.len());
        for (was, is) in was.chunks(PAGE).zip(is.chunks(PAGE)) {
            let dropped = was.iter().all(|b| *b == INT3) && is.iter().all(|b| *b == 0);
            assert!(was == is || dropped);
        }
    }

    #[test]
    fn notes_keep_their_contents() {
        let before = elf(&pages(&[(9, 1), (0, 50)]), 0);
        let after = remove(&before).unwrap();
        let note = |elf: &[u8]| {
            let headers = read_headers(elf).unwrap();
            let header = headers.iter().find(|h| h.kind == PT_NOTE).unwrap();
            contents_of(elf, header).unwrap().to_vec()
        };
        assert_eq!(note(&before), note(&after));
    }

    #[test]
    fn short_runs_do_not_cost_a_segment() {
        let before = elf(&pages(&[(1, 1), (INT3, RUN - 1), (2, 1)]), 0);
        assert_eq!(read_headers(&remove(&before).unwrap()).unwrap().len(), 2);
        assert_eq!(loaded(&before), loaded(&remove(&before).unwrap()));
    }

    #[test]
    fn a_file_that_is_cut_off_is_an_error() {
        let whole = elf(&pages(&[(1, 2)]), 0);
        for len in [0, 5, 40, 100, whole.len() - 1] {
            assert!(remove(&whole[..len]).is_err(), "{len}");
        }
    }
}
