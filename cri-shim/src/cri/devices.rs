//! Devices of a container: block devices of the node, which are plugged into its guest as disks,
//! and character devices of the guest's own kernel. A virtual machine cannot have other devices of
//! the node.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use podvisor_cri_messages::Device;

use super::error::{CriError, Result};
use super::spec;
use crate::guest_devices;
use crate::sandbox::{ContainerDevice, DeviceSource};

/// Maximum number of devices of one container.
const MAX_DEVICES: usize = 16;

/// Returns the devices for the sandbox; the node's block devices are open.
pub(super) fn open(wanted: &[Device], is_privileged: bool) -> Result<Vec<ContainerDevice>> {
    if wanted.len() > MAX_DEVICES {
        let reason = format!("{} are more than {MAX_DEVICES}", wanted.len());
        return Err(CriError::invalid("config.devices", reason));
    }
    let mut paths = BTreeSet::new();
    for device in wanted {
        spec::devices::check(device)?;
        if !paths.insert(&device.container_path) {
            let reason = format!("{:?} is there twice", device.container_path);
            return Err(CriError::invalid("config.devices.container_path", reason));
        }
    }
    let devices = wanted.iter().map(|device| {
        Ok(ContainerDevice {
            path: device.container_path.clone(),
            access: device.permissions.clone(),
            source: source(device, is_privileged)?,
        })
    });
    devices.collect()
}

fn source(device: &Device, is_privileged: bool) -> Result<DeviceSource> {
    let path = Path::new(&device.host_path);
    if guest_devices::is_given(&device.host_path, is_privileged) {
        return Ok(DeviceSource::Guest(device.host_path.clone()));
    }
    // Checked before opening it, which may have side effects.
    let looked_at = fs::metadata(path).map_err(CriError::io("look at the device", path))?;
    if !looked_at.file_type().is_block_device() {
        return Err(CriError::Refused {
            field: "config.devices.host_path",
            reason: "of the node's devices, a virtual machine can have block devices; it has \
                     /dev/fuse, /dev/net/tun, /dev/null and the like itself, and for privileged \
                     containers /dev/kmsg and /dev/loop-control",
        });
    }
    let is_read_only = !device.permissions.contains('w');
    let file = OpenOptions::new()
        .read(true)
        .write(!is_read_only)
        .open(path)
        .map_err(CriError::io("open the device", path))?;
    let meta = file
        .metadata()
        .map_err(CriError::io("look at the device", path))?;
    if meta.rdev() != looked_at.rdev() || !meta.file_type().is_block_device() {
        return Err(CriError::invalid(
            "config.devices.host_path",
            "it became another device meanwhile; try again",
        ));
    }
    let number = meta.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    Ok(DeviceSource::Disk {
        file: file.into(),
        serial: format!("b{major}:{minor}{}", if is_read_only { "r" } else { "w" }),
        is_read_only,
        mode: meta.mode() & 0o777,
        uid: meta.uid(),
        gid: meta.gid(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(host: &str, container: &str, permissions: &str) -> Device {
        Device {
            host_path: host.to_owned(),
            container_path: container.to_owned(),
            permissions: permissions.to_owned(),
        }
    }

    #[test]
    fn the_guests_own_character_devices_are_given_by_name() {
        let fuse = [device("/dev/fuse", "/dev/mine", "rw")];
        let given = open(&fuse, false).unwrap();
        assert!(matches!(&given[0].source, DeviceSource::Guest(path) if path == "/dev/fuse"));
        assert_eq!((&*given[0].path, &*given[0].access), ("/dev/mine", "rw"));
        let kmsg = [device("/dev/kmsg", "/dev/kmsg", "r")];
        assert!(open(&kmsg, false).is_err());
        open(&kmsg, true).unwrap();
    }

    #[test]
    fn what_no_guest_can_have_is_refused_by_name() {
        for (host, container, permissions, field) in [
            ("/dev/ptmx", "/dev/x", "rw", "host_path"),
            ("/dev", "/dev/x", "rw", "host_path"),
            ("/etc/passwd", "/dev/x", "rw", "host_path"),
            ("dev/null", "/dev/x", "rw", "host_path"),
            ("/dev/../dev/sda", "/dev/x", "rw", "host_path"),
            ("/dev/null", "x", "rw", "container_path"),
            ("/dev/null", "/", "rw", "container_path"),
            ("/dev/null", "/dev/x", "", "permissions"),
            ("/dev/null", "/dev/x", "rx", "permissions"),
            ("/dev/no-such-device", "/dev/x", "rw", "/dev/no-such-device"),
        ] {
            let refused = open(&[device(host, container, permissions)], true);
            let message = refused.unwrap_err().to_string();
            assert!(message.contains(field), "{host} {container}: {message}");
        }
        let twice = [
            device("/dev/null", "/dev/x", "r"),
            device("/dev/zero", "/dev/x", "r"),
        ];
        assert!(open(&twice, false).is_err());
        let many = vec![device("/dev/null", "/dev/x", "r"); MAX_DEVICES + 1];
        assert!(open(&many, false).is_err());
    }
}
