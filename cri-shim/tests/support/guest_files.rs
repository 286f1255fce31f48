//! Files for guests that are never booted.

use std::fs;

use super::{Ran, Root};

/// Creates guest files that look valid as long as they are not booted: an ELF header and a cpio.
pub(crate) fn guest_dir(root: &Root) -> String {
    let directory = root.path().join("guest");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("initramfs.cpio"), b"070701").unwrap();
    directory.to_str().unwrap().to_owned()
}

/// Creates the smallest file that is accepted as an ELF kernel: a header and one segment to load.
pub(crate) fn elf(root: &Root) -> String {
    let path = root.path().join("vmlinux-elf");
    let mut bytes = vec![0; 4096];
    bytes[..8].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1, 0]);
    bytes[16..20].copy_from_slice(&[2, 0, 62, 0]); // ET_EXEC, EM_X86_64
    bytes[20] = 1; // version
    bytes[24..32].copy_from_slice(&0x0100_0000u64.to_le_bytes()); // entry
    bytes[32] = 64; // program headers behind this one
    bytes[52..58].copy_from_slice(&[64, 0, 56, 0, 1, 0]);
    bytes[64..72].copy_from_slice(&[1, 0, 0, 0, 5, 0, 0, 0]); // PT_LOAD, r-x
    for (offset, value) in [
        (72, 0u64),
        (80, 0x0100_0000),
        (88, 0x0100_0000),
        (96, 4096),
        (104, 4096),
    ] {
        bytes[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
    }
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Runs `podvisor run` with guest files that exist.
pub(crate) fn run(root: &Root, arguments: &[&str]) -> Ran {
    let mut command = root.podvisor(&["run"]);
    command
        .args(arguments)
        .env("PODVISOR_GUEST_DIR", guest_dir(root));
    Ran::new(command.output().unwrap())
}
