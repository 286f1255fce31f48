//! KVM's memslots: which host addresses back which guest physical ones.
#![allow(unsafe_code)] // host addresses are passed to KVM

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use podvisor_devices::GuestRam;
use vm_memory::{GuestMemory as _, GuestMemoryRegion, GuestRegionMmap};

use crate::kvm::KvmError;

/// Makes every region of `ram` a slot of a VM that has none yet. Before the first vCPU this is
/// cheap; later each slot waits for a grace period. Memory that this process cannot write, the
/// guest cannot write either, whatever its page tables say. A slot lives as long as the VM: the
/// caller keeps the mappings as long as `vm`.
pub(crate) fn add_memslots(vm: &VmFd, ram: &GuestRam) -> Result<(), KvmError> {
    (0..)
        .zip(ram.iter())
        .try_for_each(|(slot, region)| add(vm, slot, region))
}

/// Describes a region as a slot.
pub(super) fn memslot(
    slot: u32,
    region: &GuestRegionMmap,
    flags: u32,
) -> kvm_userspace_memory_region {
    kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: region.start_addr().0,
        memory_size: region.len(),
        userspace_addr: region.as_ptr().addr() as u64,
    }
}

fn add(vm: &VmFd, slot: u32, region: &GuestRegionMmap) -> Result<(), KvmError> {
    let slot = memslot(slot, region, flags(region));
    // SAFETY: the address and length are those of a live mapping. The VM that is built on `vm`
    // owns the mapping and drops it after its vCPUs and this fd; KVM refuses slots that overlap
    // in the guest.
    unsafe { vm.set_user_memory_region(slot) }
        .map_err(KvmError::ioctl("KVM_SET_USER_MEMORY_REGION"))
}

fn flags(region: &GuestRegionMmap) -> u32 {
    match region.prot() & libc::PROT_WRITE {
        0 => KVM_MEM_READONLY,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{GuestMemory, MemoryShape, MemorySize};
    use podvisor_devices::pmem::PmemRegion;
    use std::fs::File;
    use std::sync::Arc;

    /// Without the flag a guest's write would end its VM: this process cannot write there either.
    #[test]
    fn what_this_process_may_not_write_is_read_only_for_the_guest() {
        let shape = MemoryShape::fixed(MemorySize::mib(16));
        let mut memory = GuestMemory::anonymous(shape).unwrap();
        let region = PmemRegion {
            start: 1 << 32,
            len: 2 << 20,
        };
        let file = Arc::new(File::open("/proc/self/exe").unwrap());
        memory.add_image(region, &file, 4096).unwrap();
        let flags: Vec<u32> = memory.all().iter().map(flags).collect();
        assert_eq!(flags, [0, KVM_MEM_READONLY, KVM_MEM_READONLY]);
    }
}
