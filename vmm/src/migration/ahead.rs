//! What KVM needs some milliseconds for, and what no device's state is needed for: it is made
//! before the guest stands still.

use std::sync::Arc;

use kvm_ioctls::{VcpuFd, VmFd};

use crate::kvm::{self, KvmDevice, KvmError};
use crate::memory::{self, GuestMemory};
use crate::snapshot::MachineState;

/// A VM of KVM's that knows the memory of the one that comes, with its chips, and with its vCPUs as
/// after RESET, of which their CPUID is not set. More may be added.
#[derive(Debug)]
pub(crate) struct VmAhead {
    pub(crate) vm_fd: Arc<VmFd>,
    pub(crate) vcpus: Vec<VcpuFd>,
}

impl VmAhead {
    pub(super) fn create(
        kvm: &KvmDevice,
        announced: &MachineState,
        memory: &GuestMemory,
    ) -> Result<Self, KvmError> {
        let vm_fd = Arc::new(kvm::create_vm(&kvm.kvm()?)?);
        memory::add_memslots(&vm_fd, memory.all())?;
        kvm::create_chips(&vm_fd)?;
        kvm::limit_vcpus(&vm_fd, announced.max_vcpus);
        let ids = 0..announced.vcpus.len() as u64;
        let create = |id| vm_fd.create_vcpu(id);
        let vcpus = ids.map(create).collect::<Result<_, _>>();
        let vcpus = vcpus.map_err(KvmError::ioctl("KVM_CREATE_VCPU"))?;
        Ok(Self { vm_fd, vcpus })
    }
}
