//! What keeps the loader from starting a kernel.

use std::error::Error;

use podvisor_boot_entries::NotFound;
use podvisor_boot_entries::cmdline::CmdlineTooLong;
use podvisor_boot_entries::kernel::KernelError;
use podvisor_kept_kernel::FrameError;
use rustix::io::Errno;
use thiserror::Error;

/// The error that ends the loader.
#[derive(Debug, Error)]
pub(crate) enum LoaderError {
    /// An argument on the command line.
    #[error("in the arguments: {0}")]
    Argument(String),
    /// A file system of the kernel's.
    #[error("failed to mount {what} at {target}")]
    KernelFileSystem {
        what: &'static str,
        target: &'static str,
        #[source]
        source: Errno,
    },
    /// The machine has no disk, or not the one that was named.
    #[error("{wanted} (the machine has {present})")]
    NoDisk { wanted: String, present: String },
    /// No file system could be mounted.
    #[error("no disk has a file system to boot from: {0}")]
    NoFileSystem(String),
    /// No entry can be booted.
    #[error("{source}{others}")]
    Entry {
        source: Box<NotFound>,
        /// What else is on the disks.
        others: String,
    },
    /// A file of the entry.
    #[error("failed to read {file} of the entry {title:?}: {reason}")]
    File {
        file: String,
        title: String,
        reason: String,
    },
    /// The kernel of the entry.
    #[error("cannot start {file} of the entry {title:?}")]
    Kernel {
        file: String,
        title: String,
        #[source]
        source: KernelError,
    },
    /// The machine is too small.
    #[error(
        "not enough memory: the kernel ({kernel}) and its initial file systems ({initrds}) need {needed} to be loaded, {available} are free: give the machine more memory"
    )]
    Memory {
        kernel: String,
        initrds: String,
        needed: String,
        available: String,
    },
    /// The command line.
    #[error(transparent)]
    Cmdline(#[from] CmdlineTooLong),
    /// The loader's kernel refuses the next one.
    #[error("the loader's kernel does not take {file}")]
    Load {
        file: String,
        #[source]
        source: std::io::Error,
    },
    /// What would be started is more than the host takes.
    #[error("cannot give the host the kernel of the entry {title:?}")]
    Frame {
        title: String,
        #[source]
        source: FrameError,
    },
    /// It could not be written.
    #[error("failed to write {what} to the disk with the serial {serial:?}")]
    HandOver {
        what: &'static str,
        serial: String,
        #[source]
        source: std::io::Error,
    },
    /// The jump failed.
    #[error("failed to start the kernel that was loaded")]
    Start(#[source] Errno),
}

/// An error's text and those of its causes.
pub(crate) fn with_causes(error: &LoaderError) -> String {
    let mut text = error.to_string();
    // That of an entry is in its text, because what else was found follows.
    let mut cause = match error {
        LoaderError::Entry { .. } => None,
        error => error.source(),
    };
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
