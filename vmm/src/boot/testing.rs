//! Handmade kernel files, and the input of fuzz targets for the loaders.
#![allow(missing_docs, unreachable_pub)] // public only for fuzz targets

use std::fs::File;
use std::io::Write;

use podvisor_devices::GuestRam;
use vm_memory::{Bytes, GuestAddress};

use super::{BootError, Entry, Initramfs, Kernel, Platform, load, write_boot_params};
use crate::layout;

/// Where the handmade kernels are loaded.
pub const LOAD: u64 = 0x10_0000;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const EHDR: usize = 64;

/// A program header.
#[derive(Debug, Clone, Copy)]
pub struct Header {
    pub kind: u32,
    pub offset: u64,
    pub address: u64,
    pub file_size: u64,
    pub mem_size: u64,
}

/// An ELF kernel, piece by piece.
#[derive(Debug, Clone)]
pub struct Elf {
    pub kind: u16,
    pub machine: u16,
    pub entry: u64,
    pub headers: Vec<Header>,
    /// The content at each `offset`.
    pub contents: Vec<(u64, Vec<u8>)>,
}

impl Elf {
    /// `code` at 1 MiB, followed by `bss` zero bytes, entered at its first byte.
    pub fn new(code: &[u8], bss: u64) -> Self {
        let size = code.len() as u64;
        Self {
            kind: 2,
            machine: 62,
            entry: LOAD,
            headers: vec![Header {
                kind: PT_LOAD,
                offset: 0x1000,
                address: LOAD,
                file_size: size,
                mem_size: size + bss,
            }],
            contents: vec![(0x1000, code.to_vec())],
        }
    }

    /// Adds notes, the last of which has the PVH entry.
    #[must_use]
    pub fn with_pvh(self, entry: u32) -> Self {
        let mut notes = note(b"GNU\0", 3, &[7; 20]);
        notes.extend(note(b"Xen\0", 18, &u64::from(entry).to_le_bytes()));
        self.with_notes(notes)
    }

    /// Adds these notes.
    #[must_use]
    pub fn with_notes(mut self, notes: Vec<u8>) -> Self {
        self.headers.push(Header {
            kind: PT_NOTE,
            offset: 0x800,
            address: 0,
            file_size: notes.len() as u64,
            mem_size: notes.len() as u64,
        });
        self.contents.push((0x800, notes));
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        elf.extend(self.kind.to_le_bytes());
        elf.extend(self.machine.to_le_bytes());
        elf.extend(1u32.to_le_bytes());
        elf.extend(self.entry.to_le_bytes());
        elf.extend((EHDR as u64).to_le_bytes());
        elf.extend([0; 12]);
        for field in [EHDR as u16, 56, self.headers.len() as u16, 0, 0, 0] {
            elf.extend(field.to_le_bytes());
        }
        for header in &self.headers {
            elf.extend(header.kind.to_le_bytes());
            elf.extend(7u32.to_le_bytes());
            let Header {
                offset,
                address,
                file_size,
                mem_size,
                ..
            } = *header;
            for field in [offset, address, address, file_size, mem_size, 0x1000] {
                elf.extend(field.to_le_bytes());
            }
        }
        for (offset, contents) in &self.contents {
            let end = *offset as usize + contents.len();
            elf.resize(elf.len().max(end), 0);
            elf[end - contents.len()..end].copy_from_slice(contents);
        }
        elf
    }
}

/// An ELF note.
pub fn note(name: &[u8], kind: u32, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [name.len() as u32, value.len() as u32, kind] {
        bytes.extend(word.to_le_bytes());
    }
    for part in [name, value] {
        bytes.extend(part);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

/// A bzImage of protocol 2.15 whose 64-bit entry is `code`, loaded at 16 MiB.
pub fn bzimage(code: &[u8]) -> Vec<u8> {
    let setup = 5 * 512;
    let mut image = vec![0u8; setup + 0x200];
    image.extend(code);
    image.resize(image.len().next_multiple_of(16), 0x90);
    let paragraphs = ((image.len() - setup) / 16) as u32;
    for (offset, bytes) in [
        (0x1f1, &[4u8][..]),                    // setup_sects
        (0x1f4, &paragraphs.to_le_bytes()),     // syssize
        (0x1fe, &[0x55, 0xaa]),                 // boot_flag
        (0x200, &[0xeb, 0x6a]),                 // jump over the header
        (0x202, b"HdrS"),                       //
        (0x206, &0x20fu16.to_le_bytes()),       // version
        (0x211, &[1]),                          // loadflags
        (0x22c, &0x7fff_ffffu32.to_le_bytes()), // initrd_addr_max
        (0x230, &0x20_0000u32.to_le_bytes()),   // kernel_alignment
        (0x234, &[1]),                          // relocatable_kernel
        (0x236, &1u16.to_le_bytes()),           // xloadflags
        (0x238, &2047u32.to_le_bytes()),        // cmdline_size
        (0x258, &0x100_0000u64.to_le_bytes()),  // pref_address
        (0x260, &0x40_0000u32.to_le_bytes()),   // init_size
    ] {
        image[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    image
}

/// Creates a temporary file with these contents.
///
/// # Panics
///
/// If there is no room for it.
pub fn file(bytes: &[u8]) -> File {
    let fd = rustix::fs::memfd_create("kernel", rustix::fs::MemfdFlags::CLOEXEC)
        .expect("a file in memory");
    let mut file = File::from(fd);
    file.write_all(bytes).expect("a file in memory takes bytes");
    file
}

/// `file` with single bytes replaced: offsets wrap at its end.
pub fn mutate(mut file: Vec<u8>, changes: &[(u16, u8)]) -> Vec<u8> {
    let len = file.len().max(1);
    for (offset, value) in changes {
        if let Some(byte) = file.get_mut(usize::from(*offset) % len) {
            *byte = *value;
        }
    }
    file
}

/// Runs both steps of booting.
pub(super) fn load_whole(
    mem: &GuestRam,
    kernel: &Kernel,
    initramfs: Option<&Initramfs>,
    cmdline: &str,
    cpus: u8,
) -> Result<Entry, BootError> {
    let loaded = load(mem, kernel, initramfs)?;
    let platform = Platform {
        cpus,
        ..Platform::default()
    };
    write_boot_params(mem, kernel, &loaded, cmdline, &platform)
}

/// Loads `kernel` into 32 MiB and checks what must hold for any bytes: it returns, the entry is
/// within memory, and the kernel did not overwrite boot structures.
///
/// # Panics
///
/// If one of these does not hold.
pub fn load_hostile(kernel: &[u8]) {
    const SIZE: usize = 32 << 20;
    let Ok(kernel) = Kernel::from_file(file(kernel)) else {
        return;
    };
    let mem = GuestRam::from_ranges(&[(GuestAddress(0), SIZE)]).expect("memory");
    let initramfs = Initramfs::from_bytes(*b"initramfs").expect("not empty");
    if let Ok(Entry { address, .. }) = load_whole(&mem, &kernel, Some(&initramfs), "cmdline", 2) {
        assert!(address >= layout::HIMEM_START && address < SIZE as u64);
        let mut read = [0; 4];
        for (at, want) in [(layout::CMDLINE, b"cmdl"), (layout::EBDA_START, b"_MP_")] {
            mem.read_slice(&mut read, GuestAddress(at)).expect("memory");
            assert_eq!(&read, want);
        }
    }
}

/// A fuzz target's body: an ELF kernel or bzImage with some of its bytes changed, or arbitrary
/// bytes.
pub fn fuzz_kernel(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else {
        return;
    };
    let changes: Vec<_> = data
        .chunks_exact(3)
        .map(|c| (u16::from_le_bytes([c[0], c[1]]), c[2]))
        .collect();
    match choice % 4 {
        0 => load_hostile(&mutate(Elf::new(&[0xf4; 64], 4096).bytes(), &changes)),
        1 => {
            let elf = Elf::new(&[0xf4; 64], 4096).with_pvh(LOAD as u32);
            load_hostile(&mutate(elf.bytes(), &changes));
        }
        2 => load_hostile(&mutate(bzimage(&[0xf4; 64]), &changes)),
        _ => load_hostile(data),
    }
}

/// A fuzz target's body: any text as a command line.
///
/// # Panics
///
/// If an accepted command line is not in memory unchanged, followed by a NUL.
pub fn fuzz_cmdline(data: &[u8]) {
    let Ok(cmdline) = std::str::from_utf8(data) else {
        return;
    };
    let mem = GuestRam::from_ranges(&[(GuestAddress(0), 8 << 20)]).expect("memory");
    let kernel = Kernel::from_file(file(&Elf::new(&[0xf4; 64], 0).bytes())).expect("a kernel");
    if load_whole(&mem, &kernel, None, cmdline, 1).is_ok() {
        let mut read = vec![0xff; data.len() + 1];
        mem.read_slice(&mut read, GuestAddress(layout::CMDLINE))
            .expect("memory");
        assert_eq!(read.split_last(), Some((&0, data)));
        assert!(!data.contains(&0));
    }
}
