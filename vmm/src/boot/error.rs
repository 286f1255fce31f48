//! Errors on the way to a booted kernel.

use std::path::PathBuf;

use super::MAX_CPUS;

/// Errors of opening, checking and loading the files that a guest boots from.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootError {
    /// The file could not be opened.
    #[error("cannot open {}", path.display())]
    Open {
        /// The path of the file, as given.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The file could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The path of the file, as given.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The path is not that of a regular file, or the file is empty.
    #[error("{} is {seems}: name a file", path.display())]
    NotAFile {
        /// The path, as given.
        path: PathBuf,
        /// What it is instead, such as "a directory".
        seems: &'static str,
    },
    /// The file does not have a bootable format.
    #[error("{} is neither an ELF vmlinux nor a bzImage: it seems to be {seems}", path.display())]
    NotAKernel {
        /// The path of the file, as given.
        path: PathBuf,
        /// The format that its first bytes indicate, such as "gzip-compressed data".
        seems: &'static str,
    },
    /// The file has a kernel's format, but its content cannot be booted.
    #[error("{} cannot be booted: take another kernel, or copy it again", path.display())]
    Kernel {
        /// The path of the file, as given.
        path: PathBuf,
        /// What is wrong in it.
        #[source]
        fault: KernelFault,
    },
    /// The file is too large for a firmware.
    #[error(
        "{} has {} MiB, a firmware at most 64: take another file",
        path.display(), size >> 20
    )]
    FirmwareSize {
        /// The path of the file, as given.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// The file is a kernel, or an image for another machine.
    #[error(
        "{} is not a firmware for this machine: take EDK2's CLOUDHV.fd, whose ELF header has an \
        entry for PVH",
        path.display()
    )]
    NotAFirmware {
        /// The path of the file, as given.
        path: PathBuf,
    },
    /// A file does not fit into an initramfs, whose format has 32 bits for its length.
    #[error(
        "the file {path} for the initramfs has 4 GiB or more: leave it out, or give it by a disk"
    )]
    InitramfsFile {
        /// Its path in the initramfs.
        path: String,
    },
    /// Kernel and initramfs do not fit into the memory below the hole for devices.
    #[error(
        "kernel and initramfs need {} MiB of guest memory, {} MiB are there: give the guest more",
        needed.div_ceil(1 << 20), available >> 20
    )]
    MemoryTooSmall {
        /// Bytes from address 0 that must be memory.
        needed: u64,
        /// Bytes from address 0 that are available.
        available: u64,
    },
    /// The command line is longer than the kernel supports.
    #[error("the kernel command line has {len} bytes, the kernel takes {max}: shorten it")]
    CmdlineTooLong {
        /// Its length in bytes.
        len: usize,
        /// The maximum length.
        max: usize,
    },
    /// A NUL ends the command line early, and a line break hides the rest.
    #[error("the kernel command line holds the control character {character:?}: remove it")]
    CmdlineCharacter {
        /// The character.
        character: char,
    },
    /// The MP table identifies CPUs by 8-bit APIC ids.
    #[error("{cpus} CPUs asked for, 1 to {MAX_CPUS} can be booted")]
    CpuCount {
        /// The requested number.
        cpus: u8,
    },
    /// Guest memory is not laid out as required for booting.
    #[error("guest memory does not begin at address 0 with at least 1 MiB")]
    MemoryLayout,
    /// Something could not be written into guest memory.
    #[error("cannot write {what} to guest address {address:#x}")]
    GuestMemory {
        /// What was written.
        what: &'static str,
        /// The guest address.
        address: u64,
        /// The cause.
        #[source]
        source: vm_memory::GuestMemoryError,
    },
    /// KVM refused a vCPU's initial state.
    #[error("cannot {what} of a vCPU")]
    Vcpu {
        /// The operation and the state, such as "set the registers".
        what: &'static str,
        /// KVM's answer.
        #[source]
        source: kvm_ioctls::Error,
    },
}

/// Why a kernel file cannot be booted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelFault {
    /// The file ends before something that it refers to.
    #[error("the file ends before its {what}")]
    Truncated {
        /// What is missing.
        what: &'static str,
    },
    /// An ELF file that is not the kernel of a 64-bit x86 machine.
    #[error("it is an ELF {what}, not a 64-bit x86 kernel")]
    ElfKind {
        /// What it is instead.
        what: &'static str,
    },
    /// The program header table is absent, too large or has another layout.
    #[error("its ELF program headers are absent, too many or of the wrong size")]
    ProgramHeaders,
    /// A segment's addresses wrap around or its sizes contradict each other.
    #[error("segment {index} has impossible addresses or sizes")]
    Segment {
        /// Its index among the program headers.
        index: usize,
    },
    /// A segment lies in the first MiB, which holds the boot parameters.
    #[error("segment {index} is loaded at {address:#x}, below 1 MiB")]
    SegmentTooLow {
        /// Its index among the program headers.
        index: usize,
        /// Its address.
        address: u64,
    },
    /// Two segments overlap.
    #[error("segments overlap at {address:#x}")]
    SegmentsOverlap {
        /// The first address used by both.
        address: u64,
    },
    /// The entry point is not in the kernel's code.
    #[error("its entry point {entry:#x} lies outside of what it loads")]
    Entry {
        /// The entry point.
        entry: u64,
    },
    /// The note that holds the PVH entry point is damaged.
    #[error("its PVH note is damaged")]
    PvhNote,
    /// A bzImage of a protocol without the 64-bit entry's fields.
    #[error("it speaks boot protocol {}.{:02}, 2.12 (Linux 3.8) is needed", version >> 8, version & 0xff)]
    BootProtocol {
        /// The version as in its header.
        version: u16,
    },
    /// A bzImage without a 64-bit entry.
    #[error("it has no 64-bit entry: a 32-bit kernel cannot be booted")]
    No64BitEntry,
    /// A field of the bzImage's setup header is impossible.
    #[error("its setup header's {field} is impossible")]
    SetupHeader {
        /// The field's name in the boot protocol.
        field: &'static str,
    },
}
