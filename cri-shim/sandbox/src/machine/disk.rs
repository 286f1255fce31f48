//! A machine's disks: those that it starts with, and those that are added while it runs.

use std::fs::File;
use std::io;
use std::sync::Arc;

use podvisor_vmm::devices::blk::FileDisk;
use podvisor_vmm::{
    BlockDevice, BlockHandle, BuildError, PlugError, PluggedDevice, UnplugRequest, Vm,
};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::error::MachineError;
use super::running::Machine;

/// Size of a disk's sector in bytes, and of a spare disk without a medium.
const SECTOR: u64 = 512;

/// A read-only disk.
#[derive(Debug)]
pub struct Disk {
    /// The open file of its contents. A lock on it is kept while the machine lives.
    pub file: File,
    /// The serial number by which the guest finds it; at most 20 bytes.
    pub serial: String,
}

/// A disk that was plugged into a running machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluggedDisk(PluggedDevice);

impl PluggedDisk {
    /// The disk's PCI address, written as the guest does.
    #[must_use]
    pub fn address(&self) -> String {
        self.0.address.to_string()
    }
}

impl Machine {
    /// Plugs a disk in; the guest finds it when it looks.
    ///
    /// # Errors
    /// The machine is not on PCI, has no free slot, or has ended.
    pub async fn plug_disk(
        &self,
        disk: Disk,
        is_read_only: bool,
    ) -> Result<PluggedDisk, MachineError> {
        // The file's opener has decided who may write to it, and from how many machines.
        let medium = medium(disk.file, &disk.serial)?;
        let device = BlockDevice::new(Box::new(medium)).serial(&disk.serial);
        let device = match is_read_only {
            true => device.read_only(),
            false => device,
        };
        let vm = Arc::clone(&self.vm);
        match tokio::task::spawn_blocking(move || plug(&vm, device)).await {
            Ok(plugged) => Ok(PluggedDisk(plugged?)),
            Err(error) => Err(MachineError::Thread(io::Error::other(error))),
        }
    }

    /// Plugs a disk in, of which the guest is told, and returns its device's name. It blocks.
    ///
    /// # Errors
    /// The machine has no free slot, does not run, or has ended.
    pub(crate) fn plug_device(&self, device: BlockDevice) -> Result<String, MachineError> {
        Ok(plug(&self.vm, device)?.name)
    }

    /// Asks the guest to release a disk; `None` if it is told of no devices: its machine was made
    /// by a podvisor that could not.
    ///
    /// # Errors
    /// The machine does not run, has ended, or has no such device.
    pub(crate) fn request_unplug(
        &self,
        device: &str,
    ) -> Result<Option<UnplugRequest>, MachineError> {
        match self.vm.request_unplug(device) {
            Err(PlugError::NotTold) => Ok(None),
            asked => Ok(Some(asked?)),
        }
    }

    /// Takes a disk away, whatever the guest does with it. It blocks.
    ///
    /// # Errors
    /// [`MachineError::Start`]: the machine does not run, and still has the disk. With any other
    /// error the guest has lost it; a request may be in flight that its file does not complete.
    pub(crate) fn unplug_device(&self, device: &str) -> Result<(), MachineError> {
        match self.vm.unplug(device) {
            Err(PlugError::State(error)) => Err(error.into()),
            unplugged => Ok(unplugged?),
        }
    }

    /// Unplugs a disk that was plugged in and that the guest has released.
    ///
    /// # Errors
    /// A request of the disk is in flight that its file does not complete.
    pub async fn unplug_disk(&self, disk: &PluggedDisk) -> Result<(), MachineError> {
        let name = disk.0.name.clone();
        self.blocking(move |vm| vm.unplug(&name)).await
    }

    /// Inserts a medium into the spare disk `index`.
    ///
    /// # Errors
    /// The spare disk does not exist, or the machine has ended.
    pub async fn insert_disk(&self, index: usize, disk: Disk) -> Result<(), MachineError> {
        let medium = medium(disk.file, &disk.serial)?;
        let slot = self.spare(index)?.name().to_owned();
        self.blocking(move |vm| vm.insert_disk(&slot, Box::new(medium), &disk.serial))
            .await
    }

    /// Removes the medium from a spare disk that the guest has unmounted.
    ///
    /// # Errors
    /// As [`Self::insert_disk`].
    pub async fn eject_disk(&self, index: usize) -> Result<(), MachineError> {
        let empty = || {
            let memory = rustix::fs::memfd_create(c"empty-disk", MemfdFlags::CLOEXEC)?;
            rustix::fs::ftruncate(&memory, SECTOR)?;
            Ok(File::from(memory))
        };
        let empty = empty().map_err(|error: Errno| MachineError::Disk {
            serial: String::new(),
            source: error.into(),
        })?;
        let empty = medium(empty, "")?;
        let slot = self.spare(index)?.clone();
        // The device may be in the middle of a read from a slow disk.
        self.blocking(move |_| slot.replace_disk(Box::new(empty), ""))
            .await
    }

    fn spare(&self, index: usize) -> Result<&BlockHandle, MachineError> {
        self.spare
            .get(index)
            .ok_or(MachineError::NoSpareDisk(index))
    }
}

fn plug(vm: &Vm, device: BlockDevice) -> Result<PluggedDevice, MachineError> {
    match vm.plug(device) {
        Err(PlugError::NotPci) => Err(MachineError::NotPci),
        Err(PlugError::Build(BuildError::NoPciSlot)) => Err(MachineError::Full),
        plugged => Ok(plugged?),
    }
}

fn medium(file: File, serial: &str) -> Result<FileDisk, MachineError> {
    FileDisk::new(file).map_err(|source| MachineError::Disk {
        serial: serial.to_owned(),
        source,
    })
}
