//! How restores go on, from what was observed.

use serde_json::{Value, json};

use super::*;

fn at(seconds: i64) -> Time {
    let begin: k8s_openapi::jiff::Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    Time(
        begin
            .checked_add(SignedDuration::from_secs(seconds))
            .unwrap(),
    )
}

/// A restore `r` of the snapshot `s` to the machine `a`, which it was taken of.
struct World {
    restore: VirtualMachineRestore,
    target: Option<VirtualMachine>,
    vmi: Option<VirtualMachineInstance>,
    snapshot: Option<VirtualMachineSnapshot>,
    content: VirtualMachineSnapshotContent,
    claims: BTreeMap<String, Arc<PersistentVolumeClaim>>,
    waiting: BTreeSet<String>,
    volumes: BTreeMap<String, VolumeSnapshot>,
    data_volumes: Vec<Arc<DataVolume>>,
    seconds: i64,
}

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

impl World {
    fn new() -> Self {
        let vm = json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "a"});
        let source = json!({"runStrategy": "Always", "template": {"spec": {"volumes": [
            {"name": "x", "persistentVolumeClaim": {"claimName": "old"}},
        ]}}});
        let backup = json!({
            "volumeName": "x", "volumeSnapshotName": "taken",
            "persistentVolumeClaim": {"metadata": {"name": "old"}, "spec": {}},
        });
        Self {
            restore: read(json!({
                "metadata": {
                    "name": "r", "namespace": "n", "uid": "u", "finalizers": [RESTORE_FINALIZER],
                    "creationTimestamp": "2026-01-01T00:00:00Z",
                },
                "spec": {"target": vm, "virtualMachineSnapshotName": "s"},
                "status": {"complete": false},
            })),
            target: read(json!({
                "metadata": {"name": "a", "uid": "vm"}, "spec": {"runStrategy": "Manual"},
            })),
            vmi: None,
            snapshot: read(json!({
                "status": {"phase": "Succeeded", "readyToUse": true, "sourceUID": "vm"},
            })),
            content: read(json!({
                "spec": {
                    "source": {"virtualMachine": {"metadata": {"name": "a"}, "spec": source}},
                    "volumeBackups": [backup],
                },
            })),
            claims: BTreeMap::new(),
            waiting: BTreeSet::new(),
            volumes: BTreeMap::from([("taken".to_owned(), read(json!({})))]),
            data_volumes: Vec::new(),
            seconds: 1,
        }
    }

    fn decide(&self) -> Decision {
        decide(&Observed {
            restore: &self.restore,
            target: self.target.as_ref(),
            vmi: self.vmi.as_ref(),
            snapshot: self.snapshot.as_ref(),
            content: Some(&self.content),
            claims: &self.claims,
            waiting: &self.waiting,
            volumes: &self.volumes,
            data_volumes: &self.data_volumes,
            now: at(self.seconds),
        })
    }

    fn lock(&mut self, holder: &str) {
        let status = &mut self.target.as_mut().unwrap().status;
        let holder = json!(holder);
        status.rest.insert("restoreInProgress".to_owned(), holder);
    }

    /// A locked target, and the names of its claims.
    fn begun() -> Self {
        let mut world = Self::new();
        world.lock("r");
        world.restore.status = world.decide().status;
        world
    }

    fn claim(&mut self, phase: &str, by: &str) {
        let name = self.restore.status.restores[0].claim.clone();
        let annotations = json!({"restore.kubevirt.io/lastRestoreUID": by});
        let claim: PersistentVolumeClaim = read(json!({
            "metadata": {"name": name, "uid": "claim", "annotations": annotations},
            "status": {"phase": phase},
        }));
        self.claims.insert(name, Arc::new(claim));
    }
}

fn why<'a>(decision: &'a Decision, kind: &str) -> &'a str {
    let conditions = &decision.status.conditions;
    let found = conditions.iter().find(|found| found.kind == kind);
    found.map_or("", |found| found.reason.as_str())
}

#[test]
fn the_target_is_locked_before_anything_is_made() {
    let mut world = World::new();
    assert_eq!(world.decide().actions, [Action::Lock]);
    world.lock("other");
    assert!(world.decide().actions.is_empty());
    assert!(why(&world.decide(), "Progressing").contains("other"));
    let mut world = World::new();
    let status = &mut world.target.as_mut().unwrap().status;
    status
        .rest
        .insert("snapshotInProgress".to_owned(), json!("t"));
    assert!(why(&world.decide(), "Ready").contains("VirtualMachineSnapshot t"));
}

#[test]
fn names_are_stored_before_claims_are_made_of_them() {
    let world = World::begun();
    let restores = &world.restore.status.restores;
    assert_eq!(restores[0].claim, "restore-u-x");
    let decision = world.decide();
    let [Action::CreateClaim(claim)] = &decision.actions[..] else {
        panic!("{decision:?}")
    };
    let source = claim.spec.as_ref().unwrap().data_source.as_ref().unwrap();
    assert_eq!(source.name, "taken");
}

#[test]
fn the_target_changes_when_all_claims_can_be_used() {
    let mut world = World::begun();
    world.claim("Pending", "u");
    assert!(world.decide().actions.is_empty());
    world.waiting.insert("restore-u-x".to_owned());
    assert_eq!(
        world.decide().actions.len(),
        1,
        "it waits for the machine itself"
    );
    world.waiting.clear();
    world.claim("Bound", "u");
    let decision = world.decide();
    let [Action::UpdateTarget(spec)] = &decision.actions[..] else {
        panic!("{decision:?}")
    };
    assert_eq!(
        spec.run_strategy.as_deref(),
        Some("Manual"),
        "as it is, not as it was"
    );
    let volumes = &spec.template.as_ref().unwrap().spec["volumes"];
    assert_eq!(
        volumes[0]["persistentVolumeClaim"]["claimName"],
        "restore-u-x"
    );
    world.claim("Lost", "u");
    assert!(why(&world.decide(), "Progressing").contains("lost"));
}

#[test]
fn a_new_target_is_made_halted_and_the_lock_of_others_is_left_alone() {
    let mut world = World::begun();
    world.target = None;
    world.claim("Bound", "u");
    let decision = world.decide();
    let [Action::CreateTarget(vm)] = &decision.actions[..] else {
        panic!("{decision:?}")
    };
    assert_eq!(vm.spec.run_strategy.as_deref(), Some("Halted"));
    assert!(target::is_restored(vm, &world.restore));
    let mut other = World::new();
    other.target.as_mut().unwrap().metadata.uid = Some("different".into());
    assert!(why(&other.decide(), "Ready").contains("already exists"));
}

#[test]
fn a_restored_target_is_unlocked_and_what_it_does_not_use_goes() {
    let mut world = World::begun();
    world.claim("Bound", "u");
    let owner = json!([{
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "a", "uid": "vm",
        "controller": true,
    }]);
    let old = json!({"metadata": {"name": "old", "uid": "dv", "ownerReferences": owner}});
    world.data_volumes.push(Arc::new(read(old)));
    let vm = world.target.as_mut().unwrap();
    let mark = [(
        "restore.kubevirt.io/lastRestoreUID".to_owned(),
        "u".to_owned(),
    )];
    vm.metadata.annotations = Some(mark.into_iter().collect());
    let decision = world.decide();
    let (name, uid) = ("old".to_owned(), "dv".to_owned());
    let all = [
        Action::OwnClaim("restore-u-x".to_owned()),
        Action::DeleteVolume { name, uid },
        Action::Unlock,
    ];
    assert_eq!(decision.actions, all);
    assert_eq!(decision.status.complete, Some(true));
    assert_eq!(decision.status.deleted_data_volumes, ["old"]);
    world.restore.status = decision.status;
    world.restore.spec.volume_ownership_policy = Some("None".to_owned());
    assert_eq!(world.decide().actions, [Action::Unlock]);
}

#[test]
fn a_target_that_runs_is_treated_as_the_policy_says() {
    let mut world = World::new();
    world.vmi = Some(VirtualMachineInstance::default());
    let of = |world: &mut World, policy: &str| {
        world.restore.spec.target_readiness_policy = Some(policy.to_owned());
        world.decide()
    };
    assert_eq!(of(&mut world, "StopTarget").actions, [Action::Stop]);
    let failed = of(&mut world, "FailImmediate");
    assert_eq!(why(&failed, "Failure"), "Restore target not ready");
    let waits = of(&mut world, "WaitGracePeriod");
    assert_eq!(waits.again, Some(Duration::from_secs(300)));
    assert_eq!(why(&waits, "Failure"), "");
    world.seconds = 301;
    assert_ne!(why(&of(&mut world, "WaitGracePeriod"), "Failure"), "");
    assert_eq!(why(&of(&mut world, "WaitEventually"), "Failure"), "");
}

#[test]
fn a_snapshot_that_cannot_be_used_is_waited_for() {
    let mut world = World::new();
    world.snapshot.as_mut().unwrap().status.ready_to_use = Some(false);
    assert!(why(&world.decide(), "Ready").contains("not ready"));
    world.snapshot = None;
    assert!(why(&world.decide(), "Ready").contains("does not exist"));
    assert!(world.decide().actions.is_empty());
}

#[test]
fn claims_in_place_give_way_and_others_do_not() {
    let mut world = World::begun();
    world.claim("Bound", "somebody");
    assert!(world.decide().actions.is_empty());
    assert!(why(&world.decide(), "Ready").contains("not of this restore"));
    world.restore.spec.volume_restore_policy = Some("InPlace".to_owned());
    let (name, uid) = ("restore-u-x".to_owned(), "claim".to_owned());
    assert_eq!(world.decide().actions, [Action::DeleteClaim { name, uid }]);
}

#[test]
fn a_restore_that_is_deleted_or_failed_unlocks_its_target() {
    let mut world = World::begun();
    world.restore.metadata.deletion_timestamp = Some(at(2));
    let all = [Action::Unlock, Action::RemoveFinalizer];
    assert_eq!(world.decide().actions, all);
    let mut world = World::begun();
    world.restore.spec.patches = vec!["nonsense".to_owned()];
    world.claim("Bound", "u");
    world.target = None;
    let decision = world.decide();
    assert!(why(&decision, "Failure").contains("spec.patches[0]"));
}
