//! Gathers the state of a paused VM for a snapshot.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::MutexGuard;

use rustix::rand::{GetRandomFlags, getrandom};

use super::vm::{Vm, VmError};
use crate::kvm::KvmError;
use crate::snapshot::{
    self, ChipState, DeviceState, Identity, MachineState, SnapshotError, VcpuState, WorkingSet,
};
use crate::vm::devices::attach::AttachedDevice;
use crate::vm::devices::handle::{HandleError, ask};
use crate::vm::hardware::pci::PciRoot;
use crate::vm::lock::lock;
use crate::vm::state::Action;

/// Why a snapshot of a VM was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TakeSnapshotError {
    /// The VM is not paused, or has ended.
    #[error(transparent)]
    State(#[from] VmError),
    /// A device did not answer.
    #[error(transparent)]
    Device(#[from] HandleError),
    /// KVM did not return the VM's state.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The snapshot could not be written, or cannot be a difference.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
}

impl Vm {
    /// Writes all of a paused VM to `dir`, which must not exist yet: [`crate::Snapshot::open`]
    /// creates VMs from it. The directory is complete, and synced to disk, when it gets its name;
    /// nothing remains if this fails, or the VM ends meanwhile. The VM stays paused.
    ///
    /// Disks are not part of it: a VM that is restored from the snapshot needs disks with the
    /// content that this VM's disks have now.
    ///
    /// # Errors
    /// See [`TakeSnapshotError`].
    pub fn snapshot(&self, dir: impl AsRef<Path>) -> Result<(), TakeSnapshotError> {
        self.save(dir.as_ref(), None)
    }

    /// As [`Self::snapshot`], to two empty files that are open for writing: for a process that may
    /// open none, which has got a [page map](crate::VmBuilder::page_map). Both are synced to disk;
    /// their names, and the directories that have them, are the caller's.
    /// [`Snapshot::is_finished`](crate::Snapshot::is_finished) tells a complete snapshot from one
    /// whose writer was killed; the files are empty again if this fails.
    ///
    /// # Errors
    /// See [`TakeSnapshotError`]; the messages call the files "state" and "memory".
    pub fn snapshot_to(&self, state: &File, memory: &File) -> Result<(), TakeSnapshotError> {
        let transition = lock(&self.transition);
        let identity = new_identity(Path::new("state"))?;
        let gathered = self.gather(&transition, identity)?;
        let plugged = self.plugged_memory()?;
        let check = || Ok(self.check_not_ended()?);
        let own = &self.context.machine.memory;
        snapshot::write_files((state, memory), &gathered, own, plugged, check)
    }

    /// As [`Self::snapshot`], but writes only the memory that this VM has written since it was
    /// restored. The full snapshot that it came from must stay where it is.
    ///
    /// # Errors
    /// See [`TakeSnapshotError`]; [`SnapshotError::NoBase`] if the VM did not come from a
    /// snapshot's directory.
    pub fn snapshot_difference(&self, dir: impl AsRef<Path>) -> Result<(), TakeSnapshotError> {
        let full = self.origin.clone().ok_or(SnapshotError::NoBase)?;
        self.save(dir.as_ref(), Some(full))
    }

    /// Returns the pages that this VM has written since it was restored from a snapshot, running or
    /// not.
    ///
    /// # Errors
    /// [`SnapshotError::NoBase`] if it was not restored, or if the kernel cannot report them.
    pub fn working_set(&self) -> Result<WorkingSet, SnapshotError> {
        let own = self.context.machine.memory.own_pages()?;
        own.map(WorkingSet::new).ok_or(SnapshotError::NoBase)
    }

    fn save(&self, dir: &Path, full: Option<(PathBuf, Identity)>) -> Result<(), TakeSnapshotError> {
        let transition = lock(&self.transition);
        let identity = new_identity(dir)?;
        let state = self.gather(&transition, identity)?;
        let memory = &self.context.machine.memory;
        let plugged = self.plugged_memory()?;
        let check = || Ok(self.check_not_ended()?);
        snapshot::write(dir, state, memory, plugged, full, check)
    }

    /// Returns where plugged memory ends, within that which may be plugged in.
    pub(super) fn plugged_memory(&self) -> Result<u64, HandleError> {
        match self.context.machine.memory.shape().hotplug_region() {
            Some(_) => self.hotplug_memory()?.run(|device| device.plugged_end()),
            None => Ok(0),
        }
    }

    /// The parts of a state are consistent only if nothing ended the VM meanwhile, such as a thread
    /// that panicked.
    pub(super) fn check_not_ended(&self) -> Result<(), VmError> {
        let has_ended = self.control().lock().outcome.is_some();
        match has_ended {
            true => Err(self.ended()),
            false => Ok(()),
        }
    }

    /// Returns the state of the VM, which is paused, and stays so for the transition.
    pub(super) fn gather(
        &self,
        _transition: &MutexGuard<'_, ()>,
        identity: Identity,
    ) -> Result<MachineState, TakeSnapshotError> {
        {
            let inner = self.control().lock();
            self.legal(&inner, Action::Snapshot)?;
        }
        let machine = &self.context.machine;
        // A device change that comes meanwhile interrupts the guest. The receivers of the interrupt
        // are saved after its sender: one interrupt too many is harmless.
        let devices = lock(&self.devices).clone();
        let devices = devices.iter().map(|device| device_state(device));
        let devices = devices.collect::<Result<_, _>>()?;
        let numbers = snapshot::msr_numbers(&machine.kvm)?;
        let vcpus = self
            .control()
            .with_vcpus(move |vcpu| VcpuState::gather(vcpu, &numbers))
            .ok_or_else(|| self.ended())?
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?;
        Ok(MachineState {
            identity,
            memory: machine.memory.shape(),
            base: None,
            cpuid: machine.cpuid.clone(),
            max_vcpus: machine.max_vcpus,
            vcpus,
            events: self.events.as_ref().map(|port| port.save()),
            firmware: self.firmware.as_ref().map(|ports| lock(ports).save()),
            chips: ChipState::gather(&machine.vm_fd)?,
            serial: self.serial.as_ref().map(|port| lock(port).save()),
            pci: self.pci.as_ref().map(PciRoot::config_address),
            devices,
            working_set: None,
        })
    }

    fn ended(&self) -> VmError {
        let inner = self.control().lock();
        self.illegal(&inner, Action::Snapshot)
    }
}

fn device_state(device: &AttachedDevice) -> Result<DeviceState, HandleError> {
    let config = device.info.config.clone();
    // All that a change of the device affects, between two changes.
    let (queues, own, config) = ask(&device.name, &device.link, move |worker| {
        let own = worker.device().save();
        (worker.queue_states(), own, config.save())
    })?;
    Ok(DeviceState {
        name: device.name.clone(),
        registers: device.registers.save(),
        queues,
        config,
        own,
    })
}

fn new_identity(dir: &Path) -> Result<Identity, SnapshotError> {
    let mut identity = Identity::default();
    rustix::io::retry_on_intr(|| getrandom(&mut identity[..], GetRandomFlags::empty())).map_err(
        |error| SnapshotError::Write {
            path: dir.to_owned(),
            source: error.into(),
        },
    )?;
    Ok(identity)
}
