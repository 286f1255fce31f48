//! The status of containers, as reported to clients.

use std::collections::HashMap;

use podvisor_cri_messages::{
    Container as Shown, ContainerFilter, ContainerResources, ContainerState, ContainerStatus,
    ContainerStatusResponse, ContainerUser, ImageSpec, LinuxContainerResources, LinuxContainerUser,
    Mount,
};

use super::stop_signal;
use crate::boot;
use crate::cri::error::Result;
use crate::cri::node::matches_labels;
use crate::cri::node::{Container, Node};
use crate::cri::state::{ContainerPhase, ContainerRecord, MountedImage};

fn state(record: &ContainerRecord) -> ContainerState {
    match record.phase {
        ContainerPhase::Created | ContainerPhase::Creating => ContainerState::ContainerCreated,
        ContainerPhase::Running { .. } => ContainerState::ContainerRunning,
        ContainerPhase::Exited(_) => ContainerState::ContainerExited,
        // Shown as it was until it is gone: a kubelet reports an unknown one as killed, and counts
        // a restart. One that has not ended has never run.
        ContainerPhase::Removing => match record.exit_before_removal {
            Some(_) => ContainerState::ContainerExited,
            None => ContainerState::ContainerCreated,
        },
    }
}

/// Replaces the name in a request's image by its tag, if it has one.
fn image_named(image: Option<ImageSpec>, tag: String) -> Option<ImageSpec> {
    let mut image = image?;
    if !tag.is_empty() {
        image.image = tag;
    }
    Some(image)
}

/// Returns the mounts of the node's files, as a runtime specification lists them.
fn mounts(mounts: &[Mount]) -> Vec<serde_json::Value> {
    let of_node = mounts.iter().filter(|mount| !mount.host_path.is_empty());
    let shown = of_node.map(|mount| {
        serde_json::json!({
            "destination": mount.container_path,
            "type": "bind",
            "source": mount.host_path,
            "options": ["rbind", if mount.readonly { "ro" } else { "rw" }],
        })
    });
    shown.collect()
}

/// Returns the mounts of a container with what is known of the images in them. Those of a container
/// from an older daemon are not known.
fn with_images(mut mounts: Vec<Mount>, images: Vec<MountedImage>) -> Vec<Mount> {
    for of_image in images {
        if let Some(mount) = mounts.get_mut(of_image.mount) {
            mount.image.get_or_insert_default().image_ref = of_image.id;
            mount.image_sub_path = of_image.sub_path;
        }
    }
    mounts
}

fn user(user: crate::sandbox::ContainerUser) -> ContainerUser {
    ContainerUser {
        linux: Some(LinuxContainerUser {
            uid: user.uid.into(),
            gid: user.gid.into(),
            supplemental_groups: user.groups.into_iter().map(i64::from).collect(),
        }),
    }
}

/// Returns the limits without those that guests ignore.
fn applied(limits: LinuxContainerResources) -> LinuxContainerResources {
    LinuxContainerResources {
        cpuset_cpus: String::new(),
        cpuset_mems: String::new(),
        ..limits
    }
}

impl Node {
    /// ContainerStatus.
    pub(in crate::cri) async fn container_status(
        &self,
        id: &str,
        verbose: bool,
    ) -> Result<ContainerStatusResponse> {
        let container = self.settled_container(id).await?;
        let mut info = HashMap::new();
        if verbose {
            let record = container.record();
            let boot = self.boot_of(&container).await;
            let details = serde_json::json!({
                "sandboxID": record.pod,
                // The PID of the machine: the container's own processes are in the guest.
                "pid": container.pod.client().map(|client| client.pid()).unwrap_or_default(),
                "runtimeSpec": {
                    "process": record.process,
                    "mounts": mounts(&record.config.mounts),
                    "linux": {"namespaces": self.namespaces(&record.pod)},
                },
                "image": record.image,
                "process": record.process,
                "user": record.user,
                "volumes": record.volumes,
                "config": record.config,
                "boot": boot,
            });
            info.insert("info".to_owned(), details.to_string());
        }
        Ok(ContainerStatusResponse {
            status: Some(self.status_of(&container)),
            info,
        })
    }

    /// Returns how a container's machine was booted, if it has one of its own.
    pub(in crate::cri) async fn boot_of(&self, container: &Container) -> Option<serde_json::Value> {
        container.with_record(|record| record.vm.is_some().then_some(()))?;
        let client = container.pod.client().ok()?;
        let report = boot::ask(&client, &container.id).await?;
        Some(boot::view(&report))
    }

    pub(in crate::cri) fn status_of(&self, container: &Container) -> ContainerStatus {
        let record = container.record();
        let state = state(&record).into();
        let linux = record.config.linux.and_then(|linux| linux.resources);
        let mut status = ContainerStatus {
            id: record.id,
            metadata: record.config.metadata,
            state,
            created_at: record.created_at,
            image: image_named(record.config.image, record.image_tag),
            image_ref: record.image_ref,
            image_id: record.image,
            labels: record.config.labels,
            annotations: record.config.annotations,
            mounts: with_images(record.config.mounts, record.mounted_images),
            stop_signal: stop_signal::to_cri(record.stop_signal),
            log_path: record.log_path,
            resources: linux.map(|linux| ContainerResources {
                linux: Some(applied(linux)),
                windows: None,
            }),
            user: record.identity.map(user),
            ..ContainerStatus::default()
        };
        match (record.phase, record.exit_before_removal) {
            (ContainerPhase::Running { started_at }, _) => status.started_at = started_at,
            (ContainerPhase::Exited(exit), _) | (ContainerPhase::Removing, Some(exit)) => {
                status.started_at = exit.started_at;
                status.finished_at = exit.finished_at;
                status.exit_code = exit.code;
                status.reason = exit.reason;
                status.message = exit.message;
            }
            _ => {}
        }
        status
    }

    /// ListContainers.
    pub(in crate::cri) async fn list_containers(
        &self,
        filter: Option<ContainerFilter>,
    ) -> Vec<Shown> {
        self.all_settled().await;
        let filter = filter.unwrap_or_default();
        let wanted = filter.state.map(|state| state.state);
        let is_wanted = |record: &ContainerRecord| {
            record.phase != ContainerPhase::Creating
                && record.id.starts_with(&filter.id)
                && record.pod.starts_with(&filter.pod_sandbox_id)
                && wanted.is_none_or(|wanted| wanted == i32::from(state(record)))
                && matches_labels(&record.config.labels, &filter.label_selector)
        };
        // A kubelet asks each second: only what is shown is copied.
        let shown = self.containers().into_iter().filter_map(|container| {
            container.with_record(|record| is_wanted(record).then(|| shown(record)))
        });
        let mut shown: Vec<Shown> = shown.collect();
        shown.sort_by_key(|shown| std::cmp::Reverse(shown.created_at));
        shown
    }
}

fn shown(record: &ContainerRecord) -> Shown {
    Shown {
        id: record.id.clone(),
        pod_sandbox_id: record.pod.clone(),
        metadata: record.config.metadata.clone(),
        image: record.config.image.clone(),
        // As containerd does in lists: kubelets that do not know `image_id` look here for the
        // images in use.
        image_ref: record.image.clone(),
        state: state(record).into(),
        created_at: record.created_at,
        labels: record.config.labels.clone(),
        annotations: record.config.annotations.clone(),
        image_id: record.image.clone(),
    }
}

#[cfg(test)]
mod tests {
    use podvisor_cri_messages::{ContainerConfig, LinuxContainerConfig, Signal};

    use super::*;
    use crate::cri::node::{Pod, TestNode};
    use crate::cri::state::{container_record, pod_record};

    #[test]
    fn the_status_names_the_images_that_are_mounted_and_the_stop_signal() {
        let node = TestNode::new();
        let image = |name: &str| Mount {
            container_path: format!("/{name}"),
            image: Some(ImageSpec {
                image: name.to_owned(),
                user_specified_image: "model:1".to_owned(),
                ..ImageSpec::default()
            }),
            ..Mount::default()
        };
        let host = Mount {
            host_path: "/srv".to_owned(),
            ..Mount::default()
        };
        let mounts = vec![image("whole"), host.clone(), image("part")];
        let mounted = |mount, id: &str, sub_path: &str| MountedImage {
            mount,
            id: id.to_owned(),
            sub_path: sub_path.to_owned(),
        };
        let record = |mounted_images| ContainerRecord {
            config: ContainerConfig {
                mounts: mounts.clone(),
                ..ContainerConfig::default()
            },
            mounted_images,
            ..container_record("c", "p")
        };
        let status = |record| node.status_of(&Container::new(record, Pod::new(pod_record("p"))));
        let known = record(vec![
            mounted(0, "sha256:a", ""),
            mounted(2, "sha256:b", "etc"),
        ]);
        let known = status(known);
        assert_eq!(known.stop_signal(), Signal::Sigterm);
        let shown = known.mounts.iter().map(|mount| {
            let image = mount.image.clone().unwrap_or_default();
            (image.image_ref, mount.image_sub_path.clone())
        });
        let expected = [("sha256:a", ""), ("", ""), ("sha256:b", "etc")];
        let expected = expected.map(|(id, path)| (id.to_owned(), path.to_owned()));
        assert_eq!(shown.collect::<Vec<_>>(), expected);
        assert_eq!(known.mounts[1], host);
        // Of an older daemon.
        assert_eq!(status(record(Vec::new())).mounts, mounts);
    }

    #[test]
    fn the_status_has_no_limits_that_are_not_applied() {
        let node = TestNode::new();
        let asked = LinuxContainerResources {
            cpu_shares: 512,
            memory_limit_in_bytes: 64 << 20,
            cpuset_cpus: "0-1".to_owned(),
            cpuset_mems: "0".to_owned(),
            ..LinuxContainerResources::default()
        };
        let record = ContainerRecord {
            config: ContainerConfig {
                linux: Some(LinuxContainerConfig {
                    resources: Some(asked),
                    ..LinuxContainerConfig::default()
                }),
                ..ContainerConfig::default()
            },
            ..container_record("c", "p")
        };
        let container = Container::new(record, Pod::new(pod_record("p")));
        let status = node.status_of(&container);
        let expected = LinuxContainerResources {
            cpu_shares: 512,
            memory_limit_in_bytes: 64 << 20,
            ..LinuxContainerResources::default()
        };
        assert_eq!(status.resources.unwrap().linux, Some(expected));
    }
}
