//! Memory images, and a guest in 64-bit mode that accesses them arbitrarily: its own page tables
//! map everything writable.

use std::path::Path;

use podvisor_devices::blk::{BlockDevice, FileDisk};
use podvisor_devices::pmem::PmemDevice;

use super::devices::{BUFFER, RINGS, bytes};
use super::*;
use crate::vm::{BuildError, PlugError, PoisonCause, State};
use crate::{SnapshotError, Transport};

/// Where the first image lies in a guest of less than 3 GiB.
const IMAGE: u64 = 1 << 32;
/// Everything a second time, mapped by other page tables.
const ALIAS: u64 = 1 << 39;
const UNIT: u64 = 2 << 20;

/// The descriptor table and its pseudo-descriptor, and the page tables.
const GDT: u64 = 0x22_0000;
const PML4: u64 = 0x21_0000;
const PDPT: u64 = 0x21_1000;
const DIRECTORIES: u64 = 0x23_0000;
/// The number of gibibytes that are mapped.
const MAPPED: u64 = 6;
/// Present, writable, accessible to all rings; and of a directory's entries, 2 MiB large.
const TABLE: u64 = 0b111;
const LARGE: u64 = 1 << 7 | TABLE;

/// Enters 64-bit mode without write protection, then executes orders: those of [`Order`] that read
/// and write 32 bits, where the upper half of the address is 20 bytes after the order, and
/// [`USE_TABLES`].
#[rustfmt::skip]
const OBEY_64: &[u8] = &[
    0x0f, 0x01, 0x15, 0x00, 0x00, 0x22, 0x00, // lgdt [GDT]
    0xb8, 0x20, 0x00, 0x00, 0x00,             // mov eax, PAE
    0x0f, 0x22, 0xe0,                         // mov cr4, eax
    0xb8, 0x00, 0x00, 0x21, 0x00,             // mov eax, PML4
    0x0f, 0x22, 0xd8,                         // mov cr3, eax
    0xb9, 0x80, 0x00, 0x00, 0xc0,             // mov ecx, EFER
    0x31, 0xd2,                               // xor edx, edx
    0xb8, 0x00, 0x01, 0x00, 0x00,             // mov eax, LME
    0x0f, 0x30,                               // wrmsr
    0xb8, 0x11, 0x00, 0x00, 0x80,             // mov eax, PG | ET | PE
    0x0f, 0x22, 0xc0,                         // mov cr0, eax
    0xea, 0x34, 0x00, 0x10, 0x00, 0x08, 0x00, // jmp 8:long
    // long:
    0xbe, 0x00, 0x00, 0x20, 0x00,             // mov esi, ORDERS
    // next:
    0xff, 0x46, 0x10,                         // inc dword [rsi + 16]
    0x8b, 0x06,                               // mov eax, [rsi]
    0x85, 0xc0,                               // test eax, eax
    0x74, 0xf7,                               // jz next
    0x8b, 0x7e, 0x04,                         // mov edi, [rsi + 4]
    0x8b, 0x4e, 0x14,                         // mov ecx, [rsi + 20]
    0x48, 0xc1, 0xe1, 0x20,                   // shl rcx, 32
    0x48, 0x09, 0xcf,                         // or rdi, rcx
    0x8b, 0x5e, 0x08,                         // mov ebx, [rsi + 8]
    0xff, 0xc8, 0x74, 0x0f,                   // dec eax; jz write
    0xff, 0xc8, 0x74, 0x0f,                   // dec eax; jz read
    0x0f, 0x22, 0xdf,                         // mov cr3, rdi
    // done:
    0xc7, 0x06, 0x00, 0x00, 0x00, 0x00,       // mov dword [rsi], 0
    0xeb, 0xd4,                               // jmp next
    // write:
    0x89, 0x1f, 0xeb, 0xf4,                   // mov [rdi], ebx; jmp done
    // read:
    0x8b, 0x0f,                               // mov ecx, [rdi]
    0x89, 0x4e, 0x0c, 0xeb, 0xed,             // mov [rsi + 12], ecx; jmp done
];

/// Switches to the page tables at the order's address.
const USE_TABLES: u32 = 3;

/// Returns page tables at `pml4`, `pdpt` and from `directories` on, as addresses and words.
fn tables(pml4: u64, pdpt: u64, directories: u64) -> Vec<(u64, Vec<u64>)> {
    let directory = |gib: u64| {
        let pages = (0..512).map(|page| gib << 30 | page << 21 | LARGE);
        (directories + gib * 0x1000, pages.collect())
    };
    let entries = (0..MAPPED).map(|gib| (directories + gib * 0x1000) | TABLE);
    let mut tables = vec![(pml4, vec![pdpt | TABLE; 2]), (pdpt, entries.collect())];
    tables.extend((0..MAPPED).map(directory));
    tables
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// An image, which stays writable for the test.
struct Image {
    file: tempfile::NamedTempFile,
}

impl Image {
    fn new(content: &[u8]) -> Self {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        Self { file }
    }

    fn path(&self) -> &Path {
        self.file.path()
    }

    fn device(&self) -> PmemDevice {
        PmemDevice::open(self.path()).unwrap()
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.path()).unwrap()
    }
}

/// A running guest in 64-bit mode.
fn start(configure: impl FnOnce(VmBuilder) -> VmBuilder) -> Guest {
    let vm = Arc::new(configure(tiny(OBEY_64)).build().unwrap());
    let mem = vm.context.machine.memory.ram().clone();
    for (at, table) in tables(PML4, PDPT, DIRECTORIES) {
        mem.write_slice(&words(&table), GuestAddress(at)).unwrap();
    }
    // The limit of three descriptors and their address, then ring 0 code of 64 bits and data.
    let gdt = [
        ((GDT + 16) << 16) | 23,
        0,
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
    ];
    mem.write_slice(&words(&gdt), GuestAddress(GDT)).unwrap();
    vm.start().unwrap();
    let guest = Guest { vm, mem };
    guest.runs_on();
    guest
}

impl Guest {
    fn far(&self, address: u64, access: impl FnOnce(u64) -> u32) -> u32 {
        self.put(20, u32::try_from(address >> 32).unwrap());
        let answer = access(address & u64::from(u32::MAX));
        self.put(20, 0);
        answer
    }

    fn far_read(&self, address: u64) -> u32 {
        self.far(address, |low| self.read(low))
    }

    fn far_write(&self, address: u64, value: u32) {
        self.far(address, |low| {
            self.write(low, value);
            0
        });
    }

    /// Gives an order that may end the VM.
    fn dare(&self, what: u32, address: u64) {
        self.put(20, u32::try_from(address >> 32).unwrap());
        self.put(4, u32::try_from(address & u64::from(u32::MAX)).unwrap());
        self.put(0, what);
        wait_for("an order's end", || {
            self.vm.state().ended() || self.obeyed()
        });
        self.put(20, 0);
    }
}

#[test]
fn a_guest_reads_the_file_and_zeroes_behind_it() {
    let content: Vec<u8> = (0..0x5000u32).flat_map(u32::to_le_bytes).collect();
    let (one, two) = (Image::new(&content), Image::new(&[9; 100]));
    let guest = start(|vm| vm.pmem(one.device()).rng().pmem(two.device()));
    let word = |device: TestDevice<'_>, at: u64| {
        u64::from(device.read(0x100 + at)) | u64::from(device.read(0x104 + at)) << 32
    };
    let (first, second) = (guest.device(0), guest.device(2));
    assert_eq!((first.read(8), second.read(8)), (27, 27));
    assert_eq!((word(first, 0), word(first, 8)), (IMAGE, UNIT));
    let other = IMAGE + (128 << 20);
    assert_eq!((word(second, 0), word(second, 8)), (other, UNIT));
    let handle = guest.vm.pmem("pmem1").unwrap();
    assert_eq!(handle.region().unwrap().start, other);
    for number in [0, 1, 0x4fff] {
        assert_eq!(guest.far_read(IMAGE + 4 * u64::from(number)), number);
    }
    assert_eq!(guest.far_read(IMAGE + 0x5000 * 4), 0);
    assert_eq!(guest.far_read(IMAGE + UNIT - 4), 0);
    assert_eq!(guest.far_read(IMAGE + UNIT), u32::MAX, "nothing is there");
    assert_eq!(guest.far_read(other + 96), 0x0909_0909);
    assert_eq!(guest.far_read(other + 100), 0);
    // The only request.
    let mut queue = first.start(RINGS);
    guest.mem.write_obj(7u32, GuestAddress(BUFFER + 8)).unwrap();
    queue.add(&[(BUFFER, 4)], &[(BUFFER + 8, 4)]);
    first.notify();
    wait_for("the flush", || queue.take_used().is_some());
    assert_eq!(bytes(&guest, BUFFER + 8, 4), [0; 4]);
    assert_eq!(guest.counter("pmem0", "flushes"), 1);
}

#[test]
fn a_guest_never_writes_the_file_whatever_its_page_tables_say() {
    let content = vec![7; 0x3000];
    let image = Image::new(&content);
    let guest = start(|vm| vm.pmem(image.device()));
    let places = [0, 4, 0xffe, 0x2ffc, 0x3000, UNIT - 4];
    for (number, place) in (0..).zip(places) {
        for address in [IMAGE + place, ALIAS + IMAGE + place] {
            let before = guest.far_read(address);
            guest.far_write(address, 0xdead_0000 + number);
            assert_eq!(guest.far_read(address), before, "{address:#x}");
        }
    }
    assert_eq!(image.bytes(), content);
    // A write that crosses a page boundary counts as two.
    let refused = guest.counter("pmem0", "refused_writes");
    assert!((12..=16).contains(&refused), "{refused}");
    // It can write its own memory by the same tables.
    guest.far_write(ALIAS + 0x30_0000, 5);
    assert_eq!(guest.far_read(0x30_0000), 5);
    assert!(guest.vm.faults().is_empty());
}

#[test]
fn page_tables_that_lie_in_the_file_are_not_marked_as_used() {
    let mut content = vec![0; 0x9000];
    for (at, table) in tables(IMAGE + 0x1000, IMAGE + 0x2000, IMAGE + 0x3000) {
        let at = usize::try_from(at - IMAGE).unwrap();
        let table = words(&table);
        content[at..at + table.len()].copy_from_slice(&table);
    }
    let image = Image::new(&content);
    let guest = start(|vm| vm.pmem(image.device()));
    // Processors that set accessed and dirty bits cannot continue: at worst, the guest ends.
    guest.dare(USE_TABLES, IMAGE + 0x1000);
    for address in [0x30_0000, ALIAS + IMAGE + 0x2000] {
        guest.dare(Order::Write32 as u32, address);
    }
    assert_eq!(image.bytes(), content);
    if !guest.vm.state().ended() {
        guest.runs_on();
    }
}

#[test]
fn devices_read_from_an_image_and_never_write_there() {
    let image = Image::new(&[7; 0x2f00]);
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(8 * 512).unwrap();
    let disk = FileDisk::new(file.reopen().unwrap()).unwrap();
    let guest = start(|vm| {
        vm.pmem(image.device())
            .block(BlockDevice::new(Box::new(disk)))
            .rng()
    });
    let disk = guest.device(1);
    let mut queue = disk.start(RINGS);
    // A write of two sectors: VIRTIO_BLK_T_OUT of sector 0.
    guest.mem.write_obj(1u64, GuestAddress(BUFFER)).unwrap();
    guest.mem.write_obj(0u64, GuestAddress(BUFFER + 8)).unwrap();
    queue.add(
        &[(BUFFER, 16), (IMAGE + 0x2c00, 1024)],
        &[(BUFFER + 0x100, 1)],
    );
    disk.notify();
    wait_for("the write", || queue.take_used().is_some());
    assert_eq!(bytes(&guest, BUFFER + 0x100, 1), [0]);
    let written = std::fs::read(file.path()).unwrap();
    assert_eq!(
        (&written[..768], &written[768..1024]),
        (&[7; 768][..], &[0; 256][..])
    );
    // A read into the image, and random bytes.
    guest.mem.write_obj(0u64, GuestAddress(BUFFER)).unwrap();
    queue.add(&[(BUFFER, 16)], &[(IMAGE, 1024), (BUFFER + 0x100, 1)]);
    disk.notify();
    wait_for("a request for a reset", || disk.status() & 64 != 0);
    let rng = guest.device(2);
    let mut queue = rng.start(RINGS + 0x10_0000);
    queue.add(&[], &[(IMAGE + UNIT - 8, 8)]);
    rng.notify();
    wait_for("a request for a reset", || rng.status() & 64 != 0);
    assert_eq!(image.bytes(), [7; 0x2f00]);
    guest.runs_on();
}

#[test]
fn a_file_that_becomes_shorter_ends_its_vm_alone() {
    let (image, other) = (Image::new(&[7; 0x8000]), Image::new(&[8; 0x8000]));
    let guest = start(|vm| vm.pmem(other.device()).pmem(image.device()));
    let neighbour = start(|vm| vm.pmem(other.device()));
    let second = IMAGE + (128 << 20);
    assert_eq!(guest.far_read(second + 0x7000), 0x0707_0707);
    image.file.as_file().set_len(0x1000).unwrap();
    // The missing part has not been accessed yet.
    assert_eq!(guest.far_read(second), 0x0707_0707);
    guest.dare(Order::Read32 as u32, second + 0x7000);
    let error = guest.vm.wait().unwrap_err();
    let VmError::Poisoned(poison) = error else {
        panic!("{error}");
    };
    assert!(
        matches!(&poison.cause, PoisonCause::ImageTruncated { device } if device == "pmem1"),
        "{poison}"
    );
    let text = poison.to_string();
    assert!(
        text.contains("the file behind pmem1 became shorter"),
        "{text}"
    );
    neighbour.runs_on();
    assert_eq!(neighbour.far_read(IMAGE + 0x7000), 0x0808_0808);
}

#[test]
fn clones_bind_the_image_anew_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("snapshot");
    let image = Image::new(&[7; 0x5000]);
    for transport in [Transport::Mmio, Transport::Pci] {
        let _ = std::fs::remove_dir_all(&place);
        let guest = start(|vm| {
            vm.transport(transport)
                .hotplug_memory(MemorySize::mib(128))
                .pmem(image.device())
        });
        let at = IMAGE + (128 << 20);
        assert_eq!(guest.far_read(at), 0x0707_0707);
        guest.pause();
        guest.vm.snapshot(&place).unwrap();
        let memory = std::fs::metadata(place.join("memory")).unwrap().len();
        assert_eq!(memory, (32 + 128) << 20, "the image is no part of it");

        let snapshot = Snapshot::open(&place).unwrap();
        assert_eq!(snapshot.devices(), ["pmem0"]);
        let clone = Guest::restore(&snapshot, |vm| vm.pmem(image.device()));
        clone.runs_on();
        assert_eq!(clone.far_read(at + 0x4ffc), 0x0707_0707);
        clone.far_write(at, 1);
        assert_eq!(clone.far_read(at), 0x0707_0707);
        assert_eq!(image.bytes(), [7; 0x5000]);

        let missing = snapshot.builder().build().unwrap_err();
        assert!(
            matches!(missing, BuildError::Snapshot(SnapshotError::Devices { .. })),
            "{missing}"
        );
        for len in [0x4fff, 0x5001] {
            let other = Image::new(&vec![7; len]);
            let error = snapshot.builder().pmem(other.device()).build();
            let error = error.unwrap_err();
            let source = std::error::Error::source(&error).unwrap().to_string();
            assert!(source.contains("another length"), "{error}: {source}");
        }
    }
}

#[test]
fn an_image_is_not_plugged_into_a_running_vm() {
    let image = Image::new(&[7; 0x5000]);
    let guest = Guest::start(|vm| vm.transport(Transport::Pci));
    let error = guest.vm.plug(image.device()).unwrap_err();
    assert!(matches!(error, PlugError::Image), "{error}");
    assert_eq!(guest.vm.state(), State::Running);
}
