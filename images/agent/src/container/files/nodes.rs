//! Devices that a container gets in addition to the default ones: disks that the host has plugged
//! in for it, character devices of the guest's kernel, and, for a container that may use
//! everything, all of the guest's.
//!
//! Device numbers are the guest's own. What the container may do with a device is added to the
//! rules of its specification, from which [`crate::cgroup::devices`] builds the program
//! that the kernel runs.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};

use oci_spec::OciSpecError;
use oci_spec::runtime::{
    LinuxDevice, LinuxDeviceBuilder, LinuxDeviceCgroup, LinuxDeviceCgroupBuilder, LinuxDeviceType,
    Mount, MountBuilder, Spec,
};
use podvisor_agent_protocol::api;
use podvisor_agent_protocol::api::device::Source;

use crate::container::files::disk::{self, DiskError};

/// Maximum number of devices of one container.
const MAX_DEVICES: usize = 64;

/// Where the guest has its own devices.
const DEV: &str = "/dev";

/// Character devices that may be passed to a container, with the permissions that udev gives them
/// on a host.
const CHARACTER: &[(&str, u32)] = &[
    ("/dev/null", 0o666),
    ("/dev/zero", 0o666),
    ("/dev/full", 0o666),
    ("/dev/random", 0o666),
    ("/dev/urandom", 0o666),
    ("/dev/tty", 0o666),
    ("/dev/fuse", 0o666),
    ("/dev/net/tun", 0o666),
    ("/dev/kmsg", 0o644),
    ("/dev/loop-control", 0o660),
];

/// Entries of the guest's `/dev` that are not shown: other file systems, devices that the container
/// has itself, and the disks, most of which hold images.
const HIDDEN: &[&str] = &["pts", "shm", "mqueue", "console", "ptmx", "fd"];
const DISKS: [&str; 2] = ["vd", "pmem"];

/// Maximum depth of directories in the guest's `/dev` that are searched.
const MAX_DEPTH: usize = 3;

/// A device cannot be passed to a container.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// More devices than the limit.
    #[error("more than {MAX_DEVICES} devices")]
    TooMany,
    /// The request is invalid.
    #[error("device {path:?}: {problem}")]
    Invalid {
        /// The path in the container.
        path: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// The disk is missing.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The guest does not have it, or its node cannot be changed.
    #[error("cannot use the guest's device {path}")]
    Guest {
        /// Its path in the guest.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A part of the specification does not fit together.
    #[error("cannot add a device to the specification")]
    Build(#[from] OciSpecError),
}

/// Additions to a specification.
#[derive(Debug, Default)]
pub struct Nodes {
    nodes: Vec<LinuxDevice>,
    rules: Vec<LinuxDeviceCgroup>,
    mounts: Vec<Mount>,
}

impl Nodes {
    /// Finds the devices of a request, whose owners are ids of the guest; waits for disks to
    /// appear. With `guest_devices`, all devices of the guest are added too.
    ///
    /// # Errors
    ///
    /// [`NodeError`].
    pub async fn find(devices: &[api::Device], guest_devices: bool) -> Result<Self, NodeError> {
        if devices.len() > MAX_DEVICES {
            return Err(NodeError::TooMany);
        }
        let mut found = Self::default();
        for device in devices {
            check(device)?;
            let (source, mode, owner) = match &device.source {
                Some(Source::DiskSerial(serial)) => {
                    disk::validate_serial(serial)?;
                    let owner = (device.uid, device.gid);
                    (disk::find(serial).await?, device.mode & 0o777, owner)
                }
                Some(Source::GuestPath(path)) => {
                    let known = CHARACTER.iter().find(|(known, _)| known == path);
                    let (path, mode) = known.ok_or_else(|| NodeError::Invalid {
                        path: device.path.clone(),
                        problem: "no character device that is given to containers",
                    })?;
                    (PathBuf::from(path), *mode, (0, 0))
                }
                Some(_) | None => {
                    return Err(NodeError::Invalid {
                        path: device.path.clone(),
                        problem: "it is not said what it is",
                    });
                }
            };
            found.add(device, &source, mode, owner)?;
        }
        if guest_devices {
            found.add_guests()?;
        }
        Ok(found)
    }

    fn add(
        &mut self,
        device: &api::Device,
        source: &Path,
        mode: u32,
        owner: (u32, u32),
    ) -> Result<(), NodeError> {
        let failed = |error| NodeError::Guest {
            path: source.to_owned(),
            source: error,
        };
        let meta = fs::metadata(source).map_err(failed)?;
        let (typ, major, minor) = numbers(&meta).ok_or_else(|| failed(not_a_device()))?;
        if !device.access.is_empty() {
            let rule = LinuxDeviceCgroupBuilder::default()
                .allow(true)
                .typ(typ)
                .major(major)
                .minor(minor)
                .access(&device.access);
            self.rules.push(rule.build()?);
        }
        if Path::new(&device.path).starts_with(DEV) {
            let path = Path::new(&device.path);
            self.nodes
                .push(node(path, (typ, major, minor), mode, owner)?);
            return Ok(());
        }
        // A node elsewhere in the root file system cannot be opened: that is mounted `nodev`. So
        // the guest's own node is shown there; no other container has a disk's node.
        if typ == LinuxDeviceType::B {
            fs::set_permissions(source, fs::Permissions::from_mode(mode)).map_err(failed)?;
            std::os::unix::fs::chown(source, Some(owner.0), Some(owner.1)).map_err(failed)?;
        }
        let options = ["bind", "rprivate"].map(str::to_owned).to_vec();
        self.mounts.push(
            MountBuilder::default()
                .destination(&device.path)
                .source(source)
                .typ("bind")
                .options(options)
                .build()?,
        );
        Ok(())
    }

    /// Adds the guest's own nodes, except for those that were added already.
    fn add_guests(&mut self) -> Result<(), NodeError> {
        let mut directories = vec![(PathBuf::from(DEV), 1)];
        while let Some((directory, level)) = directories.pop() {
            let failed = |source| NodeError::Guest {
                path: directory.clone(),
                source,
            };
            for entry in fs::read_dir(&directory).map_err(failed)? {
                // An entry that disappears meanwhile is skipped.
                let Ok(entry) = entry else { continue };
                let Ok(meta) = entry.metadata() else { continue };
                let (path, name) = (entry.path(), entry.file_name());
                let name = name.to_str().unwrap_or_default();
                let is_hidden = level == 1
                    && (HIDDEN.contains(&name) || DISKS.iter().any(|disk| name.starts_with(disk)));
                if is_hidden {
                    continue;
                }
                if meta.is_dir() && level < MAX_DEPTH {
                    directories.push((path, level + 1));
                    continue;
                }
                let Some(numbers) = numbers(&meta) else {
                    continue;
                };
                if self.nodes.iter().any(|node| *node.path() == path) {
                    continue;
                }
                let owner = (meta.uid(), meta.gid());
                let mode = meta.mode() & 0o777;
                self.nodes.push(node(&path, numbers, mode, owner)?);
            }
        }
        Ok(())
    }

    /// Adds the rules after the existing ones: the last one that matches decides.
    pub fn allow(&mut self, spec: &mut Spec) {
        let rules = std::mem::take(&mut self.rules);
        if rules.is_empty() {
            return;
        }
        if let Some(linux) = spec.linux_mut() {
            let resources = linux.resources_mut().get_or_insert_default();
            resources
                .devices_mut()
                .get_or_insert_default()
                .extend(rules);
        }
    }

    /// Adds the nodes.
    pub fn show(self, spec: &mut Spec) {
        spec.mounts_mut()
            .get_or_insert_default()
            .extend(self.mounts);
        let mut nodes = self.nodes;
        // Mounts take precedence over nodes, and nothing of the guest's is created in a volume.
        let mounts = spec.mounts().iter().flatten().map(Mount::destination);
        let mounts: Vec<&PathBuf> = mounts.filter(|path| **path != Path::new(DEV)).collect();
        nodes.retain(|node| !mounts.iter().any(|path| node.path().starts_with(path)));
        if let Some(linux) = spec.linux_mut()
            && !nodes.is_empty()
        {
            linux.devices_mut().get_or_insert_default().extend(nodes);
        }
    }
}

fn check(device: &api::Device) -> Result<(), NodeError> {
    let invalid = |problem| NodeError::Invalid {
        path: device.path.chars().take(256).collect(),
        problem,
    };
    let path = Path::new(&device.path);
    let mut parts = path.components();
    let is_plain = parts.next() == Some(Component::RootDir)
        && parts.clone().next().is_some()
        && parts.all(|part| matches!(part, Component::Normal(_)));
    if !is_plain || device.path.contains('\0') {
        return Err(invalid("its path is not an absolute one without `..`"));
    }
    match device.access.chars().all(|access| "rwm".contains(access)) {
        true => Ok(()),
        false => Err(invalid("access is some of `r`, `w` and `m`")),
    }
}

/// Returns the type and numbers of a device node.
fn numbers(meta: &fs::Metadata) -> Option<(LinuxDeviceType, i64, i64)> {
    let kind = meta.file_type();
    let typ = match (kind.is_block_device(), kind.is_char_device()) {
        (true, _) => LinuxDeviceType::B,
        (_, true) => LinuxDeviceType::C,
        _ => return None,
    };
    let device = meta.rdev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    Some((typ, major.into(), minor.into()))
}

/// Builds a node of a container.
fn node(
    path: &Path,
    (typ, major, minor): (LinuxDeviceType, i64, i64),
    mode: u32,
    (uid, gid): (u32, u32),
) -> Result<LinuxDevice, OciSpecError> {
    LinuxDeviceBuilder::default()
        .path(path)
        .typ(typ)
        .major(major)
        .minor(minor)
        .file_mode(mode)
        .uid(uid)
        .gid(gid)
        .build()
}

fn not_a_device() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "it is not a device")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(path: &str, access: &str, source: Option<Source>) -> api::Device {
        api::Device {
            path: path.to_owned(),
            access: access.to_owned(),
            source,
            ..Default::default()
        }
    }

    fn guests(path: &str) -> Option<Source> {
        Some(Source::GuestPath(path.to_owned()))
    }

    async fn found(devices: Vec<api::Device>) -> Result<Nodes, NodeError> {
        Nodes::find(&devices, false).await
    }

    #[tokio::test]
    async fn a_character_device_has_the_guests_numbers_and_the_access_that_is_asked_for() {
        let wanted = vec![
            device("/dev/mine", "r", guests("/dev/zero")),
            device("/srv/full", "rw", guests("/dev/full")),
        ];
        let mut nodes = found(wanted).await.unwrap();
        let mut spec = Spec::default();
        nodes.allow(&mut spec);
        nodes.show(&mut spec);
        let linux = spec.linux().as_ref().unwrap();
        let [node] = linux.devices().as_deref().unwrap() else {
            panic!("{:?}", linux.devices());
        };
        assert_eq!(node.path(), Path::new("/dev/mine"));
        assert_eq!((node.major(), node.minor()), (1, 5));
        assert_eq!(node.file_mode(), Some(0o666));
        let rules = linux.resources().as_ref().unwrap().devices().clone();
        let rules: Vec<_> = rules.unwrap().into_iter().rev().take(2).collect();
        assert_eq!(rules[1].access().as_deref(), Some("r"));
        assert_eq!((rules[0].major(), rules[0].minor()), (Some(1), Some(7)));
        let mount = spec.mounts().as_ref().unwrap().last().unwrap();
        assert_eq!(mount.destination(), Path::new("/srv/full"));
        assert_eq!(mount.source().as_deref(), Some(Path::new("/dev/full")));
    }

    #[tokio::test]
    async fn what_makes_no_sense_is_refused() {
        for wanted in [
            device("dev/x", "r", guests("/dev/zero")),
            device("/", "r", guests("/dev/zero")),
            device("/dev/../x", "r", guests("/dev/zero")),
            device("/dev/x", "rx", guests("/dev/zero")),
            device("/dev/x", "r", guests("/dev/mem")),
            device("/dev/x", "r", guests("/dev/../etc/passwd")),
            device("/dev/x", "r", None),
            device("/dev/x", "r", Some(Source::DiskSerial(String::new()))),
        ] {
            assert!(found(vec![wanted.clone()]).await.is_err(), "{wanted:?}");
        }
        let many = vec![device("/dev/x", "r", guests("/dev/zero")); MAX_DEVICES + 1];
        assert!(matches!(found(many).await, Err(NodeError::TooMany)));
    }

    #[test]
    fn a_container_with_the_guests_devices_has_no_disk_and_no_terminal_of_others() {
        let mut nodes = Nodes::default();
        nodes.add_guests().unwrap();
        let shown = |path: &str| {
            nodes
                .nodes
                .iter()
                .any(|node| *node.path() == Path::new(path))
        };
        assert!(shown("/dev/null") && shown("/dev/zero"));
        for hidden in [
            "/dev/console",
            "/dev/ptmx",
            "/dev/pts/0",
            "/dev/vda",
            "/dev/shm",
        ] {
            assert!(!shown(hidden), "{hidden}");
        }
        // A volume hides the guest's nodes.
        let mut spec = Spec::default();
        let at = |path: &str| {
            let mut mount = Mount::default();
            mount.set_destination(path.into());
            mount
        };
        spec.set_mounts(Some(vec![at(DEV), at("/dev/zero")]));
        nodes.show(&mut spec);
        let linux = spec.linux().as_ref().unwrap();
        let shown = linux.devices().iter().flatten().map(LinuxDevice::path);
        let shown: Vec<&PathBuf> = shown.collect();
        assert!(shown.contains(&&PathBuf::from("/dev/null")));
        assert!(!shown.contains(&&PathBuf::from("/dev/zero")));
    }
}
