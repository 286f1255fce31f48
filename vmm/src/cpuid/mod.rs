//! The CPUID that the guest sees.
//!
//! The host's KVM says what it supports ([`guest_cpuid`] asks it); [`policy::RULES`] removes and
//! adds single features, [`topology`] describes one socket with as many cores as there are vCPUs.
//! [`for_vcpu`] then sets a vCPU's own number. Caches, vendor, model and everything that no rule
//! names pass through.
//!
//! Nothing here knows VMs or vCPU threads; the input and output are entries.

mod policy;
mod topology;

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};

use crate::kvm::KvmError;

/// Returns the CPUID of a guest with `vcpus` vCPUs, without what differs between them.
///
/// `tsc_khz` is the frequency of the guest's time stamp counter, so that a guest need not measure
/// it.
pub(crate) fn guest_cpuid(kvm: &Kvm, vcpus: u8, tsc_khz: Option<u32>) -> Result<CpuId, KvmError> {
    let supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(KvmError::ioctl("KVM_GET_SUPPORTED_CPUID"))?;
    let guest = Guest {
        vcpus: vcpus.max(1),
        tsc_khz,
        tsc_deadline: kvm.check_extension(Cap::TscDeadlineTimer),
        host: |leaf| {
            let host = std::arch::x86_64::__cpuid(leaf);
            [host.eax, host.ebx, host.ecx, host.edx]
        },
    };
    let entries = compose(supported.as_slice(), &guest);
    CpuId::from_entries(&entries)
        .map_err(|_| KvmError::ioctl("KVM_SET_CPUID2")(kvm_ioctls::Error::new(libc::E2BIG)))
}

/// Returns `base` for the vCPU with APIC id `id`.
pub(crate) fn for_vcpu(base: &CpuId, id: u8) -> CpuId {
    let mut cpuid = base.clone();
    for entry in cpuid.as_mut_slice() {
        topology::number(entry, id);
    }
    cpuid
}

/// What the entries depend on besides the host.
#[derive(Debug, Clone, Copy)]
struct Guest {
    /// At least 1.
    vcpus: u8,
    tsc_khz: Option<u32>,
    /// The in-kernel local APIC has the TSC deadline timer; KVM does not report it by CPUID.
    tsc_deadline: bool,
    /// CPUID as the host executes it.
    host: fn(u32) -> [u32; 4],
}

fn compose(supported: &[kvm_cpuid_entry2], guest: &Guest) -> Vec<kvm_cpuid_entry2> {
    let mut entries = supported.to_vec();
    policy::apply(&mut entries, guest);
    topology::lay_out(&mut entries, guest.vcpus);
    entries
}

#[cfg(test)]
mod tests;
