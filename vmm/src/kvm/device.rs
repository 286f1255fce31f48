//! An open `/dev/kvm`, for VMs that are built where no file can be opened any more.
#![allow(unsafe_code)] // a descriptor becomes kvm-ioctls' own type

use std::fs::File;
use std::os::fd::{FromRawFd as _, IntoRawFd as _};

use kvm_ioctls::Kvm;

use super::{KvmError, check};
use crate::host_clock;

/// An open `/dev/kvm`.
///
/// [`VmBuilder::build`](crate::VmBuilder::build) opens it by its path. A program that enters a jail
/// first opens it before, and passes it to [`VmBuilder::kvm`](crate::VmBuilder::kvm) for each VM.
/// The host's clock, which a VM's CPUID depends on, is looked up when this is opened.
#[derive(Debug)]
pub struct KvmDevice(File);

impl KvmDevice {
    /// Opens `/dev/kvm`.
    ///
    /// # Errors
    /// [`KvmError::Open`].
    pub fn open() -> Result<Self, KvmError> {
        let file = File::options().read(true).write(true).open("/dev/kvm");
        let file = file.map_err(KvmError::Open)?;
        host_clock::remember();
        Ok(Self(file))
    }

    /// Returns it as kvm-ioctls' own type, with a descriptor of its own.
    pub(crate) fn kvm(&self) -> Result<Kvm, KvmError> {
        let file = self.0.try_clone().map_err(KvmError::Open)?;
        // SAFETY: the descriptor is of /dev/kvm, and nothing else owns it.
        let kvm = unsafe { Kvm::from_raw_fd(file.into_raw_fd()) };
        check(kvm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::create_vm;

    #[test]
    fn several_vms_are_created_with_one_open_device() {
        let device = KvmDevice::open().unwrap();
        for _ in 0..2 {
            create_vm(&device.kvm().unwrap()).unwrap();
        }
    }
}
