use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::controller::claims::{Claim, VolumeMode};
use crate::controller::instances::{failure, was_running};
use crate::controller::vmi::decision::Other;
use crate::objects::condition;

fn at(second: i64) -> Time {
    Time(Timestamp::from_second(1_000_000 + second).unwrap())
}

fn vmi(phase: Phase) -> VirtualMachineInstance {
    let mut vmi: VirtualMachineInstance = serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "a", "namespace": "n", "uid": "vmi", "finalizers": [VMI_FINALIZER]},
        "spec": {"domain": {"memory": {"guest": "1Gi"}}},
    }))
    .unwrap();
    vmi.status.phase = phase;
    vmi
}

fn deleted(phase: Phase) -> VirtualMachineInstance {
    let mut vmi = vmi(phase);
    vmi.metadata.deletion_timestamp = Some(at(0));
    vmi
}

fn pod(status: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p", "uid": "pod"},
        "spec": {"nodeName": "node", "containers": []},
        "status": status,
    }))
    .unwrap()
}

/// A pod's status, of a VM that is not paused.
fn state(state: Value) -> Value {
    json!({"conditions": [gate("True")], "containerStatuses": [{
        "name": "compute", "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "state": state,
    }]})
}

fn gate(status: &str) -> Value {
    json!({"type": UNPAUSED_GATE, "status": status})
}

fn running() -> Pod {
    pod(state(json!({"running": {}})))
}

fn run(vmi: &VirtualMachineInstance, pod: Option<&Pod>) -> Decision {
    decide(&Observed {
        vmi,
        pod,
        others: &[],
        is_migration_known: true,
        claim: &|_| None,
        volume: &|_| None,
        now: at(0),
    })
}

fn phases(decision: &Decision) -> Vec<Phase> {
    let transitions = &decision.status.phase_transition_timestamps;
    transitions.iter().map(|passed| passed.phase).collect()
}

#[test]
fn a_new_instance_gets_a_pod() {
    let decision = run(&vmi(Phase::Unset), None);
    assert_eq!(decision.status.phase, Phase::Pending);
    assert!(matches!(&decision.actions[..], [Action::CreatePod(_)]));
}

#[test]
fn what_may_go_unnoticed_is_kept_first() {
    let mut new = vmi(Phase::Unset);
    new.metadata.finalizers = None;
    let decision = run(&new, None);
    assert!(matches!(
        &decision.actions[..],
        [Action::AddFinalizer, Action::CreatePod(_)]
    ));
}

#[test]
fn phases_follow_the_pod() {
    let waiting = |sandbox: bool| {
        let ready = json!({"type": "PodReadyToStartContainers", "status": "True"});
        let conditions = if sandbox { vec![ready] } else { vec![] };
        pod(json!({"phase": "Pending", "conditions": conditions}))
    };
    let exit = |code: i32| pod(state(json!({"terminated": {"exitCode": code}})));
    for (before, pod, after) in [
        (Phase::Pending, waiting(false), Phase::Scheduling),
        (Phase::Pending, waiting(true), Phase::Scheduled),
        (Phase::Pending, running(), Phase::Running),
        (Phase::Scheduling, waiting(true), Phase::Scheduled),
        (Phase::Scheduling, running(), Phase::Running),
        (
            Phase::Scheduling,
            pod(json!({"phase": "Failed"})),
            Phase::Failed,
        ),
        (Phase::Scheduled, waiting(false), Phase::Scheduled),
        (Phase::Scheduled, exit(1), Phase::Failed),
        (Phase::Scheduled, exit(0), Phase::Succeeded),
        (Phase::Running, running(), Phase::Running),
        (Phase::Running, exit(0), Phase::Succeeded),
        (Phase::Running, exit(137), Phase::Failed),
        (
            Phase::Running,
            pod(json!({"phase": "Succeeded"})),
            Phase::Succeeded,
        ),
        (Phase::Succeeded, running(), Phase::Succeeded),
        (Phase::Failed, running(), Phase::Failed),
        (Phase::Unknown, running(), Phase::Unknown),
    ] {
        let decision = run(&vmi(before), Some(&pod));
        assert_eq!(decision.status.phase, after, "{before:?} {:?}", pod.status);
    }
}

#[test]
fn no_phase_is_missing_in_the_record() {
    let decision = run(&vmi(Phase::Unset), Some(&running()));
    assert_eq!(
        phases(&decision),
        [
            Phase::Pending,
            Phase::Scheduling,
            Phase::Scheduled,
            Phase::Running
        ]
    );
    assert!(was_running(&decision.status));
}

#[test]
fn an_instance_whose_pod_is_gone_has_failed() {
    for phase in [Phase::Scheduling, Phase::Scheduled, Phase::Running] {
        let decision = run(&vmi(phase), None);
        assert_eq!(decision.status.phase, Phase::Failed, "{phase:?}");
        assert_eq!(decision.status.reason, "PodDeleted");
        assert_eq!(decision.actions, [], "it gets no second pod");
    }
    for phase in [Phase::Succeeded, Phase::Failed] {
        assert_eq!(run(&vmi(phase), None).actions, []);
    }
}

#[test]
fn why_the_guest_ended_is_told() {
    let crashed = pod(state(
        json!({"terminated": {"exitCode": 1, "reason": "GuestPanicked"}}),
    ));
    let decision = run(&vmi(Phase::Running), Some(&crashed));
    assert_eq!(decision.status.reason, "GuestPanicked");
    let evicted = pod(json!({"phase": "Failed", "reason": "Evicted"}));
    assert_eq!(
        run(&vmi(Phase::Running), Some(&evicted)).status.reason,
        "Evicted"
    );
}

#[test]
fn a_deleted_instance_goes_after_its_pod() {
    let decision = run(&deleted(Phase::Running), Some(&running()));
    let deletion = Action::DeletePod {
        name: "p".to_owned(),
        uid: "pod".into(),
        grace: 30,
    };
    assert!(
        decision.actions.contains(&deletion),
        "{:?}",
        decision.actions
    );
    let decision = run(&deleted(Phase::Running), None);
    assert_eq!(decision.actions, [Action::RemoveFinalizer]);
    let mut last = deleted(Phase::Running);
    last.metadata.finalizers = None;
    assert_eq!(run(&last, None).actions, []);
}

#[test]
fn a_deleted_instance_without_a_pod_gets_none() {
    assert_eq!(
        run(&deleted(Phase::Pending), None).actions,
        [Action::RemoveFinalizer]
    );
}

#[test]
fn a_shorter_grace_is_passed_on() {
    let mut going = running();
    going.metadata.deletion_timestamp = Some(at(0));
    going.metadata.deletion_grace_period_seconds = Some(30);
    let mut vmi = deleted(Phase::Running);
    let deletes = |vmi: &VirtualMachineInstance| {
        let actions = run(vmi, Some(&going)).actions;
        actions
            .iter()
            .any(|action| matches!(action, Action::DeletePod { grace: 1, .. }))
    };
    assert!(!deletes(&vmi));
    vmi.spec["terminationGracePeriodSeconds"] = 0.into();
    assert!(deletes(&vmi));
}

#[test]
fn readiness_has_its_reasons() {
    let reason = |vmi: &VirtualMachineInstance, pod: Option<&Pod>| {
        let status = run(vmi, pod).status;
        let ready = condition(&status.conditions, "Ready").unwrap();
        (ready.status.clone(), ready.reason.clone())
    };
    let no = |reason: &str| ("False".to_owned(), reason.to_owned());
    assert_eq!(reason(&vmi(Phase::Pending), None), no("PodNotExists"));
    assert_eq!(
        reason(&vmi(Phase::Scheduling), Some(&pod(json!({})))),
        no("GuestNotRunning")
    );
    assert_eq!(
        reason(&vmi(Phase::Running), Some(&running())),
        no("PodConditionMissing")
    );
    let mut ready = running();
    let status = ready.status.as_mut().unwrap();
    status.conditions =
        serde_json::from_value(json!([{"type": "Ready", "status": "True"}])).unwrap();
    assert_eq!(
        reason(&vmi(Phase::Running), Some(&ready)),
        ("True".to_owned(), String::new())
    );
    ready.metadata.deletion_timestamp = Some(at(0));
    assert_eq!(
        reason(&vmi(Phase::Running), Some(&ready)),
        no("PodTerminating")
    );
}

#[test]
fn obstacles_are_copied_from_the_pod_and_forgotten() {
    let unschedulable = pod(json!({"conditions": [{
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1",
    }]}));
    let first = run(&vmi(Phase::Scheduling), Some(&unschedulable)).status;
    assert_eq!(
        condition(&first.conditions, "PodScheduled")
            .unwrap()
            .message,
        "0/1"
    );
    let pulling = pod(state(
        json!({"waiting": {"reason": "ErrImagePull", "message": "m"}}),
    ));
    let mut next = vmi(Phase::Scheduling);
    next.status = first;
    let second = run(&next, Some(&pulling)).status;
    assert!(condition(&second.conditions, "PodScheduled").is_none());
    assert_eq!(failure(&second).unwrap().reason, "ErrImagePull");
    next.status = second;
    let third = run(&next, Some(&running())).status;
    assert!(failure(&third).is_none());
}

#[test]
fn a_missing_claim_is_waited_for() {
    let mut waits = vmi(Phase::Unset);
    waits.spec["volumes"] = json!([{
        "name": "data", "persistentVolumeClaim": {"claimName": "c"},
    }]);
    let decision = run(&waits, None);
    assert_eq!(decision.actions, []);
    assert_eq!(
        failure(&decision.status).unwrap().reason,
        "FailedPvcNotFound"
    );
    let decision = decide(&Observed {
        vmi: &waits,
        pod: None,
        volume: &|_| None,
        others: &[],
        is_migration_known: true,
        claim: &|_| {
            Some(Claim {
                mode: VolumeMode::Filesystem,
                is_shared: false,
            })
        },
        now: at(0),
    });
    assert!(matches!(&decision.actions[..], [Action::CreatePod(_)]));
}

#[test]
fn a_specification_that_is_none_ends_in_a_condition() {
    let mut wrong = vmi(Phase::Unset);
    wrong.spec = json!({"domain": {"memory": {"guest": ["x"]}}});
    let decision = run(&wrong, None);
    assert_eq!(decision.actions, []);
    assert_eq!(failure(&decision.status).unwrap().reason, "FailedCreate");
}

#[test]
fn where_it_runs_and_how_it_is_reached_is_written() {
    let mut status = state(json!({"running": {}}));
    status["podIPs"] = json!([{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]);
    status["qosClass"] = "Burstable".into();
    let decision = run(&vmi(Phase::Scheduling), Some(&pod(status)));
    assert_eq!(decision.actions, [Action::SetNodeLabel("node".into())]);
    let status = &decision.status;
    assert_eq!(
        (&*status.node_name, &*status.qos_class),
        ("node", "Burstable")
    );
    assert_eq!(status.active_pods["pod"], "node");
    assert_eq!(status.interfaces[0].name, "default");
    assert_eq!(status.interfaces[0].ip_addresses, ["10.0.0.1", "fd00::1"]);
    assert!(is_true(&status.conditions, "LiveMigratable"));
    assert_eq!(status.migration_method, "LiveMigration");
}

#[test]
fn a_masqueraded_guest_is_reached_at_its_pod_though_its_agent_answers() {
    let mut status = state(json!({"running": {}}));
    status["podIPs"] = json!([{"ip": "10.0.0.2"}]);
    let pod = pod(status);
    for (card, address) in [("masquerade", "10.0.0.2"), ("bridge", "10.0.0.1")] {
        let mut moved = vmi(Phase::Running);
        moved.spec["domain"]["devices"] = json!({"interfaces": [{"name": "default", card: {}}]});
        moved.spec["networks"] = json!([{"name": "default", "pod": {}}]);
        // Of the pod that it has left, or the guest's own.
        let known = json!([{
            "name": "default",
            "ipAddress": "10.0.0.1",
            "ipAddresses": ["10.0.0.1"],
            "infoSource": "domain, guest-agent",
        }]);
        moved.status.interfaces = serde_json::from_value(known).unwrap();
        let interface = &run(&moved, Some(&pod)).status.interfaces[0];
        assert_eq!(interface.ip_address, address, "{card}");
        assert_eq!(interface.ip_addresses, [address], "{card}");
    }
}

#[test]
fn what_the_machine_has_is_written_once() {
    let mut new = vmi(Phase::Unset);
    new.spec["domain"]["cpu"] = json!({"cores": 2});
    new.spec["volumes"] = json!([
        {"name": "root", "containerDisk": {"image": "i"}},
        {"name": "data", "dataVolume": {"name": "c"}},
    ]);
    let status = run(&new, None).status;
    let rest = &status.rest;
    assert_eq!(rest["memory"]["guestAtBoot"], "1Gi");
    let topology = json!({"cores": 2, "sockets": 1, "threads": 1});
    assert_eq!(rest["currentCPUTopology"], topology);
    assert_eq!(
        rest["volumeStatus"][0],
        json!({"name": "root", "target": ""})
    );
    assert_eq!(
        rest["volumeStatus"][1]["persistentVolumeClaimInfo"]["claimName"],
        "c"
    );
    // The node knows better.
    new.status = status;
    new.status.rest["memory"]["guestCurrent"] = "2Gi".into();
    assert_eq!(run(&new, None).status.rest["memory"]["guestCurrent"], "2Gi");
}

#[test]
fn a_settled_instance_is_not_written_again() {
    let mut settled = vmi(Phase::Unset);
    settled.metadata.labels = Some([(NODE_NAME_LABEL.to_owned(), "node".to_owned())].into());
    settled.status = run(&settled, Some(&running())).status;
    let decision = decide(&Observed {
        vmi: &settled,
        pod: Some(&running()),
        others: &[],
        is_migration_known: true,
        claim: &|_| None,
        volume: &|_| None,
        now: at(1000),
    });
    assert_eq!(
        (decision.status, decision.actions),
        (settled.status.clone(), vec![])
    );
}

fn moving(open: bool) -> VirtualMachineInstance {
    let mut vmi = vmi(Phase::Running);
    let mut state = MigrationState {
        migration_uid: "m".to_owned(),
        source_pod: "p".to_owned(),
        target_pod: "q".to_owned(),
        ..MigrationState::default()
    };
    if !open {
        state.end(Some("why"), &at(0));
    }
    vmi.status.migration_state = Some(state);
    vmi
}

fn moved() -> Pod {
    let end = json!({"terminated": {"exitCode": 0, "reason": "Moved"}});
    pod(state(end))
}

#[test]
fn a_vm_that_left_has_not_ended_while_its_migration_goes_on() {
    assert_eq!(
        run(&moving(true), Some(&moved())).status.phase,
        Phase::Running
    );
    assert_eq!(run(&moving(true), None).status.phase, Phase::Running);
    let off = pod(state(
        json!({"terminated": {"exitCode": 0, "reason": "Completed"}}),
    ));
    assert_eq!(
        run(&moving(true), Some(&off)).status.phase,
        Phase::Succeeded
    );
    // It left, and the migration says that it did not.
    let lost = run(&moving(false), Some(&moved())).status;
    assert_eq!((lost.phase, &*lost.reason), (Phase::Failed, "Moved"));
    assert_eq!(run(&moving(false), None).status.phase, Phase::Failed);
}

#[test]
fn pods_that_no_migration_needs_are_ended_and_the_others_kept() {
    let mut other = running();
    other.metadata.name = Some("q".to_owned());
    other.metadata.uid = Some("other".to_owned());
    let with = |vmi: &VirtualMachineInstance, pod: Option<&Pod>, is_wanted| {
        let other = Other {
            pod: Arc::new(other.clone()),
            is_wanted,
        };
        decide(&Observed {
            vmi,
            pod,
            others: &[other],
            is_migration_known: true,
            claim: &|_| None,
            volume: &|_| None,
            now: at(0),
        })
    };
    let deletion = Action::DeletePod {
        name: "q".to_owned(),
        uid: "other".to_owned(),
        grace: 1,
    };
    let kept = with(&moving(true), Some(&running()), true);
    assert!(!kept.actions.contains(&deletion));
    assert_eq!(kept.status.active_pods.len(), 2);
    let ended = with(&moving(true), Some(&running()), false);
    assert!(ended.actions.contains(&deletion));
    // An instance that goes waits for all of its pods.
    let going = with(&deleted(Phase::Running), None, true);
    assert_eq!(going.actions, [deletion]);
}

#[test]
fn a_migration_that_was_removed_by_force_ends_as_the_source_says() {
    let look = |pod: &Pod| {
        let vmi = moving(true);
        let decision = decide(&Observed {
            vmi: &vmi,
            pod: Some(pod),
            others: &[],
            is_migration_known: false,
            claim: &|_| None,
            volume: &|_| None,
            now: at(0),
        });
        assert_eq!(decision.status.phase, Phase::Running);
        decision.status.migration_state.unwrap()
    };
    assert_eq!(look(&running()).pod(), "p");
    assert_eq!(look(&moved()).pod(), "q");
}

#[test]
fn a_paused_vm_is_not_ready_and_neither_is_its_pod() {
    let mut paused = vmi(Phase::Running);
    paused.status.conditions = vec![Condition::yes("Paused")];
    let mut status = state(json!({"running": {}}));
    status["conditions"] = json!([gate("True"), {"type": "Ready", "status": "True"}]);
    let decision = run(&paused, Some(&pod(status.clone())));
    let ready = condition(&decision.status.conditions, "Ready").unwrap();
    assert_eq!(
        (&*ready.status, &*ready.reason),
        ("False", "GuestNotRunning")
    );
    let set = |is_paused| Action::SetGate {
        pod: "p".to_owned(),
        is_paused,
    };
    assert!(decision.actions.contains(&set(true)));

    status["conditions"] = json!([gate("False"), {"type": "Ready", "status": "True"}]);
    let decision = run(&paused, Some(&pod(status.clone())));
    assert!(!decision.actions.contains(&set(true)), "it says so already");
    paused.status.conditions.clear();
    let decision = run(&paused, Some(&pod(status)));
    assert!(decision.actions.contains(&set(false)));
    assert!(is_true(&decision.status.conditions, "Ready"));
}

#[test]
fn the_pod_of_an_ended_vm_is_left_alone() {
    let ended = pod(json!({"containerStatuses": [{
        "name": "compute", "image": "", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"terminated": {"exitCode": 0}},
    }]}));
    let decision = run(&vmi(Phase::Running), Some(&ended));
    let sets = |action: &Action| matches!(action, Action::SetGate { .. });
    assert!(!decision.actions.iter().any(sets));
}
