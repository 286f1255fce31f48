//! How snapshots go on, from what was observed.

use serde_json::{Value, json};

use super::*;

/// The beginning of all times here, and so many seconds later.
fn at(seconds: i64) -> Time {
    let begin: k8s_openapi::jiff::Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    Time(
        begin
            .checked_add(SignedDuration::from_secs(seconds))
            .unwrap(),
    )
}

/// A snapshot `s` of the machine `a`, and what is around it.
struct World {
    snapshot: VirtualMachineSnapshot,
    vm: Option<VirtualMachine>,
    vmi: Option<VirtualMachineInstance>,
    content: Option<VirtualMachineSnapshotContent>,
    volumes: BTreeMap<String, VolumeSnapshot>,
    user: Option<&'static str>,
    seconds: i64,
}

impl World {
    fn new() -> Self {
        let snapshot = json!({
            "metadata": {
                "name": "s", "namespace": "n", "uid": "u", "finalizers": [SNAPSHOT_FINALIZER],
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {"source": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "a"}},
            "status": {"phase": "InProgress"},
        });
        let vm = json!({
            "metadata": {"name": "a", "namespace": "n", "uid": "vm"},
            "status": {"printableStatus": "Stopped"},
        });
        Self {
            snapshot: serde_json::from_value(snapshot).unwrap(),
            vm: serde_json::from_value(vm).unwrap(),
            vmi: None,
            content: None,
            volumes: BTreeMap::new(),
            user: None,
            seconds: 1,
        }
    }

    fn decide(&self) -> Decision {
        decide(&Observed {
            snapshot: &self.snapshot,
            vm: self.vm.as_ref(),
            vmi: self.vmi.as_ref(),
            content: self.content.as_ref(),
            volumes: &self.volumes,
            user: self.user,
            now: at(self.seconds),
        })
    }

    fn lock(&mut self, holder: &str) {
        let vm = self.vm.as_mut().unwrap();
        vm.metadata.finalizers = Some(vec![SOURCE_FINALIZER.to_owned()]);
        let holder = json!(holder);
        vm.status
            .rest
            .insert("snapshotInProgress".to_owned(), holder);
    }

    /// A locked machine with contents of two volumes.
    fn stored() -> Self {
        let mut world = Self::new();
        world.lock("s");
        let backup = |name: &str| json!({"volumeName": name, "volumeSnapshotName": name});
        let volumes = json!([{"name": "x", "persistentVolumeClaim": {"claimName": "x"}}]);
        let content = json!({
            "metadata": {"name": "c", "uid": "content"},
            "spec": {
                "source": {"virtualMachine": {
                    "metadata": {}, "spec": {"template": {"spec": {"volumes": volumes}}},
                }},
                "volumeBackups": [backup("x"), backup("y")],
            },
        });
        world.content = serde_json::from_value(content).unwrap();
        world
    }

    fn take(&mut self, name: &str, status: Value) {
        let volume = json!({"metadata": {"name": name}, "status": status});
        let volume = serde_json::from_value(volume).unwrap();
        self.volumes.insert(name.to_owned(), volume);
    }

    fn run(&mut self, conditions: &[&str]) {
        let yes = |kind: &&str| json!({"type": kind, "status": "True"});
        let conditions: Vec<_> = conditions.iter().map(yes).collect();
        let vmi = json!({"status": {"phase": "Running", "conditions": conditions}});
        self.vmi = serde_json::from_value(vmi).unwrap();
    }

    fn frozen_until(&mut self, seconds: i64) {
        let until = at(seconds).0.to_string();
        let content = self.content.as_mut().unwrap();
        let annotations = [(FROZEN_UNTIL.to_owned(), until)];
        content.metadata.annotations = Some(annotations.into_iter().collect());
    }
}

fn created(seconds: i64) -> Value {
    json!({"creationTime": at(seconds), "readyToUse": true})
}

fn why(decision: &Decision) -> &str {
    let conditions = &decision.status.conditions;
    let progress = conditions.iter().find(|found| found.kind == "Progressing");
    progress.map_or("", |progress| progress.reason.as_str())
}

#[test]
fn a_machine_is_locked_when_nothing_stands_against_it() {
    let mut world = World::new();
    assert_eq!(world.decide().actions, [Action::Lock]);
    world.user = Some("p");
    assert!(world.decide().actions.is_empty());
    assert!(why(&world.decide()).contains("pod p"));
    world.user = None;
    world.lock("other");
    assert!(world.decide().actions.is_empty());
    assert!(why(&world.decide()).contains("other"));
    world.vm = None;
    assert_eq!(why(&world.decide()), "Source does not exist");
    let mut world = World::new();
    world.vm.as_mut().unwrap().status.printable_status.clear();
    assert_eq!(why(&world.decide()), "Source has no status yet");
    let mut world = World::new();
    let pending = json!({"status": {"phase": "Scheduling"}});
    world.vmi = serde_json::from_value(pending).unwrap();
    assert_eq!(why(&world.decide()), "Source is starting");
}

#[test]
fn a_machine_that_migrates_is_waited_for() {
    let state = |state: Value| serde_json::from_value(state).unwrap();
    let begun = json!({"migrationUid": "m", "startTimestamp": at(0)});
    for running in [begun.clone(), json!({"migrationUid": "m"})] {
        let mut world = World::new();
        world.run(&[]);
        world.vmi.as_mut().unwrap().status.migration_state = state(running);
        let decision = world.decide();
        assert!(decision.actions.is_empty(), "{decision:?}");
        assert_eq!(why(&decision), "Source is migrating");
        assert_eq!(decision.again, Some(PATIENCE));
        let over = json!({"migrationUid": "m", "endTimestamp": at(1), "completed": true});
        world.vmi.as_mut().unwrap().status.migration_state = state(over);
        assert_eq!(world.decide().actions, [Action::Lock]);
    }
    // It began while the machine was being locked.
    let mut world = World::stored();
    world.run(&["AgentConnected"]);
    world.vmi.as_mut().unwrap().status.migration_state = state(begun);
    assert!(world.decide().actions.is_empty());
    assert_eq!(why(&world.decide()), "Source is migrating");
    world.frozen_until(300);
    let volume = |name: &str| Action::CreateVolume(name.to_owned());
    let actions = world.decide().actions;
    assert!(actions.contains(&volume("x")), "{actions:?}");
}

#[test]
fn what_the_machine_is_like_is_stored_once_it_is_locked() {
    let mut world = World::new();
    world.lock("s");
    let decision = world.decide();
    assert_eq!(decision.actions, [Action::CreateContent]);
    assert_eq!(decision.status.source_uid.as_deref(), Some("vm"));
}

#[test]
fn volumes_of_a_machine_that_does_not_run_are_taken_without_a_guest() {
    let mut world = World::stored();
    let volume = |name: &str| Action::CreateVolume(name.to_owned());
    assert_eq!(world.decide().actions, [volume("x"), volume("y")]);
    world.take("x", created(1));
    assert_eq!(world.decide().actions, [volume("y")]);
    world.take("y", json!({}));
    let decision = world.decide();
    assert!(decision.actions.is_empty());
    assert_eq!(decision.status.phase, SnapshotPhase::InProgress);
    world.take("y", created(2));
    let decision = world.decide();
    assert_eq!(decision.actions, [Action::Unlock]);
    assert_eq!(decision.status.phase, SnapshotPhase::Succeeded);
    assert_eq!(decision.status.ready_to_use, Some(true));
    assert_eq!(decision.content.unwrap().creation_time, Some(at(1)));
    assert!(decision.status.indications.is_empty());
}

#[test]
fn a_guest_is_frozen_before_the_first_volume_and_thawed_after_the_last() {
    let mut world = World::stored();
    world.run(&["AgentConnected"]);
    world.seconds = 60;
    let decision = world.decide();
    assert_eq!(
        decision.actions[0],
        Action::Freeze(Duration::from_secs(240))
    );
    assert_eq!(decision.actions.len(), 3);
    assert_eq!(decision.status.indications, ["Online", "GuestAgent"]);
    // It stays frozen until the others are taken.
    world.frozen_until(300);
    world.take("x", created(60));
    assert_eq!(
        world.decide().actions,
        [Action::CreateVolume("y".to_owned())]
    );
    world.take("y", created(61));
    let decision = world.decide();
    let thaw = Action::Thaw { must_succeed: true };
    assert_eq!(decision.actions, [thaw, Action::Unlock]);
    assert_eq!(decision.status.indications.len(), 2);
}

#[test]
fn volumes_that_were_taken_after_the_thaw_are_told() {
    let mut world = World::stored();
    world.snapshot.spec.failure_deadline = Some("1h".to_owned());
    world.run(&["AgentConnected"]);
    let freeze = Action::Freeze(LONGEST_FREEZE);
    assert_eq!(world.decide().actions[0], freeze);
    world.frozen_until(600);
    world.take("x", created(10));
    world.take("y", created(601));
    world.seconds = 700;
    let decision = world.decide();
    let thaw = Action::Thaw {
        must_succeed: false,
    };
    assert_eq!(decision.actions, [thaw, Action::Unlock]);
    assert!(
        decision
            .status
            .indications
            .contains(&"QuiesceTimeout".to_owned())
    );
}

#[test]
fn a_guest_without_agent_or_that_stands_still_is_not_frozen() {
    for (conditions, indication) in [
        (&[][..], "NoGuestAgent"),
        (&["AgentConnected", "Paused"], "Paused"),
    ] {
        let mut world = World::stored();
        world.run(conditions);
        let decision = world.decide();
        assert_eq!(decision.actions.len(), 2, "{indication}");
        assert_eq!(decision.status.indications, ["Online", indication]);
        assert!(
            decision
                .status
                .source_indications
                .iter()
                .all(|of| !of.message.is_empty())
        );
    }
}

#[test]
fn what_is_too_late_fails_and_leaves_nothing_behind() {
    let mut world = World::stored();
    world.run(&["AgentConnected"]);
    world.frozen_until(300);
    world.seconds = 301;
    let decision = world.decide();
    let thaw = Action::Thaw {
        must_succeed: false,
    };
    let uid = "content".to_owned();
    let all = [thaw, Action::DeleteContent { uid }, Action::Unlock];
    assert_eq!(decision.actions, all);
    assert_eq!(decision.status.phase, SnapshotPhase::Failed);
    // Without a deadline it takes as long as it takes.
    world.snapshot.spec.failure_deadline = Some("0s".to_owned());
    assert_eq!(world.decide().status.phase, SnapshotPhase::InProgress);
}

#[test]
fn a_snapshot_that_is_deleted_thaws_unlocks_and_goes() {
    let mut world = World::stored();
    world.run(&["AgentConnected"]);
    world.frozen_until(300);
    world.snapshot.metadata.deletion_timestamp = Some(at(2));
    let decision = world.decide();
    assert_eq!(decision.status.phase, SnapshotPhase::Deleting);
    assert_eq!(decision.actions.len(), 4);
    assert_eq!(decision.actions[3], Action::RemoveFinalizer);
    // What is complete stays, if it is to stay.
    world.snapshot.status.phase = SnapshotPhase::Succeeded;
    let content = world.content.as_mut().unwrap();
    content.status.creation_time = Some(at(1));
    content.status.ready_to_use = Some(true);
    let deletes = |world: &World| {
        let actions = world.decide().actions;
        actions
            .iter()
            .any(|action| matches!(action, Action::DeleteContent { .. }))
    };
    assert!(deletes(&world));
    world.snapshot.spec.deletion_policy = Some("Retain".to_owned());
    assert!(!deletes(&world));
    assert_eq!(world.decide().status.phase, SnapshotPhase::Succeeded);
}

#[test]
fn a_volume_that_is_lost_later_is_told() {
    let mut world = World::stored();
    world.snapshot.status.phase = SnapshotPhase::Succeeded;
    world.content.as_mut().unwrap().status.creation_time = Some(at(1));
    world.take("x", created(1));
    let decision = world.decide();
    assert_eq!(decision.status.ready_to_use, Some(false));
    let message = decision.status.error.unwrap().message.unwrap();
    assert!(message.contains("VolumeSnapshot y"), "{message}");
    world.content = None;
    assert!(world.decide().status.error.is_some());
}

#[test]
fn what_the_driver_says_of_a_failure_is_passed_on() {
    let mut world = World::stored();
    world.take("x", created(1));
    world.take("y", json!({"error": {"message": "no space"}}));
    let decision = world.decide();
    let message = decision.status.error.clone().unwrap().message.unwrap();
    assert!(message.contains("no space"), "{message}");
    assert_eq!(why(&decision), "In error state");
    assert_eq!(decision.status.phase, SnapshotPhase::InProgress);
}
