//! Identifies a file by its first bytes, to help users who named the wrong one.

/// Kinds of kernel files that can be booted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// An ELF file.
    Elf,
    /// A Linux bzImage, or something with its header.
    BzImage,
}

/// Formats that users mistake for kernels: offset, magic bytes, name.
const OTHERS: &[(usize, &[u8], &str)] = &[
    (0x38, b"ARM\x64", "an arm64 Image"),
    (0x38, b"RSC\x05", "a RISC-V Image"),
    (4, b"zimg", "an EFI zboot image (extract the kernel in it)"),
    (0, b"\x1f\x8b", "gzip-compressed data (decompress it first)"),
    (0, b"\xfd7zXZ\0", "xz-compressed data (decompress it first)"),
    (
        0,
        b"\x28\xb5\x2f\xfd",
        "zstd-compressed data (decompress it first)",
    ),
    (
        0,
        b"\x04\x22\x4d\x18",
        "lz4-compressed data (decompress it first)",
    ),
    (
        0,
        b"\x02\x21\x4c\x18",
        "lz4-compressed data (decompress it first)",
    ),
    (0, b"BZh", "bzip2-compressed data (decompress it first)"),
    (0, b"\x89LZO", "lzop-compressed data (decompress it first)"),
    (0, b"\x5d\0\0", "lzma-compressed data (decompress it first)"),
    (0, b"07070", "a cpio archive, such as an initramfs"),
    (0, b"QFI\xfb", "a qcow2 disk image"),
    (0, b"\x27\x05\x19\x56", "a U-Boot uImage"),
    (0, b"\xd0\x0d\xfe\xed", "a device tree or FIT image"),
    (0, b"!<arch>", "a package or library archive"),
    (0, b"PK\x03\x04", "a zip archive"),
    (257, b"ustar", "a tar archive"),
    (1024, b"\xe2\xe1\xf5\xe0", "an EROFS image"),
    (0, b"hsqs", "a squashfs image"),
    (0x438, b"\x53\xef", "an ext4 image"),
    (
        0,
        b"MZ",
        "a Windows or EFI program without a Linux boot header",
    ),
    (0, b"#!", "a script"),
    (510, b"\x55\xaa", "a disk image with a boot sector"),
];

/// The number of bytes at the start of a file that `format` examines.
pub(super) const SNIFF_LEN: usize = 4096;

/// Identifies a file by its first [`SNIFF_LEN`] bytes (fewer if it is shorter).
pub(super) fn format(head: &[u8]) -> Result<Format, &'static str> {
    let has =
        |offset: usize, magic: &[u8]| head.get(offset..).is_some_and(|h| h.starts_with(magic));
    if has(0, b"\x7fELF") {
        return Ok(Format::Elf);
    }
    if has(0x202, b"HdrS") && has(0x1fe, b"\x55\xaa") {
        return Ok(Format::BzImage);
    }
    if head.is_empty() {
        return Err("empty");
    }
    if let Some((_, _, name)) = OTHERS.iter().find(|(offset, magic, _)| has(*offset, magic)) {
        return Err(name);
    }
    let text = |b: &u8| matches!(b, b'\t' | b'\n' | b'\r' | 0x20..=0x7e);
    if head.iter().all(text) {
        return Err("a text file");
    }
    if head.iter().all(|b| *b == 0) {
        return Err("nothing but zero bytes");
    }
    Err("data of an unknown format")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_what_people_take_for_kernels() {
        let cases: [(&[u8], &str); 6] = [
            (b"\x1f\x8b\x08\0\0\0", "gzip"),
            (b"\x28\xb5\x2f\xfdxxxx", "zstd"),
            (b"070701000000", "cpio"),
            (b"#!/bin/sh\n", "script"),
            (b"just some words\n", "text"),
            (b"", "empty"),
        ];
        for (head, want) in cases {
            assert!(format(head).unwrap_err().contains(want), "{want}");
        }
        let mut arm = vec![0u8; 64];
        arm[0x38..0x3c].copy_from_slice(b"ARM\x64");
        assert!(format(&arm).unwrap_err().contains("arm64"));
    }

    #[test]
    fn a_boot_header_needs_both_of_its_magic_numbers() {
        let mut head = vec![0u8; 1024];
        head[0x202..0x206].copy_from_slice(b"HdrS");
        assert!(format(&head).is_err());
        head[0x1fe] = 0x55;
        head[0x1ff] = 0xaa;
        assert_eq!(format(&head), Ok(Format::BzImage));
    }
}
