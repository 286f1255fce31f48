//! The content of guest memory after `load` and `write_boot_params`.

use proptest::prelude::*;

use super::testing::{self, Elf, LOAD, bzimage, file, load_whole};
use super::*;

const MIB: usize = 1 << 20;
const CODE: [u8; 64] = [0xf4; 64];

fn memory(mib: usize) -> GuestRam {
    GuestRam::from_ranges(&[(GuestAddress(0), mib * MIB)]).unwrap()
}

fn kernel(bytes: &[u8]) -> Kernel {
    Kernel::from_file(file(bytes)).unwrap()
}

fn pvh() -> Kernel {
    kernel(&Elf::new(&CODE, 0x1000).with_pvh(LOAD as u32).bytes())
}

fn read<const N: usize>(mem: &GuestRam, address: u64) -> [u8; N] {
    let mut bytes = [0; N];
    mem.read_slice(&mut bytes, GuestAddress(address)).unwrap();
    bytes
}

fn word(mem: &GuestRam, address: u64) -> u32 {
    u32::from_le_bytes(read(mem, address))
}

fn quad(mem: &GuestRam, address: u64) -> u64 {
    u64::from_le_bytes(read(mem, address))
}

#[test]
fn kernels_can_be_loaded_on_another_thread() {
    fn send<T: Send>() {}
    fn sync<T: Sync>() {}
    send::<Kernel>();
    send::<Initramfs>();
    sync::<Kernel>();
    sync::<Initramfs>();
    send::<BootError>();
}

#[test]
fn a_pvh_kernel_is_told_of_command_line_initramfs_and_memory() {
    let mem = memory(64);
    let initramfs = Initramfs::from_bytes(vec![7; 5000]).unwrap();
    let entry = load_whole(&mem, &pvh(), Some(&initramfs), "quiet x=1", 1).unwrap();
    assert_eq!((entry.address, entry.protocol), (LOAD, Protocol::Pvh));
    assert_eq!(read(&mem, LOAD), CODE);
    assert_eq!(&read(&mem, layout::CMDLINE), b"quiet x=1\0");

    let info = layout::PVH_START_INFO;
    assert_eq!(word(&mem, info), 0x336e_c578);
    assert_eq!(quad(&mem, info + 24), layout::CMDLINE);
    assert_eq!(word(&mem, info + 12), 1, "one module");
    let module = quad(&mem, info + 16);
    let (address, size) = (quad(&mem, module), quad(&mem, module + 8));
    assert_eq!((address, size), ((64 * MIB - 8192) as u64, 5000));
    assert_eq!(read(&mem, address), [7; 5000]);

    let map = quad(&mem, info + 40);
    assert_eq!(word(&mem, info + 48), 2, "ranges");
    let range = |i: u64| {
        let at = map + i * 24;
        (quad(&mem, at), quad(&mem, at + 8), word(&mem, at + 16))
    };
    assert_eq!(range(0), (0, 0x9_fc00, 1));
    assert_eq!(range(1), (0x10_0000, 63 << 20, 1));
}

#[test]
fn an_elf_kernel_without_note_gets_a_zero_page_and_an_identity_map() {
    let mem = memory(64);
    let elf = kernel(&Elf::new(&CODE, 0).bytes());
    let initramfs = Initramfs::from_bytes(vec![7; 4096]).unwrap();
    let entry = load_whole(&mem, &elf, Some(&initramfs), "quiet", 1).unwrap();
    assert_eq!((entry.address, entry.protocol), (LOAD, Protocol::Linux64));

    let page = layout::ZERO_PAGE;
    assert_eq!(&read(&mem, page + 0x202), b"HdrS");
    assert_eq!(word(&mem, page + 0x228), layout::CMDLINE as u32);
    let initramfs = (word(&mem, page + 0x218), word(&mem, page + 0x21c));
    assert_eq!(initramfs, ((64 * MIB - 4096) as u32, 4096));
    assert_eq!(read(&mem, page + 0x1e8), [2u8], "ranges");
    assert_eq!(quad(&mem, page + 0x2d0 + 20), 0x10_0000);

    // Walk the tables as the processor does, for an address in the second 2 MiB.
    let pointers = quad(&mem, layout::PAGE_TABLES) & !0xfff;
    let directory = quad(&mem, pointers) & !0xfff;
    assert_eq!(quad(&mem, directory + 8), 0x20_0000 | 0x83);
    assert_eq!(quad(&mem, pointers + 8), 0, "memory ends in the first GiB");
}

#[test]
fn kernels_are_told_where_acpis_tables_begin() {
    let linux = kernel(&Elf::new(&CODE, 0).bytes());
    for (kernel, field) in [
        (pvh(), layout::PVH_START_INFO + 32),
        (linux, layout::ZERO_PAGE + 0x70),
    ] {
        let mem = memory(16);
        load_whole(&mem, &kernel, None, "", 2).unwrap();
        let rsdp = quad(&mem, field);
        assert_eq!(&read(&mem, rsdp), b"RSD PTR ");
        assert_eq!(rsdp >> 12, layout::MP_TABLE >> 12, "no page more");
    }
}

#[test]
fn the_identity_map_covers_all_memory_below_the_hole() {
    // Only memory that is written is allocated.
    let mem = GuestRam::from_ranges(&[
        (GuestAddress(0), 3 << 30),
        (GuestAddress(layout::HIGH_RAM_START), 1 << 30),
    ])
    .unwrap();
    let elf = kernel(&Elf::new(&CODE, 0).bytes());
    load_whole(&mem, &elf, None, "", 1).unwrap();
    let last = layout::PAGE_TABLES + 0x2000 + (1536 - 1) * 8;
    assert_eq!(quad(&mem, last), 0xbfe0_0000 | 0x83);
    assert!(last < layout::CMDLINE);
    assert_eq!(read(&mem, layout::ZERO_PAGE + 0x1e8), [3u8], "ranges");
    let high = layout::ZERO_PAGE + 0x2d0 + 2 * 20;
    assert_eq!((quad(&mem, high), quad(&mem, high + 8)), (1 << 32, 1 << 30));
}

#[test]
fn a_bzimage_finds_its_own_header_in_the_zero_page() {
    let mem = memory(64);
    let entry = load_whole(&mem, &kernel(&bzimage(&CODE)), None, "quiet", 1).unwrap();
    assert_eq!(
        (entry.address, entry.protocol),
        (0x100_0200, Protocol::Linux64)
    );
    assert_eq!(read(&mem, entry.address), CODE);
    let page = layout::ZERO_PAGE;
    assert_eq!(read(&mem, page + 0x206), 0x20fu16.to_le_bytes());
    assert_eq!(quad(&mem, page + 0x258), 0x100_0000);
    assert_eq!(read(&mem, page + 0x210), [0xffu8], "type_of_loader");
    assert_eq!(word(&mem, page + 0x218), 0, "no initramfs");
}

#[test]
fn an_initramfs_stays_below_what_the_kernel_can_reach() {
    let mut image = bzimage(&CODE);
    image[0x22c..0x230].copy_from_slice(&0x2ff_ffffu32.to_le_bytes());
    let mem = memory(64);
    let initramfs = Initramfs::from_bytes(vec![7; 4096]).unwrap();
    load_whole(&mem, &kernel(&image), Some(&initramfs), "", 1).unwrap();
    assert_eq!(word(&mem, layout::ZERO_PAGE + 0x218), 0x300_0000 - 4096);
}

#[test]
fn an_initramfs_read_from_a_file_arrives_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("initramfs");
    let contents: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
    std::fs::write(&path, &contents).unwrap();
    let mem = memory(16);
    let initramfs = Initramfs::open(&path).unwrap();
    for _ in 0..2 {
        load_whole(&mem, &pvh(), Some(&initramfs), "", 1).unwrap();
        let module = quad(&mem, layout::PVH_START_INFO + 16);
        let mut read = vec![0; contents.len()];
        mem.read_slice(&mut read, GuestAddress(quad(&mem, module)))
            .unwrap();
        assert!(read == contents);
    }
}

#[test]
fn a_file_that_shrank_since_it_was_opened_is_an_error() {
    let shrinking = file(&Elf::new(&CODE, 0).bytes());
    let kernel = Kernel::from_file(shrinking.try_clone().unwrap()).unwrap();
    shrinking.set_len(0x1010).unwrap();
    let error = load_whole(&memory(16), &kernel, None, "", 1).unwrap_err();
    assert!(matches!(error, BootError::GuestMemory { .. }), "{error}");
}

#[test]
fn memory_that_is_too_small_is_told_with_what_is_needed() {
    let needs = |error| match error {
        BootError::MemoryTooSmall { needed, .. } => needed >> 20,
        other => panic!("{other}"),
    };
    let big_bss = kernel(&Elf::new(&CODE, 40 << 20).bytes());
    assert_eq!(
        needs(load_whole(&memory(32), &big_bss, None, "", 1).unwrap_err()),
        41
    );

    // An initramfs must not overlap BSS, or the room for decompression.
    let initramfs = Initramfs::from_bytes(vec![7; 30 * MIB]).unwrap();
    let bss = kernel(&Elf::new(&CODE, 4 << 20).bytes());
    let error = load_whole(&memory(32), &bss, Some(&initramfs), "", 1).unwrap_err();
    assert_eq!(needs(error), 35);
    let image = kernel(&bzimage(&CODE));
    let error = load_whole(&memory(32), &image, Some(&initramfs), "", 1).unwrap_err();
    assert_eq!(needs(error), 50);
    load_whole(&memory(64), &image, Some(&initramfs), "", 1).unwrap();
}

#[test]
fn bss_is_not_touched() {
    let mem = memory(16);
    let bss = LOAD + 64;
    mem.write_slice(&[0xaa; 16], GuestAddress(bss)).unwrap();
    load_whole(&mem, &pvh(), None, "", 1).unwrap();
    assert_eq!(read(&mem, bss), [0xaa; 16]);
}

#[test]
fn command_lines_that_the_kernel_would_cut_are_refused() {
    let mem = memory(32);
    let longest = "x".repeat(2047);
    load_whole(&mem, &pvh(), None, &longest, 1).unwrap();
    let error = load_whole(&mem, &pvh(), None, &format!("{longest}y"), 1).unwrap_err();
    assert!(matches!(
        error,
        BootError::CmdlineTooLong {
            len: 2048,
            max: 2047
        }
    ));

    let mut image = bzimage(&CODE);
    image[0x238..0x23c].copy_from_slice(&255u32.to_le_bytes());
    let error = load_whole(&mem, &kernel(&image), None, &longest, 1).unwrap_err();
    assert!(matches!(error, BootError::CmdlineTooLong { max: 255, .. }));

    for bad in ["a\0b", "a\nb"] {
        let error = load_whole(&mem, &pvh(), None, bad, 1).unwrap_err();
        assert!(matches!(error, BootError::CmdlineCharacter { .. }));
    }
}

#[test]
fn the_mp_table_lists_cpus_io_apic_and_lines() {
    for cpus in [1u8, 2, 64, 254] {
        let mem = memory(16);
        load_whole(&mem, &pvh(), None, "", cpus).unwrap();
        let pointer: [u8; 16] = read(&mem, layout::EBDA_START);
        assert_eq!(&pointer[..4], b"_MP_");
        assert_eq!(sum(&pointer), 0);
        let table = u64::from(word(&mem, layout::EBDA_START + 4));
        let length = u16::from_le_bytes(read(&mem, table + 4));
        assert!(table + u64::from(length) <= layout::HIMEM_START);
        let mut bytes = vec![0; length.into()];
        mem.read_slice(&mut bytes, GuestAddress(table)).unwrap();
        assert_eq!(&bytes[..4], b"PCMP");
        assert_eq!(sum(&bytes), 0);

        // Walk the entries as a kernel does: CPUs have 20 bytes, the others 8.
        let mut rest = &bytes[44..];
        let (mut ids, mut kinds) = (Vec::new(), Vec::new());
        while let Some(kind) = rest.first() {
            if *kind == 0 {
                ids.push(rest[1]);
                assert_eq!(rest[3], if rest[1] == 0 { 3 } else { 1 }, "flags");
            }
            if *kind == 3 {
                assert_eq!((rest[5], rest[6]), (rest[7], cpus), "line, I/O APIC");
            }
            kinds.push(*kind);
            rest = &rest[if *kind == 0 { 20 } else { 8 }..];
        }
        assert_eq!(ids, (0..cpus).collect::<Vec<_>>());
        let count = |kind| kinds.iter().filter(|k| **k == kind).count();
        assert_eq!([count(1), count(2), count(3), count(4)], [1, 1, 24, 2]);
        assert_eq!(
            u16::from_le_bytes([bytes[34], bytes[35]]),
            kinds.len() as u16
        );
    }
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, b| sum.wrapping_add(*b))
}

#[test]
fn cpu_counts_that_the_mp_table_cannot_hold_are_refused() {
    for cpus in [0, 255] {
        let error = load_whole(&memory(16), &pvh(), None, "", cpus).unwrap_err();
        assert!(matches!(error, BootError::CpuCount { .. }), "{error}");
    }
}

#[test]
fn boot_structures_do_not_overlap() {
    let mut ranges = [
        (layout::GDT, 48),
        (layout::PVH_START_INFO, 56),
        (layout::PVH_MODULES, 32),
        (layout::PVH_MEMORY_MAP, 24 * 16),
        (layout::ZERO_PAGE, 4096),
        (layout::BOOT_STACK - 0xf00, 0xf00),
        (layout::PAGE_TABLES, 5 * 4096),
        (layout::CMDLINE, layout::CMDLINE_MAX as u64),
        (layout::EBDA_START, 16),
        (layout::MP_TABLE, 44 + 254 * 20 + 28 * 8),
        (layout::GENERATION_ID, 16),
        (layout::RESET_VECTOR, 16),
    ];
    ranges.sort();
    for pair in ranges.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?}");
    }
    assert!(ranges.last().unwrap().0 < layout::HIMEM_START);
}

#[test]
fn files_that_are_no_kernels_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let message = |name: &str, contents: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, contents).unwrap();
        Kernel::open(&path).unwrap_err().to_string()
    };
    let gzip = message("vmlinux.gz", b"\x1f\x8b\x08\0rest");
    assert!(gzip.contains("vmlinux.gz is neither an ELF vmlinux nor a bzImage"));
    assert!(gzip.contains("gzip"), "{gzip}");
    assert!(message("nothing", b"").contains("empty"));
    let directory = Kernel::open(dir.path()).unwrap_err().to_string();
    assert!(directory.contains("is a directory"), "{directory}");
    assert!(matches!(
        Kernel::open(dir.path().join("absent")),
        Err(BootError::Open { .. })
    ));
    assert!(matches!(
        Kernel::open("/dev/null"),
        Err(BootError::NotAFile { .. })
    ));
    assert!(matches!(
        Initramfs::from_bytes(Vec::new()),
        Err(BootError::NotAFile { .. })
    ));
}

#[test]
fn a_program_of_this_machine_is_not_booted() {
    let error = Kernel::open(std::env::current_exe().unwrap()).unwrap_err();
    assert!(
        matches!(&error, BootError::Kernel { fault, .. } if fault.to_string().contains("user space")),
        "{error:?}"
    );
}

proptest! {
    #[test]
    fn mutated_elf_kernels_load_or_are_refused(
        changes in proptest::collection::vec((0u16..0x900, any::<u8>()), 0..12),
        has_note in any::<bool>(),
    ) {
        let mut elf = Elf::new(&CODE, 0x2000);
        if has_note {
            elf = elf.with_pvh(LOAD as u32);
        }
        testing::load_hostile(&testing::mutate(elf.bytes(), &changes));
    }

    #[test]
    fn mutated_headers_of_elf_kernels_load_or_are_refused(
        changes in proptest::collection::vec((0u16..176, any::<u8>()), 1..4),
    ) {
        let elf = Elf::new(&CODE, 0x2000).with_pvh(LOAD as u32);
        testing::load_hostile(&testing::mutate(elf.bytes(), &changes));
    }

    #[test]
    fn mutated_bzimages_load_or_are_refused(
        changes in proptest::collection::vec((0x1f0u16..0x270, any::<u8>()), 0..6),
    ) {
        testing::load_hostile(&testing::mutate(bzimage(&CODE), &changes));
    }

    #[test]
    fn any_bytes_load_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..2048)) {
        testing::load_hostile(&bytes);
        testing::fuzz_kernel(&bytes);
    }

    #[test]
    fn any_text_is_a_command_line_or_refused(text in ".*") {
        testing::fuzz_cmdline(text.as_bytes());
    }
}
