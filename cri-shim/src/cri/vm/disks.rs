//! The files of a machine's disks: its own copy of the image, and the disk for cloud-init. They are
//! kept in the daemon's persistent directory for as long as the container exists.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use podvisor_cloud_init::GuestSeed;
use podvisor_cri_messages::Device;
use podvisor_images::Disk;
use podvisor_sandbox::machine::{DiskContents, MachineDisk, create_grown_overlay};

use super::{OverlayKind, VmDevice, VmRecord};
use crate::cri::error::{CriError, Result};

/// Serial numbers of the first two disks.
pub(super) const ROOT: &str = "root";
const SEED: &str = "cloud-init";

/// Names of their files.
const ROOT_FILE: &str = "root.disk";
const SEED_FILE: &str = "cloud-init.img";

/// Most block devices of a machine, beside its first two disks.
const MAX_DEVICES: usize = 18;

/// The directory of a machine's files.
#[derive(Debug, Clone)]
pub(super) struct DiskFiles(PathBuf);

impl DiskFiles {
    pub(super) fn at(dir: PathBuf) -> Self {
        Self(dir)
    }

    /// Creates the directory and the root disk, of at least `size` bytes.
    pub(super) fn create(&self, image: &Disk, size: Option<u64>) -> Result<OverlayKind> {
        let dir = &self.0;
        let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(CriError::io("create the directory", dir))?;
        let path = dir.join(ROOT_FILE);
        let overlay = create(&path)?;
        let base = image.open()?;
        let format = create_grown_overlay(&base, image.path(), &overlay, size.unwrap_or(0));
        let format = format.map_err(|source| {
            CriError::io("create the root disk", &path)(io::Error::other(source))
        })?;
        Ok(format.into())
    }

    /// Writes the disk for cloud-init.
    pub(super) fn write_seed(&self, seed: &GuestSeed) -> Result<()> {
        let volume = seed
            .volume()
            .map_err(|errors| CriError::invalid("config.annotations", errors.to_string()))?;
        let path = self.0.join(SEED_FILE);
        let file = create(&path)?;
        let written = volume.write(&file).map(drop);
        written.map_err(|error| {
            CriError::io("write the disk for cloud-init", &path)(io::Error::other(error))
        })
    }

    /// Opens the disks of a machine, in their order.
    pub(super) fn open(&self, image: &Disk, record: &VmRecord) -> Result<Vec<MachineDisk>> {
        let path = self.0.join(ROOT_FILE);
        let overlay = File::options().read(true).write(true).open(&path);
        let root = MachineDisk {
            contents: DiskContents::Overlay {
                base: image.open()?,
                overlay: overlay.map_err(CriError::io("open the root disk", &path))?,
                format: record.overlay.into(),
            },
            serial: ROOT.to_owned(),
        };
        let path = self.0.join(SEED_FILE);
        let seed = File::open(&path);
        let seed = MachineDisk {
            contents: DiskContents::Raw {
                file: seed.map_err(CriError::io("open the disk for cloud-init", &path))?,
                is_read_only: true,
            },
            serial: SEED.to_owned(),
        };
        let mut disks = vec![root, seed];
        for device in &record.devices {
            let path = Path::new(&device.path);
            let file = File::options()
                .read(true)
                .write(!device.is_read_only)
                .open(path);
            disks.push(MachineDisk {
                contents: DiskContents::Raw {
                    file: file.map_err(CriError::io("open the block device", path))?,
                    is_read_only: device.is_read_only,
                },
                serial: device.serial.clone(),
            });
        }
        Ok(disks)
    }
}

/// Creates an empty file, in place of what an earlier attempt left.
fn create(path: &Path) -> Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(CriError::io("remove the file", path)(error));
        }
        _ => {}
    }
    let mut options = OpenOptions::new();
    let created = options
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    created.map_err(CriError::io("create the file", path))
}

/// Returns the block devices of a container as disks.
pub(super) fn devices(devices: &[Device]) -> Result<Vec<VmDevice>> {
    const FIELD: &str = "config.devices";
    if devices.len() > MAX_DEVICES {
        let reason = format!(
            "{} block devices, but a machine has at most {MAX_DEVICES}",
            devices.len()
        );
        return Err(CriError::invalid(FIELD, reason));
    }
    let mut disks = Vec::new();
    for (number, device) in devices.iter().enumerate() {
        let path = Path::new(&device.host_path);
        let metadata = fs::metadata(path).map_err(CriError::io("find the block device", path))?;
        if !metadata.file_type().is_block_device() {
            let shown: String = device.host_path.chars().take(256).collect();
            let reason = format!("{shown:?} is not a block device: a machine has no other");
            return Err(CriError::invalid(FIELD, reason));
        }
        if device.container_path == "/" {
            let reason = "a persistent root disk (devicePath /) is not supported: take a block \
                          volume with another path, and mount it by cloud-init";
            return Err(CriError::invalid(FIELD, reason));
        }
        disks.push(VmDevice {
            path: device.host_path.clone(),
            serial: format!("device{number}"),
            is_read_only: !device.permissions.contains('w'),
        });
    }
    Ok(disks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_block_devices_become_disks_and_only_so_many() {
        let device = |host: &str, path: &str| Device {
            host_path: host.to_owned(),
            container_path: path.to_owned(),
            permissions: "rw".to_owned(),
        };
        assert_eq!(devices(&[]).unwrap(), []);
        let error = devices(&[device("/dev/null", "/dev/x")]).unwrap_err();
        assert!(error.to_string().contains("not a block device"), "{error}");
        let error = devices(&[device("/no/such", "/dev/x")]).unwrap_err();
        assert!(error.to_string().contains("/no/such"), "{error}");
        let many = vec![device("/dev/null", "/dev/x"); 19];
        let error = devices(&many).unwrap_err();
        assert!(error.to_string().contains("at most 18"), "{error}");
    }

    #[test]
    fn what_an_earlier_attempt_left_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "old").unwrap();
        assert_eq!(create(&path).unwrap().metadata().unwrap().len(), 0);
    }
}
