//! Whether a file is a kernel that can be started: Linux's `bzImage` for 64-bit x86
//! (Documentation/arch/x86/boot.rst), which alone `kexec_file_load` takes.

use thiserror::Error;

/// Bytes at the start of the file that [`check`] needs.
pub const HEADER_BYTES: usize = 0x400;

/// A file that is not a kernel to start.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// Nothing is in it.
    #[error("the file is empty")]
    Empty,
    /// It is a kernel of another kind of machine.
    #[error("this is a kernel for {0}, the machine is x86-64")]
    OtherMachine(&'static str),
    /// It is something else.
    #[error("this is no kernel but {0}; a bzImage is needed")]
    OtherFile(&'static str),
    /// It is a kernel of a boot protocol before 2.12.
    #[error("the kernel has boot protocol {}.{:02}, 2.12 (Linux 3.8) is the oldest that can be started", .0 >> 8, .0 & 0xff)]
    Protocol(u16),
    /// It has no 64-bit entry point.
    #[error("the kernel is a 32-bit one, or cannot be loaded at any address")]
    No64BitEntry,
    /// It is shorter than its header says.
    #[error("the kernel is cut off: {has} bytes, {needed} by its header")]
    CutOff {
        /// Bytes that are there.
        has: u64,
        /// Bytes that the header needs.
        needed: u64,
    },
}

/// What a kernel's header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelHeader {
    /// Bytes that the kernel takes until it has unpacked itself.
    pub init_bytes: u32,
    /// Bytes that its command line may have.
    pub cmdline_bytes: u32,
}

/// Checks the first [`HEADER_BYTES`] bytes of a kernel's file of `size` bytes.
///
/// # Errors
///
/// If it cannot be started; the error says what it is, as far as its first bytes tell.
pub fn check(start: &[u8], size: u64) -> Result<KernelHeader, KernelError> {
    if size == 0 || start.is_empty() {
        return Err(KernelError::Empty);
    }
    let (Some(magic), Some(protocol)) = (field::<4>(start, 0x202), field(start, 0x206)) else {
        return Err(other(start));
    };
    if &magic != b"HdrS" || field(start, 0x1fe) != Some([0x55, 0xaa]) {
        return Err(other(start));
    }
    let protocol = u16::from_le_bytes(protocol);
    if protocol < 0x20c {
        return Err(KernelError::Protocol(protocol));
    }
    let xloadflags = field(start, 0x236).map(u16::from_le_bytes);
    let is_relocatable = start.get(0x234).is_some_and(|flag| *flag != 0);
    // Bit 0: there is a 64-bit entry point; bit 1: it works above 4 GiB, which kexec wants.
    if xloadflags.is_none_or(|flags| flags & 3 != 3) || !is_relocatable {
        return Err(KernelError::No64BitEntry);
    }
    let setup_sectors = match start.get(0x1f1) {
        Some(0) | None => 4,
        Some(sectors) => u64::from(*sectors),
    };
    let paragraphs = field(start, 0x1f4).map_or(0, u32::from_le_bytes);
    let needed = (setup_sectors + 1) * 512 + u64::from(paragraphs) * 16;
    if size < needed {
        return Err(KernelError::CutOff { has: size, needed });
    }
    Ok(KernelHeader {
        init_bytes: field(start, 0x260).map_or(0, u32::from_le_bytes),
        cmdline_bytes: field(start, 0x238).map_or(0, u32::from_le_bytes),
    })
}

fn field<const N: usize>(start: &[u8], offset: usize) -> Option<[u8; N]> {
    start.get(offset..)?.get(..N)?.try_into().ok()
}

fn other(start: &[u8]) -> KernelError {
    const FILES: &[(&[u8], &str)] = &[
        (b"\x1f\x8b", "gzip-compressed data"),
        (b"\x28\xb5\x2f\xfd", "zstd-compressed data"),
        (b"\xfd7zXZ", "xz-compressed data"),
        (b"070701", "an initial file system (cpio)"),
        (b"#!", "a script"),
    ];
    if start.get(0x38..0x3c) == Some(b"ARM\x64") {
        return KernelError::OtherMachine("arm64");
    }
    if start.get(0x38..0x3c) == Some(b"RSC\x05") {
        return KernelError::OtherMachine("riscv64");
    }
    if start.starts_with(b"\x7fELF") {
        return match field(start, 0x12).map(u16::from_le_bytes) {
            Some(62) => KernelError::OtherFile("an ELF file"),
            Some(3) => KernelError::OtherMachine("32-bit x86"),
            Some(183) => KernelError::OtherMachine("arm64"),
            Some(243) => KernelError::OtherMachine("riscv64"),
            Some(22) => KernelError::OtherMachine("s390x"),
            Some(21) => KernelError::OtherMachine("ppc64"),
            _ => KernelError::OtherMachine("another kind of machine (ELF)"),
        };
    }
    if start.starts_with(b"MZ") {
        let pe = field(start, 0x3c).map(u32::from_le_bytes);
        let pe = pe.and_then(|at| usize::try_from(at).ok());
        let machine = pe.and_then(|at| field::<6>(start, at));
        return match machine {
            Some([b'P', b'E', 0, 0, 0x64, 0xaa]) => KernelError::OtherMachine("arm64"),
            _ => KernelError::OtherFile("an EFI program"),
        };
    }
    let named = FILES.iter().find(|(magic, _)| start.starts_with(magic));
    KernelError::OtherFile(named.map_or("data of an unknown kind", |(_, name)| *name))
}

/// The header of a kernel that can be started, for tests.
#[cfg(any(test, feature = "test-utils"))]
#[must_use]
#[allow(
    clippy::indexing_slicing,
    reason = "offsets within what was made before"
)]
pub fn example() -> Vec<u8> {
    let mut start = vec![0; HEADER_BYTES * 4];
    start[0x1f1] = 1;
    start[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    start[0x202..0x206].copy_from_slice(b"HdrS");
    start[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    start[0x234] = 1;
    start[0x236] = 3;
    start[0x238..0x23c].copy_from_slice(&2047_u32.to_le_bytes());
    start[0x260..0x264].copy_from_slice(&(40_u32 << 20).to_le_bytes());
    start
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_bzimage_is_a_kernel() {
        let header = check(&example(), 4096).unwrap();
        assert_eq!(header.init_bytes, 40 << 20);
        assert_eq!(header.cmdline_bytes, 2047);
    }

    #[test]
    fn what_is_no_kernel_to_start_is_named() {
        let message = |start: &[u8]| check(start, start.len() as u64).unwrap_err().to_string();
        assert_eq!(check(&[], 0), Err(KernelError::Empty));
        assert!(message(b"\x1f\x8bxx").contains("gzip"));
        assert!(message(b"#!/bin/sh\n").contains("a script"));
        let mut arm = vec![0; 0x400];
        arm[0x38..0x3c].copy_from_slice(b"ARM\x64");
        assert!(message(&arm).contains("kernel for arm64"));
        let mut elf = b"\x7fELF".to_vec();
        elf.resize(0x400, 0);
        elf[0x12] = 3;
        assert!(message(&elf).contains("32-bit x86"));
        assert!(message(&[7; 4096]).contains("unknown"));

        let mut old = example();
        old[0x206] = 6;
        assert_eq!(message(&old), KernelError::Protocol(0x206).to_string());
        assert!(message(&old).contains("2.06"));
        let mut narrow = example();
        narrow[0x236] = 0;
        assert_eq!(check(&narrow, 4096), Err(KernelError::No64BitEntry));
        let mut cut = example();
        cut[0x1f4..0x1f8].copy_from_slice(&1000_u32.to_le_bytes());
        let needed = 1024 + 16_000;
        assert_eq!(
            check(&cut, 4096),
            Err(KernelError::CutOff { has: 4096, needed })
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_checked_without_a_panic(
            start in proptest::collection::vec(any::<u8>(), 0..1200), size: u64,
        ) {
            let _ = check(&start, size);
        }
    }
}
