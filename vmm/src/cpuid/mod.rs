//! Temporary.
use crate::kvm::KvmError;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::Kvm;
pub(crate) fn guest_cpuid(kvm: &Kvm, _vcpus: u8, _tsc: Option<u32>) -> Result<CpuId, KvmError> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(KvmError::ioctl("KVM_GET_SUPPORTED_CPUID"))
}
pub(crate) fn for_vcpu(base: &CpuId, id: u8) -> CpuId {
    let mut c = base.clone();
    for e in c.as_mut_slice() {
        match e.function {
            1 => {
                e.ebx = (e.ebx & 0xffffff) | (u32::from(id) << 24);
                e.ecx |= 1 << 24 | 1 << 31
            }
            0xb => e.edx = u32::from(id),
            _ => {}
        }
    }
    c
}
