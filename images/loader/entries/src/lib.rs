//! What the boot loader of a distribution's disk would start: kernel, initial file systems, command
//! line. Nothing here reads a file or a device; whoever mounted the disk implements [`Volumes`].
//!
//! [`find`] asks the formats in turn, each of which is a room:
//!
//! | room | reads |
//! | --- | --- |
//! | [`grub`] | `grub.cfg`: a subset of GRUB's language, its environment block, `blscfg` |
//! | [`bls`] | Boot Loader Specification, type 1: `loader/entries/*.conf` |
//! | [`uki`] | Boot Loader Specification, type 2: unified kernel images |
//! | [`extlinux`] | `extlinux.conf`, `syslinux.cfg`, `isolinux.cfg` |
//! | [`newest`] | nothing: the newest `vmlinuz*` beside its initial file system |
//!
//! Two more parse what a loader meets on its way: [`signature`] tells what a partition holds,
//! [`kernel`] whether a file is a kernel that can be started. [`cmdline`] completes the command line.
//!
//! Disks are hostile: each file, each list and each format's work is bounded ([`limits`]), paths
//! with `..` are refused, and what fails is the error of one format, which names file and line.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)
)]

pub mod bls;
pub mod cmdline;
mod entry;
pub mod extlinux;
mod files;
mod find;
pub mod grub;
mod grub_env;
pub mod kernel;
pub mod limits;
pub mod newest;
pub mod signature;
pub mod uki;
pub mod version;
mod volumes;

#[cfg(any(test, feature = "test-utils"))]
pub mod memory;

pub use entry::{BootEntry, FilePart, FileRef, Format};
pub use files::{Files, PathError, normalize};
pub use find::{EntryError, FailedConfig, Found, NotFound, find};
pub use volumes::{FileError, FileKind, FileStat, Root, Volume, VolumeId, Volumes};
