//! What a machine begins from: a firmware, the kernel that is kept of its image, or the
//! files of a saved machine.

use std::fs::File;

use serde::{Deserialize, Serialize};

/// A kernel that an image boots, and what it is started with: a new machine over that image starts
/// it at once, in place of the loader. Its reboots go through the loader, which sees what the guest
/// has changed.
#[derive(Debug)]
pub struct KeptKernel {
    /// An ELF vmlinux or a bzImage, open for reading.
    pub kernel: File,
    /// Its initial file system.
    pub initramfs: Option<File>,
    /// Its command line.
    pub cmdline: String,
    /// What the image's boot loader calls it; the machine's console says so.
    pub title: String,
}

/// A saved machine that is continued in place of a boot.
#[derive(Debug)]
pub struct SavedMachine {
    /// The state of vCPUs and devices, open for reading; for [`ContinueAs::Same`], for writing as
    /// well.
    pub state: File,
    /// The memory, open for reading. It must not change while a machine runs from it.
    pub memory: File,
    /// What the machine is to the one that was saved.
    pub continues: ContinueAs,
}

/// What a machine's boot CPU enters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum BootProgram {
    /// A kernel: podvisor's loader, or the guest's own.
    #[default]
    Kernel,
    /// A firmware ([`Firmware`](podvisor_vmm::Firmware)), which boots the machine's disks. There is
    /// no initial file system and no command line.
    Firmware,
}

/// What a machine that continues from files is to the one that was saved there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContinueAs {
    /// The same one, once: the state is emptied before the guest runs, since its disks are then
    /// no longer those that the memory knows.
    Same,
    /// A copy, with its own disks; its guest is told that it is one by its generation ID.
    Copy,
}
