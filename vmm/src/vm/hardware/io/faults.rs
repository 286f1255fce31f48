//! Failures of devices, which are kept for the owner of their VM.

use std::sync::{Arc, Mutex, PoisonError};

use podvisor_devices::virtio::{Fault, HostFault};

/// The maximum number of device faults that are kept for the owner.
const FAULTS_KEPT: usize = 64;

/// A failure of a device's host side, for the owner of the VM.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceFault {
    /// The device's name, as in [`crate::vm::Vm::counters`].
    pub device: String,
    /// What failed, with its causes.
    pub fault: Arc<Fault>,
}

/// The faults so far; the oldest are dropped if there are too many.
pub(crate) type Faults = Arc<Mutex<Vec<DeviceFault>>>;

/// Adds a fault of a device.
pub(super) fn keep(faults: &Faults, device: &str, fault: HostFault) {
    let mut faults = faults.lock().unwrap_or_else(PoisonError::into_inner);
    if faults.len() == FAULTS_KEPT {
        faults.remove(0);
    }
    faults.push(DeviceFault {
        device: device.to_owned(),
        fault: Arc::new(Fault::Host(fault)),
    });
}
