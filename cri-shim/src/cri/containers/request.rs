//! What CreateContainer asks for, checked before anything is created.

use std::path::Path;

use podvisor_cri_messages::{ContainerConfig, Mount};
use rustix::fs::StatVfsMountFlags;

use super::stop_signal;
use crate::cri::error::{CriError, Result};
use crate::cri::spec::{self, Volume};
use crate::machine::UserRange;

/// What a request asks of its mounts and of its end, checked.
pub(super) struct Settings {
    /// `image_sub_path` of the mounts.
    pub(super) image_sub_paths: Vec<String>,
    /// `mount_options` of the mounts; those of further mounts are empty.
    pub(super) mount_flags: Vec<StatVfsMountFlags>,
    /// Linux' signal number; `None` for the image's.
    pub(super) stop_signal: Option<u32>,
}

impl Settings {
    pub(super) fn of(config: &ContainerConfig) -> Result<Self> {
        let sub_paths = spec::mounts::sub_paths(&config.mounts);
        let stop_signal = stop_signal::from_cri(config.stop_signal);
        Ok(Self {
            image_sub_paths: sub_paths
                .map_err(|error| CriError::ImageVolume(Box::new(error.into())))?,
            mount_flags: spec::mounts::asked_flags(&config.mounts)?,
            stop_signal: stop_signal
                .map_err(|reason| CriError::invalid("config.stop_signal", reason))?,
        })
    }

    /// Notes the flags of mounts that are added to those of the request, of which there are
    /// `mounts`.
    pub(super) fn add_mount_flags(&mut self, mounts: usize, flags: Vec<StatVfsMountFlags>) {
        self.mount_flags.resize(mounts, StatVfsMountFlags::empty());
        self.mount_flags.extend(flags);
    }

    /// Returns the `mount_options` of a mount by its index.
    pub(super) fn mount_flags(&self, mount: usize) -> StatVfsMountFlags {
        let flags = self.mount_flags.get(mount).copied();
        flags.unwrap_or(StatVfsMountFlags::empty())
    }

    /// Notes the `mount_options` of volumes, which are those mounts that are no images, in their
    /// order.
    pub(super) fn restrict(&self, mounts: &[Mount], volumes: &mut [Volume]) {
        let mounts = mounts.iter().enumerate();
        let mounts = mounts.filter(|(_, mount)| spec::mounts::image_of(mount).is_none());
        for ((number, _), volume) in mounts.zip(volumes) {
            volume.asked = self.mount_flags(number);
        }
    }
}

/// Validates a request before anything is created.
pub(super) fn check(config: &ContainerConfig, users: Option<UserRange>) -> Result<()> {
    let metadata = config.metadata.as_ref();
    let metadata = metadata.ok_or_else(|| CriError::invalid("config.metadata", "it is missing"))?;
    if metadata.name.is_empty() {
        return Err(CriError::invalid("config.metadata.name", "it is empty"));
    }
    if config
        .image
        .as_ref()
        .is_none_or(|image| image.image.is_empty())
    {
        return Err(CriError::invalid("config.image", "it names no image"));
    }
    Ok(spec::mounts::check(&config.mounts, users)?)
}

/// Returns the container's log path below the pod's log directory; empty if either is empty.
pub(in crate::cri) fn log_path(directory: &str, name: &str) -> Result<String> {
    if directory.is_empty() || name.is_empty() {
        return Ok(String::new());
    }
    let field = "config.log_path";
    let inside = Path::new(name)
        .components()
        .all(|part| matches!(part, std::path::Component::Normal(_)));
    if !inside || name.contains('\0') {
        let reason = format!("{name:?} is not a path below the pod's log_directory");
        return Err(CriError::invalid(field, reason));
    }
    Path::new(directory)
        .join(name)
        .into_os_string()
        .into_string()
        .map_err(|_| CriError::invalid(field, "it is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_stays_in_its_pods_directory() {
        assert_eq!(
            log_path("/var/log/pods/x", "c/0.log").unwrap(),
            "/var/log/pods/x/c/0.log"
        );
        assert_eq!(log_path("", "c/0.log").unwrap(), "");
        assert_eq!(log_path("/x", "").unwrap(), "");
        for bad in ["../0.log", "/etc/passwd", "a/../../b"] {
            assert!(log_path("/x", bad).is_err(), "{bad}");
        }
    }
}
