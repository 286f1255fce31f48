//! Restores a snapshot's state into a newly created machine.

use std::collections::BTreeSet;

use kvm_ioctls::Cap;
use podvisor_devices::pci::SLOTS;
use podvisor_devices::virtio::RestoreError;

use super::hardware::Hardware;
use crate::snapshot::{CounterSetup, DeviceState, MachineState, SavedRegisters, SnapshotError};
use crate::vm::devices::attach::{self, AttachedDevice, GivenDevice, NewDevice};
use crate::vm::devices::id;

/// Checks that there is a device for each one of the snapshot, and gives each its name, its place
/// and its own state, before it is attached.
pub(crate) fn device_states(
    devices: Vec<GivenDevice>,
    states: &[DeviceState],
) -> Result<Vec<NewDevice>, SnapshotError> {
    let mut devices = attach::named(devices);
    // The number of a device that was plugged in may differ from its position among its type; an
    // id is the same.
    fn types<'a>(names: impl Iterator<Item = &'a String>) -> impl Iterator<Item = &'a str> {
        names.map(|name| id::type_of(name).unwrap_or(name))
    }
    let saved = states.iter().map(|state| &state.name);
    let given = devices.iter().map(|new| &new.name);
    if !types(saved.clone()).eq(types(given.clone())) {
        return Err(SnapshotError::Devices {
            saved: saved.cloned().collect(),
            given: given.cloned().collect(),
        });
    }
    let mut taken = BTreeSet::from([0]);
    for (new, state) in devices.iter_mut().zip(states) {
        new.device
            .restore(&state.own)
            .map_err(SnapshotError::of_device(&state.name))?;
        new.name.clone_from(&state.name);
        if let SavedRegisters::Pci(slot, _) = &state.registers {
            if *slot >= SLOTS || !taken.insert(*slot) {
                return Err(SnapshotError::of_device(&state.name)(
                    RestoreError::Invalid {
                        what: "a place on the PCI bus that does not exist, or is another device's",
                    },
                ));
            }
            new.slot = Some(*slot);
        }
    }
    Ok(devices)
}

/// Sets vCPUs, chips and the devices' registers.
pub(crate) fn machine(hardware: &mut Hardware, state: &MachineState) -> Result<(), SnapshotError> {
    let can_scale = hardware.vm_fd.check_extension(Cap::TscControl);
    for (number, (vcpu, saved)) in hardware.vcpus.iter().zip(&state.vcpus).enumerate() {
        let counter = CounterSetup {
            can_scale,
            is_first: number == 0,
        };
        saved.apply(vcpu, counter, &mut hardware.tsc_offset)?;
    }
    // I/O APIC and PIC may interrupt immediately, which requires the local APICs.
    state.chips.apply(&hardware.vm_fd)?;
    if let (Some(pci), Some(address)) = (&hardware.pci, state.pci) {
        pci.set_config_address(address);
    }
    // Devices raise interrupts that were pending, which requires all APICs.
    for (device, saved) in hardware.devices.devices.iter().zip(&state.devices) {
        registers(device, saved).map_err(SnapshotError::of_device(&saved.name))?;
    }
    hardware.prepare_notifications();
    Ok(())
}

fn registers(device: &AttachedDevice, saved: &DeviceState) -> Result<(), RestoreError> {
    device.info.config.restore(&saved.config)?;
    device.registers.restore(&saved.registers, &saved.queues)
}
