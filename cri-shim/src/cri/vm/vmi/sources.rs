//! Where on the node a volume is: among the pod's own mounts and devices, by its name.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use podvisor_cri_messages::{ContainerConfig, Device, Mount};
use rustix::fs::OFlags;

use super::super::honour;
use super::super::shares::WantedShare;
use crate::cri::error::{CriError, Result};
use crate::cri::spec;
use crate::cri::state::NodeFile;
use crate::cri::vm_spec::{VmiError, VmiMachine};

/// Where directories of volumes are mounted.
const MOUNTS: &str = "/podvisor/volumes/";

/// Where block devices of volumes are.
const DEVICES: &str = "/podvisor/devices/";

/// The name of the volume with the kernel to boot.
const KERNEL: &str = "kernel-boot";

/// The disk in a claim that is a file system.
const CLAIM_FILE: &str = "disk.img";

/// Refuses mounts and devices that are no volumes of the object, but for those that a kubelet adds
/// and those with files for programs of a container, which no one in the guest asks for.
pub(in crate::cri::vm) fn check_container(config: &ContainerConfig) -> Result<()> {
    for device in &config.devices {
        if !device.container_path.starts_with(DEVICES) {
            return Err(CriError::invalid(
                "config.devices",
                format!("{}: a device of no volume", shown(&device.container_path)),
            ));
        }
    }
    for mount in &config.mounts {
        let is_ignored = honour::is_of_kubelet(mount) || honour::is_file_volume(mount);
        if !mount.container_path.starts_with(MOUNTS) && !is_ignored {
            return Err(CriError::invalid(
                "config.mounts",
                format!("{}: a mount of no volume", shown(&mount.container_path)),
            ));
        }
    }
    Ok(())
}

/// A path of the pod, quoted and cut.
fn shown(path: &str) -> String {
    let shown: String = path.chars().take(256).collect();
    format!("{shown:?}")
}

impl VmiMachine {
    /// Returns the directories that the guest mounts, of those that the pod has mounted.
    ///
    /// # Errors
    /// A volume is not mounted, or not as a directory.
    pub(in crate::cri::vm) fn wanted_shares(
        &self,
        config: &ContainerConfig,
    ) -> Result<Vec<WantedShare>> {
        let sources = Sources(config);
        let wanted = self.shares.iter().map(|share| {
            let (path, name) = (share.path.as_str(), share.name.as_str());
            let directory = sources.directory(path, name)?;
            if !directory.is_dir() {
                let problem = "is not a directory: only a claim with volumeMode Filesystem is one";
                return Err(VmiError::field(path, problem));
            }
            let mount = sources.mount_of(path, name)?;
            Ok(WantedShare {
                tag: share.name.clone(),
                mount: Mount {
                    readonly: mount.readonly || share.is_read_only,
                    ..mount.clone()
                },
            })
        });
        let wanted: Result<Vec<_>, VmiError> = wanted.collect();
        wanted.map_err(CriError::Vmi)
    }
}

/// The mounts and devices of a pod's container.
#[derive(Debug, Clone, Copy)]
pub(in crate::cri::vm) struct Sources<'a>(pub(in crate::cri::vm) &'a ContainerConfig);

impl<'a> Sources<'a> {
    fn mount_of(self, path: &str, name: &str) -> Result<&'a Mount, VmiError> {
        let wanted = format!("{MOUNTS}{name}");
        let mut mounts = self.0.mounts.iter();
        let found = mounts.find(|mount| mount.container_path == wanted);
        found.ok_or_else(|| VmiError::field(path, format!("is not mounted by the pod at {wanted}")))
    }

    fn device_of(self, name: &str) -> Option<&'a Device> {
        let wanted = format!("{DEVICES}{name}");
        let mut devices = self.0.devices.iter();
        devices.find(|device| device.container_path == wanted)
    }

    /// Returns the name of the image that is mounted as a volume.
    pub(super) fn image(self, path: &str, name: &str) -> Result<&'a str, VmiError> {
        let image = spec::mounts::image_of(self.mount_of(path, name)?);
        image.ok_or_else(|| VmiError::field(path, "is not an image volume of the pod"))
    }

    /// Returns the name of the image with the kernel to boot.
    pub(super) fn kernel_image(self) -> Result<&'a str, VmiError> {
        self.image("spec.domain.firmware.kernelBoot.container", KERNEL)
    }

    /// Returns the directory of a volume.
    pub(super) fn directory(self, path: &str, name: &str) -> Result<&'a Path, VmiError> {
        let mount = self.mount_of(path, name)?;
        match spec::mounts::image_of(mount) {
            None => Ok(Path::new(&mount.host_path)),
            Some(_) => Err(VmiError::field(path, "is an image volume of the pod")),
        }
    }

    /// Returns the directory of a ConfigMap, Secret or the like, whose links a kubelet made.
    pub(super) fn files(self, path: &str, name: &str) -> Result<&'a Path, VmiError> {
        let mount = self.mount_of(path, name)?;
        match honour::is_file_volume(mount) {
            true => Ok(Path::new(&mount.host_path)),
            false => Err(VmiError::field(
                path,
                "is not a ConfigMap, Secret, downwardAPI or projected volume of the pod",
            )),
        }
    }

    /// Returns what a claim is on the node.
    pub(in crate::cri::vm) fn claim(self, path: &str, name: &str) -> Result<ClaimPlace, VmiError> {
        if let Some(device) = self.device_of(name) {
            return Ok(ClaimPlace {
                file: NodeFile::Device(PathBuf::from(&device.host_path)),
                is_read_only: !device.permissions.contains('w'),
            });
        }
        let directory = self.directory(path, name)?;
        Ok(ClaimPlace {
            file: NodeFile::File(directory.join(CLAIM_FILE)),
            is_read_only: self.mount_of(path, name)?.readonly,
        })
    }
}

/// A claim of the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cri::vm) struct ClaimPlace {
    pub(in crate::cri::vm) file: NodeFile,
    /// The pod may not write it.
    pub(in crate::cri::vm) is_read_only: bool,
}

impl NodeFile {
    pub(in crate::cri::vm) fn path(&self) -> &Path {
        match self {
            Self::Device(path) | Self::File(path) => path,
        }
    }

    /// Opens it.
    pub(in crate::cri::vm) fn open(&self, is_read_only: bool) -> io::Result<File> {
        // A FIFO must not hold up who opens it.
        let mut flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        if let Self::File(_) = self {
            flags |= OFlags::NOFOLLOW;
        }
        let file = File::options()
            .read(true)
            .write(!is_read_only)
            .custom_flags(flags.bits().cast_signed())
            .open(self.path())?;
        let kind = file.metadata()?.file_type();
        let (is_it, what) = match self {
            Self::Device(_) => (kind.is_block_device(), "it is not a block device"),
            Self::File(_) => (kind.is_file(), "it is not a regular file"),
        };
        match is_it {
            true => Ok(file),
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, what)),
        }
    }
}

/// Makes an empty disk in a directory of the pod, unless an earlier attempt has made it.
pub(super) fn make_empty(directory: &Path, bytes: u64) -> io::Result<NodeFile> {
    let path = directory.join(CLAIM_FILE);
    let created = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path);
    match created {
        Ok(file) => file.set_len(bytes)?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    Ok(NodeFile::File(path))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn what_a_claim_contains_is_opened_only_if_it_is_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img");
        let file = NodeFile::File(path.clone());
        let outside = dir.path().join("shadow");
        fs::write(&outside, "secret").unwrap();
        assert_eq!(file.open(true).unwrap_err().kind(), io::ErrorKind::NotFound);
        symlink(&outside, &path).unwrap();
        assert!(file.open(true).is_err(), "a link was followed");
        fs::remove_file(&path).unwrap();
        // Nobody writes to it: a plain open would wait for ever.
        mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        let error = file.open(true).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
        fs::remove_file(&path).unwrap();
        fs::write(&path, "disk").unwrap();
        file.open(false).unwrap();
        let error = NodeFile::Device(path).open(true).unwrap_err().to_string();
        assert!(error.contains("not a block device"), "{error}");
    }

    #[test]
    fn an_empty_disk_is_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let made = make_empty(dir.path(), 1 << 20).unwrap();
        assert_eq!(fs::metadata(made.path()).unwrap().len(), 1 << 20);
        fs::write(made.path(), "used").unwrap();
        assert_eq!(make_empty(dir.path(), 1 << 20).unwrap(), made);
        assert_eq!(fs::read(made.path()).unwrap(), b"used");
    }
}
