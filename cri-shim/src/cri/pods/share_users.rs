//! Whose rights on the node a pod's process has where it serves volumes.
//!
//! The process of a pod starts before the pod's volumes are known. It serves them as nobody on the
//! node, with mounts whose users are mapped, wherever they can be expected to have such mounts. If
//! one then cannot, the pod's machine is ended, and its kubelet makes the pod anew: that one's
//! process serves volumes as the node's root.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing::{info, warn};

use crate::bind::MOUNTINFO;
use crate::cri::error::CriError;
use crate::cri::node::{Node, Pod};
use crate::sandbox::{JailLayer, JailMode, SandboxClient, ShareUsers, jail};

/// Where kubelets have the volumes of their pods.
const KUBELET: &str = "/var/lib/kubelet";

/// Where volumes of a kubelet's pods are, as far as a node tells before there are any. Secrets are
/// on a tmpfs, as `/run` is: mapped only since Linux 6.3.
const PLACES: [&str; 3] = ["/", KUBELET, "/run"];

/// Tries mounts with mapped users of the places of volumes, and of podvisor's persistent directory.
/// Returns the first that has none, and the kernel's answer. This blocks.
pub(crate) fn place_without_mapped_users(root: &Path) -> Option<(PathBuf, io::Error)> {
    let places = PLACES.map(Path::new).into_iter().chain([root]);
    let mut tried = places.filter(|place| place.exists()).filter_map(|place| {
        let error = jail::try_mapped_users(place).err()?;
        Some((place.to_owned(), error))
    });
    tried.next()
}

/// File systems that a kubelet's volumes may be expected to have mapped users on. Whether one has
/// is tried when a volume is mounted.
const MAPPABLE: [&str; 11] = [
    "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "squashfs", "tmpfs", "vfat", "xfs",
];

impl Node {
    /// Returns why the processes of pods serve volumes as the node's root, if all of them do. This
    /// blocks.
    pub(in crate::cri) fn no_mapped_users(&self) -> Option<&str> {
        if self.config.jail == JailMode::Disabled {
            return Some("pods' processes have no jail");
        }
        if !self.config.map_users {
            return Some("the setting map_users is false");
        }
        let tried = self.host_users.tried.get_or_init(|| {
            let refused = place_without_mapped_users(&self.config.root);
            let why = refused.map(|(place, error)| {
                format!(
                    "no mounts with mapped users of {}: {error}",
                    place.display()
                )
            });
            if let Some(why) = &why {
                info!(why, "pods' processes serve volumes as the host's root");
            }
            why
        });
        tried.as_deref()
    }

    /// Returns whose rights the process of a new pod gets. This blocks.
    pub(in crate::cri) fn share_users(&self, uid: &str) -> ShareUsers {
        if self.requires_mapped_users() {
            return ShareUsers::Mapped;
        }
        let volumes = || {
            let table = fs::read(MOUNTINFO).unwrap_or_default();
            may_be_mapped(&table, uid)
        };
        // Other clients do not make a pod anew.
        let has_kubelet = || is_name(uid) && Path::new(KUBELET).join("pods").join(uid).is_dir();
        let is_mapped = !self.host_users.has(uid)
            && has_kubelet()
            && volumes()
            && self.no_mapped_users().is_none();
        match is_mapped {
            true => ShareUsers::Mapped,
            false => ShareUsers::Host,
        }
    }

    fn requires_mapped_users(&self) -> bool {
        self.config
            .required_layers
            .contains(&JailLayer::MappedUsers)
    }

    /// Ends the machine of a pod if what failed is a volume without mapped users, and pods may have
    /// one: its kubelet makes it anew.
    pub(in crate::cri) fn end_for_host_users(
        &self,
        pod: &Pod,
        client: &SandboxClient,
        error: &CriError,
    ) {
        if !matches!(error, CriError::HostUsers { .. }) || self.requires_mapped_users() {
            return;
        }
        let metadata = pod.with_record(|record| record.config.metadata.clone());
        let uid = metadata.unwrap_or_default().uid;
        warn!(pod = pod.id, uid, %error, "the pod is ended, to be made anew as the host's root");
        self.host_users.add(&uid);
        let client = client.clone();
        // The caller has the pod's turn, in which its end is noted.
        tokio::spawn(async move {
            if let Err(error) = client.shutdown(Duration::ZERO).await {
                warn!(%error, "failed to end the machine of a pod that is to be made anew");
            }
        });
    }
}

fn is_name(uid: &str) -> bool {
    !uid.is_empty() && uid.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

/// Whether the volumes that a kubelet has mounted for a pod are, by the mount table, of file
/// systems that may be expected to have mapped users. File servers are not asked: one may not
/// answer.
fn may_be_mapped(table: &[u8], uid: &str) -> bool {
    let below = PathBuf::from("pods").join(uid);
    let mut lines = table.split(|byte| *byte == b'\n');
    lines.all(|line| {
        let mut fields = line.split(|byte| *byte == b' ');
        let point = fields.nth(4).unwrap_or_default();
        let point = String::from_utf8_lossy(point);
        let is_of_pod = ["volumes", "volume-subpaths"]
            .iter()
            .any(|kind| point.contains(&format!("/{}/{kind}/", below.display())));
        let kind = fields.skip_while(|field| *field != b"-").nth(1);
        !is_of_pod || kind.is_some_and(|kind| MAPPABLE.iter().any(|name| name.as_bytes() == kind))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cri::node::TestNode;

    #[test]
    fn a_pod_with_a_volume_on_a_file_server_is_the_hosts_root_from_the_start() {
        let table = |kind: &str| {
            format!(
                "21 1 0:19 / / rw - overlay overlay rw\n\
                 22 21 0:20 / /var/lib/kubelet/pods/u-1/volumes/kubernetes.io~secret/a rw \
                 shared:3 - tmpfs tmpfs rw\n\
                 23 21 0:21 / /var/lib/kubelet/pods/u-1/volumes/kubernetes.io~csi/b/mount rw \
                 - {kind} server:/b rw\n\
                 24 21 0:5 /b /var/lib/kubelet/pods/u-1/volumeDevices/c rw - devtmpfs udev rw\n"
            )
        };
        assert!(may_be_mapped(table("ext4").as_bytes(), "u-1"));
        assert!(!may_be_mapped(table("nfs4").as_bytes(), "u-1"));
        assert!(may_be_mapped(table("nfs4").as_bytes(), "u-2"));
        assert!(may_be_mapped(b"", "u-1"));
    }

    #[test]
    fn a_pod_that_no_kubelet_makes_anew_is_the_hosts_root() {
        let node = TestNode::new();
        for uid in ["", "..", "no-such-pod"] {
            assert_eq!(node.share_users(uid), ShareUsers::Host, "{uid}");
        }
        // Without a jail.
        assert!(node.no_mapped_users().unwrap().contains("jail"));
    }
}
