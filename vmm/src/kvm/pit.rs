//! The in-kernel PIT's reinjection of lost ticks.
#![allow(unsafe_code)] // an ioctl that kvm-ioctls does not have

use std::io;

use kvm_bindings::{KVMIO, kvm_reinject_control};
use kvm_ioctls::VmFd;
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_io_nr;

use super::KvmError;

ioctl_io_nr!(KVM_REINJECT_CONTROL, KVMIO, 0x71);

/// Lets ticks that a guest was too late for be lost. Linux counts no ticks; to reinject them KVM
/// watches each end of interrupt, for which it turns AVIC and APICv off.
pub(super) fn disable_reinjection(vm: &VmFd) -> Result<(), KvmError> {
    let control = kvm_reinject_control {
        pit_reinject: 0,
        reserved: [0; 31],
    };
    // SAFETY: the kernel reads the structure, whose type is the one that this ioctl takes.
    let result = unsafe { ioctl_with_ref(vm, KVM_REINJECT_CONTROL(), &control) };
    if result == 0 {
        Ok(())
    } else {
        Err(KvmError::Ioctl {
            ioctl: "KVM_REINJECT_CONTROL",
            source: io::Error::last_os_error(),
        })
    }
}
