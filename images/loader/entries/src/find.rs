//! The search: each volume's configurations in the order of disks, then the newest kernels.

use std::fmt::{self, Write as _};

use thiserror::Error;

use crate::bls::{self, BlsError};
use crate::extlinux::{self, ExtlinuxError};
use crate::files::Files;
use crate::grub::{self, GrubError};
use crate::uki::{self, UkiError};
use crate::volumes::{FileError, VolumeId, Volumes};
use crate::{BootEntry, limits, newest};

/// The error of one format.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EntryError {
    /// `grub.cfg`.
    #[error(transparent)]
    Grub(#[from] GrubError),
    /// Boot Loader Specification, type 1.
    #[error(transparent)]
    Bls(#[from] BlsError),
    /// Boot Loader Specification, type 2.
    #[error(transparent)]
    Uki(#[from] UkiError),
    /// `extlinux.conf` and its kind.
    #[error(transparent)]
    Extlinux(#[from] ExtlinuxError),
    /// A directory of kernels.
    #[error(transparent)]
    File(#[from] FileError),
}

/// A configuration that was there and could not be used.
#[derive(Debug)]
pub struct FailedConfig {
    /// The volume's device, such as `vda1`.
    pub device: String,
    /// Why not.
    pub error: EntryError,
}

impl fmt::Display for FailedConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.device, self.error)
    }
}

/// What to boot, and what was passed over on the way.
#[derive(Debug)]
pub struct Found {
    /// The entry.
    pub entry: BootEntry,
    /// Configurations before it that could not be used.
    pub failed: Vec<FailedConfig>,
}

/// Nothing to boot.
#[derive(Debug, Error)]
pub struct NotFound {
    /// The volumes' devices and file systems.
    pub volumes: Vec<String>,
    /// Configurations that could not be used.
    pub failed: Vec<FailedConfig>,
}

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.failed.is_empty() {
            f.write_str("no file system has anything to boot")?;
        } else {
            f.write_str("what is configured cannot be booted")?;
        }
        for failed in &self.failed {
            write!(f, "; {failed}")?;
        }
        let mut looked = String::new();
        for volume in &self.volumes {
            let separator = if looked.is_empty() { "" } else { ", " };
            let _ = write!(looked, "{separator}{volume}");
        }
        let looked = if looked.is_empty() {
            "nothing"
        } else {
            &looked
        };
        write!(
            f,
            "; on {looked} was looked for {}, EFI/*/grub.cfg, {}/*.conf, {}/*.efi, {}, \
             and for vmlinuz* in /boot and /",
            grub::PATHS.join(", "),
            bls::DIRECTORIES.join("/*.conf, "),
            uki::DIRECTORY,
            extlinux::PATHS.join(", "),
        )
    }
}

/// Returns what these disks boot.
///
/// Volume by volume, the first configuration that works wins: `grub.cfg`, which knows about the
/// others where a system has several, then the Boot Loader Specification, then extlinux. Only when
/// no volume has any, the newest kernel is taken, volume by volume again.
///
/// # Errors
///
/// If nothing can be booted; the error lists what was looked for, and each format's own error.
pub fn find(volumes: &dyn Volumes) -> Result<Found, NotFound> {
    let files = Files::new(volumes);
    let mut failed = Vec::new();
    let all = || (0..files.volumes().len()).map(VolumeId);
    for volume in all() {
        if let Some(entry) = configured(&files, volume, &mut failed) {
            return Ok(Found { entry, failed });
        }
    }
    for volume in all() {
        match newest::load(&files, volume) {
            Ok(Some(entry)) => return Ok(Found { entry, failed }),
            Ok(None) => {}
            Err(error) => fail(&files, volume, error.into(), &mut failed),
        }
    }
    let names = files.volumes().iter();
    let volumes = names
        .map(|volume| format!("{} ({})", volume.device, volume.kind))
        .collect();
    Err(NotFound { volumes, failed })
}

/// More failures than this are not kept: disks may have any number of them.
const FAILURES: usize = 16;

fn fail(files: &Files<'_>, volume: VolumeId, error: EntryError, failed: &mut Vec<FailedConfig>) {
    if failed.len() < FAILURES {
        let device = files.volume(volume).map(|volume| volume.device.clone());
        failed.push(FailedConfig {
            device: device.unwrap_or_default(),
            error,
        });
    }
}

fn configured(
    files: &Files<'_>,
    volume: VolumeId,
    failed: &mut Vec<FailedConfig>,
) -> Option<BootEntry> {
    let mut keep = |result: Result<Option<BootEntry>, EntryError>| {
        result.unwrap_or_else(|error| {
            fail(files, volume, error, failed);
            None
        })
    };
    let grub = |path: &str| match files.stat(volume, path) {
        Ok(Some(_)) => grub::load(files, volume, path)
            .map(Some)
            .map_err(Into::into),
        Ok(None) => Ok(None),
        Err(error) => Err(error.into()),
    };
    for path in grub::PATHS {
        if let Some(entry) = keep(grub(path)) {
            return Some(entry);
        }
    }
    let vendors = files.list(volume, "EFI").unwrap_or_default();
    for vendor in vendors.iter().take(limits::VENDORS) {
        if let Some(entry) = keep(grub(&format!("EFI/{vendor}/grub.cfg"))) {
            return Some(entry);
        }
    }
    for directory in bls::DIRECTORIES {
        if let Some(entry) = keep(bls::load(files, volume, directory).map_err(Into::into)) {
            return Some(entry);
        }
    }
    if let Some(entry) = keep(uki::newest(files, volume).map_err(Into::into)) {
        return Some(entry);
    }
    for path in extlinux::PATHS {
        let result = match files.stat(volume, path) {
            Ok(Some(_)) => extlinux::load(files, volume, path)
                .map(Some)
                .map_err(Into::into),
            Ok(None) => Ok(None),
            Err(error) => Err(error.into()),
        };
        if let Some(entry) = keep(result) {
            return Some(entry);
        }
    }
    None
}
