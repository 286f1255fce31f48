//! Which pods may write to claims: of all pods, no more is kept than says that.

use k8s_openapi::api::core::v1::{
    PersistentVolumeClaimVolumeSource, Pod, PodSpec, PodStatus, Volume,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Leaves of a pod what [`writes_to`] and a store look at.
pub(super) fn trim(pod: &mut Pod) {
    let metadata = std::mem::take(&mut pod.metadata);
    let volumes = pod.spec.take().and_then(|spec| spec.volumes);
    let claims = volumes.into_iter().flatten().filter_map(|volume| {
        let claim = volume.persistent_volume_claim?;
        Some(Volume {
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: claim.claim_name,
                read_only: claim.read_only,
            }),
            ..Volume::default()
        })
    });
    let claims: Vec<_> = claims.collect();
    *pod = Pod {
        metadata: ObjectMeta {
            name: metadata.name,
            namespace: metadata.namespace,
            uid: metadata.uid,
            resource_version: metadata.resource_version,
            ..ObjectMeta::default()
        },
        spec: (!claims.is_empty()).then(|| PodSpec {
            volumes: Some(claims),
            ..PodSpec::default()
        }),
        status: pod.status.take().map(|status| PodStatus {
            phase: status.phase,
            ..PodStatus::default()
        }),
    };
}

/// Returns whether a pod that has not ended may write to one of these claims.
pub(super) fn writes_to(pod: &Pod, names: &[&str]) -> bool {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
    let mut claims = volumes
        .into_iter()
        .flatten()
        .filter_map(|volume| volume.persistent_volume_claim.as_ref());
    !matches!(phase, Some("Succeeded" | "Failed"))
        && claims.any(|of| names.contains(&of.claim_name.as_str()) && of.read_only != Some(true))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(phase: &str, claim: Value) -> Pod {
        let pod = json!({
            "metadata": { "name": "a", "namespace": "n", "labels": { "x": "y" } },
            "spec": {
                "containers": [{ "name": "c", "env": [{ "name": "A", "value": "secret" }] }],
                "volumes": [
                    { "name": "e", "emptyDir": {} },
                    { "name": "v", "persistentVolumeClaim": claim },
                ],
            },
            "status": { "phase": phase, "podIP": "10.0.0.1" },
        });
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn what_is_left_of_a_pod_says_as_much_of_its_claims() {
        for (phase, claim, writes) in [
            ("Running", json!({ "claimName": "a" }), true),
            (
                "Pending",
                json!({ "claimName": "a", "readOnly": false }),
                true,
            ),
            ("Running", json!({ "claimName": "b" }), false),
            (
                "Running",
                json!({ "claimName": "a", "readOnly": true }),
                false,
            ),
            ("Succeeded", json!({ "claimName": "a" }), false),
            ("Failed", json!({ "claimName": "a" }), false),
        ] {
            let mut pod = pod(phase, claim);
            assert_eq!(writes_to(&pod, &["x", "a"]), writes, "{pod:?}");
            trim(&mut pod);
            assert_eq!(writes_to(&pod, &["x", "a"]), writes, "{pod:?}");
            let left = serde_json::to_string(&pod).unwrap();
            assert!(
                !left.contains("secret") && !left.contains("labels"),
                "{left}"
            );
        }
    }
}
