//! The objects of `podvisor-cluster-types` as resources that kube can get and watch.

use std::borrow::Cow;

use k8s_openapi::{NamespaceResourceScope, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::Resource;
use podvisor_cluster_types::{
    migration::{MigrationSpec, MigrationStatus},
    replica_set::{ReplicaSetSpec, ReplicaSetStatus},
    vm::{VmSpec, VmStatus},
    vmi::{VmiSpec, VmiStatus},
};
use serde::{Deserialize, Serialize};

/// The group of KubeVirt's objects.
pub const GROUP: &str = "kubevirt.io";

/// The version in which objects are stored.
pub const VERSION: &str = "v1";

/// An older name of the same version, which is served too.
pub const OLD_VERSION: &str = "v1alpha3";

/// Defines an object of a kind with metadata, specification and status.
macro_rules! resource {
    ($(
        $(#[$meta:meta])*
        $kind:ident($group:expr, $version:expr, $plural:literal): $spec:ty, $status:ty;
    )*) => { $(
        $(#[$meta])*
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "camelCase", tag = "kind")]
        pub struct $kind {
            /// Its group and version.
            #[serde(default)]
            pub api_version: String,
            /// Name, labels, owners.
            pub metadata: ObjectMeta,
            /// What is wanted.
            #[serde(default)]
            pub spec: $spec,
            /// What is.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub status: Option<$status>,
        }

        impl $kind {
            /// An object of this name.
            #[must_use]
            pub fn new(name: &str, spec: $spec) -> Self {
                Self {
                    api_version: format!("{}/{}", $group, $version),
                    metadata: ObjectMeta { name: Some(name.to_owned()), ..Default::default() },
                    spec,
                    status: None,
                }
            }
        }

        impl Resource for $kind {
            type DynamicType = ();
            type Scope = NamespaceResourceScope;

            fn kind((): &()) -> Cow<'_, str> {
                stringify!($kind).into()
            }

            fn group((): &()) -> Cow<'_, str> {
                $group.into()
            }

            fn version((): &()) -> Cow<'_, str> {
                $version.into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    )* };
}

resource! {
    /// A VM that is kept, started and stopped.
    VirtualMachine(GROUP, VERSION, "virtualmachines"): VmSpec, VmStatus;

    /// One running VM.
    VirtualMachineInstance(GROUP, VERSION, "virtualmachineinstances"): VmiSpec, VmiStatus;

    /// One move of a VMI to another node.
    VirtualMachineInstanceMigration(GROUP, VERSION, "virtualmachineinstancemigrations"):
        MigrationSpec, MigrationStatus;

    /// As many equal VMIs as wanted.
    VirtualMachineInstanceReplicaSet(GROUP, VERSION, "virtualmachineinstancereplicasets"):
        ReplicaSetSpec, ReplicaSetStatus;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_written_with_its_kind_and_version() {
        let json = serde_json::to_value(VirtualMachine::new("a", VmSpec::default())).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "apiVersion": "kubevirt.io/v1",
                "kind": "VirtualMachine",
                "metadata": { "name": "a" },
                "spec": {},
            })
        );
        let read: VirtualMachine = serde_json::from_value(json).unwrap();
        assert_eq!(read.metadata.name.as_deref(), Some("a"));
    }
}
