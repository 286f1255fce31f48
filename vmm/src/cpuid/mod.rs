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

use crate::host_clock;
use crate::kvm::KvmError;

/// Returns the CPUID of a guest with `vcpus` vCPUs, without what differs between them.
///
/// `tsc_khz` is the frequency of the guest's time stamp counter, so that a guest need not measure
/// it.
pub(crate) fn guest_cpuid(kvm: &Kvm, vcpus: u8, tsc_khz: Option<u32>) -> Result<CpuId, KvmError> {
    let supported = supported(kvm)?;
    let offers_tsc = policy::has_invariant_tsc(supported.as_slice());
    let guest = Guest {
        vcpus: vcpus.max(1),
        tsc_khz,
        tsc_is_unstable: offers_tsc && host_clock::is_other(),
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

fn supported(kvm: &Kvm) -> Result<CpuId, KvmError> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(KvmError::ioctl("KVM_GET_SUPPORTED_CPUID"))
}

/// Whether a guest's kernel needs retpolines where the host's own may do without: see
/// [`crate::check::guests_lack_ibrs`].
pub(crate) fn lacks_ibrs(kvm: &Kvm) -> Result<bool, KvmError> {
    Ok(policy::lacks_automatic_ibrs(supported(kvm)?.as_slice()))
}

/// Returns `base` for the vCPU with APIC id `id`.
pub(crate) fn for_vcpu(base: &CpuId, id: u8) -> CpuId {
    let mut cpuid = base.clone();
    for entry in cpuid.as_mut_slice() {
        topology::number(entry, id);
    }
    cpuid
}

/// The number of bits of a physical address that every x86-64 processor has, and that one has which
/// does not tell (Intel SDM, CPUID leaf 0x80000008).
pub(crate) const LEAST_PHYSICAL_BITS: u32 = 36;

/// The number of bits of a physical address that no x86-64 processor exceeds: what a page table's
/// entry has room for.
pub(crate) const MOST_PHYSICAL_BITS: u32 = 52;

/// Returns the number of bits of the guest's physical addresses.
pub(crate) fn physical_bits(cpuid: &CpuId) -> u32 {
    let mut entries = cpuid.as_slice().iter();
    let sizes = entries.find(|entry| entry.function == 0x8000_0008);
    match sizes.map_or(0, |sizes| sizes.eax & 0xff) {
        0 => LEAST_PHYSICAL_BITS,
        bits => bits,
    }
}

/// What the entries depend on besides the host.
#[derive(Debug, Clone, Copy)]
struct Guest {
    /// At least 1.
    vcpus: u8,
    tsc_khz: Option<u32>,
    /// The host's kernel does not trust the time stamp counter as its own clock.
    tsc_is_unstable: bool,
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
