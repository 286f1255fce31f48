//! A virtual machine's state in a word, for `kubectl get vm`.

use crate::objects::{
    Condition, Phase, VirtualMachine, VirtualMachineInstance, VmStatus, VolumeState, condition,
    is_true,
};

/// Returns the word; `starts`: an instance is to be made, now or after a wait; `volumes`: the state
/// of the DataVolume that is the least far.
#[must_use]
pub(super) fn status(
    vm: &VirtualMachine,
    vmi: Option<&VirtualMachineInstance>,
    status: &VmStatus,
    starts: bool,
    volumes: VolumeState,
) -> &'static str {
    if vm.metadata.deletion_timestamp.is_some() {
        return "Terminating";
    }
    let Some(vmi) = vmi else {
        return without_instance(status, starts, volumes);
    };
    let of_vmi = &vmi.status;
    if vmi.metadata.deletion_timestamp.is_some() && !of_vmi.phase.is_final() {
        return "Stopping";
    }
    if is_migrating(vmi) {
        return "Migrating";
    }
    if is_true(&of_vmi.conditions, "Paused") {
        return "Paused";
    }
    match of_vmi.phase {
        Phase::Running => "Running",
        Phase::Succeeded | Phase::Failed => match &status.start_failure {
            Some(_) => "CrashLoopBackOff",
            None => "Stopped",
        },
        Phase::Unknown => "Unknown",
        Phase::Unset | Phase::Pending | Phase::Scheduling | Phase::Scheduled => {
            obstacle(&of_vmi.conditions, volumes).unwrap_or("Starting")
        }
    }
}

fn without_instance(status: &VmStatus, starts: bool, volumes: VolumeState) -> &'static str {
    match (&status.start_failure, starts) {
        (Some(_), true) => "CrashLoopBackOff",
        (None, true) => "Starting",
        (_, false) => filling(volumes).unwrap_or("Stopped"),
    }
}

fn filling(volumes: VolumeState) -> Option<&'static str> {
    match volumes {
        VolumeState::Failed | VolumeState::Retrying => Some("DataVolumeError"),
        VolumeState::Filling => Some("Provisioning"),
        VolumeState::WaitsForConsumer | VolumeState::Ready => None,
    }
}

fn is_migrating(vmi: &VirtualMachineInstance) -> bool {
    let state = vmi.status.migration_state.as_ref();
    state.is_some_and(|state| state.start_timestamp.is_some() && state.end_timestamp.is_none())
}

/// Returns what keeps an instance from starting.
fn obstacle(conditions: &[Condition], volumes: VolumeState) -> Option<&'static str> {
    let reason = |kind: &str| {
        condition(conditions, kind)
            .filter(|condition| condition.status == "False")
            .map(|condition| condition.reason.as_str())
    };
    match (reason("PodScheduled"), reason("Synchronized")) {
        (Some("Unschedulable"), _) => Some("ErrorUnschedulable"),
        (_, Some("ErrImagePull")) => Some("ErrImagePull"),
        (_, Some("ImagePullBackOff")) => Some("ImagePullBackOff"),
        (_, Some("FailedPvcNotFound")) => Some("ErrorPvcNotFound"),
        _ if filling(volumes) == Some("DataVolumeError") => filling(volumes),
        _ if is_true(conditions, "Provisioning") => Some("WaitingForVolumeBinding"),
        _ => match reason("DataVolumesReady") {
            Some("NotAllDVsReady") => Some("Provisioning"),
            _ => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use serde_json::json;

    use super::*;
    use crate::objects::MigrationState;
    use crate::objects::StartFailure;

    fn vmi(phase: &str, conditions: serde_json::Value) -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "status": {"phase": phase, "conditions": conditions},
        }))
        .unwrap()
    }

    fn word(vmi: Option<&VirtualMachineInstance>) -> &'static str {
        let (vm, of_vm) = (VirtualMachine::default(), VmStatus::default());
        status(&vm, vmi, &of_vm, false, VolumeState::Ready)
    }

    #[test]
    fn each_state_of_an_instance_has_its_word() {
        let none = json!([]);
        let no =
            |kind: &str, reason: &str| json!([{"type": kind, "status": "False", "reason": reason}]);
        let yes = |kind: &str| json!([{"type": kind, "status": "True"}]);
        for (phase, conditions, expected) in [
            ("", none.clone(), "Starting"),
            ("Pending", none.clone(), "Starting"),
            ("Scheduled", none.clone(), "Starting"),
            ("Running", none.clone(), "Running"),
            ("Running", yes("Paused"), "Paused"),
            ("Succeeded", none.clone(), "Stopped"),
            ("Failed", none.clone(), "Stopped"),
            ("WaitingForSync", none, "Unknown"),
            (
                "Scheduling",
                no("PodScheduled", "Unschedulable"),
                "ErrorUnschedulable",
            ),
            (
                "Scheduling",
                no("Synchronized", "ErrImagePull"),
                "ErrImagePull",
            ),
            (
                "Scheduling",
                no("Synchronized", "ImagePullBackOff"),
                "ImagePullBackOff",
            ),
            (
                "Pending",
                no("Synchronized", "FailedPvcNotFound"),
                "ErrorPvcNotFound",
            ),
            ("Pending", no("Synchronized", "FailedCreate"), "Starting"),
            ("Pending", yes("Provisioning"), "WaitingForVolumeBinding"),
            (
                "Pending",
                no("DataVolumesReady", "NotAllDVsReady"),
                "Provisioning",
            ),
        ] {
            let vmi = vmi(phase, conditions);
            assert_eq!(
                word(Some(&vmi)),
                expected,
                "{phase}: {:?}",
                vmi.status.conditions
            );
        }
    }

    #[test]
    fn deletion_comes_first() {
        let now = Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
        let mut running = vmi("Running", json!([]));
        running.metadata.deletion_timestamp = Some(now.clone());
        assert_eq!(word(Some(&running)), "Stopping");
        let mut vm = VirtualMachine::default();
        vm.metadata.deletion_timestamp = Some(now);
        assert_eq!(
            status(&vm, Some(&running), &vm.status, false, VolumeState::Ready),
            "Terminating"
        );
    }

    #[test]
    fn a_migration_is_seen_until_it_ends() {
        let mut running = vmi("Running", json!([]));
        let time = Some(Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH));
        let state = MigrationState {
            start_timestamp: time.clone(),
            ..MigrationState::default()
        };
        running.status.migration_state = Some(state.clone());
        assert_eq!(word(Some(&running)), "Migrating");
        running.status.migration_state = Some(MigrationState {
            end_timestamp: time,
            ..state
        });
        assert_eq!(word(Some(&running)), "Running");
    }

    #[test]
    fn without_an_instance_the_strategy_decides() {
        let vm = VirtualMachine::default();
        let mut of_vm = VmStatus::default();
        let status =
            |vm: &VirtualMachine,
             vmi: Option<&VirtualMachineInstance>,
             of_vm: &VmStatus,
             starts: bool| { status(vm, vmi, of_vm, starts, VolumeState::Ready) };
        assert_eq!(status(&vm, None, &of_vm, false), "Stopped");
        assert_eq!(status(&vm, None, &of_vm, true), "Starting");
        of_vm.start_failure = Some(StartFailure::default());
        assert_eq!(status(&vm, None, &of_vm, true), "CrashLoopBackOff");
        assert_eq!(
            status(&vm, Some(&vmi("Failed", json!([]))), &of_vm, false),
            "CrashLoopBackOff"
        );
    }
}
