//! A firmware, which boots what is on the guest's disks.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::kernel::Kernel;
use super::source::Source;
use super::{BootError, Protocol};

/// EDK2's CloudHv images have 4 MiB.
const MAX_SIZE: u64 = 64 << 20;

/// A firmware that a guest boots by, instead of a kernel: an ELF file with an entry of PVH, such as
/// `CLOUDHV.fd`, which is EDK2's platform `OvmfPkg/CloudHv`.
///
/// The file is opened, identified and checked immediately; its contents are read when the VM is
/// built. It must not change in between.
#[derive(Debug)]
pub struct Firmware(Kernel);

impl Firmware {
    /// Opens the firmware at `path`.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read or is not such a firmware.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, BootError> {
        Source::open(path.as_ref()).and_then(Self::new)
    }

    /// Creates a firmware from a file that is open for reading, wherever it comes from.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open); the messages call the file "firmware".
    pub fn from_file(file: File) -> Result<Self, BootError> {
        Source::new(file, PathBuf::from("firmware")).and_then(Self::new)
    }

    fn new(source: Source) -> Result<Self, BootError> {
        let path = source.path().to_owned();
        let size = source.inspect(|_, size| Ok(size))?;
        if size > MAX_SIZE {
            return Err(BootError::FirmwareSize { path, size });
        }
        let kernel = Kernel::new(source)?;
        match kernel.elf_protocol() {
            Some(Protocol::Pvh) => Ok(Self(kernel)),
            _ => Err(BootError::NotAFirmware { path }),
        }
    }

    /// Returns the program that the boot CPU enters.
    pub(crate) fn into_kernel(self) -> Kernel {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::boot::testing::Elf;

    fn open(bytes: &[u8]) -> Result<Firmware, BootError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        Firmware::open(file.path())
    }

    #[test]
    fn a_firmware_has_an_entry_of_pvh_and_a_kernel_is_none() {
        let pvh = Elf::new(&[0xf4; 16], 0).with_pvh(0x10_0000).bytes();
        assert!(open(&pvh).is_ok());
        let kernel = open(&Elf::new(&[0xf4; 16], 0).bytes()).unwrap_err();
        assert!(matches!(kernel, BootError::NotAFirmware { .. }), "{kernel}");
        let text = open(b"no firmware").unwrap_err();
        assert!(matches!(text, BootError::NotAKernel { .. }), "{text}");
        assert!(open(&pvh[..40]).is_err());
    }

    #[test]
    fn a_file_that_is_too_large_is_refused_before_it_is_read() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(MAX_SIZE + 1).unwrap();
        let error = Firmware::from_file(file).unwrap_err();
        assert!(matches!(error, BootError::FirmwareSize { .. }), "{error}");
    }
}
