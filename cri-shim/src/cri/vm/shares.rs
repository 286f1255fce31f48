//! Directories of the node that a machine mounts by virtio-fs.
//!
//! They are mounted as the volumes of a container are: in the mount namespace of the pod's process,
//! below the directory that it shares, for as long as the container exists. Each is a device of the
//! machine, whose guest mounts it by its tag.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use podvisor_cloud_init::{GuestMount, MountSource};
use podvisor_cri_messages::Mount;
use podvisor_sandbox::machine::MachineShare;

use crate::blocking::{apart, in_place};
use crate::cri::error::{CriError, Result};
use crate::cri::node::{Node, Pod};
use crate::cri::spec::VolumeSource;
use crate::cri::vm_spec::MAX_TAG;
use crate::cri::volumes;

/// A directory that a machine is to mount.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct WantedShare {
    pub(super) tag: String,
    /// The container's mount of it.
    pub(super) mount: Mount,
}

impl WantedShare {
    /// Returns the shares of these mounts, whose tags are the last parts of their paths where those
    /// can be tags that nothing else has.
    pub(super) fn of_mounts(mounts: Vec<Mount>) -> Vec<Self> {
        let mut taken = BTreeSet::new();
        let mut shares = Vec::new();
        for (number, mount) in mounts.into_iter().enumerate() {
            let path = mount.container_path.trim_end_matches('/');
            let last = path.rsplit('/').next().unwrap_or_default();
            let own = Some(last.to_owned()).filter(|last| is_tag(last));
            let mut others = (number..).map(|number| format!("volume{number}"));
            let tag = own.filter(|tag| !taken.contains(tag));
            let tag = tag.or_else(|| others.find(|tag| !taken.contains(tag)));
            let tag = tag.unwrap_or_default();
            taken.insert(tag.clone());
            shares.push(Self { tag, mount });
        }
        shares
    }

    /// Returns what cloud-init mounts: the directory at the container's path.
    pub(super) fn guest_mount(&self) -> GuestMount {
        GuestMount {
            source: MountSource::Share {
                tag: self.tag.clone(),
            },
            path: self.mount.container_path.clone(),
            read_only: self.mount.readonly,
        }
    }
}

fn is_tag(text: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_TAG).contains(&text.len()) && text.bytes().all(is_letter)
}

impl Node {
    /// Mounts directories for a container's machine, whose users they have until it is removed.
    pub(super) async fn share_directories(
        &self,
        pod: &Arc<Pod>,
        container: &str,
        wanted: &[WantedShare],
    ) -> Result<Vec<MachineShare>> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let client = pod.client()?;
        let shared = self.shared_directory(pod, &client)?;
        let mounts: Vec<Mount> = wanted.iter().map(|share| share.mount.clone()).collect();
        let look = {
            let (shared, pod) = (Arc::clone(&shared), Arc::clone(pod));
            move || volumes::look(&shared, &pod.mounted, &mounts, BTreeMap::new())
        };
        // A file server that does not answer must not delay the pod's end.
        let looked = tokio::select! {
            looked = apart("vm-volumes", look) => {
                looked.map_err(CriError::host("look at the volumes"))??
            }
            () = pod.is_to_end() => return Err(pod.not_ready()),
        };
        let mounted = in_place(|| volumes::mount(&shared, &pod.mounted, container, looked));
        let mounted = mounted.inspect_err(|error| self.end_for_host_users(pod, &client, error))?;
        let shares = wanted.iter().zip(mounted).map(|(wanted, volume)| {
            let VolumeSource::Shared(name) = volume.source else {
                let reason = format!("{:?}: not a directory", wanted.mount.container_path);
                return Err(CriError::invalid("config.mounts", reason));
            };
            Ok(MachineShare {
                tag: wanted.tag.clone(),
                name,
                is_read_only: wanted.mount.readonly,
            })
        });
        shares.collect()
    }

    /// Unmounts what was mounted for a container that was not created.
    pub(super) fn unshare_directories(&self, pod: &Pod, container: &str) -> Result<()> {
        let shared = self.dir(&pod.id).join(volumes::SHARED);
        in_place(|| volumes::release(&shared, &pod.mounted, container))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_the_last_parts_of_paths_and_unlike() {
        let mount = |path: &str| Mount {
            container_path: path.to_owned(),
            readonly: path == "/b/data",
            ..Mount::default()
        };
        let long = format!("/{}", "x".repeat(37));
        let paths = ["/a/data", "/b/data", "/c/", "/d e", &long, "/volume4"];
        let shares = WantedShare::of_mounts(paths.map(mount).into());
        let tags: Vec<&str> = shares.iter().map(|share| share.tag.as_str()).collect();
        assert_eq!(
            tags,
            ["data", "volume1", "c", "volume3", "volume4", "volume5"]
        );
        let second = shares[1].guest_mount();
        assert_eq!((second.path.as_str(), second.read_only), ("/b/data", true));
    }
}
