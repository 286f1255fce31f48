//! A VM that KVM creates while its configuration is not known yet.

use kvm_ioctls::VmFd;

use crate::kvm::{self, KvmError};
use crate::vm::threads::Ahead;

/// A VM of KVM's without vCPUs, memory or devices, which is created on a thread of its own.
///
/// Older kernels (Linux 6.1 among them) wait for an RCU grace period in `KVM_CREATE_VM`, for some
/// milliseconds. A program that starts a process for each VM can spend that time on reading the
/// VM's configuration: it begins first of all, and passes this to
/// [`VmBuilder::early`](crate::vm::VmBuilder::early). The thread is gone when the VM is built, or when
/// this is dropped, which waits for it.
#[derive(Debug)]
pub struct EarlyVm(pub(crate) Ahead<Result<VmFd, KvmError>>);

impl EarlyVm {
    /// Begins to create it. It cannot fail: a VM that could not be created early is created by
    /// [`VmBuilder::build`](crate::vm::VmBuilder::build), which returns the error if that fails, too.
    #[must_use]
    pub fn begin() -> Self {
        Self(Ahead::begin("vm-create", || {
            kvm::open().and_then(|kvm| kvm::create_vm(&kvm))
        }))
    }

    pub(crate) fn take(self) -> Option<VmFd> {
        let created = self.0.take()?;
        let failed = |error: &KvmError| tracing::debug!(%error, "no VM was created early");
        created.inspect_err(failed).ok()
    }
}
