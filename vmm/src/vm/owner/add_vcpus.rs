//! The number of vCPUs, and adding vCPUs to a running guest.

use std::sync::MutexGuard;

use kvm_ioctls::VcpuFd;

use crate::boot::{self, BootError};
use crate::cpuid;
use crate::kvm::{self, KvmError};
use crate::vm::control::Inner;
use crate::vm::lifecycle::start::NewThread;
use crate::vm::lifecycle::{Vm, VmError};
use crate::vm::lock::lock;
use crate::vm::state::Action;
use crate::vm::vcpu::spare::NewVcpu;

/// Why vCPUs could not be added.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddVcpusError {
    /// More than the guest's firmware tables list.
    #[error("cannot have {vcpus} vCPUs: the VM was built for at most {max}")]
    TooMany {
        /// The requested number.
        vcpus: u8,
        /// The maximum set by [`VmBuilder::max_vcpus`](crate::vm::VmBuilder::max_vcpus).
        max: u8,
    },
    /// The VM is not running, or a thread could not be started.
    #[error(transparent)]
    State(#[from] VmError),
    /// KVM failed to create one.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// KVM refused its initial state.
    #[error(transparent)]
    Boot(#[from] BootError),
}

impl Vm {
    /// Returns the number of vCPUs; 0 once the VM has ended.
    #[must_use]
    pub fn vcpus(&self) -> u8 {
        let waiting = lock(&self.parts).as_ref().map(|parts| parts.vcpus.len());
        let count = waiting.unwrap_or_else(|| self.control().lock().vcpus);
        u8::try_from(count).unwrap_or(u8::MAX)
    }

    /// Returns the maximum number of vCPUs.
    #[must_use]
    pub fn max_vcpus(&self) -> u8 {
        self.context.machine.max_vcpus
    }

    /// Adds vCPUs to a running guest until there are `count`; existing ones stay. A new one waits
    /// for the guest to bring it up, as all but the first do at boot: see
    /// [`VmBuilder::max_vcpus`](crate::vm::VmBuilder::max_vcpus). A guest with
    /// [`VmBuilder::cpu_hotplug`](crate::vm::VmBuilder::cpu_hotplug) is told of them.
    ///
    /// # Errors
    /// See [`AddVcpusError`]. vCPUs that were added before the failure stay.
    pub fn add_vcpus(&self, count: u8) -> Result<(), AddVcpusError> {
        let _transition = lock(&self.transition);
        let there = self.legal_vcpus(&self.control().lock())?;
        let max = self.max_vcpus();
        if count > max {
            return Err(AddVcpusError::TooMany { vcpus: count, max });
        }
        let added = self.add_each(there, count);
        if let Some(port) = &self.events {
            port.add_cpus(self.vcpus());
        }
        added
    }

    fn add_each(&self, there: u8, count: u8) -> Result<(), AddVcpusError> {
        for id in there..count {
            let vcpu = self.new_vcpu(id)?;
            let thread = {
                let mut inner = self.control().lock();
                // A thread that ends the VM waits for this thread, or this finds that it has ended.
                self.legal_vcpus(&inner)?;
                inner.vcpus += 1;
                inner.threads += 1;
                drop(inner);
                NewThread::of_vcpu(&self.context, id, move || vcpu.take())
            };
            self.spawn(vec![thread])?;
        }
        Ok(())
    }

    /// Returns the number of vCPUs, if more may be added now.
    fn legal_vcpus(&self, inner: &MutexGuard<'_, Inner>) -> Result<u8, VmError> {
        self.legal(inner, Action::AddVcpus)?;
        Ok(u8::try_from(inner.vcpus).unwrap_or(u8::MAX))
    }

    /// Creates a vCPU as after RESET, which waits for INIT and SIPI. Its time stamp counter agrees
    /// with those of the others.
    pub(crate) fn new_vcpu(&self, id: u8) -> Result<NewVcpu, AddVcpusError> {
        let spare = lock(&self.spare_vcpu).take_if(|(number, _)| *number == id);
        let vcpu = match spare {
            Some((_, vcpu)) => vcpu,
            None => {
                let vm = &self.context.machine.vm_fd;
                vm.create_vcpu(u64::from(id))
                    .map_err(KvmError::ioctl("KVM_CREATE_VCPU"))?
            }
        };
        let prepared = self.prepare_vcpu(id, &vcpu);
        let new = NewVcpu::new(id, vcpu, self.spare_vcpu.clone());
        prepared.map(|()| new)
    }

    fn prepare_vcpu(&self, id: u8, vcpu: &VcpuFd) -> Result<(), AddVcpusError> {
        let machine = &self.context.machine;
        if let Some(khz) = machine.tsc_khz {
            kvm::count_as_the_others(vcpu, khz, machine.tsc_offset)?;
        }
        vcpu.set_cpuid2(&cpuid::for_vcpu(&machine.cpuid, id))
            .map_err(KvmError::ioctl("KVM_SET_CPUID2"))?;
        boot::boot_registers(vcpu, None)?;
        // KVM renumbers local APICs when the state of one is set, not when one is added.
        let lapic = vcpu.get_lapic().map_err(KvmError::ioctl("KVM_GET_LAPIC"))?;
        vcpu.set_lapic(&lapic)
            .map_err(KvmError::ioctl("KVM_SET_LAPIC"))?;
        Ok(())
    }
}
