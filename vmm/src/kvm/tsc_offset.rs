//! The offset that is added to the host's time stamp counter for a guest (`KVM_VCPU_TSC_OFFSET`,
//! since Linux 5.16).
//!
//! Writing the counter's MSR is not the same: KVM takes a value within a second of what it expects
//! as an attempt to synchronize counters, and older kernels (seen with 6.1) expect a new vCPU's
//! counter to have started at 0 when it was created. A guest that was saved in its first second
//! went back in time.
#![allow(unsafe_code)] // ioctls that kvm-ioctls does not wrap for vCPUs of this architecture

use std::io;

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr};
use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;

use super::KvmError;

ioctl_iow_nr!(
    KVM_SET_DEVICE_ATTR,
    kvm_bindings::KVMIO,
    0xe1,
    kvm_device_attr
);
ioctl_iow_nr!(
    KVM_GET_DEVICE_ATTR,
    kvm_bindings::KVMIO,
    0xe2,
    kvm_device_attr
);
ioctl_iow_nr!(
    KVM_HAS_DEVICE_ATTR,
    kvm_bindings::KVMIO,
    0xe3,
    kvm_device_attr
);

fn attribute(value: *const u64) -> kvm_device_attr {
    kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: value as u64,
        flags: 0,
    }
}

fn outcome(ioctl: &'static str, result: libc::c_int) -> Result<(), KvmError> {
    match result {
        0 => Ok(()),
        _ => Err(KvmError::Ioctl {
            ioctl,
            source: io::Error::last_os_error(),
        }),
    }
}

/// Returns the offset of a vCPU; `None` if the host's KVM does not report it.
pub(crate) fn tsc_offset(vcpu: &VcpuFd) -> Result<Option<u64>, KvmError> {
    let mut offset = 0_u64;
    let attribute = attribute(&raw mut offset);
    // SAFETY: the kernel reads the attribute, and does not touch the value.
    if unsafe { ioctl_with_ref(vcpu, KVM_HAS_DEVICE_ATTR(), &attribute) } != 0 {
        return Ok(None);
    }
    // SAFETY: the kernel writes a u64 to the attribute's address, which is that of `offset`.
    let result = unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &attribute) };
    outcome("KVM_GET_DEVICE_ATTR", result)?;
    Ok(Some(offset))
}

/// Sets the offset of a vCPU that is not running.
pub(crate) fn set_tsc_offset(vcpu: &VcpuFd, offset: u64) -> Result<(), KvmError> {
    let attribute = attribute(&raw const offset);
    // SAFETY: the kernel reads the attribute, and a u64 at its address, which is that of `offset`.
    let result = unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &attribute) };
    outcome("KVM_SET_DEVICE_ATTR", result)
}
