//! What the processes of pods and containers may do, and the namespaces that they share.

use prost::{Enumeration, Message};
use serde::Serialize;

use crate::{IdMapping, Int64Value};

/// With whom a namespace is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum NamespaceMode {
    /// With the pod.
    Pod = 0,
    /// With nobody.
    Container = 1,
    /// With the node.
    Node = 2,
    /// With another container of the pod.
    Target = 3,
}

/// Which groups a container's user is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum SupplementalGroupsPolicy {
    /// Those of the image's `/etc/group`, and those that the pod names.
    Merge = 0,
    /// Only those that the pod names.
    Strict = 1,
}

/// Which profile is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum SecurityProfileType {
    /// The one of the runtime.
    RuntimeDefault = 0,
    /// None.
    Unconfined = 1,
    /// A profile of the node.
    Localhost = 2,
}

/// The user namespace of a pod.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct UserNamespace {
    /// With whom it is shared.
    #[prost(enumeration = "NamespaceMode", tag = "1")]
    pub mode: i32,
    /// Users of the node for those of the pod.
    #[prost(message, repeated, tag = "2")]
    pub uids: Vec<IdMapping>,
    /// Groups of the node for those of the pod.
    #[prost(message, repeated, tag = "3")]
    pub gids: Vec<IdMapping>,
}

/// Which namespaces a pod or a container shares, and with what.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct NamespaceOption {
    /// The network namespace.
    #[prost(enumeration = "NamespaceMode", tag = "1")]
    pub network: i32,
    /// The PID namespace.
    #[prost(enumeration = "NamespaceMode", tag = "2")]
    pub pid: i32,
    /// The IPC namespace.
    #[prost(enumeration = "NamespaceMode", tag = "3")]
    pub ipc: i32,
    /// The container whose processes it sees, with `NamespaceMode::Target`.
    #[prost(string, tag = "4")]
    pub target_id: String,
    /// The user namespace.
    #[prost(message, optional, tag = "5")]
    pub userns_options: Option<UserNamespace>,
}

/// What the processes of a pod may do, as far as the pod decides it.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct LinuxSandboxSecurityContext {
    /// Its namespaces.
    #[prost(message, optional, tag = "1")]
    pub namespace_options: Option<NamespaceOption>,
    /// Its label of SELinux.
    #[prost(message, optional, tag = "2")]
    pub selinux_options: Option<SeLinuxOption>,
    /// The user by number.
    #[prost(message, optional, tag = "3")]
    pub run_as_user: Option<Int64Value>,
    /// The group. It needs a user.
    #[prost(message, optional, tag = "8")]
    pub run_as_group: Option<Int64Value>,
    /// Whether its root cannot be written.
    #[prost(bool, tag = "4")]
    pub readonly_rootfs: bool,
    /// Further groups.
    #[prost(int64, repeated, tag = "5")]
    pub supplemental_groups: Vec<i64>,
    /// Whether groups of the image's `/etc/group` are added (Kubernetes 1.31).
    #[prost(enumeration = "SupplementalGroupsPolicy", tag = "11")]
    pub supplemental_groups_policy: i32,
    /// Whether it may do whatever the node may.
    #[prost(bool, tag = "6")]
    pub privileged: bool,
    /// The profile of seccomp.
    #[prost(message, optional, tag = "9")]
    pub seccomp: Option<SecurityProfile>,
    /// The profile of AppArmor.
    #[prost(message, optional, tag = "10")]
    pub apparmor: Option<SecurityProfile>,
    /// Deprecated: the profile of seccomp; see `seccomp`.
    #[prost(string, tag = "7")]
    pub seccomp_profile_path: String,
}

/// A profile of seccomp or AppArmor.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct SecurityProfile {
    /// Which profile.
    #[prost(enumeration = "SecurityProfileType", tag = "1")]
    pub profile_type: i32,
    /// A profile of the node: a path for seccomp, a name for AppArmor.
    #[prost(string, tag = "2")]
    pub localhost_ref: String,
}

/// A label of SELinux.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct SeLinuxOption {
    /// The user.
    #[prost(string, tag = "1")]
    pub user: String,
    /// The role.
    #[prost(string, tag = "2")]
    pub role: String,
    /// The type.
    #[prost(string, tag = "3")]
    pub r#type: String,
    /// The level.
    #[prost(string, tag = "4")]
    pub level: String,
}

/// Changes to the capabilities that a runtime gives by default.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct Capability {
    /// Capabilities that are added.
    #[prost(string, repeated, tag = "1")]
    pub add_capabilities: Vec<String>,
    /// Capabilities that are taken away; before others are added.
    #[prost(string, repeated, tag = "2")]
    pub drop_capabilities: Vec<String>,
    /// Capabilities that programs keep without being root.
    #[prost(string, repeated, tag = "3")]
    pub add_ambient_capabilities: Vec<String>,
}

/// What the processes of a container may do.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct LinuxContainerSecurityContext {
    /// Capabilities of its processes.
    #[prost(message, optional, tag = "1")]
    pub capabilities: Option<Capability>,
    /// Whether it may do whatever the node may.
    #[prost(bool, tag = "2")]
    pub privileged: bool,
    /// Its namespaces.
    #[prost(message, optional, tag = "3")]
    pub namespace_options: Option<NamespaceOption>,
    /// Its label of SELinux.
    #[prost(message, optional, tag = "4")]
    pub selinux_options: Option<SeLinuxOption>,
    /// The user by number.
    #[prost(message, optional, tag = "5")]
    pub run_as_user: Option<Int64Value>,
    /// The group. It needs a user.
    #[prost(message, optional, tag = "12")]
    pub run_as_group: Option<Int64Value>,
    /// The user by name, which the image must have.
    #[prost(string, tag = "6")]
    pub run_as_username: String,
    /// Whether its root cannot be written.
    #[prost(bool, tag = "7")]
    pub readonly_rootfs: bool,
    /// Further groups.
    #[prost(int64, repeated, tag = "8")]
    pub supplemental_groups: Vec<i64>,
    /// Whether groups of the image's `/etc/group` are added (Kubernetes 1.31).
    #[prost(enumeration = "SupplementalGroupsPolicy", tag = "17")]
    pub supplemental_groups_policy: i32,
    /// Whether no program gives its caller more rights.
    #[prost(bool, tag = "11")]
    pub no_new_privs: bool,
    /// Paths that it must not see.
    #[prost(string, repeated, tag = "13")]
    pub masked_paths: Vec<String>,
    /// Paths that cannot be written.
    #[prost(string, repeated, tag = "14")]
    pub readonly_paths: Vec<String>,
    /// The profile of seccomp.
    #[prost(message, optional, tag = "15")]
    pub seccomp: Option<SecurityProfile>,
    /// The profile of AppArmor.
    #[prost(message, optional, tag = "16")]
    pub apparmor: Option<SecurityProfile>,
    /// Deprecated: the profile of AppArmor by its name; see `apparmor`.
    #[prost(string, tag = "9")]
    pub apparmor_profile: String,
    /// Deprecated: the profile of seccomp; see `seccomp`.
    #[prost(string, tag = "10")]
    pub seccomp_profile_path: String,
}
