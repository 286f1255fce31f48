//! What a machine is made of.

use std::fmt;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::Path;

use podvisor_vmm::{EarlyVm, Initramfs, Kernel, Snapshot, Transport};

use super::disk::Disk;
use super::error::MachineError;
use super::nic::Nic;
use super::share::SharedDir;

/// The kernel and initramfs that a machine boots.
#[derive(Debug)]
pub struct GuestFiles {
    pub(super) kernel: Kernel,
    pub(super) initramfs: Initramfs,
}

impl GuestFiles {
    /// Opens a kernel (ELF vmlinux or bzImage) and an initramfs.
    ///
    /// # Errors
    /// A file cannot be read, or the first one is not a kernel.
    pub fn open(kernel: &Path, initramfs: &Path) -> Result<Self, MachineError> {
        Ok(Self {
            kernel: Kernel::open(kernel)?,
            initramfs: Initramfs::open(initramfs)?,
        })
    }

    /// Uses files that are open already.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_files(kernel: File, initramfs: File) -> Result<Self, MachineError> {
        Ok(Self {
            kernel: Kernel::from_file(kernel)?,
            initramfs: Initramfs::from_file(initramfs)?,
        })
    }
}

/// How a machine starts.
#[derive(Debug)]
pub enum Boot {
    /// By booting.
    Cold(GuestFiles),
    /// As a clone of a machine with the same CPUs, memory and devices.
    Warm(Snapshot),
    /// As such a clone, but only if its guest knows all features of this host's CPU. A guest that
    /// booted before a microcode or kernel update of the host would not use what the update
    /// brought.
    Template(Snapshot),
}

/// The unit of [`MachineConfig::growth`] in bytes.
pub const GROWTH_UNIT: u64 = 128 << 20;

/// The configuration of a machine. None of its files is opened by path.
#[derive(Debug)]
pub struct MachineConfig {
    /// How it starts.
    pub boot: Boot,
    /// Virtual CPUs.
    pub cpus: u8,
    /// The maximum of vCPUs for [`Machine::add_cpus`](super::Machine::add_cpus); at least `cpus`.
    pub max_cpus: u8,
    /// Memory in bytes.
    pub memory: u64,
    /// Bytes that [`Machine::grow`](super::Machine::grow) may add at run time: a multiple of
    /// [`GROWTH_UNIT`].
    pub growth: u64,
    /// Disks that exist from the start.
    pub disks: Vec<Disk>,
    /// Disks that are empty until [`Machine::insert_disk`](super::Machine::insert_disk) fills them.
    pub spare_disks: u8,
    /// Network cards.
    pub nics: Vec<Nic>,
    /// The directory that the guest finds under [`SHARE_TAG`](super::SHARE_TAG).
    pub share: Option<SharedDir>,
    /// The bus of its devices.
    pub transport: Transport,
    /// Whether the guest's kernel counts pressure stall information.
    pub psi: bool,
    /// The file for the serial console's output; `None` makes the boot faster.
    pub console: Option<File>,
    /// A VM that KVM creates already.
    pub early: Option<EarlyVm>,
}

/// A vsock port of the host that the guest may connect to.
pub struct VsockPort {
    /// Its number.
    pub port: u32,
    /// Called with each connection, on the device's event loop: it must not block.
    pub on_connect: Box<dyn FnMut(UnixStream) + Send>,
}

impl fmt::Debug for VsockPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VsockPort")
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}
