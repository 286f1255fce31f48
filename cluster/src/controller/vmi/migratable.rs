//! Whether an instance can move to another node while it runs: a pure function of what it has.
//!
//! Reasons are KubeVirt's. Where there is more than one, all messages are told, and the reason is
//! `NotMigratable`.

use podvisor_cluster_types::vmi::{VmiSpec, Volume};

use crate::controller::claims::Claim;

/// Annotation by which a user accepts that a guest whose card is bridged to the pod network is off
/// the network after a migration.
const BRIDGE_ANNOTATION: &str = "kubevirt.io/allow-pod-bridge-network-live-migration";

/// How an instance's disks move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Both nodes open the same ones.
    Live,
    /// Those that are on the node are copied.
    Block,
}

impl Method {
    /// The word for it in the instance's status.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Live => "LiveMigration",
            Self::Block => "BlockMigration",
        }
    }
}

/// Why an instance cannot move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// In a word.
    pub reason: &'static str,
    /// In sentences.
    pub message: String,
}

/// Returns how an instance moves.
///
/// # Errors
///
/// What it has cannot move.
pub fn migratable(
    spec: &VmiSpec,
    has_annotation: &dyn Fn(&str) -> bool,
    claim: &dyn Fn(&str) -> Option<Claim>,
) -> Result<Method, Obstacle> {
    let mut found = Vec::new();
    let mut method = Method::Live;
    for volume in &spec.volumes {
        match disk(volume, claim) {
            Disk::Shared => {}
            Disk::Local => method = Method::Block,
            Disk::Claim(name) => found.push((
                "DisksNotLiveMigratable",
                format!(
                    "cannot migrate VMI: PVC {name} is not shared, live migration requires that \
                     all PVCs must be shared (using ReadWriteMany access mode)"
                ),
            )),
        }
    }
    if is_bridged(spec) && !has_annotation(BRIDGE_ANNOTATION) {
        found.push((
            "InterfaceNotLiveMigratable",
            format!(
                "cannot migrate VMI which does not use masquerade to connect to the pod network: \
                 its guest would keep the address of the pod that it leaves, and be off the \
                 network until it is reset, which the annotation {BRIDGE_ANNOTATION} accepts"
            ),
        ));
    }
    if !spec.domain.devices.filesystems.is_empty() {
        found.push((
            "VirtIOFSNotLiveMigratable",
            "cannot migrate VMI with shared directories (virtiofs)".to_owned(),
        ));
    }
    let reason = match found.as_slice() {
        [] => return Ok(method),
        [(reason, _)] => reason,
        _ => "NotMigratable",
    };
    let messages: Vec<String> = found.iter().map(|(_, message)| message.clone()).collect();
    Err(Obstacle {
        reason,
        message: messages.join("; "),
    })
}

/// Where a volume's contents are.
enum Disk {
    /// At both nodes.
    Shared,
    /// What the guest writes is on its node, and is copied.
    Local,
    /// In a claim that one node has.
    Claim(String),
}

fn disk(volume: &Volume, claim: &dyn Fn(&str) -> Option<Claim>) -> Disk {
    let of_claim = |name: &str| match claim(name) {
        // Without the claim there is no pod either, which is told elsewhere.
        Some(claim) if !claim.is_shared => Disk::Claim(name.to_owned()),
        _ => Disk::Shared,
    };
    let below = volume.ephemeral.as_ref();
    let below = below.and_then(|disk| disk.persistent_volume_claim.as_ref());
    if let Some(source) = &volume.persistent_volume_claim {
        of_claim(&source.claim_name)
    } else if let Some(source) = below {
        match of_claim(&source.claim_name) {
            Disk::Shared => Disk::Local,
            other => other,
        }
    } else if let Some(source) = &volume.data_volume {
        of_claim(&source.name)
    } else if volume.container_disk.is_some() || volume.empty_disk.is_some() {
        Disk::Local
    } else {
        Disk::Shared
    }
}

/// Whether a card has the address of its pod, which differs at another node.
fn is_bridged(spec: &VmiSpec) -> bool {
    let pod_networks = spec.networks.iter().filter(|network| network.pod.is_some());
    let mut cards = pod_networks.flat_map(|network| {
        let cards = spec.domain.devices.interfaces.iter();
        cards.filter(|card| card.name == network.name)
    });
    cards.any(|card| card.masquerade.is_none())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::controller::claims::VolumeMode;

    fn with(networks: Value, volumes: Value, annotated: bool) -> Result<Method, Obstacle> {
        let spec: VmiSpec = serde_json::from_value(json!({
            "domain": {"devices": networks},
            "networks": [{"name": "default", "pod": {}}],
            "volumes": volumes,
        }))
        .unwrap();
        let claim = |name: &str| {
            Some(Claim {
                mode: VolumeMode::Block,
                is_shared: name == "shared",
            })
        };
        migratable(&spec, &|_| annotated, &claim)
    }

    fn masquerade() -> Value {
        json!({"interfaces": [{"name": "default", "masquerade": {}}]})
    }

    fn bridge() -> Value {
        json!({"interfaces": [{"name": "default", "bridge": {}}]})
    }

    fn reason(result: Result<Method, Obstacle>) -> &'static str {
        result.err().map_or("", |obstacle| obstacle.reason)
    }

    #[test]
    fn an_instance_whose_disks_both_nodes_open_moves() {
        let shared = json!([
            {"name": "a", "persistentVolumeClaim": {"claimName": "shared"}},
            {"name": "b", "cloudInitNoCloud": {"userData": "x"}},
            {"name": "c", "configMap": {"name": "m"}},
        ]);
        assert_eq!(with(masquerade(), shared, false), Ok(Method::Live));
    }

    #[test]
    fn what_is_written_on_the_node_is_copied() {
        let local = json!([
            {"name": "a", "containerDisk": {"image": "i"}},
            {"name": "b", "emptyDisk": {"capacity": "1Gi"}},
        ]);
        assert_eq!(with(masquerade(), local, false), Ok(Method::Block));
        // The claim below is only read, by each node.
        let claim = json!({"persistentVolumeClaim": {"claimName": "shared"}});
        let overlay = json!([{"name": "a", "ephemeral": claim}]);
        assert_eq!(with(masquerade(), overlay, false), Ok(Method::Block));
    }

    #[test]
    fn a_claim_of_one_node_keeps_an_instance_there() {
        let one = json!([{"name": "a", "dataVolume": {"name": "one"}}]);
        let obstacle = with(masquerade(), one, false).unwrap_err();
        assert_eq!(obstacle.reason, "DisksNotLiveMigratable");
        assert!(obstacle.message.contains("PVC one is not shared"));
    }

    #[test]
    fn what_was_plugged_in_moves_if_both_nodes_have_it() {
        let plugged = |claim: &str| {
            let claim = json!({"claimName": claim, "hotpluggable": true});
            json!([{"name": "data", "persistentVolumeClaim": claim}])
        };
        assert_eq!(
            with(masquerade(), plugged("shared"), false),
            Ok(Method::Live)
        );
        let obstacle = with(masquerade(), plugged("one"), false).unwrap_err();
        assert_eq!(obstacle.reason, "DisksNotLiveMigratable");
        assert!(obstacle.message.contains("PVC one"), "{obstacle:?}");
    }

    #[test]
    fn an_address_that_would_change_has_to_be_accepted() {
        assert_eq!(
            reason(with(bridge(), json!([]), false)),
            "InterfaceNotLiveMigratable"
        );
        assert_eq!(with(bridge(), json!([]), true), Ok(Method::Live));
    }

    #[test]
    fn several_obstacles_are_told_together() {
        let one = json!([{"name": "a", "persistentVolumeClaim": {"claimName": "one"}}]);
        let obstacle = with(bridge(), one, false).unwrap_err();
        assert_eq!(obstacle.reason, "NotMigratable");
        assert!(obstacle.message.contains("PVC one") && obstacle.message.contains("masquerade"));
    }
}
