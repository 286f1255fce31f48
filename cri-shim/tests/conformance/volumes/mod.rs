//! Directories and files of the host in a container.

mod in_memory;
mod mounts;
mod of_images;
mod programs;

use std::ffi::CStr;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use podvisor_cri::sandbox::jail;
use podvisor_cri_messages::*;
use rustix::fs::XattrFlags;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount,
};
use tonic::Code;

use crate::client::{ask, ask_images};
use crate::fixture::RUNTIME;
use crate::pod::{Client, Container, Pod, image, security, stdout, strings};
use crate::support::until;

pub(crate) fn mount(host: &Path, container: &str) -> Mount {
    Mount {
        container_path: container.to_owned(),
        host_path: host.display().to_string(),
        ..Default::default()
    }
}

/// A directory of the host with its own file system mounted in it, until this is dropped.
pub(crate) struct Mounted(pub(crate) PathBuf);

impl Mounted {
    /// Mounts a tmpfs, on which only newer hosts map users.
    fn at(path: PathBuf) -> Self {
        Self::with(path, c"")
    }

    fn with(path: PathBuf, options: &CStr) -> Self {
        let mount = rustix::mount::mount("tmpfs", &path, "tmpfs", MountFlags::empty(), options);
        mount.unwrap();
        Self(path)
    }

    /// Mounts an ext4 in a new directory.
    fn with_attributes(name: &str) -> Self {
        let path = RUNTIME.directory(name).join("mounted");
        fs::create_dir(&path).unwrap();
        Self::disk(path)
    }

    /// Mounts an ext4 of 16 MiB, which has extended attributes and maps users on every host.
    fn disk(path: PathBuf) -> Self {
        let disk = RUNTIME.directory("disk").join("disk");
        let script = "/sbin/mke2fs -q -t ext4 \"$1\" 16M >/dev/null && mount -o loop \"$1\" .";
        let mut make = Command::new("sh");
        make.args(["-c", script, "sh"]).arg(disk).current_dir(&path);
        assert!(make.status().unwrap().success());
        Self(path)
    }

    pub(crate) fn bound(from: &Path, path: PathBuf) -> Self {
        mount_bind(from, &path).unwrap();
        Self(path)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Returns the number of mounts of a file system.
fn mounts_of(device: u64) -> usize {
    let id = format!(
        "{}:{}",
        rustix::fs::major(device),
        rustix::fs::minor(device)
    );
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let ids = table.lines().filter_map(|line| line.split(' ').nth(2));
    ids.filter(|mounted| *mounted == id).count()
}

/// Creates a directory of the host like that of an emptyDir of the medium Memory.
pub(crate) fn memory_volume(name: &str, options: &CStr) -> Mounted {
    let dir = RUNTIME.directory(name);
    let volume = dir.join("volumes/kubernetes.io~empty-dir/cache");
    fs::create_dir_all(&volume).unwrap();
    Mounted::with(volume, options)
}
