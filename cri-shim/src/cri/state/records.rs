//! Records of the database, as JSON with a version.

use std::collections::BTreeMap;
use std::net::IpAddr;

use oci_spec::runtime::Process;
use podvisor_cri_messages::{ContainerConfig, PodSandboxConfig};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::vm_record::VmRecord;
use crate::sandbox::{ContainerUser, GuestNetwork, SupplementalGroups};

/// A value that is stored under an id.
pub(crate) trait Record: Clone + Serialize + DeserializeOwned {
    /// Name of the table.
    const TABLE: &'static str;
    /// Version of the record's format. A podvisor reads all records up to its own version: a field
    /// that is added has a default, and what a podvisor without it would misunderstand is a new
    /// version.
    const VERSION: u32;
    /// The key.
    fn id(&self) -> &str;
}

/// A pod sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct PodRecord {
    /// 64 hexadecimal digits.
    pub(crate) id: String,
    /// As the kubelet wants it.
    #[serde(with = "super::protobuf")]
    pub(crate) config: PodSandboxConfig,
    /// The runtime handler as the kubelet named it; empty for the default.
    pub(crate) handler: String,
    /// Nanoseconds since 1970.
    pub(crate) created_at: i64,
    /// Its state in the life cycle.
    pub(crate) phase: PodPhase,
    /// Its addresses, the primary one first.
    pub(crate) addresses: Vec<IpAddr>,
    /// The size that its guest was created with.
    #[serde(default)]
    pub(crate) size: GuestSize,
    /// Its volumes in memory, by their keys; `None` if an older daemon created its guest, which
    /// does not know such volumes.
    #[serde(default)]
    pub(crate) memory_volumes: Option<Vec<MemoryVolume>>,
    /// Whether its guest's agent fills volumes that images declare.
    #[serde(default)]
    pub(crate) fills_volumes: bool,
    /// Bytes that its guest got beyond its limits, for containers without one.
    #[serde(default)]
    pub(crate) extra: u64,
    /// Its network, if it is a virtual machine, whose own system is told of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) network: Option<GuestNetwork>,
}

/// A volume that is a tmpfs on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryVolume {
    /// Its path on the host.
    pub(crate) path: String,
    /// Whether the guest has its own tmpfs in its place; otherwise the pod sees the host's.
    pub(crate) in_guest: bool,
}

/// The memory of a pod's guest, in bytes, and its vCPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GuestSize {
    /// At boot.
    pub(crate) memory: u64,
    /// Maximum that may be added.
    pub(crate) growth: u64,
    /// vCPUs at boot.
    #[serde(default)]
    pub(crate) vcpus: u8,
    /// Maximum number of vCPUs; 0 in a record of an older daemon.
    #[serde(default)]
    pub(crate) max_vcpus: u8,
}

impl GuestSize {
    /// Returns whether the guest may get more vCPUs than it booted with.
    pub(crate) fn may_get_vcpus(self) -> bool {
        self.max_vcpus > self.vcpus
    }
}

/// The life cycle of a pod sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PodPhase {
    /// Being created; undone after a crash.
    Creating,
    /// Its machine runs.
    Ready,
    /// Its machine is gone; its network may not be.
    Stopped {
        /// The reason, if no caller asked for it.
        reason: Option<String>,
        /// The host's kernel killed it because memory ran out.
        #[serde(default)]
        is_out_of_memory: bool,
    },
    /// Being removed; continued after a crash.
    Removing,
}

impl PodPhase {
    /// The machine is gone, and not because memory ran out.
    pub(crate) fn stopped(reason: Option<String>) -> Self {
        Self::Stopped {
            reason,
            is_out_of_memory: false,
        }
    }
}

/// A container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ContainerRecord {
    /// 64 hexadecimal digits.
    pub(crate) id: String,
    /// Its sandbox.
    pub(crate) pod: String,
    /// As the kubelet wants it.
    #[serde(with = "super::protobuf")]
    pub(crate) config: ContainerConfig,
    /// Id of its image.
    pub(crate) image: String,
    /// The image's name with its digest, or its id.
    pub(crate) image_ref: String,
    /// Signal that asks it to end.
    pub(crate) stop_signal: u32,
    /// Path of its log; empty for none.
    pub(crate) log_path: String,
    /// Names of its volumes in the pod's shared directory.
    pub(crate) volumes: Vec<String>,
    /// Its process, the template for those of an exec.
    pub(crate) process: Process,
    /// `user[:group]` for the agent to look up.
    pub(crate) user: String,
    /// Which groups of the image its processes belong to.
    pub(crate) groups: SupplementalGroups,
    /// The user of its process, once the guest has created it.
    #[serde(default)]
    pub(crate) identity: Option<ContainerUser>,
    /// The tag that is reported for its image; empty if it has none.
    #[serde(default)]
    pub(crate) image_tag: String,
    /// Why it cannot be started: its process cannot be created. It does not exist in any guest.
    #[serde(default)]
    pub(crate) start_error: Option<String>,
    /// The images that it mounts; empty in a record of an older daemon.
    #[serde(default)]
    pub(crate) mounted_images: Vec<MountedImage>,
    /// How it had ended when its removal began; `None` if it had not.
    #[serde(default)]
    pub(crate) exit_before_removal: Option<ContainerExit>,
    /// The machine that it is, in a pod that is a virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) vm: Option<VmRecord>,
    /// Nanoseconds since 1970.
    pub(crate) created_at: i64,
    /// Its state in the life cycle.
    pub(crate) phase: ContainerPhase,
}

/// An image that a container mounts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MountedImage {
    /// Index in the mounts of the container's configuration.
    pub(crate) mount: usize,
    /// The image's id.
    pub(crate) id: String,
    /// The path in the image that is mounted; empty for all of it.
    pub(crate) sub_path: String,
}

/// The life cycle of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ContainerPhase {
    /// Being created; undone after a crash.
    Creating,
    /// Created, not started.
    Created,
    /// Started; after a crash its sandbox has newer information.
    Running {
        /// Nanoseconds since 1970.
        started_at: i64,
    },
    /// Ended, or failed to start.
    Exited(ContainerExit),
    /// Being removed; continued after a crash.
    Removing,
}

impl ContainerPhase {
    /// Returns whether it uses memory and CPUs, or will.
    pub(crate) fn is_there(&self) -> bool {
        !matches!(self, Self::Exited(_) | Self::Removing)
    }
}

/// How a container ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ContainerExit {
    /// Nanoseconds since 1970; 0 when it never started.
    pub(crate) started_at: i64,
    /// Nanoseconds since 1970.
    pub(crate) finished_at: i64,
    /// The exit code; 128 plus the signal's number if a signal killed it.
    pub(crate) code: i32,
    /// A single word, for programs.
    pub(crate) reason: String,
    /// Details, for people.
    pub(crate) message: String,
}

impl ContainerExit {
    /// The reason of a container whose machine went on at another node.
    pub(crate) const MOVED: &str = "Moved";
}

impl Record for PodRecord {
    const TABLE: &'static str = "pods";
    const VERSION: u32 = 1;

    fn id(&self) -> &str {
        &self.id
    }
}

impl Record for ContainerRecord {
    const TABLE: &'static str = "containers";
    const VERSION: u32 = 1;

    fn id(&self) -> &str {
        &self.id
    }
}

/// A record with its version.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Versioned<T> {
    pub(super) version: u32,
    #[serde(flatten)]
    pub(super) rest: T,
}

/// A record of any version.
pub(super) type AnyRecord = Versioned<BTreeMap<String, serde_json::Value>>;

/// For tests: a running pod.
#[cfg(test)]
pub(crate) fn pod_record(id: &str) -> PodRecord {
    PodRecord {
        id: id.to_owned(),
        config: PodSandboxConfig {
            hostname: "web".to_owned(),
            ..Default::default()
        },
        handler: String::new(),
        created_at: 7,
        phase: PodPhase::Ready,
        addresses: vec!["10.0.0.2".parse().unwrap()],
        size: GuestSize {
            memory: 1 << 28,
            growth: 1 << 34,
            vcpus: 1,
            max_vcpus: 8,
        },
        memory_volumes: None,
        fills_volumes: false,
        extra: 0,
        network: None,
    }
}

/// For tests: a created container.
#[cfg(test)]
pub(crate) fn container_record(id: &str, pod: &str) -> ContainerRecord {
    ContainerRecord {
        id: id.to_owned(),
        pod: pod.to_owned(),
        config: ContainerConfig::default(),
        image: String::new(),
        image_ref: String::new(),
        stop_signal: 15,
        log_path: String::new(),
        volumes: Vec::new(),
        process: Process::default(),
        user: String::new(),
        groups: SupplementalGroups::default(),
        identity: None,
        image_tag: String::new(),
        start_error: None,
        mounted_images: Vec::new(),
        exit_before_removal: None,
        vm: None,
        created_at: 0,
        phase: ContainerPhase::Created,
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use serde_json::{Value, json};

    use super::*;

    /// Checks that a record is written as `form`, and read from it.
    fn has_form<R: Record + PartialEq + Debug>(record: R, form: &Value) {
        let versioned = Versioned {
            version: R::VERSION,
            rest: record.clone(),
        };
        assert_eq!(serde_json::to_value(versioned).unwrap(), *form);
        assert_eq!(read::<R>(form), record);
    }

    fn read<R: Record>(form: &Value) -> R {
        let read: Versioned<R> = serde_json::from_value(form.clone()).unwrap();
        read.rest
    }

    fn with(form: &Value, field: &str, value: Value) -> Value {
        let mut form = form.clone();
        form[field] = value;
        form
    }

    /// A podvisor on a node finds the records of those before it: a change of these forms that
    /// needs a change of this test needs a new version too.
    #[test]
    fn pods_are_recorded_in_this_form() {
        let mut record = pod_record("p");
        record.size = GuestSize::default();
        // As the first version wrote them.
        let first = json!({
            "version": 1, "id": "p", "config": "EgN3ZWI=",
            "handler": "", "created_at": 7, "phase": "Ready", "addresses": ["10.0.0.2"],
        });
        assert_eq!(read::<PodRecord>(&first), record);

        let form = json!({
            "version": 1, "id": "p", "config": "EgN3ZWI=", "handler": "vm", "created_at": 7,
            "phase": "Ready", "addresses": ["10.0.0.2"],
            "size": {"memory": 1, "growth": 2, "vcpus": 3, "max_vcpus": 4},
            "memory_volumes": [{"path": "/v", "in_guest": true}], "fills_volumes": true,
            "extra": 5,
        });
        record.handler = "vm".to_owned();
        record.size = GuestSize {
            memory: 1,
            growth: 2,
            vcpus: 3,
            max_vcpus: 4,
        };
        record.memory_volumes = Some(vec![MemoryVolume {
            path: "/v".to_owned(),
            in_guest: true,
        }]);
        record.fills_volumes = true;
        record.extra = 5;
        has_form(record.clone(), &form);

        let stopped = json!({"Stopped": {"reason": "x", "is_out_of_memory": true}});
        let phases = [
            (PodPhase::Creating, json!("Creating")),
            (PodPhase::Removing, json!("Removing")),
            (
                PodPhase::Stopped {
                    reason: Some("x".to_owned()),
                    is_out_of_memory: true,
                },
                stopped,
            ),
        ];
        for (phase, value) in phases {
            record.phase = phase;
            has_form(record.clone(), &with(&form, "phase", value));
        }
        let stopped = json!({"Stopped": {"reason": null}});
        let read = read::<PodRecord>(&with(&first, "phase", stopped));
        assert_eq!(read.phase, PodPhase::stopped(None));
    }

    /// As [`pods_are_recorded_in_this_form`].
    #[test]
    fn containers_are_recorded_in_this_form() {
        let process = json!({"cwd": "/", "args": ["sh"], "user": {"uid": 0, "gid": 0}});
        // As the first version wrote them.
        let first = json!({
            "version": 1, "id": "c", "pod": "p",
            "config": "",
            "image": "i", "image_ref": "r",
            "stop_signal": 15, "log_path": "", "volumes": ["v"], "process": process, "user": "",
            "groups": "Default", "created_at": 7, "phase": "Created",
        });
        let mut record = container_record("c", "p");
        record.image = "i".to_owned();
        record.image_ref = "r".to_owned();
        record.volumes = vec!["v".to_owned()];
        record.process = serde_json::from_value(process).unwrap();
        record.created_at = 7;
        assert_eq!(read::<ContainerRecord>(&first), record);

        let exit = json!({
            "started_at": 1, "finished_at": 2, "code": 3, "reason": "Error", "message": "m",
        });
        let added = json!({
            "groups": "Strict", "identity": {"uid": 1, "gid": 2, "groups": [3]},
            "image_tag": "t", "start_error": "e",
            "mounted_images": [{"mount": 0, "id": "i", "sub_path": "s"}],
            "exit_before_removal": exit,
        });
        let mut form = first.clone();
        for (field, value) in added.as_object().unwrap() {
            form[field] = value.clone();
        }
        form["config"] = json!("");
        // The form of the OCI's runtime specification.
        form["process"] = serde_json::to_value(&record.process).unwrap();
        let ended = ContainerExit {
            started_at: 1,
            finished_at: 2,
            code: 3,
            reason: "Error".to_owned(),
            message: "m".to_owned(),
        };
        record.groups = SupplementalGroups::Strict;
        record.identity = Some(ContainerUser {
            uid: 1,
            gid: 2,
            groups: vec![3],
        });
        record.image_tag = "t".to_owned();
        record.start_error = Some("e".to_owned());
        record.mounted_images = vec![MountedImage {
            mount: 0,
            id: "i".to_owned(),
            sub_path: "s".to_owned(),
        }];
        record.exit_before_removal = Some(ended.clone());
        has_form(record.clone(), &form);

        let phases = [
            (ContainerPhase::Creating, json!("Creating")),
            (
                ContainerPhase::Running { started_at: 9 },
                json!({"Running": {"started_at": 9}}),
            ),
            (ContainerPhase::Exited(ended), json!({"Exited": exit})),
            (ContainerPhase::Removing, json!("Removing")),
        ];
        for (phase, value) in phases {
            record.phase = phase;
            has_form(record.clone(), &with(&form, "phase", value));
        }
    }
}
