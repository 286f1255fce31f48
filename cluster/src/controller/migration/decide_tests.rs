use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::controller::nodes::{MigrationReport, NodeReport};
use crate::objects::Phase;

fn at(second: i64) -> Time {
    Time(Timestamp::from_second(1_000_000 + second).unwrap())
}

fn migration(phase: MigrationPhase) -> VirtualMachineInstanceMigration {
    let mut migration: VirtualMachineInstanceMigration = serde_json::from_value(json!({
        "metadata": {"name": "m", "uid": "m", "finalizers": [MIGRATION_FINALIZER]},
        "spec": {"vmiName": "a"},
    }))
    .unwrap();
    migration.status.phase = phase;
    migration
}

fn vmi() -> VirtualMachineInstance {
    let mut vmi: VirtualMachineInstance = serde_json::from_value(json!({
        "metadata": {"name": "a", "uid": "a"},
        "spec": {"domain": {"memory": {"guest": "1Gi"}}},
        "status": {"nodeName": "s", "conditions": [{"type": "LiveMigratable", "status": "True"}]},
    }))
    .unwrap();
    vmi.status.phase = Phase::Running;
    vmi
}

fn pod(name: &str, node: &str, state: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": name, "uid": name, "creationTimestamp": at(0)},
        "spec": {"nodeName": node, "containers": []},
        "status": {"containerStatuses": [{
            "name": "compute", "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "state": state,
        }]},
    }))
    .unwrap()
}

fn running(name: &str, node: &str) -> Pod {
    pod(name, node, json!({"running": {}}))
}

fn says(state: NodeState) -> Seen {
    Seen::Vm(NodeReport {
        is_expected: false,
        migration: Some(MigrationReport {
            state,
            ..MigrationReport::default()
        }),
    })
}

/// A migration and all that belongs to it; `moves` is a scene in the phase Running.
struct Scene {
    migration: VirtualMachineInstanceMigration,
    vmi: Option<VirtualMachineInstance>,
    source: Option<Pod>,
    target: Option<Pod>,
    at_source: Seen,
    at_target: Seen,
    plugs: Result<Vec<String>, String>,
    refused: Option<String>,
    may_begin: bool,
    settings: Settings,
    now: i64,
}

impl Scene {
    fn new(phase: MigrationPhase) -> Self {
        Self {
            migration: migration(phase),
            vmi: Some(vmi()),
            source: Some(running("source", "s")),
            target: None,
            at_source: Seen::NotAsked,
            at_target: Seen::NotAsked,
            plugs: Ok(Vec::new()),
            refused: None,
            may_begin: true,
            settings: Settings::default(),
            now: 0,
        }
    }

    fn moves(at_source: Seen, at_target: Seen) -> Self {
        let mut scene = Self::new(MigrationPhase::Running);
        scene.target = Some(running("target", "t"));
        let state = MigrationState {
            source_node: "s".into(),
            target_node: "t".into(),
            source_pod: "source".into(),
            target_pod: "target".into(),
            start_timestamp: Some(at(0)),
            migration_uid: "m".into(),
            ..MigrationState::default()
        };
        scene.vmi.as_mut().unwrap().status.migration_state = Some(state);
        (scene.at_source, scene.at_target) = (at_source, at_target);
        scene
    }

    fn delete(mut self) -> Self {
        self.migration.metadata.deletion_timestamp = Some(at(0));
        self
    }

    fn look(&self) -> Decision {
        decide(&Observed {
            migration: &self.migration,
            vmi: self.vmi.as_ref(),
            source: self.source.as_ref(),
            target: self.target.as_ref(),
            at_source: self.at_source.clone(),
            at_target: self.at_target.clone(),
            plugs: self.plugs.clone(),
            refused: self.refused.clone(),
            may_begin: self.may_begin,
            settings: &self.settings,
            policy: None,
            now: at(self.now),
        })
    }

    /// Why it fails now.
    fn failure(&self) -> String {
        let decision = self.look();
        assert_eq!(decision.status.phase, MigrationPhase::Failed);
        decision.status.conditions[0].message.clone()
    }
}

#[test]
fn a_migration_waits_for_a_place_and_makes_a_pod() {
    let mut scene = Scene::new(MigrationPhase::Unset);
    scene.may_begin = false;
    let decision = scene.look();
    assert_eq!(decision.status.phase, MigrationPhase::Pending);
    assert!(decision.actions.is_empty());
    scene.may_begin = true;
    assert_eq!(scene.look().actions, [Action::CreateTarget]);
    scene.target = Some(pod("target", "t", json!({"waiting": {}})));
    let decision = scene.look();
    assert_eq!(decision.status.phase, MigrationPhase::Scheduling);
    assert!(decision.actions.is_empty());
}

#[test]
fn the_instance_says_who_moves_before_anything_does() {
    let mut scene = Scene::new(MigrationPhase::Scheduling);
    scene.target = Some(running("target", "t"));
    let decision = scene.look();
    assert_eq!(decision.status.phase, MigrationPhase::PreparingTarget);
    let state = decision.state.unwrap();
    assert!(state.is_open());
    assert_eq!(
        (&*state.source_pod, &*state.target_pod),
        ("source", "target")
    );
    assert_eq!(state.pod(), "source");
    assert!(decision.actions.is_empty());
}

#[test]
fn what_cannot_begin_fails_and_says_why() {
    let with = |change: &dyn Fn(&mut Scene)| {
        let mut scene = Scene::new(MigrationPhase::Pending);
        change(&mut scene);
        scene.failure()
    };
    assert!(with(&|scene| scene.vmi = None).contains("does not exist"));
    assert!(
        with(&|scene| scene.vmi.as_mut().unwrap().status.phase = Phase::Failed).contains("end")
    );
    let why = with(&|scene| {
        let conditions = &mut scene.vmi.as_mut().unwrap().status.conditions;
        conditions[0] = Condition::no("LiveMigratable", "DisksNotLiveMigratable", "disk a");
    });
    assert!(
        why.contains("DisksNotLiveMigratable") && why.contains("disk a"),
        "{why}"
    );
    let why = with(&|scene| {
        let other = MigrationState {
            migration_uid: "other".into(),
            ..MigrationState::default()
        };
        scene.vmi.as_mut().unwrap().status.migration_state = Some(other);
    });
    assert!(why.contains("other"), "{why}");
    assert_eq!(
        Scene::new(MigrationPhase::Pending).delete().failure(),
        "canceled"
    );
}

#[test]
fn a_target_that_is_not_scheduled_in_time_is_not_waited_for() {
    let mut scene = Scene::new(MigrationPhase::Scheduling);
    let mut target = pod("target", "t", json!({"waiting": {}}));
    target.spec.as_mut().unwrap().node_name = None;
    scene.target = Some(target);
    scene.now = 299;
    assert_eq!(scene.look().status.phase, MigrationPhase::Scheduling);
    scene.now = 300;
    assert!(scene.failure().contains("300 s"));
    scene.target = Some(pod("target", "t", json!({"waiting": {}})));
    assert_eq!(scene.look().status.phase, MigrationPhase::Scheduling);
    scene.now = 900;
    assert!(scene.failure().contains("900 s"));
    scene.target = None;
    assert!(scene.failure().contains("gone"));
    let ended = json!({"terminated": {"exitCode": 1, "message": "no memory"}});
    scene.target = Some(pod("target", "t", ended));
    assert!(scene.failure().contains("no memory"));
}

#[test]
fn the_target_is_told_first_and_then_the_source() {
    let mut scene = Scene::moves(Seen::Vm(NodeReport::default()), says(NodeState::Waiting));
    scene.migration.status.phase = MigrationPhase::PreparingTarget;
    assert_eq!(scene.look().actions, [Action::Expect]);
    if let Seen::Vm(report) = &mut scene.at_target {
        report.is_expected = true;
    }
    let ready = scene.look();
    assert_eq!(ready.status.phase, MigrationPhase::TargetReady);
    scene.migration.status = ready.status;
    // What was plugged into the guest is not there yet.
    scene.plugs = Err("the volume data is not on the target's node".to_owned());
    assert_eq!(scene.look().actions, []);
    let passed = &mut scene.migration.status.phase_transition_timestamps;
    passed.push(MigrationTransition {
        phase: MigrationPhase::PreparingTarget,
        phase_transition_timestamp: Some(at(0)),
    });
    scene.now = 301;
    assert!(scene.failure().contains("the volume data"));
    scene.now = 0;
    let plugs = vec!["keeper".to_owned()];
    scene.plugs = Ok(plugs.clone());
    assert_eq!(scene.look().actions, [Action::Send { plugs }]);
    // The node's part was started again meanwhile.
    scene.at_target = says(NodeState::Waiting);
    assert_eq!(scene.look().actions, [Action::Expect]);
    scene.at_source = says(NodeState::Sending);
    let begun = scene.look();
    assert_eq!(begun.status.phase, MigrationPhase::Running);
    assert!(begun.state.unwrap().start_timestamp.is_some());
}

#[test]
fn a_refusal_ends_it_unless_it_was_begun_before() {
    let mut scene = Scene::moves(Seen::Vm(NodeReport::default()), says(NodeState::Waiting));
    scene.migration.status.phase = MigrationPhase::TargetReady;
    scene.refused = Some("it has a local disk".into());
    assert_eq!(scene.failure(), "it has a local disk");
    scene.at_source = says(NodeState::Sending);
    assert_eq!(scene.look().status.phase, MigrationPhase::Running);
}

#[test]
fn the_end_is_what_the_nodes_say() {
    use NodeState::{
        Cancelled, Done, Failed, HandingOver, InDoubt, Receiving, Sending, Unknown, Waiting,
    };
    let gone = || Seen::Unreachable("no route".into());
    let run = |run| vec![Action::Resolve { run }];
    let cancel = |side| vec![Action::Cancel(side)];
    let on = MigrationPhase::Running;
    let (well, badly) = (MigrationPhase::Succeeded, MigrationPhase::Failed);
    for (source, target, phase, actions) in [
        (says(Sending), says(Receiving), on, vec![]),
        (says(HandingOver), says(HandingOver), on, vec![]),
        (says(Done), says(Done), well, vec![]),
        (says(Done), gone(), well, vec![]),
        (gone(), says(Done), well, vec![]),
        (says(HandingOver), says(Done), well, vec![]),
        (says(InDoubt), says(Done), well, run(false)),
        (says(InDoubt), says(Failed), on, run(true)),
        (says(InDoubt), says(Cancelled), on, run(true)),
        (says(InDoubt), says(HandingOver), on, cancel(Side::Target)),
        (says(InDoubt), says(Waiting), on, cancel(Side::Target)),
        (says(InDoubt), gone(), on, vec![]),
        (says(InDoubt), Seen::NoVm, on, vec![]),
        (says(Failed), says(Failed), badly, vec![]),
        (says(Cancelled), says(Receiving), badly, vec![]),
        (gone(), gone(), on, vec![]),
        (Seen::NoVm, says(Receiving), on, cancel(Side::Target)),
        (Seen::NoVm, Seen::NoVm, badly, vec![]),
        // The target's process was killed.
        (says(InDoubt), says(Unknown), on, vec![]),
        (says(Sending), says(Unknown), on, vec![]),
    ] {
        let scene = Scene::moves(source.clone(), target.clone());
        let decision = scene.look();
        let shown = format!("{source:?} {target:?}");
        assert_eq!(decision.status.phase, phase, "{shown}");
        assert_eq!(decision.actions, actions, "{shown}");
        if phase.is_final() {
            let state = decision.state.unwrap();
            assert_eq!(state.failed, phase == badly, "{shown}");
            assert_eq!(state.pod() == "target", phase == well, "{shown}");
        }
    }
}

#[test]
fn a_target_that_stays_silent_is_taken_to_run_the_vm() {
    let mut scene = Scene::moves(says(NodeState::InDoubt), Seen::Unreachable("dead".into()));
    scene.now = 10;
    let doubt = scene.look();
    scene.vmi.as_mut().unwrap().status.migration_state = doubt.state;
    scene.now = 609;
    assert_eq!(scene.look().status.phase, MigrationPhase::Running);
    scene.now = 610;
    let over = scene.look();
    assert_eq!(over.status.phase, MigrationPhase::Succeeded);
    assert_eq!(over.actions, [Action::Resolve { run: false }]);
    assert_eq!(over.state.unwrap().pod(), "target");
    // One that answers will not know more later.
    for knows_no_more in [Seen::NoVm, says(NodeState::Unknown)] {
        scene.at_target = knows_no_more;
        scene.now = 69;
        assert_eq!(scene.look().status.phase, MigrationPhase::Running);
        scene.now = 70;
        assert_eq!(scene.look().status.phase, MigrationPhase::Succeeded);
    }
}

#[test]
fn a_source_that_was_killed_is_not_waited_for() {
    use NodeState::{Cancelled, Done, Failed, Receiving, Unknown};
    let (on, well, badly) = (
        MigrationPhase::Running,
        MigrationPhase::Succeeded,
        MigrationPhase::Failed,
    );
    let cancel = vec![Action::Cancel(Side::Target)];
    for (target, phase, actions) in [
        (says(Receiving), on, cancel),
        (says(Done), well, vec![]),
        (says(Failed), badly, vec![]),
        (says(Cancelled), badly, vec![]),
        (says(Unknown), on, vec![]),
    ] {
        let mut scene = Scene::moves(says(Unknown), target);
        let killed = json!({"terminated": {"exitCode": 255}});
        scene.source = Some(pod("source", "s", killed));
        let decision = scene.look();
        assert_eq!(decision.status.phase, phase, "{:?}", scene.at_target);
        assert_eq!(decision.actions, actions, "{:?}", scene.at_target);
    }
}

#[test]
fn a_migration_may_take_all_the_time_that_there_is() {
    let mut scene = Scene::moves(says(NodeState::Sending), says(NodeState::Receiving));
    scene.settings.completion_timeout_per_gi_b = u64::MAX;
    scene.now = 1_000_000;
    assert!(scene.look().actions.is_empty());
}

#[test]
fn a_deleted_migration_is_cancelled_and_says_how_that_went() {
    let scene = Scene::moves(says(NodeState::Sending), says(NodeState::Receiving)).delete();
    let aborting = scene.look();
    assert_eq!(aborting.actions, [Action::Cancel(Side::Source)]);
    let state = aborting.state.unwrap();
    assert_eq!(state.abort_status, "Aborting");
    for (end, status) in [
        (NodeState::Cancelled, "Succeeded"),
        (NodeState::Done, "Failed"),
    ] {
        let mut scene = Scene::moves(says(end), says(end)).delete();
        scene.vmi.as_mut().unwrap().status.migration_state = Some(state.clone());
        let ended = scene.look();
        assert_eq!(ended.state.unwrap().abort_status, status);
        assert_eq!(ended.actions, [Action::RemoveFinalizer]);
    }
}

#[test]
fn an_end_that_was_written_is_kept() {
    let mut scene = Scene::moves(says(NodeState::Sending), Seen::NoVm);
    let vmi = scene.vmi.as_mut().unwrap();
    let state = vmi.status.migration_state.as_mut().unwrap();
    state.end(None, &at(5));
    let decision = scene.look();
    assert_eq!(decision.status.phase, MigrationPhase::Succeeded);
    assert_eq!(decision.state, None);
    let state = scene.vmi.as_mut().unwrap().status.migration_state.as_mut();
    state.unwrap().end(Some("why"), &at(6));
    assert_eq!(scene.failure(), "why");
}

/// A generator of numbers that repeat for a seed (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

/// Two nodes with a VM, and what the cluster knows of it.
struct Model {
    scene: Scene,
    source: Option<NodeState>,
    target: Option<NodeState>,
    is_expected: bool,
    /// The source was told that the VM is not its own.
    is_source_over: bool,
}

impl Model {
    fn new() -> Self {
        Self {
            scene: Scene::new(MigrationPhase::Unset),
            source: None,
            target: None,
            is_expected: false,
            is_source_over: false,
        }
    }

    fn copies(&self) -> usize {
        let at_source = match self.source {
            None | Some(NodeState::Sending | NodeState::Failed | NodeState::Cancelled) => {
                !self.is_source_over
            }
            _ => false,
        };
        usize::from(at_source) + usize::from(self.target == Some(NodeState::Done))
    }

    /// The nodes go on by themselves; `cut`: their connection breaks.
    fn nodes(&mut self, random: &mut Random, cut: bool) {
        use NodeState::{Done, Failed, HandingOver, InDoubt, Receiving, Sending};
        match (self.source, self.target) {
            (Some(Sending), Some(Receiving)) if cut => {
                (self.source, self.target) = (Some(Failed), Some(Failed));
            }
            (Some(Sending), Some(Receiving)) => {
                (self.source, self.target) = (Some(HandingOver), Some(HandingOver));
            }
            (Some(HandingOver), Some(HandingOver)) => match (random.below(3), cut) {
                // Before, or after it was given away; the target has heard that, or not.
                (0, true) => (self.source, self.target) = (Some(Failed), Some(Failed)),
                (1, true) => (self.source, self.target) = (Some(InDoubt), Some(Failed)),
                (_, true) => (self.source, self.target) = (Some(InDoubt), Some(Done)),
                (_, false) => (self.source, self.target) = (Some(Done), Some(Done)),
            },
            (Some(Sending | HandingOver), Some(NodeState::Cancelled | Failed)) => {
                self.source = Some(Failed);
            }
            (Some(Failed | NodeState::Cancelled), Some(Receiving | HandingOver)) => {
                self.target = Some(Failed);
            }
            _ => {}
        }
    }

    /// A controller looks once, and may be killed anywhere.
    fn look(&mut self, random: &mut Random, calm: bool) {
        let mut see = |state: Option<NodeState>, is_expected| {
            if !calm && random.one_in(4) {
                return Seen::Unreachable("cut off".into());
            }
            let migration = state.map(|state| MigrationReport {
                state,
                ..MigrationReport::default()
            });
            Seen::Vm(NodeReport {
                is_expected,
                migration,
            })
        };
        if asks_nodes(self.scene.migration.status.phase) {
            self.scene.at_source = see(self.source, false);
            self.scene.at_target = see(self.target, self.is_expected);
        }
        let decision = self.scene.look();
        let mut killed = || !calm && random.one_in(5);
        if killed() {
            return;
        }
        if let (Some(state), Some(vmi)) = (decision.state, &mut self.scene.vmi) {
            vmi.status.migration_state = Some(state);
        }
        if killed() {
            return;
        }
        self.scene.migration.status = decision.status;
        for action in decision.actions {
            if killed() {
                return;
            }
            self.act(&action);
        }
    }

    fn act(&mut self, action: &Action) {
        use NodeState::{Cancelled, Failed, HandingOver, InDoubt, Receiving, Sending, Waiting};
        match action {
            Action::CreateTarget => {
                self.scene.target = Some(running("target", "t"));
                self.target = self.target.or(Some(Waiting));
            }
            Action::Expect => self.is_expected = self.target == Some(Waiting),
            Action::Send { .. } => {
                if self.is_expected && self.source.is_none() && self.target == Some(Waiting) {
                    (self.source, self.target) = (Some(Sending), Some(Receiving));
                    self.is_expected = false;
                }
            }
            Action::Cancel(Side::Source) => {
                if matches!(self.source, Some(Sending | HandingOver)) {
                    self.source = Some(Cancelled);
                }
            }
            Action::Cancel(Side::Target) => {
                if matches!(self.target, Some(Waiting | Receiving | HandingOver)) {
                    self.target = Some(Cancelled);
                }
            }
            Action::Resolve { run: true } => {
                if self.source == Some(InDoubt) {
                    self.source = Some(Failed);
                }
            }
            Action::Resolve { run: false } => {
                if self.source == Some(InDoubt) {
                    self.is_source_over = true;
                    self.source = Some(NodeState::Done);
                }
            }
            Action::RemoveFinalizer => {}
        }
    }
}

#[test]
fn whatever_is_killed_when_one_copy_runs_and_the_cluster_knows_where() {
    let mut ends = std::collections::BTreeMap::<_, u32>::new();
    for seed in 0..5_000 {
        let mut random = Random(seed);
        let mut model = Model::new();
        for step in 0..400 {
            let calm = step > 60;
            match random.below(8) {
                0 if !calm => model.is_expected = false,
                1 if !calm && random.one_in(12) => {
                    model.scene.migration.metadata.deletion_timestamp = Some(at(0));
                }
                2 | 3 => {
                    let cut = random.one_in(6);
                    model.nodes(&mut random, cut);
                }
                _ => model.look(&mut random, calm),
            }
            assert!(model.copies() <= 1, "{seed}: two copies run");
            if model.scene.migration.status.phase.is_final() {
                break;
            }
        }
        let phase = model.scene.migration.status.phase;
        assert!(
            phase.is_final(),
            "{seed}: {phase:?} {:?} {:?}",
            model.source,
            model.target
        );
        *ends.entry(phase).or_default() += 1;
        let runs_there = model.target == Some(NodeState::Done);
        assert_eq!(runs_there, phase == MigrationPhase::Succeeded, "{seed}");
        assert_eq!(model.copies(), 1, "{seed}");
        let state = model.scene.vmi.unwrap().status.migration_state;
        let pod = state.as_ref().map_or("source", MigrationState::pod);
        assert_eq!(pod == "target", runs_there, "{seed}");
    }
    let most = ends.get(&MigrationPhase::Succeeded).copied();
    assert!(most.is_some_and(|most| most > 1_000), "{ends:?}");
}
