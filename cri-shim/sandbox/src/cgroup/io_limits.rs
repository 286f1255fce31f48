//! Limits of a machine's I/O on block devices of the host, in its group's `io.max`.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};
use serde::{Deserialize, Serialize};

use super::{CgroupError, write};

/// The controller of the limits.
const CONTROLLER: &str = "io";

/// The kernel's directories of block devices, by their numbers.
const BLOCK_DEVICES: &str = "/sys/dev/block";

/// The limits of a machine's I/O on a block device of the host. `None` is no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct IoLimit {
    /// The device: a whole disk, no partition.
    pub device: PathBuf,
    /// Bytes read in a second.
    pub read_bps: Option<u64>,
    /// Bytes written in a second.
    pub write_bps: Option<u64>,
    /// Reads in a second.
    pub read_iops: Option<u64>,
    /// Writes in a second.
    pub write_iops: Option<u64>,
}

/// The reason why a machine's I/O cannot be limited. It is not started then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IoLimitError {
    /// The device is not there.
    #[error("cannot limit the I/O of {}", .device.display())]
    Device {
        /// What should be a device.
        device: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// It is something else.
    #[error("cannot limit the I/O of {}: it is no block device", .0.display())]
    NoBlockDevice(PathBuf),
    /// It is a part of a disk.
    #[error(
        "cannot limit the I/O of {}: it is a partition, and the kernel limits whole disks; name \
         {} instead",
        .partition.display(),
        .disk.display()
    )]
    Partition {
        /// The partition.
        partition: PathBuf,
        /// Its disk.
        disk: PathBuf,
    },
    /// The sandbox was to have no control group: see `cgroup_parent` of its configuration.
    #[error("cannot limit the sandbox's I/O without a control group of its own")]
    NoGroup,
    /// The control group with the limits cannot be made.
    #[error("cannot limit the sandbox's I/O")]
    Group(#[from] CgroupError),
}

/// The limits of one device: a line of `io.max`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IoMax {
    major: u32,
    minor: u32,
    limit: IoLimit,
}

#[cfg(test)]
impl IoMax {
    /// Gives it the number of a device that no host has.
    pub(super) fn lose_device(&mut self) {
        self.major = 4095;
    }
}

impl fmt::Display for IoMax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)?;
        for (name, value) in [
            ("rbps", self.limit.read_bps),
            ("wbps", self.limit.write_bps),
            ("riops", self.limit.read_iops),
            ("wiops", self.limit.write_iops),
        ] {
            match value {
                Some(value) => write!(f, " {name}={value}")?,
                None => write!(f, " {name}=max")?,
            }
        }
        Ok(())
    }
}

/// Checks that the devices are there and that the kernel can limit their I/O. Returns the limits,
/// one for each device, by the first of its paths. Of several of the same kind, the last one
/// counts.
///
/// # Errors
/// [`IoLimitError`] for a device that is not there, or that the kernel cannot limit.
pub fn merge_io_limits(limits: &[IoLimit]) -> Result<Vec<IoLimit>, IoLimitError> {
    let lines = resolve(limits)?;
    Ok(lines.into_iter().map(|line| line.limit).collect())
}

/// Finds the devices. One may have several paths; the last limit of each kind is that of the
/// device.
pub(crate) fn resolve(limits: &[IoLimit]) -> Result<Vec<IoMax>, IoLimitError> {
    let mut lines: Vec<IoMax> = Vec::new();
    for limit in limits {
        let (major, minor) = numbers(&limit.device)?;
        if let Some(disk) = disk_of(Path::new(BLOCK_DEVICES), major, minor) {
            let partition = limit.device.clone();
            return Err(IoLimitError::Partition { partition, disk });
        }
        add(&mut lines, major, minor, limit);
    }
    Ok(lines)
}

/// Returns the numbers of a block device.
fn numbers(device: &Path) -> Result<(u32, u32), IoLimitError> {
    let meta = fs::metadata(device).map_err(|source| IoLimitError::Device {
        device: device.to_owned(),
        source,
    })?;
    match meta.file_type().is_block_device() {
        true => Ok((major(meta.rdev()), minor(meta.rdev()))),
        false => Err(IoLimitError::NoBlockDevice(device.to_owned())),
    }
}

/// Returns the disk of a partition, by the kernel's directory of block devices.
fn disk_of(devices: &Path, major: u32, minor: u32) -> Option<PathBuf> {
    let device = devices.join(format!("{major}:{minor}"));
    if !device.join("partition").exists() {
        return None;
    }
    // The directory of a partition is in that of its disk.
    let device = fs::canonicalize(device).ok()?;
    let disk = device.parent()?.file_name()?.to_str()?;
    // The kernel replaces the slash in names such as that of /dev/cciss/c0d0.
    Some(Path::new("/dev").join(disk.replace('!', "/")))
}

/// Adds the limits of a device to those that it has already.
fn add(lines: &mut Vec<IoMax>, major: u32, minor: u32, limit: &IoLimit) {
    let known = |line: &&mut IoMax| (line.major, line.minor) == (major, minor);
    let Some(line) = lines.iter_mut().find(known) else {
        let limit = limit.clone();
        return lines.push(IoMax {
            major,
            minor,
            limit,
        });
    };
    let line = &mut line.limit;
    for (old, new) in [
        (&mut line.read_bps, limit.read_bps),
        (&mut line.write_bps, limit.write_bps),
        (&mut line.read_iops, limit.read_iops),
        (&mut line.write_iops, limit.write_iops),
    ] {
        *old = new.or(*old);
    }
}

/// Sets the limits of a new group in the hierarchy at `root`. The kernel takes one device with each
/// write.
pub(super) fn set_io_limits(root: &Path, group: &Path, lines: &[IoMax]) -> Result<(), CgroupError> {
    let path = group.join("io.max");
    for line in lines {
        let line = line.to_string();
        write(&path, &line).map_err(|error| match error {
            CgroupError::Step { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                without_file(root, group)
            }
            CgroupError::Step { path, source, .. } => CgroupError::Value {
                value: line,
                path,
                source,
            },
            other => other,
        })?;
    }
    Ok(())
}

/// Returns why a group has no `io.max`.
fn without_file(root: &Path, group: &Path) -> CgroupError {
    let lists = |dir: &Path, file: &str| {
        let list = fs::read_to_string(dir.join(file)).unwrap_or_default();
        list.split_whitespace().any(|name| name == CONTROLLER)
    };
    if !lists(root, "cgroup.controllers") {
        return CgroupError::NoController(CONTROLLER);
    }
    let above = group.ancestors().skip(1);
    let above = above.take_while(|group| group.starts_with(root));
    // The uppermost one: the groups below it cannot enable the controller.
    let disabling = above.filter(|group| !lists(group, "cgroup.subtree_control"));
    match disabling.last() {
        Some(group) => CgroupError::NotEnabled {
            controller: CONTROLLER,
            group: group.to_owned(),
        },
        None => CgroupError::NoFile(group.join("io.max")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn limit(device: &str) -> IoLimit {
        IoLimit {
            device: device.into(),
            ..IoLimit::default()
        }
    }

    #[test]
    fn a_device_has_one_line_with_all_of_its_limits() {
        let mut lines = Vec::new();
        let reads = IoLimit {
            read_bps: Some(1 << 20),
            read_iops: Some(3),
            ..limit("/dev/sda")
        };
        let more = IoLimit {
            read_iops: Some(4),
            write_iops: Some(u64::MAX),
            ..limit("/dev/disk/by-id/a")
        };
        let other = IoLimit {
            write_bps: Some(7),
            ..limit("/dev/sdb")
        };
        add(&mut lines, 8, 0, &reads);
        add(&mut lines, 8, 16, &other);
        add(&mut lines, 8, 0, &more);
        let lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
        let first = format!("8:0 rbps=1048576 wbps=max riops=4 wiops={}", u64::MAX);
        assert_eq!(lines, [&*first, "8:16 rbps=max wbps=7 riops=max wiops=max"]);
    }

    #[test]
    fn the_disk_of_a_partition_is_named() {
        let sys = tempfile::tempdir().unwrap();
        let devices = sys.path().join("dev/block");
        fs::create_dir_all(&devices).unwrap();
        for (numbers, path) in [
            ("8:0", "devices/pci/block/sda"),
            ("8:1", "devices/pci/block/sda/sda1"),
            ("104:1", "devices/pci/block/cciss!c0d0/cciss!c0d0p1"),
        ] {
            let directory = sys.path().join(path);
            fs::create_dir_all(&directory).unwrap();
            symlink(&directory, devices.join(numbers)).unwrap();
            if numbers.ends_with('1') {
                fs::write(directory.join("partition"), "1\n").unwrap();
            }
        }
        assert_eq!(disk_of(&devices, 8, 0), None);
        assert_eq!(disk_of(&devices, 8, 2), None);
        assert_eq!(disk_of(&devices, 8, 1), Some("/dev/sda".into()));
        assert_eq!(disk_of(&devices, 104, 1), Some("/dev/cciss/c0d0".into()));
        let error = IoLimitError::Partition {
            partition: "/dev/sda1".into(),
            disk: "/dev/sda".into(),
        };
        let text = error.to_string();
        assert!(text.contains("name /dev/sda instead"), "{text}");
    }

    #[test]
    fn what_is_no_block_device_is_refused() {
        for (path, word) in [
            ("/dev/null", "no block device"),
            ("/etc", "no block device"),
            ("/dev/no-such-disk", "/dev/no-such-disk"),
        ] {
            let error = merge_io_limits(&[limit(path)]).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains(path), "{error}");
        }
        assert_eq!(merge_io_limits(&[]).unwrap(), []);
    }

    #[test]
    fn a_group_that_cannot_limit_io_has_an_error_that_says_why() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let group = root.join("parent/id");
        fs::create_dir_all(&group).unwrap();
        let line = IoMax {
            major: 8,
            minor: 0,
            limit: IoLimit {
                read_bps: Some(1),
                ..IoLimit::default()
            },
        };
        let set = || set_io_limits(root, &group, std::slice::from_ref(&line));
        let refused = || set().unwrap_err();
        let list = |file: &str, text: &str| fs::write(root.join(file), text).unwrap();

        assert!(matches!(refused(), CgroupError::NoController("io")));
        list("cgroup.controllers", "cpu iota memory\n");
        assert!(matches!(refused(), CgroupError::NoController("io")));
        list("cgroup.controllers", "cpu io memory\n");
        let disabling = || match refused() {
            CgroupError::NotEnabled { controller, group } => (controller, group),
            other => panic!("{other:?}"),
        };
        assert_eq!(disabling(), ("io", root.to_owned()));
        list("cgroup.subtree_control", "io\n");
        assert_eq!(disabling(), ("io", root.join("parent")));
        list("parent/cgroup.subtree_control", "cpu io\n");
        let path = group.join("io.max");
        assert!(matches!(refused(), CgroupError::NoFile(file) if file == path));
        assert!(!path.exists());

        fs::create_dir(&path).unwrap();
        let text = refused().to_string();
        assert!(text.contains("8:0 rbps=1 wbps=max"), "{text}");
        assert!(text.contains("io.max"), "{text}");
        fs::remove_dir(&path).unwrap();
        fs::write(&path, "").unwrap();
        set().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text, "8:0 rbps=1 wbps=max riops=max wiops=max");
    }
}
