//! A machine's disks: those that it begins with, and those that come and go while it runs.

use std::fs::File;
use std::io;
use std::sync::Arc;

use podvisor_vmm::devices::blk::FileDisk;
use podvisor_vmm::{BlockDevice, BlockHandle, BuildError, PlugError, Plugged};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::{Machine, MachineError};

/// Bytes of a disk's sector: what a spare disk has without a medium.
const SECTOR: u64 = 512;

/// A read-only disk.
#[derive(Debug)]
pub struct Disk {
    /// The open file behind it. A lock that it holds is kept while the machine lives.
    pub file: File,
    /// How the guest finds it; at most 20 bytes.
    pub serial: String,
}

/// A disk that was plugged into a running machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluggedDisk(Plugged);

impl PluggedDisk {
    /// Where the guest finds it, as it writes PCI addresses.
    #[must_use]
    pub fn address(&self) -> String {
        self.0.address.to_string()
    }
}

impl Machine {
    /// Plugs a disk in, for the guest to find when it looks.
    ///
    /// # Errors
    /// The machine is not on PCI, has no place for a further device, or has ended.
    pub async fn plug_disk(
        &self,
        disk: Disk,
        is_read_only: bool,
    ) -> Result<PluggedDisk, MachineError> {
        // Who may write to it, and from how many machines, is whoever opened it to say.
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

    /// Takes a disk away that was plugged in, which the guest has let go of.
    ///
    /// # Errors
    /// It is in the middle of a request that its file does not answer.
    pub async fn unplug_disk(&self, disk: &PluggedDisk) -> Result<(), MachineError> {
        let name = disk.0.name.clone();
        self.blocking(move |vm| vm.unplug(&name)).await
    }

    /// Gives the spare disk `index` a medium.
    ///
    /// # Errors
    /// There is no such spare disk, or the machine has ended.
    pub async fn insert_disk(&self, index: usize, disk: Disk) -> Result<(), MachineError> {
        let medium = medium(disk.file, &disk.serial)?;
        let slot = self.spare(index)?.name().to_owned();
        self.blocking(move |vm| vm.insert_disk(&slot, Box::new(medium), &disk.serial))
            .await
    }

    /// Takes the medium out of a spare disk, which the guest has unmounted.
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
        self.blocking(move |_| slot.swap(Box::new(empty), "")).await
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
