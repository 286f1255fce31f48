//! Guest memory as KVM memslots.
#![allow(unsafe_code)] // KVM is told host addresses

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use podvisor_devices::GuestRam;
use vm_memory::{GuestMemory, GuestMemoryRegion};

use super::KvmError;

/// Makes every region of `memory` a memslot. The caller keeps `memory` alive as long as `vm`.
pub(crate) fn set_memory(vm: &VmFd, memory: &GuestRam) -> Result<(), KvmError> {
    for (slot, region) in (0u32..).zip(memory.iter()) {
        let slot = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr().addr() as u64,
        };
        // SAFETY: the address and length are those of a live mapping. The VM that is built on
        // `vm` owns `memory` and drops it after its vCPUs and this fd; regions of one
        // `GuestRam` do not overlap.
        unsafe { vm.set_user_memory_region(slot) }
            .map_err(KvmError::ioctl("KVM_SET_USER_MEMORY_REGION"))?;
    }
    Ok(())
}
