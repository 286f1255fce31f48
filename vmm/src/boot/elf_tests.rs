use super::*;
use crate::boot::testing::{Elf, Header, LOAD, file, note};
use proptest::prelude::*;

const CODE: [u8; 64] = [0xf4; 64];

fn parse_bytes(bytes: &[u8]) -> Result<ElfImage, KernelFault> {
    let head = &bytes[..bytes.len().min(4096)];
    ElfImage::parse(&file(bytes), bytes.len() as u64, head)
}

fn parse(elf: &Elf) -> Result<ElfImage, KernelFault> {
    parse_bytes(&elf.bytes())
}

/// Returns the fault of a good kernel after `spoil`.
fn fault(spoil: impl FnOnce(&mut Elf)) -> KernelFault {
    let mut elf = Elf::new(&CODE, 0);
    assert!(parse(&elf).is_ok());
    spoil(&mut elf);
    parse(&elf).unwrap_err()
}

fn entry(elf: &Elf) -> (u64, Protocol) {
    let Entry { address, protocol } = parse(elf).unwrap().entry();
    (address, protocol)
}

#[test]
fn a_kernel_with_the_pvh_note_is_entered_there() {
    let elf = Elf::new(&CODE, 0);
    assert_eq!(entry(&elf), (LOAD, Protocol::Linux64));
    let elf = elf.with_pvh(LOAD as u32 + 8);
    assert_eq!(entry(&elf), (LOAD + 8, Protocol::Pvh));
}

#[test]
fn linux_is_entered_in_64_bit_mode_even_with_the_pvh_note() {
    let mut notes = note(b"Linux\0", 257, &[0]);
    notes.extend(note(b"Xen\0", 18, &(LOAD as u32 + 8).to_le_bytes()));
    let elf = Elf::new(&CODE, 0).with_notes(notes);
    assert_eq!(entry(&elf), (LOAD, Protocol::Linux64));
}

#[test]
fn bss_counts_as_memory_and_is_not_read() {
    let image = parse(&Elf::new(&CODE, 1 << 20)).unwrap();
    assert_eq!(image.end(), LOAD + 64 + (1 << 20));
    let pieces: Vec<_> = image.pieces().collect();
    assert_eq!(pieces.iter().map(|p| p.size).sum::<u64>(), 64);
}

#[test]
fn a_segment_of_bss_alone_is_memory_without_contents() {
    let mut elf = Elf::new(&CODE, 0);
    elf.headers.push(Header {
        kind: 1,
        // Offsets of segments without file content mean nothing.
        offset: 0x7fff_ffff,
        address: 0x20_0000,
        file_size: 0,
        mem_size: 0x1000,
    });
    let image = parse(&elf).unwrap();
    assert_eq!(image.end(), 0x20_1000);
    assert_eq!(image.pieces().count(), 1);
}

#[test]
fn impossible_segments_are_refused() {
    let segment = KernelFault::Segment { index: 0 };
    assert_eq!(fault(|e| e.headers[0].address = u64::MAX - 10), segment);
    assert_eq!(fault(|e| e.headers[0].mem_size = 10), segment);
    assert_eq!(fault(|e| e.headers[0].offset = u64::MAX - 10), segment);
    assert_eq!(
        fault(|e| e.headers[0].offset = 0x10_0000),
        KernelFault::Truncated { what: "segments" }
    );
    assert_eq!(
        fault(|e| e.headers[0].address = 0x7000),
        KernelFault::SegmentTooLow {
            index: 0,
            address: 0x7000
        }
    );
    assert_eq!(
        fault(|e| {
            let again = Header {
                address: LOAD + 32,
                ..e.headers[0]
            };
            e.headers.push(again);
        }),
        KernelFault::SegmentsOverlap { address: LOAD + 32 }
    );
}

#[test]
fn an_entry_outside_of_what_is_loaded_is_refused() {
    let outside = KernelFault::Entry { entry: LOAD + 64 };
    // Nor in BSS, which contains no code.
    assert_eq!(
        fault(|e| {
            e.headers[0].mem_size += 4096;
            e.entry = LOAD + 64;
        }),
        outside
    );
    let elf = Elf::new(&CODE, 0).with_pvh(0x1234);
    assert_eq!(parse(&elf), Err(KernelFault::Entry { entry: 0x1234 }));
}

#[test]
fn a_32_bit_entry_may_say_that_it_is_one() {
    let of_386 = |mut elf: Elf| {
        elf.machine = 3;
        elf
    };
    let pvh = of_386(Elf::new(&[0xf4], 0).with_pvh(0x10_0000));
    assert_eq!(entry(&pvh), (0x10_0000, Protocol::Pvh));
    let without = parse(&of_386(Elf::new(&[0xf4], 0))).unwrap_err();
    assert!(
        without.to_string().contains("another processor"),
        "{without}"
    );
}

#[test]
fn what_is_no_kernel_of_this_machine_is_named() {
    let what = |spoil: fn(&mut Elf)| match fault(spoil) {
        KernelFault::ElfKind { what } => what,
        other => panic!("{other}"),
    };
    assert!(what(|e| e.machine = 183).contains("another processor"));
    assert!(what(|e| e.kind = 1).contains("object file"));
    let interpreter = |e: &mut Elf| {
        e.headers.push(Header {
            kind: 3,
            ..e.headers[0]
        });
    };
    assert!(what(interpreter).contains("user space"));

    let mut bytes = Elf::new(&CODE, 0).bytes();
    bytes[4] = 1;
    let fault = parse_bytes(&bytes).unwrap_err();
    assert!(fault.to_string().contains("32-bit machine"), "{fault}");
}

#[test]
fn absurd_header_tables_are_refused() {
    let spoilt = |offset: usize, value: u16| {
        let mut bytes = Elf::new(&CODE, 0).bytes();
        bytes[offset..offset + 2].copy_from_slice(&value.to_le_bytes());
        parse_bytes(&bytes).unwrap_err()
    };
    assert_eq!(spoilt(56, 0), KernelFault::ProgramHeaders);
    assert_eq!(spoilt(56, u16::MAX), KernelFault::ProgramHeaders);
    assert_eq!(spoilt(54, 55), KernelFault::ProgramHeaders);
    let beyond = KernelFault::Truncated {
        what: "program headers",
    };
    assert_eq!(spoilt(32, u16::MAX), beyond);
    assert_eq!(spoilt(38, u16::MAX), beyond, "an offset that would wrap");
}

#[test]
fn notes_that_lie_about_their_size_end_the_search() {
    for (name, desc) in [(u32::MAX, 4), (4, u32::MAX), (u32::MAX, u32::MAX)] {
        let mut notes = note(b"Xen\0", 18, &[0; 4]);
        notes[0..4].copy_from_slice(&name.to_le_bytes());
        notes[4..8].copy_from_slice(&desc.to_le_bytes());
        let mut elf = Elf::new(&CODE, 0).with_pvh(LOAD as u32);
        elf.contents[1].1[..notes.len()].copy_from_slice(&notes);
        assert_eq!(parse(&elf).unwrap().entry().protocol, Protocol::Linux64);
    }
}

#[test]
fn a_pvh_note_without_room_for_an_address_is_refused() {
    let mut elf = Elf::new(&CODE, 0).with_pvh(LOAD as u32);
    let short = note(b"Xen\0", 18, &[1, 2]);
    elf.headers[1].file_size = short.len() as u64;
    elf.contents[1].1 = short;
    assert_eq!(parse(&elf), Err(KernelFault::PvhNote));
}

proptest! {
    #[test]
    fn what_is_accepted_is_ascending_disjoint_and_in_the_file(
        headers in proptest::collection::vec(
            (0u32..5, 0u64..0x3000, 0x9_0000u64..0x40_0000, 0u64..0x2000, 0u64..0x4000), 1..8
        ),
        entry in 0x10_0000u64..0x40_0000,
    ) {
        let mut elf = Elf::new(&CODE, 0);
        elf.entry = entry;
        elf.headers = headers.into_iter().map(|(kind, offset, address, file_size, mem_size)| {
            Header { kind, offset, address, file_size, mem_size }
        }).collect();
        let size = elf.bytes().len() as u64;
        if let Ok(image) = parse(&elf) {
            let mut end = layout::HIMEM_START;
            for segment in &image.segments {
                prop_assert!(segment.piece.address >= end);
                prop_assert!(segment.piece.size <= segment.mem_size);
                prop_assert!(segment.piece.size == 0 || segment.piece.offset + segment.piece.size <= size);
                end = segment.end();
            }
            prop_assert_eq!(image.end(), end);
        }
    }
}
