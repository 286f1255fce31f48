//! How copies go on, from what was observed.

use serde_json::{Value, json};

use super::*;

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// A copy of the machine `a`, and what is around it.
struct World {
    clone: VirtualMachineClone,
    source: Option<VirtualMachine>,
    snapshot: Option<VirtualMachineSnapshot>,
    content: Option<VirtualMachineSnapshotContent>,
    restore: Option<VirtualMachineRestore>,
    are_bound: bool,
    has_target: bool,
}

impl World {
    fn new() -> Self {
        let vm = json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "a"});
        Self {
            clone: read(json!({
                "apiVersion": "clone.kubevirt.io/v1beta1", "kind": "VirtualMachineClone",
                "metadata": {"name": "c", "uid": "u"}, "spec": {"source": vm},
            })),
            source: Some(VirtualMachine::default()),
            snapshot: None,
            content: None,
            restore: None,
            are_bound: false,
            has_target: false,
        }
    }

    fn decide(&self) -> Decision {
        decide(&Observed {
            clone: &self.clone,
            source: self.source.as_ref(),
            snapshot: self.snapshot.as_ref(),
            content: self.content.as_ref(),
            restore: self.restore.as_ref(),
            are_bound: self.are_bound,
            has_target: self.has_target,
            now: Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH),
        })
    }

    /// A snapshot that can be restored.
    fn taken() -> Self {
        let source = json!({"virtualMachine": {"metadata": {"name": "a"}, "spec": {}}});
        Self {
            snapshot: read(json!({
                "metadata": {"name": "tmp-snapshot-u"},
                "status": {"phase": "Succeeded", "readyToUse": true},
            })),
            content: read(json!({"spec": {"source": source}})),
            ..Self::new()
        }
    }

    /// A restore that is done.
    fn restored() -> Self {
        Self {
            restore: read(json!({
                "metadata": {"name": "tmp-restore-u"}, "status": {"complete": true},
            })),
            has_target: true,
            ..Self::taken()
        }
    }
}

fn message(decision: &Decision) -> &str {
    &decision.status.conditions[0].message
}

#[test]
fn a_machine_is_copied_by_a_snapshot_and_a_restore_that_go_with_the_copy() {
    let decision = World::new().decide();
    let [Action::CreateSnapshot(snapshot)] = &decision.actions[..] else {
        panic!("{decision:?}")
    };
    assert_eq!(snapshot.metadata.name.as_deref(), Some("tmp-snapshot-u"));
    assert_eq!(
        snapshot.metadata.owner_references.as_ref().unwrap()[0].uid,
        "u"
    );
    assert_eq!(decision.status.phase, ClonePhase::SnapshotInProgress);
    let decision = World::taken().decide();
    let [Action::CreateRestore(restore)] = &decision.actions[..] else {
        panic!("{decision:?}")
    };
    let target = &restore.spec.target.as_ref().unwrap().name;
    assert!(target.starts_with("clone-a-"), "{target}");
    assert_eq!(decision.status.phase, ClonePhase::RestoreInProgress);
}

#[test]
fn a_snapshot_is_kept_until_all_of_its_volumes_were_restored() {
    let mut world = World::restored();
    let decision = world.decide();
    assert_eq!(decision.status.phase, ClonePhase::Succeeded);
    assert!(decision.actions.is_empty());
    assert!(decision.status.target_name.is_some());
    world.clone.status = decision.status;
    world.are_bound = true;
    let decision = world.decide();
    let all = [
        Action::DeleteRestore("tmp-restore-u".to_owned()),
        Action::DeleteSnapshot("tmp-snapshot-u".to_owned()),
    ];
    assert_eq!(decision.actions, all);
    world.clone.status = decision.status;
    assert!(world.decide().actions.is_empty());
}

#[test]
fn a_snapshot_of_a_user_is_copied_and_stays() {
    let mut world = World::restored();
    world.clone.spec.source = read(json!({
        "apiGroup": "snapshot.kubevirt.io", "kind": "VirtualMachineSnapshot", "name": "mine",
    }));
    world.are_bound = true;
    let all = [Action::DeleteRestore("tmp-restore-u".to_owned())];
    assert_eq!(world.decide().actions, all);
    world.snapshot = None;
    world.restore = None;
    let decision = world.decide();
    assert!(decision.actions.is_empty());
    assert_eq!(
        decision.status.conditions[0].reason,
        "Source does not exist"
    );
}

#[test]
fn what_cannot_be_copied_is_told() {
    let mut world = World::new();
    world.source = None;
    let decision = world.decide();
    assert!(decision.actions.is_empty() && decision.status.phase != ClonePhase::Failed);
    let mut world = World::taken();
    world.has_target = true;
    assert!(message(&world.decide()).contains("already exists"));
    let status = &mut world.snapshot.as_mut().unwrap().status;
    status.phase = SnapshotPhase::Failed;
    assert!(message(&world.decide()).contains("snapshot failed"));
    let mut world = World::restored();
    let failure = json!([{"type": "Failure", "status": "True", "reason": "no room"}]);
    let status = &mut world.restore.as_mut().unwrap().status;
    status.conditions = read(failure);
    let decision = world.decide();
    assert_eq!(decision.status.phase, ClonePhase::Failed);
    assert!(message(&decision).contains("no room"));
    let mut world = World::new();
    world.clone.status.restore_name = Some("tmp-restore-u".to_owned());
    assert!(message(&world.decide()).contains("does not exist any more"));
}
