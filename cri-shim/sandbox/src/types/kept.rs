//! How the kernel of an image is read from its disk.

use std::fs::File;
use std::time::Duration;

/// A machine of the loader alone, which writes to a file what an image boots. No code of the image
/// runs in it.
#[derive(Debug)]
pub struct ReadKernel {
    /// The loader's kernel, an ELF vmlinux.
    pub kernel: File,
    /// Holds the loader.
    pub initramfs: File,
    /// The command line of the loader's kernel. The image is the disk with the serial
    /// [`IMAGE`](Self::IMAGE), the file that with the serial [`FRAME`](Self::FRAME).
    pub cmdline: String,
    /// Memory in bytes; at most what the sandbox was launched for.
    pub memory: u64,
    /// The image, a raw disk, open for reading.
    pub image: File,
    /// What the loader writes to, open for reading and writing, as large as may be written.
    pub frame: File,
}

impl ReadKernel {
    /// The serial of the image.
    pub const IMAGE: &str = "root";

    /// How long the machine may run. One that boots its disk itself has more time
    /// ([`BootMachine::LOADER_LIMIT`](crate::BootMachine::LOADER_LIMIT)), and kubelets do not wait
    /// for both.
    pub const LIMIT: Duration = Duration::from_secs(60);

    /// The serial of the disk that is written.
    pub const FRAME: &str = "kept-kernel";
}
