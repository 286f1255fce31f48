//! Containers: what they are made of, their states and the calls that make and change them.

use std::collections::HashMap;

use prost::{Enumeration, Message};
use serde::{Serialize, Serializer};

use crate::{
    ImageSpec, LinuxContainerResources, LinuxContainerSecurityContext, PodSandboxConfig, Signal,
    WindowsContainerConfig, WindowsContainerResources,
};

/// Whether mounts on one side are seen on the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum MountPropagation {
    /// On neither side.
    PropagationPrivate = 0,
    /// Those of the node are seen in the container.
    PropagationHostToContainer = 1,
    /// On both sides.
    PropagationBidirectional = 2,
}

/// State of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum ContainerState {
    /// It was made and not started.
    ContainerCreated = 0,
    /// It runs.
    ContainerRunning = 1,
    /// It has ended.
    ContainerExited = 2,
    /// Nobody knows.
    ContainerUnknown = 3,
}

/// A directory, a file or an image that a container sees at a path of its own.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Mount {
    /// Where the container sees it.
    #[prost(string, tag = "1")]
    pub container_path: String,
    /// What is mounted: a path of the node. Empty for an image.
    #[prost(string, tag = "2")]
    pub host_path: String,
    /// Whether it cannot be written.
    #[prost(bool, tag = "3")]
    pub readonly: bool,
    /// Whether its files get the container's label of SELinux.
    #[prost(bool, tag = "4")]
    pub selinux_relabel: bool,
    /// Whether mounts below it are seen on the other side.
    #[prost(enumeration = "MountPropagation", tag = "5")]
    pub propagation: i32,
    /// Users of the node for those of the container, on this mount.
    #[prost(message, repeated, tag = "6")]
    pub uid_mappings: Vec<IdMapping>,
    /// Groups of the node for those of the container, on this mount.
    #[prost(message, repeated, tag = "7")]
    pub gid_mappings: Vec<IdMapping>,
    /// Whether mounts below it cannot be written either.
    #[prost(bool, tag = "8")]
    pub recursive_read_only: bool,
    /// The image that is mounted, instead of `host_path`.
    #[prost(message, optional, tag = "9")]
    pub image: Option<ImageSpec>,
    /// The directory or file of the image that is mounted (Kubernetes 1.33).
    #[prost(string, tag = "10")]
    pub image_sub_path: String,
    /// Further options of the mount, such as `noexec` (Kubernetes 1.37).
    #[prost(string, repeated, tag = "11")]
    pub mount_options: Vec<String>,
}

/// A range of ids of the node that stand for those of a container.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message, Serialize)]
pub struct IdMapping {
    /// The first id on the node.
    #[prost(uint32, tag = "1")]
    pub host_id: u32,
    /// The first id in the container.
    #[prost(uint32, tag = "2")]
    pub container_id: u32,
    /// How many ids.
    #[prost(uint32, tag = "3")]
    pub length: u32,
}

/// An environment variable.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct KeyValue {
    /// Its name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// The value, of any bytes.
    #[serde(serialize_with = "as_text")]
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
}

/// What a container has on Linux.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct LinuxContainerConfig {
    /// Limits.
    #[prost(message, optional, tag = "1")]
    pub resources: Option<LinuxContainerResources>,
    /// What its processes may do.
    #[prost(message, optional, tag = "2")]
    pub security_context: Option<LinuxContainerSecurityContext>,
}

/// As whom the first process of a container runs, as the runtime found out.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct LinuxContainerUser {
    /// The user.
    #[prost(int64, tag = "1")]
    pub uid: i64,
    /// The group.
    #[prost(int64, tag = "2")]
    pub gid: i64,
    /// Further groups.
    #[prost(int64, repeated, tag = "3")]
    pub supplemental_groups: Vec<i64>,
}

/// What a kubelet names a container by.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct ContainerMetadata {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// How often it was made anew before, from 0 on.
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
}

/// A device of the node in a container.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct Device {
    /// Where the container sees it.
    #[prost(string, tag = "1")]
    pub container_path: String,
    /// The device's path on the node.
    #[prost(string, tag = "2")]
    pub host_path: String,
    /// What is allowed: some of `rwm`.
    #[prost(string, tag = "3")]
    pub permissions: String,
}

/// A device of the Container Device Interface.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct CdiDevice {
    /// Its name, such as `vendor.com/class=name`.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// What a container is made of.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct ContainerConfig {
    /// Its names.
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<ContainerMetadata>,
    /// The image.
    #[prost(message, optional, tag = "2")]
    pub image: Option<ImageSpec>,
    /// The command, which takes the place of the image's `Entrypoint`.
    #[prost(string, repeated, tag = "3")]
    pub command: Vec<String>,
    /// Arguments, which take the place of the image's `Cmd`.
    #[prost(string, repeated, tag = "4")]
    pub args: Vec<String>,
    /// The working directory; the image's if it is empty.
    #[prost(string, tag = "5")]
    pub working_dir: String,
    /// Environment variables.
    #[prost(message, repeated, tag = "6")]
    pub envs: Vec<KeyValue>,
    /// What it sees of the node and of images.
    #[prost(message, repeated, tag = "7")]
    pub mounts: Vec<Mount>,
    /// Devices of the node.
    #[prost(message, repeated, tag = "8")]
    pub devices: Vec<Device>,
    /// Values to select by.
    #[prost(map = "string, string", tag = "9")]
    pub labels: HashMap<String, String>,
    /// Values that runtimes hand on and some read.
    #[prost(map = "string, string", tag = "10")]
    pub annotations: HashMap<String, String>,
    /// Its log, relative to the pod's directory of logs.
    #[prost(string, tag = "11")]
    pub log_path: String,
    /// Whether it has a stdin.
    #[prost(bool, tag = "12")]
    pub stdin: bool,
    /// Whether stdin ends with the first that was attached to it.
    #[prost(bool, tag = "13")]
    pub stdin_once: bool,
    /// Whether it has a terminal.
    #[prost(bool, tag = "14")]
    pub tty: bool,
    /// What only Linux has.
    #[prost(message, optional, tag = "15")]
    pub linux: Option<LinuxContainerConfig>,
    /// What only Windows has.
    #[prost(message, optional, tag = "16")]
    pub windows: Option<WindowsContainerConfig>,
    /// Devices of the Container Device Interface.
    #[prost(message, repeated, tag = "17")]
    pub cdi_devices: Vec<CdiDevice>,
    /// The signal that stops it (Kubernetes 1.33).
    #[prost(enumeration = "Signal", tag = "18")]
    pub stop_signal: i32,
}

/// Request of [`RuntimeService::create_container`](crate::RuntimeService::create_container).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CreateContainerRequest {
    /// The id of the pod.
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    /// The container.
    #[prost(message, optional, tag = "2")]
    pub config: Option<ContainerConfig>,
    /// The pod, as it was made.
    #[prost(message, optional, tag = "3")]
    pub sandbox_config: Option<PodSandboxConfig>,
}

/// Answer of [`RuntimeService::create_container`](crate::RuntimeService::create_container).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct CreateContainerResponse {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
}

/// Request of [`RuntimeService::start_container`](crate::RuntimeService::start_container).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct StartContainerRequest {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
}

/// Answer of [`RuntimeService::start_container`](crate::RuntimeService::start_container).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct StartContainerResponse {}

/// Request of [`RuntimeService::stop_container`](crate::RuntimeService::stop_container).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct StopContainerRequest {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
    /// How long it has from its stop signal until it is killed, in seconds.
    #[prost(int64, tag = "2")]
    pub timeout: i64,
}

/// Answer of [`RuntimeService::stop_container`](crate::RuntimeService::stop_container).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct StopContainerResponse {}

/// Request of [`RuntimeService::remove_container`](crate::RuntimeService::remove_container).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct RemoveContainerRequest {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
}

/// Answer of [`RuntimeService::remove_container`](crate::RuntimeService::remove_container).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct RemoveContainerResponse {}

/// The state of a container, which can be absent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct ContainerStateValue {
    /// Its state.
    #[prost(enumeration = "ContainerState", tag = "1")]
    pub state: i32,
}

/// Which containers are listed: those that match all of it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerFilter {
    /// The id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its state.
    #[prost(message, optional, tag = "2")]
    pub state: Option<ContainerStateValue>,
    /// The id of the pod.
    #[prost(string, tag = "3")]
    pub pod_sandbox_id: String,
    /// Labels that it must have, each with this value.
    #[prost(map = "string, string", tag = "4")]
    pub label_selector: HashMap<String, String>,
}

/// Request of [`RuntimeService::list_containers`](crate::RuntimeService::list_containers).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListContainersRequest {
    /// What to list; everything without it.
    #[prost(message, optional, tag = "1")]
    pub filter: Option<ContainerFilter>,
}

/// A container in a list.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Container {
    /// Its id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// The id of the pod.
    #[prost(string, tag = "2")]
    pub pod_sandbox_id: String,
    /// Its names.
    #[prost(message, optional, tag = "3")]
    pub metadata: Option<ContainerMetadata>,
    /// The image, as the container names it.
    #[prost(message, optional, tag = "4")]
    pub image: Option<ImageSpec>,
    /// The image, by digest or id.
    #[prost(string, tag = "5")]
    pub image_ref: String,
    /// Its state.
    #[prost(enumeration = "ContainerState", tag = "6")]
    pub state: i32,
    /// When it was made, in nanoseconds since 1970.
    #[prost(int64, tag = "7")]
    pub created_at: i64,
    /// Values to select by.
    #[prost(map = "string, string", tag = "8")]
    pub labels: HashMap<String, String>,
    /// Values that runtimes hand on and some read.
    #[prost(map = "string, string", tag = "9")]
    pub annotations: HashMap<String, String>,
    /// The image's id on the node.
    #[prost(string, tag = "10")]
    pub image_id: String,
}

/// Answer of [`RuntimeService::list_containers`](crate::RuntimeService::list_containers).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListContainersResponse {
    /// Some or all of the containers.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<Container>,
}

/// Request of [`RuntimeService::stream_containers`](crate::RuntimeService::stream_containers).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StreamContainersRequest {
    /// What to list; everything without it.
    #[prost(message, optional, tag = "1")]
    pub filter: Option<ContainerFilter>,
}

/// One of the answers of
/// [`RuntimeService::stream_containers`](crate::RuntimeService::stream_containers).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StreamContainersResponse {
    /// Some or all of the containers.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<Container>,
}

/// Request of [`RuntimeService::container_status`](crate::RuntimeService::container_status).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ContainerStatusRequest {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
    /// Whether the answer shall tell more in `info`.
    #[prost(bool, tag = "2")]
    pub verbose: bool,
}

/// State of a container.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerStatus {
    /// Its id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its names.
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<ContainerMetadata>,
    /// Its state.
    #[prost(enumeration = "ContainerState", tag = "3")]
    pub state: i32,
    /// When it was made, in nanoseconds since 1970.
    #[prost(int64, tag = "4")]
    pub created_at: i64,
    /// When it was started, in nanoseconds since 1970; 0 before.
    #[prost(int64, tag = "5")]
    pub started_at: i64,
    /// When it ended, in nanoseconds since 1970; 0 before.
    #[prost(int64, tag = "6")]
    pub finished_at: i64,
    /// The exit code; only once it has ended.
    #[prost(int32, tag = "7")]
    pub exit_code: i32,
    /// The image, as the container names it.
    #[prost(message, optional, tag = "8")]
    pub image: Option<ImageSpec>,
    /// The image, by digest or id.
    #[prost(string, tag = "9")]
    pub image_ref: String,
    /// The reason of its state, as one word.
    #[prost(string, tag = "10")]
    pub reason: String,
    /// More of the reason, for people.
    #[prost(string, tag = "11")]
    pub message: String,
    /// Values to select by.
    #[prost(map = "string, string", tag = "12")]
    pub labels: HashMap<String, String>,
    /// Values that runtimes hand on and some read.
    #[prost(map = "string, string", tag = "13")]
    pub annotations: HashMap<String, String>,
    /// What it sees of the node and of images.
    #[prost(message, repeated, tag = "14")]
    pub mounts: Vec<Mount>,
    /// Its log, as an absolute path.
    #[prost(string, tag = "15")]
    pub log_path: String,
    /// Limits that it has now.
    #[prost(message, optional, tag = "16")]
    pub resources: Option<ContainerResources>,
    /// The image's id on the node.
    #[prost(string, tag = "17")]
    pub image_id: String,
    /// As whom it runs (Kubernetes 1.31).
    #[prost(message, optional, tag = "18")]
    pub user: Option<ContainerUser>,
    /// The signal that stops it (Kubernetes 1.33).
    #[prost(enumeration = "Signal", tag = "19")]
    pub stop_signal: i32,
}

/// Answer of [`RuntimeService::container_status`](crate::RuntimeService::container_status).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerStatusResponse {
    /// Its state.
    #[prost(message, optional, tag = "1")]
    pub status: Option<ContainerStatus>,
    /// What a runtime tells besides, if it was asked to be verbose.
    #[prost(map = "string, string", tag = "2")]
    pub info: HashMap<String, String>,
}

/// The limits that a container has now.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerResources {
    /// What only Linux has.
    #[prost(message, optional, tag = "1")]
    pub linux: Option<LinuxContainerResources>,
    /// What only Windows has.
    #[prost(message, optional, tag = "2")]
    pub windows: Option<WindowsContainerResources>,
}

/// As whom a container runs.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ContainerUser {
    /// What only Linux has.
    #[prost(message, optional, tag = "1")]
    pub linux: Option<LinuxContainerUser>,
}

/// Request of
/// [`RuntimeService::update_container_resources`](crate::RuntimeService::update_container_resources).
#[derive(Clone, PartialEq, Eq, Message)]
pub struct UpdateContainerResourcesRequest {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
    /// What only Linux has.
    #[prost(message, optional, tag = "2")]
    pub linux: Option<LinuxContainerResources>,
    /// What only Windows has.
    #[prost(message, optional, tag = "3")]
    pub windows: Option<WindowsContainerResources>,
    /// Values that runtimes hand on and some read.
    #[prost(map = "string, string", tag = "4")]
    pub annotations: HashMap<String, String>,
}

/// Answer of
/// [`RuntimeService::update_container_resources`](crate::RuntimeService::update_container_resources).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct UpdateContainerResourcesResponse {}

/// Request of
/// [`RuntimeService::reopen_container_log`](crate::RuntimeService::reopen_container_log).
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct ReopenContainerLogRequest {
    /// The id of the container.
    #[prost(string, tag = "1")]
    pub container_id: String,
}

/// Answer of
/// [`RuntimeService::reopen_container_log`](crate::RuntimeService::reopen_container_log).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct ReopenContainerLogResponse {}

impl KeyValue {
    /// Returns a variable whose value is text.
    #[must_use]
    pub fn new(key: impl Into<String>, value: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            value: value.into().into_bytes(),
        }
    }

    /// Returns the value as text, as specifications of containers have it, which are JSON: each
    /// byte that is not part of UTF-8 is replaced by U+FFFD.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::with_capacity(self.value.len());
        for chunk in self.value.utf8_chunks() {
            text.push_str(chunk.valid());
            text.extend(chunk.invalid().iter().map(|_| char::REPLACEMENT_CHARACTER));
        }
        text
    }
}

fn as_text<S: Serializer>(value: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&String::from_utf8_lossy(value))
}

#[cfg(test)]
mod tests {
    use super::KeyValue;

    #[test]
    fn each_byte_of_a_value_that_is_not_utf_8_is_replaced() {
        for (value, text) in [
            (&b"\xff"[..], "\u{fffd}"),
            (b"a\xe2\x82b", "a\u{fffd}\u{fffd}b"),
            ("ä€".as_bytes(), "ä€"),
            (b"\xed\xa0\x80", "\u{fffd}\u{fffd}\u{fffd}"),
        ] {
            let variable = KeyValue {
                key: "V".to_owned(),
                value: value.to_vec(),
            };
            assert_eq!(variable.text(), text);
        }
        assert_eq!(KeyValue::new("K", "ä").text(), "ä");
    }
}
