//! What devices change of a container, as fields of its configuration.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use podvisor_cri_messages::{ContainerConfig, Device, KeyValue, Mount, MountPropagation};
use rustix::fs::{StatVfsMountFlags, major, minor};

use super::document::{self, DeviceNode, Edits};
use super::error::CdiError;
use crate::cri::spec::{SpecFault, devices, mounts};
use crate::guest_devices;

/// Access to a device for which a document names none.
const ALL_ACCESS: &str = "rwm";

/// A document, or a device of it, for messages.
#[derive(Debug)]
pub(super) struct Origin(String);

impl Origin {
    pub(super) fn of_file(path: &Path) -> Self {
        Self(format!("{}, for all of its CDI devices", path.display()))
    }

    pub(super) fn of_device(path: &Path, name: &str) -> Self {
        Self(format!("{}, CDI device {name}", path.display()))
    }

    fn refused(&self, field: impl Into<String>, reason: impl Into<String>) -> CdiError {
        CdiError::Refused {
            origin: self.0.clone(),
            field: field.into(),
            reason: reason.into(),
        }
    }

    fn invalid(&self, field: &str, source: SpecFault) -> CdiError {
        CdiError::Invalid {
            origin: self.0.clone(),
            field: field.to_owned(),
            source,
        }
    }

    /// Looks at a path of the node, which must be there when the container is made.
    fn look_at(&self, field: &str, path: &str) -> Result<Metadata, CdiError> {
        fs::metadata(path).map_err(|source| CdiError::Missing {
            origin: self.0.clone(),
            field: field.to_owned(),
            path: PathBuf::from(path),
            source,
        })
    }
}

/// A container's configuration with what its CDI devices add.
#[derive(Debug)]
pub(in crate::cri) struct WithDevices {
    pub(in crate::cri) config: ContainerConfig,
    /// Flags of the mounts that were added, which are the last ones.
    pub(in crate::cri) mount_flags: Vec<StatVfsMountFlags>,
}

/// What all devices of a container change.
#[derive(Debug)]
pub(super) struct Collected {
    is_privileged: bool,
    variables: Vec<KeyValue>,
    groups: Vec<u32>,
    mounts: Vec<(Mount, StatVfsMountFlags)>,
    devices: Vec<Device>,
}

impl Collected {
    /// Begins with none, for this container.
    pub(super) fn new(config: &ContainerConfig) -> Self {
        let linux = config.linux.as_ref();
        let security = linux.and_then(|linux| linux.security_context.as_ref());
        Self {
            is_privileged: security.is_some_and(|security| security.privileged),
            variables: Vec::new(),
            groups: Vec::new(),
            mounts: Vec::new(),
            devices: Vec::new(),
        }
    }

    /// Adds changes; later ones replace earlier ones at the same path.
    pub(super) fn add(&mut self, origin: &Origin, edits: &Edits) -> Result<(), CdiError> {
        let not_empty = |list: &Option<Vec<_>>| list.as_ref().is_some_and(|list| !list.is_empty());
        if not_empty(&edits.hooks) {
            let reason = "programs of the node cannot run in a guest; have the driver describe the \
                          device by variables and mounts, or run the pod in another runtime";
            return Err(origin.refused("containerEdits.hooks", reason));
        }
        if not_empty(&edits.net_devices) {
            let reason = "interfaces of the node come into a guest by CNI alone: use a network for \
                          them";
            return Err(origin.refused("containerEdits.netDevices", reason));
        }
        if edits.intel_rdt.is_some() {
            let reason = "a guest has no resctrl; have the driver leave it out";
            return Err(origin.refused("containerEdits.intelRdt", reason));
        }
        for variable in edits.env.iter().flatten() {
            let (key, value) = variable.split_once('=').unwrap_or((variable, ""));
            self.variables.push(KeyValue::new(key, value));
        }
        let groups = edits.additional_gids.iter().flatten();
        // The specification has 0 ignored.
        self.groups.extend(groups.filter(|group| **group != 0));
        for (number, wanted) in edits.mounts.iter().flatten().enumerate() {
            let field = format!("containerEdits.mounts[{number}]");
            let (mount, flags) = volume(origin, &field, wanted)?;
            let is_other = |known: &Mount| known.container_path != mount.container_path;
            self.mounts.retain(|(known, _)| is_other(known));
            self.mounts.push((mount, flags));
        }
        for (number, wanted) in edits.device_nodes.iter().flatten().enumerate() {
            let field = format!("containerEdits.deviceNodes[{number}]");
            let device = device(origin, &field, wanted, self.is_privileged)?;
            let is_other = |known: &Device| known.container_path != device.container_path;
            self.devices.retain(is_other);
            self.devices.push(device);
        }
        Ok(())
    }

    /// Adds them to the container, for which they go before what the request says.
    pub(super) fn add_to(self, mut config: ContainerConfig) -> WithDevices {
        config.envs.extend(self.variables);
        if !self.groups.is_empty() {
            let linux = config.linux.get_or_insert_default();
            let security = linux.security_context.get_or_insert_default();
            for group in self.groups.into_iter().map(i64::from) {
                if !security.supplemental_groups.contains(&group) {
                    security.supplemental_groups.push(group);
                }
            }
        }
        let is_replaced = |known: &Device| {
            let mut devices = self.devices.iter();
            devices.any(|device| device.container_path == known.container_path)
        };
        config.devices.retain(|known| !is_replaced(known));
        config.devices.extend(self.devices);
        let (mounts, mount_flags): (Vec<_>, _) = self.mounts.into_iter().unzip();
        config.mounts.extend(mounts);
        WithDevices {
            config,
            mount_flags,
        }
    }
}

/// Returns a volume, as a kubelet would ask for it.
fn volume(
    origin: &Origin,
    field: &str,
    wanted: &document::Mount,
) -> Result<(Mount, StatVfsMountFlags), CdiError> {
    let kind = wanted.kind.as_deref().unwrap_or_default();
    if !["", "none", "bind"].contains(&kind) {
        let reason = format!("{kind:?} is not a bind mount; have the driver mount it on the node");
        return Err(origin.refused(format!("{field}.type"), reason));
    }
    let mut mount = Mount {
        container_path: wanted.container_path.clone(),
        host_path: wanted.host_path.clone(),
        ..Mount::default()
    };
    let mut flags = StatVfsMountFlags::empty();
    for option in wanted.options.iter().flatten() {
        match option.as_str() {
            // What volumes are anyway.
            "bind" | "rbind" | "private" | "rprivate" | "rw" | "exec" | "defaults" => {}
            "ro" => mount.readonly = true,
            "rro" => (mount.readonly, mount.recursive_read_only) = (true, true),
            "slave" | "rslave" => {
                mount.propagation = MountPropagation::PropagationHostToContainer.into();
            }
            "shared" | "rshared" => {
                mount.propagation = MountPropagation::PropagationBidirectional.into();
            }
            "noexec" => flags |= StatVfsMountFlags::NOEXEC,
            "nosuid" => flags |= StatVfsMountFlags::NOSUID,
            "nodev" => flags |= StatVfsMountFlags::NODEV,
            _ => {
                let reason = format!(
                    "{option:?} is not one of bind, rbind, private, rprivate, slave, rslave, ro, \
                     rro, rw, exec, noexec, nosuid and nodev; have the driver leave it out"
                );
                return Err(origin.refused(format!("{field}.options"), reason));
            }
        }
    }
    let checked = mounts::check(std::slice::from_ref(&mount), None);
    checked.map_err(|fault| origin.invalid(field, fault))?;
    // Missing paths are made for kubelets only.
    origin.look_at(&format!("{field}.hostPath"), &wanted.host_path)?;
    Ok((mount, flags))
}

/// Returns a device, as a kubelet would ask for it.
fn device(
    origin: &Origin,
    field: &str,
    wanted: &DeviceNode,
    is_privileged: bool,
) -> Result<Device, CdiError> {
    let of_node = [
        ("fileMode", wanted.file_mode.is_some()),
        ("uid", wanted.uid.is_some()),
        ("gid", wanted.gid.is_some()),
    ];
    if let Some((name, _)) = of_node.into_iter().find(|(_, is_set)| *is_set) {
        let reason = "the device in the guest has the mode and owner of the one on the node; set \
                      them there, and have the driver leave it out";
        return Err(origin.refused(format!("{field}.{name}"), reason));
    }
    let permissions = match wanted.permissions.as_deref() {
        None | Some("") => ALL_ACCESS,
        Some(some) => some,
    };
    if permissions == "none" {
        let reason = "a device that may not be used is not put into a guest; use some of `rwm`";
        return Err(origin.refused(format!("{field}.permissions"), reason));
    }
    let host_path = wanted.host_path.as_deref().unwrap_or_default();
    let host_path = match host_path {
        "" => wanted.path.as_str(),
        some => some,
    };
    let device = Device {
        container_path: wanted.path.clone(),
        host_path: host_path.to_owned(),
        permissions: permissions.to_owned(),
    };
    let checked = devices::check(&device);
    checked.map_err(|fault| origin.invalid(field, fault))?;
    let kind = wanted.kind.as_deref().unwrap_or_default();
    let is_guests = guest_devices::is_given(host_path, is_privileged);
    if !is_guests {
        let meta = origin.look_at(&format!("{field}.hostPath"), host_path)?;
        if !meta.file_type().is_block_device() {
            let reason = format!(
                "{host_path} is no block device: of the node's devices, a virtual machine can have \
                 those; run the pod in another runtime"
            );
            return Err(origin.refused(field, reason));
        }
        let there = [i64::from(major(meta.rdev())), i64::from(minor(meta.rdev()))];
        let numbers = [wanted.major.unwrap_or(0), wanted.minor.unwrap_or(0)];
        if numbers != [0, 0] && numbers != there {
            let [major, minor] = there;
            let reason = format!("{host_path} is the device {major}:{minor} now");
            return Err(origin.refused(format!("{field}.major"), reason));
        }
    }
    let kinds = if is_guests { ["c", "u"] } else { ["b", "b"] };
    if !kind.is_empty() && !kinds.contains(&kind) {
        let reason = format!("{host_path} is not of the type {kind:?}");
        return Err(origin.refused(format!("{field}.type"), reason));
    }
    Ok(device)
}
