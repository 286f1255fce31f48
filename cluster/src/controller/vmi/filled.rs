//! Whether the DataVolumes of an instance are filled.

use super::decision::{Action, Decision, Observed, set_phase};
use super::pod;
use crate::objects::{Condition, Phase, VolumeState, clear_condition, condition, set_condition};

/// Returns whether all DataVolumes of an instance are filled, and records it. Without those that
/// never will be, the instance is over.
pub(super) fn are_all(observed: &Observed<'_>, decision: &mut Decision) -> bool {
    let Ok(spec) = pod::specification(observed.vmi) else {
        return true;
    };
    let fixed = spec
        .volumes
        .iter()
        .filter(|volume| !volume.is_hotpluggable());
    let names = fixed.filter_map(|volume| {
        let data = volume.data_volume.as_ref().map(|data| &data.name);
        let claim = volume.persistent_volume_claim.as_ref();
        data.or(claim.map(|claim| &claim.claim_name))
    });
    let states: Vec<(&String, VolumeState)> = names
        .filter_map(|name| Some((name, (observed.volume)(name)?)))
        .collect();
    let Some((name, state)) = states.into_iter().max_by_key(|(_, state)| *state) else {
        return true;
    };
    let now = &observed.now;
    let Decision { status, actions } = decision;
    let conditions = &mut status.conditions;
    match state {
        VolumeState::WaitsForConsumer => {
            let message = format!("DataVolume {name} waits for a pod that uses its claim");
            let provisioning = Condition {
                message,
                ..Condition::yes("Provisioning")
            };
            set_condition(conditions, provisioning, now);
            // A claim that does not exist yet leads to another look when it does.
            let own = pod::pod(observed.vmi, &|name| observed.mode(name)).ok();
            actions.extend(own.map(|pod| Action::CreateConsumer(Box::new(pod))));
        }
        _ => {
            if condition(conditions, "Provisioning").is_some() {
                actions.push(Action::DeleteConsumer);
            }
            clear_condition(conditions, "Provisioning");
        }
    }
    if state == VolumeState::Ready {
        let ready = Condition {
            reason: "AllDVsReady".to_owned(),
            ..Condition::yes("DataVolumesReady")
        };
        set_condition(conditions, ready, now);
        return true;
    }
    let message = format!("DataVolume {name} is not filled");
    let waiting = Condition::no("DataVolumesReady", "NotAllDVsReady", message);
    set_condition(conditions, waiting, now);
    clear_condition(conditions, "Synchronized");
    if state == VolumeState::Failed {
        set_phase(status, Phase::Failed, now);
        status.reason = "FailedDataVolumeImport".to_owned();
    }
    false
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;
    use serde_json::json;

    use super::*;
    use crate::controller::claims::{Claim, VolumeMode};
    use crate::controller::vmi::decide;
    use crate::objects::{VMI_FINALIZER, VirtualMachineInstance, is_true};

    const BLOCK: Claim = Claim {
        mode: VolumeMode::Block,
        is_shared: false,
    };

    #[test]
    fn an_instance_waits_until_its_volumes_are_filled() {
        let mut waiting: VirtualMachineInstance = serde_json::from_value(json!({
            "metadata": {
                "name": "a", "namespace": "n", "uid": "vmi", "finalizers": [VMI_FINALIZER],
            },
            "spec": {"domain": {"memory": {"guest": "1Gi"}}},
            "status": {"phase": "Pending"},
        }))
        .unwrap();
        waiting.spec["volumes"] = json!([
            {"name": "a", "dataVolume": {"name": "a"}},
            {"name": "b", "persistentVolumeClaim": {"claimName": "b"}},
            {"name": "c", "dataVolume": {"name": "gone"}},
        ]);
        let look = |state: VolumeState| {
            decide(&Observed {
                vmi: &waiting,
                pod: None,
                others: &[],
                is_migration_known: true,
                claim: &|_| Some(BLOCK),
                volume: &|name| match name {
                    "a" => Some(VolumeState::Ready),
                    "b" => Some(state),
                    _ => None,
                },
                now: Time(Timestamp::UNIX_EPOCH),
            })
        };
        let reason = |decision: &Decision| {
            let found = condition(&decision.status.conditions, "DataVolumesReady");
            found.unwrap().reason.clone()
        };
        let ready = look(VolumeState::Ready);
        assert!(matches!(&ready.actions[..], [Action::CreatePod(_)]));
        assert_eq!(reason(&ready), "AllDVsReady");
        for state in [VolumeState::Filling, VolumeState::Retrying] {
            let decision = look(state);
            assert_eq!(
                (&decision.actions[..], decision.status.phase),
                (&[][..], Phase::Pending)
            );
            assert_eq!(reason(&decision), "NotAllDVsReady");
            assert!(!is_true(&decision.status.conditions, "Provisioning"));
        }
        let waits = look(VolumeState::WaitsForConsumer);
        assert!(is_true(&waits.status.conditions, "Provisioning"));
        assert!(matches!(&waits.actions[..], [Action::CreateConsumer(_)]));
        let mut begun = waiting.clone();
        begun.status = waits.status;
        let filled = decide(&Observed {
            vmi: &begun,
            pod: None,
            others: &[],
            is_migration_known: true,
            claim: &|_| Some(BLOCK),
            volume: &|_| Some(VolumeState::Ready),
            now: Time(Timestamp::UNIX_EPOCH),
        });
        assert!(matches!(
            &filled.actions[..],
            [Action::DeleteConsumer, Action::CreatePod(_)]
        ));
        let failed = look(VolumeState::Failed).status;
        assert_eq!(
            (failed.phase, failed.reason.as_str()),
            (Phase::Failed, "FailedDataVolumeImport")
        );
    }
}
