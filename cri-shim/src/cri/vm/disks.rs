//! The files of a machine's disks: what it writes to copies, and disks with files. They are kept in
//! the daemon's persistent directory for as long as the container exists.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{
    DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _,
};
use std::path::{Path, PathBuf};

use podvisor_cloud_init::GuestSeed;
use podvisor_cloud_init::fat::Volume;
use podvisor_cri_messages::Device;
use podvisor_images::{Disk, Store};
use podvisor_sandbox::machine::{DiskContents, MachineDisk, create_grown_overlay};
use rustix::fs::statvfs;
use tracing::info;

use super::images;
use super::persistent;
use crate::cri::error::{CriError, Result};
use crate::cri::state::{DiskContent, DiskRecord, NodeFile, OverlayRecord, ROOT, VmRecord};

/// Serial number of the disk with the seed, which follows the root disk.
const SEED: &str = "cloud-init";

/// Names of their files.
const ROOT_FILE: &str = "root.disk";
const SEED_FILE: &str = "cloud-init.img";

/// Most block devices of a machine, besides its first two disks.
const MAX_DEVICES: usize = 18;

/// So many files of a machine are counted: more than there are.
const MAX_FILES: usize = 256;

/// What a machine's files take on the node's disk.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct FilesUsage {
    pub(super) bytes: u64,
    pub(super) files: u64,
    /// What the file system has altogether.
    pub(super) capacity: u64,
    pub(super) max_files: u64,
}

/// The directory of a machine's files.
#[derive(Debug, Clone)]
pub(super) struct DiskFiles(PathBuf);

impl DiskFiles {
    pub(super) fn at(dir: PathBuf) -> Self {
        Self(dir)
    }

    /// Creates the directory.
    pub(super) fn prepare(&self) -> Result<()> {
        let dir = &self.0;
        let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(CriError::io("create the directory", dir))
    }

    /// Creates an empty file.
    pub(super) fn create(&self, name: &str) -> Result<File> {
        create(&self.0.join(name))
    }

    /// Opens a file for reading.
    pub(super) fn read(&self, name: &str) -> Result<File> {
        let path = self.0.join(name);
        File::open(&path).map_err(CriError::io("open the machine's file", &path))
    }

    /// Returns what a machine's files take on the node's disk. A copy that shares blocks with its
    /// image counts as far as it has grown.
    pub(super) fn usage(&self, record: &VmRecord) -> io::Result<FilesUsage> {
        let mut usage = FilesUsage::default();
        for entry in fs::read_dir(&self.0)?.take(MAX_FILES) {
            // A file that goes meanwhile takes nothing.
            let Ok(found) = entry.and_then(|entry| entry.metadata()) else {
                continue;
            };
            usage.bytes = usage.bytes.saturating_add(bytes(&found));
            usage.files = usage.files.saturating_add(1);
        }
        let shared = record.disks.iter().filter_map(|disk| match &disk.content {
            DiskContent::Image { overlay, .. } => Some(overlay.as_ref()?.shared),
            DiskContent::Ephemeral { overlay, .. } => Some(overlay.shared),
            _ => None,
        });
        usage.bytes = usage.bytes.saturating_sub(shared.sum());
        let system = statvfs(&self.0)?;
        usage.capacity = system.f_blocks.saturating_mul(system.f_frsize);
        usage.max_files = system.f_files;
        Ok(usage)
    }

    /// Opens a file for reading, and for writing if its contents come from another node.
    fn rewrite(&self, name: &str) -> Result<File> {
        let path = self.0.join(name);
        let opened = File::options().read(true).write(true).open(&path);
        opened.map_err(CriError::io("open the machine's file", &path))
    }

    /// Creates the file with what a guest writes to a disk of at least `size` bytes; `base` is
    /// opened from `path`.
    pub(super) fn overlay(
        &self,
        name: &str,
        base: &File,
        path: &Path,
        size: Option<u64>,
    ) -> Result<OverlayRecord> {
        let file = self.create(name)?;
        let format = create_grown_overlay(base, path, &file, size.unwrap_or(0));
        let format = format.map_err(|source| {
            CriError::io("create the disk", &self.0.join(name))(io::Error::other(source))
        })?;
        let made = file.metadata();
        let made = made.map_err(CriError::io("look at the disk", &self.0.join(name)))?;
        Ok(OverlayRecord {
            file: name.to_owned(),
            kind: format.into(),
            shared: bytes(&made),
        })
    }

    /// Writes a volume with files.
    pub(super) fn volume(&self, name: &str, volume: &Volume) -> Result<()> {
        let file = self.create(name)?;
        let written = volume.write(&file).map(drop);
        written.map_err(|error| {
            CriError::io("write the disk with files", &self.0.join(name))(io::Error::other(error))
        })
    }

    /// Creates the disks of a machine that boots an image: it, cloud-init's, and block devices.
    /// What the guest writes goes to the devices' root volume, or to a file of its own.
    pub(super) fn of_image(
        &self,
        image: &Disk,
        size: Option<u64>,
        seed: &GuestSeed,
        devices: BlockVolumes,
    ) -> Result<Vec<DiskRecord>> {
        let volume = seed
            .volume()
            .map_err(|errors| CriError::invalid("config.annotations", errors.to_string()))?;
        let content = match devices.root {
            Some(device) => {
                write_root(&device, image, size)?;
                DiskContent::Persistent(device)
            }
            None => DiskContent::Image {
                id: image.id().to_string(),
                overlay: Some(self.overlay(ROOT_FILE, &image.open()?, image.path(), size)?),
            },
        };
        self.volume(SEED_FILE, &volume)?;
        let root = DiskRecord {
            serial: ROOT.to_owned(),
            is_read_only: false,
            is_local: true,
            content,
        };
        let seed = DiskRecord {
            serial: SEED.to_owned(),
            is_read_only: true,
            is_local: true,
            content: DiskContent::Made(SEED_FILE.to_owned()),
        };
        let mut disks = vec![root, seed];
        disks.extend(devices.others.into_iter().map(|other| other.disk));
        Ok(disks)
    }

    /// Opens the disks of a machine, in their order.
    pub(super) fn open(&self, store: &Store, record: &VmRecord) -> Result<Vec<MachineDisk>> {
        let open = |disk: &DiskRecord| {
            Ok(MachineDisk {
                contents: self.contents(store, disk)?,
                moves: disk.moves(),
                serial: disk.serial.clone(),
            })
        };
        record.disks.iter().map(open).collect()
    }

    fn contents(&self, store: &Store, disk: &DiskRecord) -> Result<DiskContents> {
        let is_read_only = disk.is_read_only;
        let raw = |file| DiskContents::Raw { file, is_read_only };
        Ok(match &disk.content {
            DiskContent::Image { id, overlay } => {
                let image = images::stored_disk(store, id)?;
                let image = image.ok_or_else(|| CriError::NoImage { name: id.clone() })?;
                match overlay {
                    Some(overlay) => self.over(image.open()?, overlay)?,
                    None => raw(image.open()?),
                }
            }
            DiskContent::Ephemeral { base, overlay } => {
                let opened = base.open(true);
                let opened = opened.map_err(CriError::io("open the disk", base.path()))?;
                self.over(opened, overlay)?
            }
            DiskContent::Made(name) => raw(self.rewrite(name)?),
            DiskContent::Node(node) => {
                let opened = node.open(is_read_only);
                raw(opened.map_err(CriError::io("open the disk", node.path()))?)
            }
            DiskContent::Persistent(node) => DiskContents::Part {
                file: open_root(node)?,
                first: persistent::HEADER_SECTORS,
            },
        })
    }

    fn over(&self, base: File, overlay: &OverlayRecord) -> Result<DiskContents> {
        let path = self.0.join(&overlay.file);
        let file = File::options().read(true).write(true).open(&path);
        Ok(DiskContents::Overlay {
            base,
            overlay: file.map_err(CriError::io("open the disk", &path))?,
            format: overlay.kind.into(),
        })
    }
}

/// Returns how many bytes of a file are on the disk.
fn bytes(metadata: &fs::Metadata) -> u64 {
    metadata.blocks().saturating_mul(512)
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

/// Writes the image to a pod's root volume, unless it is there already.
fn write_root(device: &NodeFile, image: &Disk, size: Option<u64>) -> Result<()> {
    let volume = open_root(device)?;
    let written = persistent::prepare(&volume, &image.open()?, image.id().bytes(), size);
    let is_new = written.map_err(|error| {
        CriError::io("make the root disk of", device.path())(io::Error::other(error))
    })?;
    let (device, image) = (device.path().display(), image.id());
    match is_new {
        true => info!(%device, %image, "the image is written to the root volume"),
        false => info!(%device, %image, "the root volume has the image already"),
    }
    Ok(())
}

fn open_root(device: &NodeFile) -> Result<File> {
    let opened = device.open(false);
    opened.map_err(CriError::io("open the root volume", device.path()))
}

/// The block devices of a container.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct BlockVolumes {
    /// The one that the machine boots from.
    pub(super) root: Option<NodeFile>,
    /// The others.
    pub(super) others: Vec<BlockVolume>,
}

/// A block device that is a disk of the guest.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BlockVolume {
    /// Where the pod asked for it.
    pub(super) path: String,
    pub(super) disk: DiskRecord,
}

/// Returns the block devices of a container as disks.
pub(super) fn devices(devices: &[Device]) -> Result<BlockVolumes> {
    const FIELD: &str = "config.devices";
    let mut volumes = BlockVolumes::default();
    for device in devices {
        let path = Path::new(&device.host_path);
        let metadata = fs::metadata(path).map_err(CriError::io("find the block device", path))?;
        if !metadata.file_type().is_block_device() {
            let shown: String = device.host_path.chars().take(256).collect();
            let reason = format!("{shown:?} is not a block device: a machine has no other");
            return Err(CriError::invalid(FIELD, reason));
        }
        add(&mut volumes, device).map_err(|reason| CriError::invalid(FIELD, reason))?;
    }
    Ok(volumes)
}

/// Adds a block device; the error is what is wrong with it.
fn add(volumes: &mut BlockVolumes, device: &Device) -> Result<(), String> {
    let file = NodeFile::Device(PathBuf::from(&device.host_path));
    let is_read_only = !device.permissions.contains('w');
    if device.container_path == "/" {
        if is_read_only {
            let reason = "the root disk (devicePath /) is read-only: take a volume that the \
                          machine may write";
            return Err(reason.to_owned());
        }
        return match volumes.root.replace(file) {
            None => Ok(()),
            Some(_) => Err("two root disks (devicePath /)".to_owned()),
        };
    }
    let number = volumes.others.len();
    if number == MAX_DEVICES {
        return Err(format!(
            "a machine has at most {MAX_DEVICES} block devices besides its root"
        ));
    }
    volumes.others.push(BlockVolume {
        path: device.container_path.clone(),
        disk: DiskRecord {
            serial: format!("device{number}"),
            is_read_only,
            is_local: false,
            content: DiskContent::Node(file),
        },
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::cri::state::OverlayKind;

    #[test]
    fn what_a_guest_writes_is_counted_and_not_what_it_shares() {
        let dir = tempfile::tempdir().unwrap();
        let files = DiskFiles::at(dir.path().join("machine"));
        files.prepare().unwrap();
        files
            .create("0.disk")
            .unwrap()
            .write_all(&[1; 64 << 10])
            .unwrap();
        let empty = serde_json::json!({"uuid": vec![0; 16], "vcpus": 1, "memory": 1});
        let mut record: VmRecord = serde_json::from_value(empty).unwrap();
        let before = files.usage(&record).unwrap();
        assert!(before.bytes >= 64 << 10, "{before:?}");
        assert!(before.capacity > before.bytes, "{before:?}");
        record.disks.push(DiskRecord {
            serial: ROOT.to_owned(),
            is_read_only: false,
            is_local: true,
            content: DiskContent::Image {
                id: "sha256:00".to_owned(),
                overlay: Some(OverlayRecord {
                    file: "0.disk".to_owned(),
                    kind: OverlayKind::Reflink,
                    shared: before.bytes,
                }),
            },
        });
        files
            .create("1.img")
            .unwrap()
            .write_all(&[1; 16 << 10])
            .unwrap();
        let after = files.usage(&record).unwrap();
        assert!((16 << 10..64 << 10).contains(&after.bytes), "{after:?}");
        assert_eq!(after.files, 2);
    }

    #[test]
    fn only_block_devices_become_disks_and_only_so_many() {
        let device = |host: &str, path: &str| Device {
            host_path: host.to_owned(),
            container_path: path.to_owned(),
            permissions: "rw".to_owned(),
        };
        assert_eq!(devices(&[]).unwrap(), BlockVolumes::default());
        let error = devices(&[device("/dev/null", "/dev/x")]).unwrap_err();
        assert!(error.to_string().contains("not a block device"), "{error}");
        let error = devices(&[device("/no/such", "/dev/x")]).unwrap_err();
        assert!(error.to_string().contains("/no/such"), "{error}");
        let mut volumes = BlockVolumes::default();
        add(&mut volumes, &device("/dev/a", "/")).unwrap();
        for _ in 0..MAX_DEVICES {
            add(&mut volumes, &device("/dev/b", "/dev/x")).unwrap();
        }
        assert_eq!(volumes.root, Some(NodeFile::Device("/dev/a".into())));
        assert_eq!(volumes.others[17].disk.serial, "device17");
        let error = add(&mut volumes, &device("/dev/c", "/dev/y")).unwrap_err();
        assert!(error.contains("at most 18"), "{error}");
        let error = add(&mut volumes, &device("/dev/c", "/")).unwrap_err();
        assert!(error.contains("two root disks"), "{error}");
        let read_only = Device {
            permissions: "r".to_owned(),
            ..device("/dev/a", "/")
        };
        let error = add(&mut BlockVolumes::default(), &read_only).unwrap_err();
        assert!(error.contains("read-only"), "{error}");
    }

    #[test]
    fn what_an_earlier_attempt_left_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "old").unwrap();
        assert_eq!(create(&path).unwrap().metadata().unwrap().len(), 0);
    }
}
