//! A machine's disks: those that it starts with, and those that are added while it runs.

use std::fs::File;
use std::io;
use std::sync::Arc;

use podvisor_vmm::devices::blk::FileDisk;
use podvisor_vmm::{BlockDevice, BlockHandle, BuildError, PlugError, PluggedDevice};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::{Machine, MachineError};

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
        match tokio::task::spawn_blocking(move || vm.plug(device)).await {
            Ok(Err(PlugError::NotPci)) => Err(MachineError::NotPci),
            Ok(Err(PlugError::Build(BuildError::NoPciSlot))) => Err(MachineError::Full),
            Ok(plugged) => Ok(PluggedDisk(plugged?)),
            Err(error) => Err(MachineError::Thread(io::Error::other(error))),
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

fn medium(file: File, serial: &str) -> Result<FileDisk, MachineError> {
    FileDisk::new(file).map_err(|source| MachineError::Disk {
        serial: serial.to_owned(),
        source,
    })
}
