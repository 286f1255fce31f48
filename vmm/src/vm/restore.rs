//! Puts what a snapshot holds into a machine that has just been made.

use std::sync::PoisonError;

use podvisor_devices::virtio::{RestoreError, VirtioDevice};

use super::attach::{self, Attached};
use super::hardware::Hardware;
use crate::snapshot::{DeviceState, MachineState, SnapshotError};

/// Checks that there is a device for each one of the snapshot, and gives each its own state, before
/// it is attached.
pub(super) fn device_states(
    devices: &mut [Box<dyn VirtioDevice>],
    states: &[DeviceState],
) -> Result<(), SnapshotError> {
    let given = attach::names(devices);
    let saved: Vec<String> = states.iter().map(|state| state.name.clone()).collect();
    if given != saved {
        return Err(SnapshotError::Devices { saved, given });
    }
    for (device, state) in devices.iter_mut().zip(states) {
        device.restore(&state.own).map_err(refused(&state.name))?;
    }
    Ok(())
}

/// Sets vCPUs, chips and the devices' registers.
pub(super) fn machine(hardware: &Hardware, state: &MachineState) -> Result<(), SnapshotError> {
    for (vcpu, saved) in hardware.vcpus.iter().zip(&state.vcpus) {
        saved.apply(vcpu)?;
    }
    // I/O APIC and PIC may interrupt at once, which local APICs must be there for.
    state.chips.apply(&hardware.vm_fd)?;
    // Devices raise interrupts that were on their way, which the I/O APIC must be there for.
    for (device, saved) in hardware.devices.devices.iter().zip(&state.devices) {
        registers(device, saved).map_err(refused(&saved.name))?;
    }
    Ok(())
}

fn registers(device: &Attached, saved: &DeviceState) -> Result<(), RestoreError> {
    device.info.config.restore(&saved.config)?;
    let mut transport = device
        .transport
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    transport.restore(&saved.registers, &saved.queues)
}

pub(super) fn refused(name: &str) -> impl FnOnce(RestoreError) -> SnapshotError {
    let device = name.to_owned();
    move |source| SnapshotError::Device { device, source }
}
