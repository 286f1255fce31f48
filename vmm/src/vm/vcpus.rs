//! How many vCPUs there are, and more of them for a running guest.

use std::sync::{Arc, Mutex, MutexGuard};

use kvm_ioctls::VcpuFd;

use super::control::Inner;
use super::start::NewThread;
use super::{Action, Vm, VmError, lock};
use crate::boot::{self, BootError};
use crate::cpuid;
use crate::kvm::KvmError;

/// Why there are no more vCPUs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddVcpusError {
    /// The guest was told of fewer when it booted.
    #[error("cannot have {vcpus} vCPUs: the VM was built for at most {max}")]
    TooMany {
        /// What was asked for.
        vcpus: u8,
        /// What [`VmBuilder::max_vcpus`](super::VmBuilder::max_vcpus) said.
        max: u8,
    },
    /// The VM does not run, or has no thread for one.
    #[error(transparent)]
    State(#[from] VmError),
    /// KVM refused one.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// KVM refused the state in which one begins.
    #[error(transparent)]
    Boot(#[from] BootError),
}

/// A vCPU that was made and has no thread, and its number. KVM makes each number once in the life
/// of a VM.
pub(super) type SpareVcpu = Arc<Mutex<Option<(u8, VcpuFd)>>>;

/// A vCPU on its way to its thread. One that does not get there is there for the next attempt.
pub(super) struct NewVcpu {
    made: Option<(u8, VcpuFd)>,
    spare: SpareVcpu,
}

impl NewVcpu {
    /// For the thread that it gets to.
    fn take(mut self) -> Option<VcpuFd> {
        self.made.take().map(|(_, vcpu)| vcpu)
    }
}

impl Drop for NewVcpu {
    fn drop(&mut self) {
        if let Some(made) = self.made.take() {
            *lock(&self.spare) = Some(made);
        }
    }
}

impl Vm {
    /// vCPUs that there are; none once the VM has ended.
    #[must_use]
    pub fn vcpus(&self) -> u8 {
        let waiting = lock(&self.parts).as_ref().map(|parts| parts.vcpus.len());
        let count = waiting.unwrap_or_else(|| self.control().lock().vcpus);
        u8::try_from(count).unwrap_or(u8::MAX)
    }

    /// vCPUs that there may ever be.
    #[must_use]
    pub fn max_vcpus(&self) -> u8 {
        self.context.machine.max_vcpus
    }

    /// Adds vCPUs to a running guest until there are `count`; those that there are stay. A new one
    /// waits for the guest to bring it up, as all but the first do at boot: see
    /// [`VmBuilder::max_vcpus`](super::VmBuilder::max_vcpus).
    ///
    /// # Errors
    /// See [`AddVcpusError`]. Those that were made before it failed are there.
    pub fn add_vcpus(&self, count: u8) -> Result<(), AddVcpusError> {
        let _transition = lock(&self.transition);
        let there = self.legal_vcpus(&self.control().lock())?;
        let max = self.max_vcpus();
        if count > max {
            return Err(AddVcpusError::TooMany { vcpus: count, max });
        }
        for id in there..count {
            let vcpu = self.new_vcpu(id)?;
            let thread = {
                let mut inner = self.control().lock();
                // Whoever ends the VM waits for the thread, or this finds that it has ended.
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

    /// As many as there are, when there may be more now.
    fn legal_vcpus(&self, inner: &MutexGuard<'_, Inner>) -> Result<u8, VmError> {
        self.legal(inner, Action::AddVcpus)?;
        Ok(u8::try_from(inner.vcpus).unwrap_or(u8::MAX))
    }

    /// A vCPU as after RESET, which waits for INIT and SIPI. KVM has its time stamp counter agree
    /// with those of the others.
    pub(super) fn new_vcpu(&self, id: u8) -> Result<NewVcpu, AddVcpusError> {
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
        let new = NewVcpu {
            made: Some((id, vcpu)),
            spare: self.spare_vcpu.clone(),
        };
        prepared.map(|()| new)
    }

    fn prepare_vcpu(&self, id: u8, vcpu: &VcpuFd) -> Result<(), AddVcpusError> {
        let machine = &self.context.machine;
        if let Some(khz) = machine.tsc_khz
            && vcpu.get_tsc_khz().is_ok_and(|here| here != khz)
        {
            vcpu.set_tsc_khz(khz)
                .map_err(KvmError::ioctl("KVM_SET_TSC_KHZ"))?;
        }
        vcpu.set_cpuid2(&cpuid::for_vcpu(&machine.cpuid, id))
            .map_err(KvmError::ioctl("KVM_SET_CPUID2"))?;
        boot::boot_registers(vcpu, None)?;
        // KVM numbers local APICs anew when one is set, not when there is one more.
        let lapic = vcpu.get_lapic().map_err(KvmError::ioctl("KVM_GET_LAPIC"))?;
        vcpu.set_lapic(&lapic)
            .map_err(KvmError::ioctl("KVM_SET_LAPIC"))?;
        Ok(())
    }
}
