use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::json;

use super::*;
use crate::objects::VolumeState;

fn at(second: i64) -> Time {
    Time(Timestamp::from_second(1_000_000 + second).unwrap())
}

fn vm(strategy: &str) -> VirtualMachine {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": "a", "uid": "vm", "generation": 1, "finalizers": [VM_FINALIZER]},
        "spec": {"runStrategy": strategy, "template": {"spec": {"domain": {}}}},
    }))
    .unwrap()
}

fn vmi(phase: Phase, passed: &[Phase]) -> VirtualMachineInstance {
    let mut vmi = VirtualMachineInstance::default();
    vmi.metadata.name = Some("a".into());
    vmi.metadata.uid = Some("vmi".into());
    vmi.metadata.owner_references = Some(vec![OwnerReference {
        uid: "vm".into(),
        controller: Some(true),
        ..OwnerReference::default()
    }]);
    vmi.status.phase = phase;
    vmi.status.phase_transition_timestamps = passed
        .iter()
        .map(|&phase| crate::objects::PhaseTransition {
            phase,
            phase_transition_timestamp: None,
        })
        .collect();
    vmi
}

static NO_VOLUMES: Volumes = Volumes {
    missing: Vec::new(),
    state: VolumeState::Ready,
};

fn observe<'a>(vm: &'a VirtualMachine, vmi: Option<&'a VirtualMachineInstance>) -> Observed<'a> {
    Observed {
        vm,
        vmi,
        started_with: None,
        is_live: false,
        volumes: &NO_VOLUMES,
        now: at(0),
        jitter: 0.0,
    }
}

fn actions(vm: &VirtualMachine, vmi: Option<&VirtualMachineInstance>) -> Vec<Action> {
    decide(&observe(vm, vmi)).actions
}

fn starts() -> Vec<Action> {
    vec![Action::Start { paused: false }]
}

fn stops() -> Vec<Action> {
    vec![Action::Stop { uid: "vmi".into() }]
}

#[test]
fn a_new_machine_starts_by_its_strategy() {
    for (strategy, expected) in [
        ("Always", starts()),
        ("RerunOnFailure", starts()),
        ("Once", starts()),
        ("Manual", vec![]),
        ("Halted", vec![]),
    ] {
        assert_eq!(actions(&vm(strategy), None), expected, "{strategy}");
    }
    let mut old = vm("");
    old.spec.run_strategy = None;
    old.spec.running = Some(true);
    assert_eq!(actions(&old, None), starts());
    old.spec.running = Some(false);
    assert_eq!(actions(&old, None), []);
}

#[test]
fn a_final_instance_is_replaced_removed_or_left() {
    for (strategy, phase, expected) in [
        ("Always", Phase::Succeeded, stops()),
        ("Always", Phase::Failed, stops()),
        ("RerunOnFailure", Phase::Succeeded, stops()),
        ("RerunOnFailure", Phase::Failed, stops()),
        ("Manual", Phase::Succeeded, vec![]),
        ("Manual", Phase::Failed, vec![]),
        ("Once", Phase::Succeeded, vec![]),
        ("Once", Phase::Failed, vec![]),
        ("Halted", Phase::Succeeded, stops()),
        ("Halted", Phase::Running, stops()),
        ("Always", Phase::Running, vec![]),
        ("Once", Phase::Running, vec![]),
    ] {
        let vmi = vmi(phase, &[Phase::Running]);
        assert_eq!(
            actions(&vm(strategy), Some(&vmi)),
            expected,
            "{strategy} {phase:?}"
        );
    }
}

#[test]
fn what_is_being_deleted_is_not_deleted_again() {
    let mut going = vmi(Phase::Running, &[]);
    going.metadata.deletion_timestamp = Some(at(0));
    assert_eq!(actions(&vm("Halted"), Some(&going)), []);
}

#[test]
fn rerun_on_failure_remembers_that_it_failed_before_it_deletes() {
    let machine = vm("RerunOnFailure");
    let failed = vmi(Phase::Failed, &[Phase::Running]);
    let first = decide(&observe(&machine, Some(&failed)));
    assert_eq!(
        first.status.state_change_requests,
        [StateChangeRequest::start()]
    );
    let mut machine = machine;
    machine.status = first.status;
    assert_eq!(actions(&machine, None), starts());
    // Once it runs, the request is done.
    let running = vmi(Phase::Running, &[]);
    let third = decide(&observe(&machine, Some(&running)));
    assert!(third.status.state_change_requests.is_empty());
    machine.status = third.status;
    assert_eq!(actions(&machine, None), [], "it succeeded, and was removed");
}

#[test]
fn a_machine_that_runs_once_does_not_run_twice() {
    let mut machine = vm("Once");
    let running = vmi(Phase::Running, &[]);
    machine.status = decide(&observe(&machine, Some(&running))).status;
    assert_eq!(machine.status.run_strategy.as_deref(), Some("Once"));
    assert_eq!(actions(&machine, None), []);
}

#[test]
fn the_strategy_is_recorded_only_when_there_is_nothing_left_to_start() {
    // Killed between the status and the instance, a controller must still start it.
    for strategy in ["Always", "Once", "RerunOnFailure"] {
        let decision = decide(&observe(&vm(strategy), None));
        assert_eq!(decision.status.run_strategy, None, "{strategy}");
    }
    let decision = decide(&observe(&vm("Manual"), None));
    assert_eq!(decision.status.run_strategy.as_deref(), Some("Manual"));
}

#[test]
fn requests_start_and_stop() {
    let with = |strategy: &str, requests: &[StateChangeRequest]| {
        let mut machine = vm(strategy);
        machine.status.run_strategy = Some(strategy.into());
        machine.status.state_change_requests = requests.to_vec();
        machine
    };
    let start = StateChangeRequest::start();
    let stop = StateChangeRequest::stop("vmi");
    let running = vmi(Phase::Running, &[]);
    let ended = vmi(Phase::Succeeded, &[Phase::Running]);
    assert_eq!(
        actions(&with("Manual", std::slice::from_ref(&start)), None),
        starts()
    );
    assert_eq!(
        actions(&with("RerunOnFailure", std::slice::from_ref(&start)), None),
        starts()
    );
    assert_eq!(
        actions(&with("Halted", std::slice::from_ref(&start)), None),
        [Action::SwitchToAlways]
    );
    for strategy in ["Always", "Manual", "RerunOnFailure", "Once"] {
        assert_eq!(
            actions(&with(strategy, std::slice::from_ref(&stop)), Some(&running)),
            stops(),
            "{strategy}"
        );
    }
    // A final instance of a manual machine is in the way of the next.
    assert_eq!(
        actions(&with("Manual", std::slice::from_ref(&start)), Some(&ended)),
        stops()
    );
    // A restart: the start stays until the old instance is gone.
    let restart = with("Manual", &[stop.clone(), start.clone()]);
    let decision = decide(&observe(&restart, Some(&running)));
    assert_eq!(decision.actions, stops());
    assert_eq!(decision.status.state_change_requests, [stop, start.clone()]);
    let decision = decide(&observe(&restart, None));
    assert_eq!(decision.actions, starts());
    assert_eq!(
        decision.status.state_change_requests,
        std::slice::from_ref(&start)
    );
    // A stop of another instance than this one is done.
    let late = with("Manual", &[StateChangeRequest::stop("older")]);
    let decision = decide(&observe(&late, Some(&running)));
    assert_eq!(decision.actions, []);
    assert!(decision.status.state_change_requests.is_empty());
    // A start while it runs is done.
    let decision = decide(&observe(&with("Manual", &[start]), Some(&running)));
    assert_eq!(
        (
            decision.actions.len(),
            decision.status.state_change_requests.len()
        ),
        (0, 0)
    );
}

#[test]
fn a_start_may_begin_paused() {
    let mut machine = vm("Manual");
    let mut request = StateChangeRequest::start();
    request.data.insert("paused".into(), "true".into());
    machine.status.state_change_requests = vec![request];
    assert_eq!(actions(&machine, None), [Action::Start { paused: true }]);
}

#[test]
fn failed_starts_wait_longer_each_time() {
    let mut machine = vm("Always");
    let mut seconds = Vec::new();
    for n in 0..7 {
        let mut failed = vmi(Phase::Failed, &[Phase::Scheduled]);
        failed.metadata.uid = Some(format!("vmi-{n}"));
        machine.status = decide(&observe(&machine, Some(&failed))).status;
        // The same instance counts once.
        let again = decide(&observe(&machine, Some(&failed))).status;
        assert_eq!(again.start_failure, machine.status.start_failure);
        let decision = decide(&observe(&machine, None));
        assert_eq!(decision.actions, [], "it waits");
        assert_eq!(decision.status.printable_status, "CrashLoopBackOff");
        seconds.push(decision.again.unwrap().as_secs());
    }
    assert_eq!(seconds, [10, 40, 90, 160, 250, 300, 300]);
    let mut later = observe(&machine, None);
    later.now = at(300);
    assert_eq!(decide(&later).actions, starts());
    // It runs: everything is forgotten.
    let running = vmi(Phase::Running, &[]);
    machine.status = decide(&observe(&machine, Some(&running))).status;
    assert_eq!(machine.status.start_failure, None);
    // One that failed after it ran is replaced at once.
    let failed = vmi(Phase::Failed, &[Phase::Running]);
    machine.status = decide(&observe(&machine, Some(&failed))).status;
    assert_eq!(actions(&machine, None), starts());
}

#[test]
fn the_wait_is_longer_at_random_and_has_a_bound() {
    assert_eq!(wait(1, 0.5), Duration::from_secs(15));
    assert_eq!(wait(5, 0.5), Duration::from_secs(300));
    assert_eq!(wait(u32::MAX, f64::INFINITY), Duration::from_secs(300));
}

#[test]
fn other_strategies_forget_failed_starts() {
    let mut machine = vm("Manual");
    machine.status.start_failure = Some(StartFailure::default());
    assert_eq!(decide(&observe(&machine, None)).status.start_failure, None);
}

#[test]
fn a_deleted_machine_goes_after_its_instance() {
    let mut machine = vm("Always");
    machine.metadata.deletion_timestamp = Some(at(0));
    let running = vmi(Phase::Running, &[]);
    assert_eq!(actions(&machine, Some(&running)), stops());
    let mut going = running.clone();
    going.metadata.deletion_timestamp = Some(at(0));
    assert_eq!(actions(&machine, Some(&going)), []);
    assert_eq!(actions(&machine, None), [Action::RemoveFinalizer]);
    machine
        .metadata
        .finalizers
        .as_mut()
        .unwrap()
        .push("orphan".into());
    assert_eq!(actions(&machine, Some(&running)), [Action::Orphan]);
    let mut orphan = running;
    orphan.metadata.owner_references = None;
    assert_eq!(actions(&machine, Some(&orphan)), [Action::RemoveFinalizer]);
}

#[test]
fn an_instance_of_somebody_else_is_left_alone() {
    let mut foreign = vmi(Phase::Running, &[]);
    foreign.metadata.owner_references = None;
    let decision = decide(&observe(&vm("Halted"), Some(&foreign)));
    assert_eq!(decision.actions, []);
    assert!(!decision.status.created);
    let failure = condition(&decision.status.conditions, "Failure").unwrap();
    assert_eq!(failure.reason, "FailedCreate");
}

#[test]
fn a_strategy_that_is_none_is_told() {
    let decision = decide(&observe(&vm("Sometimes"), None));
    let failure = condition(&decision.status.conditions, "Failure").unwrap();
    assert_eq!(failure.reason, "InvalidRunStrategy");
    assert_eq!(decision.actions, []);
}

#[test]
fn the_instances_state_is_the_machines() {
    let mut running = vmi(Phase::Running, &[]);
    running.status.conditions = vec![
        Condition::yes("Ready"),
        Condition::yes("Paused"),
        Condition::no("Synchronized", "FailedCreate", "quota"),
    ];
    let status = decide(&observe(&vm("Always"), Some(&running))).status;
    assert!(status.created && status.ready);
    assert_eq!(
        condition(&status.conditions, "Failure").unwrap().message,
        "quota"
    );
    assert_eq!(
        condition(&status.conditions, "Paused").unwrap().status,
        "True"
    );
    let status = decide(&observe(&vm("Halted"), None)).status;
    assert!(!status.created && !status.ready);
    assert_eq!(
        condition(&status.conditions, "Ready").unwrap().status,
        "False"
    );
    assert_eq!(status.printable_status, "Stopped");
}

#[test]
fn a_changed_template_asks_for_a_restart() {
    let machine = vm("Always");
    let running = vmi(Phase::Running, &[]);
    let restart = |started_with: Option<&Value>| {
        let mut observed = observe(&machine, Some(&running));
        observed.started_with = started_with;
        let status = decide(&observed).status;
        condition(&status.conditions, "RestartRequired").is_some()
    };
    assert!(!restart(None));
    assert!(!restart(Some(&json!({"domain": {}}))));
    assert!(restart(Some(&json!({"domain": {"cpu": {"cores": 2}}}))));
}

#[test]
fn an_instance_that_runs_takes_more_sockets_without_a_restart() {
    let mut machine = vm("Always");
    let mut running = vmi(Phase::Running, &[]);
    running.spec = json!({"domain": {"cpu": {"sockets": 1, "maxSockets": 4}}});
    let started = json!({"domain": {"cpu": {"sockets": 1}}});
    let mut decided = |sockets: i64, is_live| {
        if let Some(template) = &mut machine.spec.template {
            template.spec = json!({"domain": {"cpu": {"sockets": sockets}}});
        }
        let mut observed = observe(&machine, Some(&running));
        (observed.started_with, observed.is_live) = (Some(&started), is_live);
        let decision = decide(&observed);
        let changes = |action: &Action| matches!(action, Action::Change(_));
        let restart = condition(&decision.status.conditions, "RestartRequired");
        (decision.actions.iter().any(changes), restart.is_some())
    };
    assert_eq!(decided(2, true), (true, false));
    assert_eq!(decided(8, true), (false, true));
    assert_eq!(decided(2, false), (false, true));
}

#[test]
fn a_settled_machine_is_not_written_again() {
    let mut machine = vm("Always");
    let running = vmi(Phase::Running, &[]);
    machine.status = decide(&observe(&machine, Some(&running))).status;
    let mut later = observe(&machine, Some(&running));
    later.now = at(1000);
    let decision = decide(&later);
    assert_eq!(
        (decision.status, decision.actions),
        (machine.status.clone(), vec![])
    );
}

#[test]
fn a_machine_makes_its_volumes_and_starts_when_they_are_filled() {
    let look = |vm: &VirtualMachine, state, missing: usize| {
        let volumes = Volumes {
            missing: vec![DataVolume::default(); missing],
            state,
        };
        let mut observed = observe(vm, None);
        observed.volumes = &volumes;
        decide(&observed)
    };
    let (always, halted) = (vm("Always"), vm("Halted"));
    for (vm, state, missing, actions, word) in [
        (&always, VolumeState::Filling, 2, 2, "Provisioning"),
        (&halted, VolumeState::Filling, 1, 1, "Provisioning"),
        (&always, VolumeState::Retrying, 0, 0, "DataVolumeError"),
        (&always, VolumeState::Failed, 0, 0, "DataVolumeError"),
        (&always, VolumeState::WaitsForConsumer, 0, 1, "Starting"),
        (&halted, VolumeState::WaitsForConsumer, 0, 0, "Stopped"),
        (&always, VolumeState::Ready, 0, 1, "Starting"),
    ] {
        let decision = look(vm, state, missing);
        assert_eq!(decision.actions.len(), actions, "{decision:?}");
        assert_eq!(decision.status.printable_status, word, "{state:?}");
        assert_eq!(decision.again, None);
    }
    let mut going = vm("Always");
    going.metadata.deletion_timestamp = Some(at(0));
    let made = |action: &Action| matches!(action, Action::CreateVolume(_));
    assert!(
        !look(&going, VolumeState::Filling, 1)
            .actions
            .iter()
            .any(made)
    );
}
