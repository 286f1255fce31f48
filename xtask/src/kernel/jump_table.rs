//! Sorts the kernel's table of patchable branches (`__jump_table`) at build time, as its own
//! `sorttable` does with exceptions; otherwise `jump_label_init` sorts it at each boot.
//!
//! An entry is `struct jump_entry` of `include/linux/jump_label.h`: the branch's address, its
//! target, and its key, each as the distance from its own field. Two bits of the key are flags.

use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};

use super::alignment_padding::{Header, PT_LOAD, read_headers};

/// `s32 code; s32 target; long key;`
const ENTRY: usize = 16;
const TARGET: u64 = 4;
const KEY: u64 = 8;

/// The key's flags.
const FLAGS: u64 = 3;

/// The symbols around the table.
const START: &str = "__start___jump_table";
const STOP: &str = "__stop___jump_table";

/// An entry with addresses, in the order of the kernel's `jump_label_cmp`: branches are patched in
/// sorted batches of the same key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    key: u64,
    code: u64,
    target: u64,
    flags: u64,
}

/// Returns the addresses of the table, from the output of `nm` for the kernel.
pub(crate) fn find(symbols: &str) -> Result<Range<u64>> {
    let address = |name: &str| {
        let mut found = symbols.lines().filter_map(|line| {
            let mut words = line.split_whitespace();
            let (address, _, symbol) = (words.next()?, words.next()?, words.next()?);
            (symbol == name).then_some(address)
        });
        let (Some(address), None) = (found.next(), found.next()) else {
            bail!("the kernel does not have the symbol {name} exactly once");
        };
        u64::from_str_radix(address, 16)
            .with_context(|| format!("the address of {name} is `{address}`"))
    };
    Ok(address(START)?..address(STOP)?)
}

/// Sorts the table at these addresses of the kernel `elf`.
pub(crate) fn sort(elf: &mut [u8], table: Range<u64>) -> Result<()> {
    let headers = read_headers(elf)?;
    let segments: Vec<&Header> = headers.iter().filter(|h| h.kind == PT_LOAD).collect();
    let size = usize::try_from(table.end.saturating_sub(table.start))?;
    ensure!(
        size > 0 && size.is_multiple_of(ENTRY),
        "the jump table from {:#x} to {:#x} has no entries of {ENTRY} bytes",
        table.start,
        table.end
    );
    let mut offsets = segments.iter().filter_map(|segment| {
        let at = usize::try_from(table.start.checked_sub(segment.virtual_address)?).ok()?;
        (at.checked_add(size)? <= segment.file_size).then_some(segment.offset + at)
    });
    let offset = offsets.next();
    let offset = offset.with_context(|| format!("no segment has the jump table at {table:#x?}"))?;
    let bytes = elf.get_mut(offset..offset + size);
    let bytes = bytes.context("the jump table reaches beyond the file")?;

    let places = || (table.start..).step_by(ENTRY);
    let mut entries = Vec::with_capacity(size / ENTRY);
    for (entry, place) in bytes.chunks_exact(ENTRY).zip(places()) {
        entries.push(read(entry, place)?);
    }
    let is_loaded = |address: u64| {
        segments.iter().any(|segment| {
            let at = address.checked_sub(segment.virtual_address);
            at.is_some_and(|at| at < segment.mem_size)
        })
    };
    for entry in &entries {
        ensure!(
            [entry.code, entry.target, entry.key]
                .into_iter()
                .all(is_loaded),
            "an entry of the jump table leads out of the kernel: {entry:#x?}"
        );
    }
    entries.sort_unstable();
    for ((entry, place), bytes) in entries
        .iter()
        .zip(places())
        .zip(bytes.chunks_exact_mut(ENTRY))
    {
        bytes.copy_from_slice(&write(entry, place)?);
    }
    Ok(())
}

/// Returns the entry at the address `place`.
fn read(bytes: &[u8], place: u64) -> Result<Entry> {
    let short = |at: u64| -> Result<u64> {
        let at = usize::try_from(at)?;
        let distance = i32::from_le_bytes(bytes[at..at + 4].try_into()?);
        Ok(i64::from(distance).cast_unsigned())
    };
    let key = u64::from_le_bytes(bytes[8..].try_into()?);
    Ok(Entry {
        key: (key & !FLAGS).wrapping_add(place + KEY),
        code: short(0)?.wrapping_add(place),
        target: short(TARGET)?.wrapping_add(place + TARGET),
        flags: key & FLAGS,
    })
}

/// Returns the bytes of an entry at the address `place`.
fn write(entry: &Entry, place: u64) -> Result<[u8; ENTRY]> {
    let short = |to: u64, from: u64| {
        let distance = i32::try_from(to.wrapping_sub(from).cast_signed());
        distance.with_context(|| format!("{to:#x} is too far from the jump table at {from:#x}"))
    };
    let mut bytes = [0; ENTRY];
    bytes[..4].copy_from_slice(&short(entry.code, place)?.to_le_bytes());
    bytes[4..8].copy_from_slice(&short(entry.target, place + TARGET)?.to_le_bytes());
    let key = entry.key.wrapping_sub(place + KEY) | entry.flags;
    bytes[8..].copy_from_slice(&key.to_le_bytes());
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::alignment_padding::tests::elf;

    /// Address of the segment of [`elf`].
    const BASE: u64 = u64::MAX << 31;
    /// Offset of the table in it.
    const TABLE: usize = 0x40;

    fn at(offset: u64) -> u64 {
        BASE + offset
    }

    fn entry(key: u64, code: u64, flags: u64) -> Entry {
        Entry {
            key: at(key),
            code: at(code),
            target: at(code + 9),
            flags,
        }
    }

    /// Returns a kernel with these entries, and 4 KiB of zeroed memory for its keys.
    fn kernel(entries: &[Entry]) -> (Vec<u8>, Range<u64>) {
        let table = at(TABLE as u64)..at((TABLE + entries.len() * ENTRY) as u64);
        let mut contents = vec![7; 0x800];
        for (number, entry) in entries.iter().enumerate() {
            let place = TABLE + number * ENTRY;
            let bytes = write(entry, at(place as u64)).unwrap();
            contents[place..place + ENTRY].copy_from_slice(&bytes);
        }
        (elf(&contents, 0x1000), table)
    }

    #[test]
    fn entries_are_in_the_kernels_order_and_lead_where_they_led() {
        let sorted = [
            entry(0x600, 0x500, 1),
            entry(0x600, 0x510, 0),
            // Code before the table, a key in memory that is not in the file.
            entry(0x900, 0x10, 3),
            entry(0x900, 0x20, 2),
            entry(0x908, 0x18, 0),
        ];
        let mixed = [3, 0, 4, 2, 1].map(|number: usize| sorted[number]);
        let (mut elf, table) = kernel(&mixed);
        sort(&mut elf, table).unwrap();
        // Everything around the table is unchanged.
        assert!(elf == kernel(&sorted).0);
    }

    #[test]
    fn a_table_that_is_not_as_expected_is_an_error() {
        let (whole, table) = kernel(&[entry(0x600, 0x500, 0), entry(0x608, 0x508, 0)]);
        let refused = |table: Range<u64>| sort(&mut whole.clone(), table).unwrap_err().to_string();
        for range in [
            table.start..table.start,
            table.end..table.start,
            table.start..table.end - 8,
        ] {
            assert!(refused(range).contains("no entries"));
        }
        for range in [
            0x40..0x60,
            // Not in the file, but in zeroed memory.
            at(0x7f8)..at(0x808),
        ] {
            assert!(refused(range).contains("no segment"));
        }
        // Not a table.
        assert!(refused(at(0x100)..at(0x110)).contains("leads out of the kernel"));
        let mut cut = whole[..whole.len() - 0x7b0].to_vec();
        assert!(
            sort(&mut cut, table)
                .unwrap_err()
                .to_string()
                .contains("beyond the file")
        );
    }

    #[test]
    fn the_table_is_between_its_symbols() {
        let symbols = "ffffffff81000000 T _text\nffffffff82000010 D __start___jump_table\n\
                       ffffffff82000030 D __stop___jump_table\n                 U other\n";
        assert_eq!(
            find(symbols).unwrap(),
            0xffff_ffff_8200_0010..0xffff_ffff_8200_0030
        );
        for bad in [
            "",
            "ffffffff82000010 D __start___jump_table",
            &format!("{symbols}ffffffff82000011 d __start___jump_table\n"),
        ] {
            assert!(
                find(bad).unwrap_err().to_string().contains("exactly once"),
                "{bad}"
            );
        }
    }
}
