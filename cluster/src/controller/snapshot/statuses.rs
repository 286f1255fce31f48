//! Of which volumes of a virtual machine snapshots can be taken.

use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::{Value, json};

use super::content::{claim_of, volumes_of};
use crate::controller::classes::Classes;
use crate::objects::VirtualMachine;

/// Returns whether a virtual machine has claims: only of them snapshots can be taken.
pub(in crate::controller) fn has_claims(vm: &VirtualMachine) -> bool {
    volumes_of(&vm.spec).any(|volume| claim_of(volume).is_some())
}

/// Returns what the status of a virtual machine says of its volumes.
pub(in crate::controller) fn statuses(
    vm: &VirtualMachine,
    claim: &dyn Fn(&str) -> Option<Arc<PersistentVolumeClaim>>,
    classes: &Classes,
) -> Vec<Value> {
    let status = |volume: &Value| {
        let name = volume.get("name").and_then(Value::as_str)?;
        let reason = match claim_of(volume) {
            None => Some(format!(
                "Snapshot is not supported for this volumeSource type [{name}]"
            )),
            Some(of) => match claim(of) {
                None => Some(format!("PVC {of} does not exist [{name}]")),
                Some(claim) => obstacle(&claim, classes).map(|why| format!("{why} [{name}]")),
            },
        };
        Some(match reason {
            None => json!({"name": name, "enabled": true}),
            Some(reason) => json!({"name": name, "enabled": false, "reason": reason}),
        })
    };
    volumes_of(&vm.spec).filter_map(status).collect()
}

/// Why no snapshot of a claim can be taken.
fn obstacle(claim: &PersistentVolumeClaim, classes: &Classes) -> Option<String> {
    let spec = claim.spec.clone().unwrap_or_default();
    let Some(class) = &spec.storage_class_name else {
        return Some("The PVC has no StorageClass".to_owned());
    };
    let is_known = classes.of_spec(&spec).is_some();
    (!is_known).then(|| {
        format!(
            "No VolumeSnapshotClass: Volume snapshots are not configured for this StorageClass \
             [{class}]"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_volume_says_whether_a_snapshot_of_it_can_be_taken() {
        let vm: VirtualMachine = serde_json::from_value(json!({
            "spec": {"template": {"spec": {"volumes": [
                {"name": "image", "containerDisk": {"image": "i"}},
                {"name": "fast", "dataVolume": {"name": "fast"}},
                {"name": "slow", "persistentVolumeClaim": {"claimName": "slow"}},
                {"name": "none", "persistentVolumeClaim": {"claimName": "none"}},
            ]}}},
        }))
        .unwrap();
        assert!(has_claims(&vm));
        let classes = Classes::with("fast", "d", &[("snapshots", "d")]);
        let claim = |name: &str| {
            let claim = json!({"spec": {"storageClassName": name}});
            (name != "none").then(|| Arc::new(serde_json::from_value(claim).unwrap()))
        };
        let found = statuses(&vm, &claim, &classes);
        let enabled: Vec<_> = found.iter().map(|of| of["enabled"] == true).collect();
        assert_eq!(enabled, [false, true, false, false]);
        let reason = |index: usize| found[index]["reason"].as_str().unwrap();
        assert!(reason(0).contains("volumeSource type [image]"));
        assert!(reason(2).contains("StorageClass [slow]"));
        assert!(reason(3).contains("does not exist"));
    }
}
