//! The KubeVirt object: what an administrator decides for the whole cluster.
//!
//! Its `spec` describes an installation by KubeVirt's operator as well. There is none here: what
//! only the operator acts on is refused, unless it says nothing or what is the case anyway.

use serde_json::Value;

use crate::{
    Cause, Causes, ClusterConfig, ClusterDefaults, FieldPath, Quantity, cause::shown,
    config::DefaultBinding, vmi::EVICTION_STRATEGIES,
};

/// Feature gates of what is there with or without them.
pub const FEATURE_GATES: [&str; 8] = [
    "DataVolumes",
    "EnableVirtioFsConfigVolumes",
    "ExpandDisks",
    "HotplugVolumes",
    "LiveMigration",
    "Snapshot",
    "VMLiveUpdateFeatures",
    "VSOCK",
];

/// The words of `vmRolloutStrategy`.
const ROLLOUT: [&str; 2] = ["Stage", "LiveUpdate"];

/// The words of `imagePullPolicy`.
const PULL: [&str; 3] = ["Always", "IfNotPresent", "Never"];

object! {
    /// What is decided (`spec`).
    pub struct KubeVirtSpec {
        /// What is filled in and allowed, and how VMs move.
        pub configuration: KubeVirtConfiguration,
        /// Of the components' images, as they were installed: nothing depends on it.
        pub image_pull_policy: Option<String>,
    }

    /// What is filled in and allowed, and how VMs move (`spec.configuration`).
    pub struct KubeVirtConfiguration {
        /// CPU model of VMs that name none.
        pub cpu_model: Option<String>,
        /// CPU request of VMs that give none.
        pub cpu_request: Option<Quantity>,
        /// Eviction strategy of VMs that give none.
        pub eviction_strategy: Option<String>,
        /// Whether a change of a running VM waits for its restart: `Stage` or `LiveUpdate`.
        pub vm_rollout_strategy: Option<String>,
        /// How far a running VM may grow.
        pub live_update_configuration: Option<LiveUpdateConfiguration>,
        /// How VMs move.
        pub migrations: Option<MigrationConfiguration>,
        /// How VMs are in the pod network.
        pub network: Option<NetworkConfiguration>,
        /// Feature gates.
        pub developer_configuration: Option<DeveloperConfiguration>,
    }

    /// How far a running VM may grow.
    pub struct LiveUpdateConfiguration {
        /// The most sockets.
        pub max_cpu_sockets: Option<i64>,
        /// The most guest memory.
        pub max_guest: Option<Quantity>,
    }

    /// How VMs move, where no MigrationPolicy says otherwise.
    pub struct MigrationConfiguration {
        /// Migrations at the same time.
        pub parallel_migrations_per_cluster: Option<i64>,
        /// Migrations at the same time out of one node.
        pub parallel_outbound_migrations_per_node: Option<i64>,
        /// Most bytes per second while the guest runs; 0 for no limit.
        pub bandwidth_per_migration: Option<Quantity>,
        /// Seconds that each GiB of memory may take.
        #[serde(rename = "completionTimeoutPerGiB")]
        pub completion_timeout_per_gi_b: Option<i64>,
        /// Seconds without anything sent after which a migration fails.
        pub progress_timeout: Option<i64>,
        /// Whether a guest that writes faster than its memory is sent is slowed down.
        pub allow_auto_converge: Option<bool>,
        /// Whether a guest may stand still for as long as it takes.
        pub allow_workload_disruption: Option<bool>,
        /// Refused.
        pub allow_post_copy: Option<bool>,
    }

    /// How VMs are in the pod network.
    pub struct NetworkConfiguration {
        /// How the default network is attached: `bridge` or `masquerade`.
        pub default_network_interface: Option<String>,
        /// Whether a card may be bridged to the pod network.
        pub permit_bridge_interface_on_pod_network: Option<bool>,
    }

    /// What developers of KubeVirt decide.
    pub struct DeveloperConfiguration {
        /// Features that are wanted.
        pub feature_gates: Vec<String>,
    }
}

impl KubeVirtSpec {
    /// Every cause to refuse this specification, below `path` (`spec`). `given` is its JSON, of
    /// which nothing that is not known may say anything.
    #[must_use]
    pub fn validate(&self, given: &Value, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        let known = serde_json::to_value(self).unwrap_or_default();
        refuse_unknown(given, &known, path, &mut causes);
        if let Some(policy) = &self.image_pull_policy {
            causes.one_of(&path.child("imagePullPolicy"), policy, &PULL);
        }
        let path = path.child("configuration");
        self.configuration.validate(&path, &mut causes);
        causes.into_vec()
    }
}

/// Refuses each field of `given` that says something and is not in `known`.
fn refuse_unknown(given: &Value, known: &Value, path: &FieldPath, causes: &mut Causes) {
    let Value::Object(fields) = given else {
        return;
    };
    for (name, value) in fields {
        match known.get(name) {
            Some(known) => refuse_unknown(value, known, &path.child(name), causes),
            None if says_nothing(value) => {}
            None if value.is_object() => {
                refuse_unknown(value, &Value::Null, &path.child(name), causes);
            }
            None => causes.not_supported(&path.child(name), "is not supported: leave it out"),
        }
    }
}

/// Whether this is what a missing field means.
fn says_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) | Value::Number(_) => false,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.values().all(says_nothing),
    }
}

impl KubeVirtConfiguration {
    fn validate(&self, path: &FieldPath, causes: &mut Causes) {
        if let Some(strategy) = &self.eviction_strategy {
            let path = path.child("evictionStrategy");
            causes.one_of(&path, strategy, &EVICTION_STRATEGIES);
        }
        if let Some(strategy) = &self.vm_rollout_strategy {
            causes.one_of(&path.child("vmRolloutStrategy"), strategy, &ROLLOUT);
        }
        if let Some(request) = &self.cpu_request
            && request.amount().is_err()
        {
            let given = shown(request.as_str());
            causes.invalid(
                &path.child("cpuRequest"),
                format_args!("is {given}, not a quantity"),
            );
        }
        if let Some(live) = &self.live_update_configuration {
            let path = path.child("liveUpdateConfiguration");
            at_least(
                live.max_cpu_sockets,
                1,
                &path.child("maxCpuSockets"),
                causes,
            );
            is_bytes(live.max_guest.as_ref(), &path.child("maxGuest"), causes);
        }
        if let Some(migrations) = &self.migrations {
            migrations.validate(&path.child("migrations"), causes);
        }
        if let Some(network) = &self.network
            && let Some(binding) = &network.default_network_interface
        {
            let path = path.child("network.defaultNetworkInterface");
            causes.one_of(&path, binding, &["bridge", "masquerade"]);
        }
        let gates = self.developer_configuration.as_ref();
        let gates = gates.map_or(&[][..], |developers| &developers.feature_gates);
        for (index, gate) in gates.iter().enumerate() {
            if !FEATURE_GATES.contains(&gate.as_str()) {
                let path = path.child("developerConfiguration.featureGates");
                let (given, all) = (shown(gate), FEATURE_GATES.join(", "));
                causes.not_supported(
                    &path.index(index),
                    format_args!("is {given}, a feature that is not there; these are: {all}"),
                );
            }
        }
    }

    /// Puts this into what the cluster's file says.
    pub fn apply(&self, rules: &mut ClusterConfig, defaults: &mut ClusterDefaults) {
        fn replace<T: Clone>(old: &mut Option<T>, new: Option<&T>) {
            if new.is_some() {
                *old = new.cloned();
            }
        }
        replace(&mut defaults.cpu_model, self.cpu_model.as_ref());
        replace(&mut defaults.cpu_request, self.cpu_request.as_ref());
        replace(
            &mut defaults.eviction_strategy,
            self.eviction_strategy.as_ref(),
        );
        if let Some(strategy) = &self.vm_rollout_strategy {
            let is_live = strategy == "LiveUpdate";
            (rules.live_update, defaults.live_update) = (is_live, is_live);
        }
        if let Some(live) = &self.live_update_configuration {
            replace(&mut defaults.max_sockets, live.max_cpu_sockets.as_ref());
            replace(&mut defaults.max_guest, live.max_guest.as_ref());
        }
        if let Some(network) = &self.network {
            match network.default_network_interface.as_deref() {
                Some("bridge") => defaults.binding = DefaultBinding::Bridge,
                Some("masquerade") => defaults.binding = DefaultBinding::Masquerade,
                _ => {}
            }
            if let Some(is_permitted) = network.permit_bridge_interface_on_pod_network {
                rules.permit_bridge_on_pod_network = is_permitted;
            }
        }
    }
}

impl MigrationConfiguration {
    fn validate(&self, path: &FieldPath, causes: &mut Causes) {
        for (field, value, least) in [
            (
                "parallelMigrationsPerCluster",
                self.parallel_migrations_per_cluster,
                1,
            ),
            (
                "parallelOutboundMigrationsPerNode",
                self.parallel_outbound_migrations_per_node,
                1,
            ),
            (
                "completionTimeoutPerGiB",
                self.completion_timeout_per_gi_b,
                0,
            ),
            ("progressTimeout", self.progress_timeout, 1),
        ] {
            at_least(value, least, &path.child(field), causes);
        }
        let bandwidth = path.child("bandwidthPerMigration");
        is_bytes(self.bandwidth_per_migration.as_ref(), &bandwidth, causes);
        if self.allow_post_copy == Some(true) {
            causes.not_supported(
                &path.child("allowPostCopy"),
                "is not supported: memory is copied before the VM moves",
            );
        }
    }
}

fn at_least(value: Option<i64>, least: i64, path: &FieldPath, causes: &mut Causes) {
    if let Some(value) = value
        && value < least
    {
        causes.invalid(path, format_args!("is {value}, and {least} is the least"));
    }
}

fn is_bytes(quantity: Option<&Quantity>, path: &FieldPath, causes: &mut Causes) {
    if let Some(quantity) = quantity
        && quantity.bytes().is_none()
    {
        let given = shown(quantity.as_str());
        causes.invalid(path, format_args!("is {given}, not a number of bytes"));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(given: Value) -> Vec<String> {
        let spec: KubeVirtSpec = serde_json::from_value(given.clone()).unwrap();
        let causes = spec.validate(&given, &FieldPath::new("spec"));
        causes.into_iter().map(|cause| cause.field).collect()
    }

    #[test]
    fn the_object_of_a_release_says_nothing_that_cannot_be() {
        let released = json!({
            "certificateRotateStrategy": {},
            "configuration": { "developerConfiguration": { "featureGates": [] } },
            "customizeComponents": {},
            "imagePullPolicy": "IfNotPresent",
            "workloadUpdateStrategy": { "workloadUpdateMethods": [] },
        });
        assert_eq!(refused(released), [""; 0]);
    }

    #[test]
    fn what_cannot_be_is_refused_by_its_path_and_all_at_once() {
        let given = json!({
            "imageTag": "v1.0.0",
            "imagePullPolicy": "Sometimes",
            "configuration": {
                "evictionStrategy": "Flee",
                "vmRolloutStrategy": "Now",
                "cpuRequest": "much",
                "developerConfiguration": {
                    "featureGates": ["Snapshot", "HostDisk"],
                    "useEmulation": true,
                },
                "liveUpdateConfiguration": { "maxCpuSockets": 0, "maxGuest": "big" },
                "migrations": {
                    "allowPostCopy": true,
                    "parallelMigrationsPerCluster": 0,
                    "bandwidthPerMigration": "fast",
                    "network": "migrations",
                },
                "network": { "defaultNetworkInterface": "slirp" },
            },
        });
        let mut found = refused(given);
        found.sort();
        let configuration = [
            "cpuRequest",
            "developerConfiguration.featureGates[1]",
            "developerConfiguration.useEmulation",
            "evictionStrategy",
            "liveUpdateConfiguration.maxCpuSockets",
            "liveUpdateConfiguration.maxGuest",
            "migrations.allowPostCopy",
            "migrations.bandwidthPerMigration",
            "migrations.network",
            "migrations.parallelMigrationsPerCluster",
            "network.defaultNetworkInterface",
            "vmRolloutStrategy",
        ];
        let configuration = configuration.map(|name| format!("spec.configuration.{name}"));
        let mut wanted = configuration.to_vec();
        wanted.extend([
            "spec.imagePullPolicy".to_owned(),
            "spec.imageTag".to_owned(),
        ]);
        wanted.sort();
        assert_eq!(found, wanted);
    }

    #[test]
    fn what_is_said_replaces_the_clusters_file_and_nothing_else() {
        let given = json!({
            "evictionStrategy": "LiveMigrate",
            "vmRolloutStrategy": "LiveUpdate",
            "liveUpdateConfiguration": { "maxGuest": "8Gi" },
            "network": {
                "defaultNetworkInterface": "masquerade",
                "permitBridgeInterfaceOnPodNetwork": false,
            },
        });
        let configuration: KubeVirtConfiguration = serde_json::from_value(given).unwrap();
        let mut rules = ClusterConfig::default();
        let mut defaults = ClusterDefaults {
            cpu_model: Some("host-passthrough".to_owned()),
            max_sockets: Some(2),
            ..ClusterDefaults::default()
        };
        configuration.apply(&mut rules, &mut defaults);
        assert!(rules.live_update && defaults.live_update);
        assert!(!rules.permit_bridge_on_pod_network);
        assert_eq!(defaults.eviction_strategy.as_deref(), Some("LiveMigrate"));
        assert_eq!(defaults.max_guest, Some(Quantity::new("8Gi")));
        assert_eq!(defaults.binding, DefaultBinding::Masquerade);
        assert_eq!(defaults.cpu_model.as_deref(), Some("host-passthrough"));
        assert_eq!(defaults.max_sockets, Some(2));
    }
}
