//! A vCPU that is added to a running guest, until its thread has it.

use std::sync::{Arc, Mutex};

use kvm_ioctls::VcpuFd;

use crate::vm::lock::lock;

/// A vCPU that was created and has no thread, and its number. KVM creates each number only once in
/// the lifetime of a VM.
pub(crate) type SpareVcpu = Arc<Mutex<Option<(u8, VcpuFd)>>>;

/// A vCPU on its way to its thread. One that does not get there is kept for the next attempt.
pub(crate) struct NewVcpu {
    made: Option<(u8, VcpuFd)>,
    spare: SpareVcpu,
}

impl NewVcpu {
    pub(crate) fn new(id: u8, vcpu: VcpuFd, spare: SpareVcpu) -> Self {
        Self {
            made: Some((id, vcpu)),
            spare,
        }
    }

    /// Takes the vCPU, on the thread that runs it.
    pub(crate) fn take(mut self) -> Option<VcpuFd> {
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
