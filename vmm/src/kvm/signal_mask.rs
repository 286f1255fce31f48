//! `KVM_SET_SIGNAL_MASK`: the signals that are blocked while a vCPU runs guest code.
//!
//! It is the thread's own mask, with two exceptions. The kick ends `KVM_RUN`. So does SIGBUS, by
//! which the host reports that memory that backs the guest's has failed: if it were blocked, KVM
//! would retry the same access forever. (The C library's own signals, 32 and 33, are unblocked in
//! every thread's mask and must stay so: `setuid` of a process waits for all its threads.)
#![allow(unsafe_code)] // an ioctl that kvm-ioctls does not wrap

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

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

/// Makes the calling thread's signal mask apply while `vcpu` runs guest code on it, except that
/// `kick` and SIGBUS are unblocked.
pub(crate) fn set_signal_mask(vcpu: &VcpuFd, kick: i32) -> Result<(), KvmError> {
    let mut own = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: both pointers are valid, and the set is initialised even if the call fails.
    let set = unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), own.as_mut_ptr());
        for signal in [kick, libc::SIGBUS] {
            libc::sigdelset(own.as_mut_ptr(), signal);
        }
        // The kernel's 64 signals are the first 8 bytes of the C library's set.
        own.as_ptr().cast::<[u8; 8]>().read()
    };
    let mask = SignalMask { len: 8, set };
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
