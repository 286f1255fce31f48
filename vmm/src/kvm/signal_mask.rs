//! `KVM_SET_SIGNAL_MASK`: the signals that are blocked while a vCPU runs guest code.
//!
//! A vCPU thread blocks the kick signal and lets KVM unblock it for the time of `KVM_RUN`
//! alone. A kick that comes a moment too early stays pending and ends the next `KVM_RUN` at
//! once, so none is ever lost, and no signal handler is needed: the signal is never delivered.
#![allow(unsafe_code)] // an ioctl that kvm-ioctls does not wrap

use std::io;

use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;

use super::KvmError;

/// `struct kvm_signal_mask` with the kernel's 64 signals.
#[repr(C)]
#[derive(Debug)]
struct SignalMask {
    len: u32,
    set: [u8; 8],
}

/// The head of `struct kvm_signal_mask`, whose size is part of the ioctl's number.
type SignalMaskHead = u32;

ioctl_iow_nr!(
    KVM_SET_SIGNAL_MASK,
    kvm_bindings::KVMIO,
    0x8b,
    SignalMaskHead
);

/// While `vcpu` runs guest code every signal but `kick` is blocked in its thread.
pub(crate) fn set_signal_mask(vcpu: &VcpuFd, kick: i32) -> Result<(), KvmError> {
    let bit = u64::try_from(kick - 1)
        .ok()
        .and_then(|shift| 1u64.checked_shl(shift as u32));
    let all_but_kick = !bit.unwrap_or(0);
    let mask = SignalMask {
        len: 8,
        set: all_but_kick.to_ne_bytes(),
    };
    // SAFETY: the kernel reads the head and `len` more bytes, which is exactly `mask`
    // (`repr(C)`, no padding before `set`).
    let result = unsafe { ioctl_with_ref(vcpu, KVM_SET_SIGNAL_MASK(), &mask) };
    if result == 0 {
        Ok(())
    } else {
        let source = io::Error::last_os_error();
        Err(KvmError::Ioctl {
            ioctl: "KVM_SET_SIGNAL_MASK",
            source,
        })
    }
}
