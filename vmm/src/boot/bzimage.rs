//! bzImages, by their setup header (Linux, Documentation/arch/x86/boot.rst).

use linux_loader::bootparam::{XLF_KERNEL_64, setup_header};
use vm_memory::ByteValued;

use super::KernelFault;
use super::source::FileRange;
use crate::layout;

/// Where the setup header lies in the file and in the zero page.
const HEADER: usize = 0x1f1;
/// The byte at `HEADER_LENGTH` is the length of the header after the byte that follows.
const HEADER_LENGTH: usize = 0x201;
/// First protocol with `xloadflags`.
const VERSION_MIN: u16 = 0x20c;
/// `loadflags`: the protected-mode code is loaded at 1 MiB or above.
const LOADED_HIGH: u8 = 1;
/// Where the 64-bit entry lies in the protected-mode code.
const ENTRY_64: u64 = 0x200;
const SECTOR: u64 = 512;

/// A checked bzImage.
#[derive(Debug)]
pub(super) struct BzImage {
    /// As in the file: the kernel gets it in its zero page, completed by us.
    header: setup_header,
    code: FileRange,
    end: u64,
}

impl BzImage {
    /// Checks the bzImage of `size` bytes that starts with `head`.
    pub(super) fn parse(head: &[u8], size: u64) -> Result<Self, KernelFault> {
        let header = read_header(head)?;
        let (version, loadflags, xloadflags) =
            (header.version, header.loadflags, header.xloadflags);
        if version < VERSION_MIN {
            return Err(KernelFault::BootProtocol { version });
        }
        if u32::from(xloadflags) & XLF_KERNEL_64 == 0 {
            return Err(KernelFault::No64BitEntry);
        }
        if loadflags & LOADED_HIGH == 0 {
            return Err(KernelFault::SetupHeader { field: "loadflags" });
        }

        // 0 means 4, for compatibility with old boot loaders; the boot sector comes on top.
        let setup_sects = match header.setup_sects {
            0 => 4,
            n => u64::from(n),
        };
        let offset = (setup_sects + 1) * SECTOR;
        // Data after the code (a signature, padding of a partition) does not belong to the kernel.
        let code_size = u64::from(header.syssize) * 16;
        let code_size = size.saturating_sub(offset).min(code_size);
        let payload_end = u64::from(header.payload_offset) + u64::from(header.payload_length);
        if code_size <= ENTRY_64 || payload_end > code_size {
            return Err(KernelFault::Truncated {
                what: "compressed kernel",
            });
        }

        let address = load_address(&header)?;
        let init_size = u64::from(header.init_size);
        if init_size < code_size {
            return Err(KernelFault::SetupHeader { field: "init_size" });
        }
        let end = address
            .checked_add(init_size)
            .ok_or(KernelFault::SetupHeader {
                field: "pref_address",
            })?;
        Ok(Self {
            header,
            code: FileRange {
                offset,
                address,
                size: code_size,
            },
            end,
        })
    }

    pub(super) fn header(&self) -> &setup_header {
        &self.header
    }

    /// Returns the protected-mode code, the only part that is loaded.
    pub(super) fn piece(&self) -> FileRange {
        self.code
    }

    pub(super) fn entry(&self) -> u64 {
        self.code.address + ENTRY_64
    }

    /// Returns the end of the memory that the kernel needs to unpack itself.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    pub(super) fn initramfs_end_max(&self) -> u64 {
        u64::from(self.header.initrd_addr_max) + 1
    }

    /// Returns the maximum number of bytes of the command line, without the NUL.
    pub(super) fn cmdline_max(&self) -> usize {
        self.header.cmdline_size as usize
    }
}

fn read_header(head: &[u8]) -> Result<setup_header, KernelFault> {
    let truncated = KernelFault::Truncated {
        what: "setup header",
    };
    let length = head.get(HEADER_LENGTH).ok_or(truncated.clone())?;
    let end = HEADER_LENGTH + 1 + usize::from(*length);
    let bytes = head.get(HEADER..end).ok_or(truncated)?;
    let mut header = setup_header::default();
    // Newer kernels may know more fields than we do, older ones fewer.
    let known = bytes.len().min(size_of::<setup_header>());
    header.as_mut_slice()[..known].copy_from_slice(&bytes[..known]);
    Ok(header)
}

/// Returns where the code is loaded: the address that the kernel prefers, which saves a move. A
/// relocatable kernel would run elsewhere too, but never below that address.
fn load_address(header: &setup_header) -> Result<u64, KernelFault> {
    let (address, alignment) = (header.pref_address, u64::from(header.kernel_alignment));
    let misaligned =
        alignment == 0 || !alignment.is_power_of_two() || !address.is_multiple_of(alignment);
    if header.relocatable_kernel != 0 && misaligned {
        return Err(KernelFault::SetupHeader {
            field: "kernel_alignment",
        });
    }
    if address < layout::HIMEM_START {
        return Err(KernelFault::SetupHeader {
            field: "pref_address",
        });
    }
    Ok(address)
}

#[cfg(test)]
#[path = "bzimage_tests.rs"]
mod tests;
