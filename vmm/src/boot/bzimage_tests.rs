use super::*;
use crate::boot::testing::bzimage;

const SETUP: usize = 5 * 512;

fn parse(image: &[u8]) -> Result<BzImage, KernelFault> {
    BzImage::parse(&image[..image.len().min(4096)], image.len() as u64)
}

fn good() -> Vec<u8> {
    bzimage(&[0xf4; 64])
}

/// Returns the fault of a good bzImage with `bytes` at `offset`.
fn fault(offset: usize, bytes: &[u8]) -> KernelFault {
    let mut image = good();
    image[offset..offset + bytes.len()].copy_from_slice(bytes);
    parse(&image).unwrap_err()
}

fn field(offset: usize, bytes: &[u8]) -> &'static str {
    match fault(offset, bytes) {
        KernelFault::SetupHeader { field } => field,
        other => panic!("{other}"),
    }
}

#[test]
fn the_code_behind_the_setup_sectors_is_loaded_where_it_prefers_to_be() {
    let image = good();
    let parsed = parse(&image).unwrap();
    let size = (image.len() - SETUP) as u64;
    assert_eq!(
        parsed.piece(),
        FileRange {
            offset: SETUP as u64,
            address: 0x100_0000,
            size
        }
    );
    assert_eq!(parsed.entry(), 0x100_0200);
    assert_eq!(parsed.end(), 0x140_0000);
    assert_eq!(parsed.initramfs_end_max(), 1 << 31);
}

#[test]
fn setup_sects_of_zero_means_four() {
    let mut image = good();
    image[0x1f1] = 0;
    assert_eq!(parse(&image).unwrap().piece().offset, SETUP as u64);
}

#[test]
fn what_follows_the_code_is_not_loaded() {
    let mut image = good();
    let size = parse(&image).unwrap().piece().size;
    image.extend([0xaa; 4096]);
    assert_eq!(parse(&image).unwrap().piece().size, size);
}

#[test]
fn old_protocols_and_32_bit_kernels_are_refused() {
    assert_eq!(
        fault(0x206, &0x20bu16.to_le_bytes()),
        KernelFault::BootProtocol { version: 0x20b }
    );
    assert_eq!(fault(0x236, &[0, 0]), KernelFault::No64BitEntry);
    assert_eq!(field(0x211, &[0]), "loadflags");
    let text = KernelFault::BootProtocol { version: 0x20b }.to_string();
    assert!(text.contains("2.11"), "{text}");
}

#[test]
fn impossible_addresses_and_sizes_are_refused() {
    assert_eq!(field(0x258, &[0; 8]), "pref_address");
    assert_eq!(field(0x258, &[0xff; 8]), "kernel_alignment");
    assert_eq!(
        field(0x258, &0xffff_ffff_ffe0_0000u64.to_le_bytes()),
        "pref_address"
    );
    assert_eq!(field(0x230, &[0; 4]), "kernel_alignment");
    assert_eq!(field(0x230, &3u32.to_le_bytes()), "kernel_alignment");
    assert_eq!(field(0x260, &[0; 4]), "init_size");
}

#[test]
fn truncated_files_are_refused() {
    let image = good();
    for len in [0x202, 0x206, 0x250, SETUP, SETUP + 0x200] {
        let fault = parse(&image[..len]).unwrap_err();
        assert!(
            matches!(fault, KernelFault::Truncated { .. }),
            "{len}: {fault}"
        );
    }
    assert!(matches!(
        fault(0x1f1, &[255]),
        KernelFault::Truncated { .. }
    ));
    // A compressed kernel that would extend beyond the file.
    assert!(matches!(
        fault(0x24c, &u32::MAX.to_le_bytes()),
        KernelFault::Truncated { .. }
    ));
}
