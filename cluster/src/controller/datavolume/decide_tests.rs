use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::controller::claims::is_filled;
use crate::objects::condition;

fn at(second: i64) -> Time {
    Time(Timestamp::from_second(1_000_000 + second).unwrap())
}

fn volume() -> DataVolume {
    serde_json::from_value(json!({
        "metadata": {"name": "a", "namespace": "n", "uid": "u"},
        "spec": {
            "source": {"http": {"url": "https://h/x"}},
            "storage": {"resources": {"requests": {"storage": "1Gi"}}},
        },
    }))
    .unwrap()
}

fn annotated(name: &str, value: &str) -> DataVolume {
    let mut volume = volume();
    let name = format!("cdi.kubevirt.io/{name}");
    volume.metadata.annotations = Some([(name, value.to_owned())].into());
    volume
}

fn claim(phase: &str) -> PersistentVolumeClaim {
    let mut claim = claim::claim(&volume(), None).unwrap();
    claim.status = serde_json::from_value(json!({"phase": phase})).unwrap();
    claim
}

fn full() -> PersistentVolumeClaim {
    let mut claim = claim("Bound");
    let annotations = claim.metadata.annotations.get_or_insert_default();
    annotations.insert(
        "cdi.kubevirt.io/storage.pod.phase".into(),
        "Succeeded".into(),
    );
    claim
}

fn pod(status: Value) -> Pod {
    let mut pod = pod::pod(&volume(), Devices::default(), "", "image", 0)
        .unwrap()
        .unwrap();
    pod.metadata.uid = Some("pod".into());
    pod.status = serde_json::from_value(status).unwrap();
    pod
}

fn with_state(phase: &str, restarts: i32, state: Value, last: Value) -> Pod {
    pod(json!({"phase": phase, "containerStatuses": [{
        "name": "importer", "image": "", "imageID": "", "ready": true,
        "restartCount": restarts, "state": state, "lastState": last,
    }]}))
}

fn running() -> Pod {
    with_state("Running", 0, json!({"running": {}}), json!({}))
}

fn observe<'a>(
    volume: &'a DataVolume,
    claim: Option<&'a PersistentVolumeClaim>,
    pod: Option<&'a Pod>,
) -> Observed<'a> {
    Observed {
        volume,
        claim,
        pod,
        foreign: None,
        unresolved: None,
        source: None,
        waits_for_consumer: false,
        default_class: None,
        progress: None,
        image: "image",
        now: at(0),
    }
}

fn look(volume: &DataVolume, claim: Option<&PersistentVolumeClaim>, pod: Option<&Pod>) -> Decision {
    decide(&observe(volume, claim, pod))
}

fn reason<'a>(decision: &'a Decision, kind: &str) -> &'a str {
    &condition(&decision.status.conditions, kind).unwrap().reason
}

#[test]
fn a_claim_is_made_then_its_importer() {
    let volume = volume();
    let decision = look(&volume, None, None);
    assert!(matches!(&decision.actions[..], [Action::CreateClaim(_)]));
    assert_eq!(decision.status.phase, Phase::Pending);
    assert_eq!(decision.status.claim_name, "a");
    let decision = look(&volume, Some(&claim("Bound")), None);
    assert!(matches!(&decision.actions[..], [Action::CreatePod(_)]));
    assert_eq!(decision.status.phase, Phase::ImportScheduled);
    // A class that binds at once may need the pod for it.
    let decision = look(&volume, Some(&claim("Pending")), None);
    assert!(matches!(&decision.actions[..], [Action::CreatePod(_)]));
    assert_eq!(decision.status.phase, Phase::Pending);
}

#[test]
fn a_class_that_waits_for_a_consumer_is_waited_for() {
    let pending = claim("Pending");
    let (plain, immediate) = (volume(), annotated("storage.bind.immediate.requested", ""));
    let look = |volume: &DataVolume, claim: &PersistentVolumeClaim| {
        let mut observed = observe(volume, Some(claim), None);
        observed.waits_for_consumer = true;
        decide(&observed)
    };
    let decision = look(&plain, &pending);
    assert_eq!(decision.status.phase, Phase::WaitForFirstConsumer);
    assert_eq!(decision.actions, []);
    assert_eq!(look(&immediate, &pending).actions.len(), 1);
    assert_eq!(look(&plain, &claim("Bound")).actions.len(), 1);
    let mut chosen = pending;
    let annotations = chosen.metadata.annotations.get_or_insert_default();
    annotations.insert("volume.kubernetes.io/selected-node".into(), "n".into());
    assert_eq!(look(&plain, &chosen).actions.len(), 1);
}

#[test]
fn a_running_importer_is_asked_for_its_progress() {
    let (volume, claim, pod) = (volume(), claim("Bound"), running());
    let mut observed = observe(&volume, Some(&claim), Some(&pod));
    observed.progress = Some(12.345);
    let decision = decide(&observed);
    assert_eq!(decision.status.phase, Phase::ImportInProgress);
    assert_eq!(decision.status.progress, "12.35%");
    assert_eq!(decision.again, Some(ASK));
    assert_eq!(reason(&decision, "Running"), "Pod is running");
    for (progress, expected) in [(f64::NAN, "N/A"), (1e9, "100.00%"), (-1.0, "0.00%")] {
        observed.progress = Some(progress);
        assert_eq!(decide(&observed).status.progress, expected);
    }
}

#[test]
fn what_failed_is_told_and_tried_again() {
    let ended = json!({"terminated": {"exitCode": 1, "message": "no such file\n"}});
    let waiting = json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}});
    let pod = with_state("Running", 2, waiting, ended);
    let decision = look(&volume(), Some(&claim("Bound")), Some(&pod));
    assert_eq!(decision.status.phase, Phase::ImportInProgress);
    assert_eq!(decision.status.restart_count, Some(2));
    assert_eq!(decision.actions, []);
    let found = condition(&decision.status.conditions, "Running").unwrap();
    assert_eq!(
        (found.reason.as_str(), found.message.as_str()),
        ("Error", "no such file")
    );
    let mut after = volume();
    after.status = decision.status;
    assert_eq!(after.state(), VolumeState::Retrying);
}

#[test]
fn a_pod_that_failed_as_a_whole_is_replaced_after_a_while() {
    let volume = volume();
    let mut failed = pod(json!({"phase": "Failed", "reason": "Evicted"}));
    failed.metadata.creation_timestamp = Some(at(-4));
    let decision = look(&volume, Some(&claim("Bound")), Some(&failed));
    assert_eq!(decision.again, Some(Duration::from_secs(6)));
    assert_eq!(decision.actions, []);
    failed.metadata.creation_timestamp = Some(at(-11));
    let decision = look(&volume, Some(&claim("Bound")), Some(&failed));
    assert_eq!(decision.actions, [Action::DeletePod { uid: "pod".into() }]);
    assert_eq!(decision.status.restart_count, Some(1));
    let found = condition(&decision.status.conditions, "Running").unwrap();
    assert_eq!(found.message, "Evicted");
    let mut after = volume.clone();
    after.status = decision.status;
    let next = look(&after, Some(&claim("Bound")), None);
    let [Action::CreatePod(next)] = &next.actions[..] else {
        panic!("{next:?}");
    };
    assert_eq!(pod::restarts(next), 1);
}

#[test]
fn an_image_that_cannot_be_pulled_is_told() {
    let waiting = json!({"waiting": {"reason": "ImagePullBackOff", "message": "m"}});
    let pod = with_state("Pending", 0, waiting, json!({}));
    let decision = look(&volume(), Some(&claim("Bound")), Some(&pod));
    assert_eq!(decision.status.phase, Phase::ImportScheduled);
    assert_eq!(reason(&decision, "Running"), "ImagePullFailed");
}

#[test]
fn success_is_written_on_the_claim_first_and_is_final() {
    let volume = volume();
    let done = pod(json!({"phase": "Succeeded"}));
    let decision = look(&volume, Some(&claim("Bound")), Some(&done));
    assert_eq!(decision.actions, [Action::MarkClaim]);
    assert_ne!(decision.status.phase, Phase::Succeeded);
    let decision = look(&volume, Some(&full()), Some(&done));
    assert_eq!(decision.status.phase, Phase::Succeeded);
    assert_eq!(decision.status.progress, "100.0%");
    assert_eq!(decision.actions, [Action::DeletePod { uid: "pod".into() }]);
    assert_eq!(
        condition(&decision.status.conditions, "Ready")
            .unwrap()
            .status,
        "True"
    );
    let retained = annotated("storage.pod.retainAfterCompletion", "true");
    assert_eq!(look(&retained, Some(&full()), Some(&done)).actions, []);
    // Neither a lost status nor a lost pod makes a filled claim be filled again.
    assert_eq!(look(&volume, Some(&full()), None).actions, []);
}

#[test]
fn a_volume_that_is_not_kept_leaves_its_claim() {
    let mut volume = annotated("storage.deleteAfterCompletion", "true");
    let done = pod(json!({"phase": "Succeeded"}));
    let decision = look(&volume, Some(&full()), Some(&done));
    assert_eq!(decision.actions, [Action::DeletePod { uid: "pod".into() }]);
    // Whoever waits for it sees that it succeeded first.
    assert_eq!(look(&volume, Some(&full()), None).actions, []);
    volume.status = decision.status;
    let decision = look(&volume, Some(&full()), None);
    assert_eq!(decision.actions, [Action::ReleaseClaim]);
    let mut released = serde_json::to_value(full()).unwrap();
    let change = claim::release(&volume);
    released["metadata"]["ownerReferences"] = change["metadata"]["ownerReferences"].clone();
    let populated = &change["metadata"]["annotations"];
    for (name, value) in populated.as_object().unwrap() {
        released["metadata"]["annotations"][name] = value.clone();
    }
    let released = serde_json::from_value(released).unwrap();
    assert_eq!(
        look(&volume, Some(&released), None).actions,
        [Action::Delete]
    );
    // Another one of that name takes the claim as it is.
    let mut next = self::volume();
    next.metadata.uid = Some("next".into());
    let decision = look(&next, Some(&released), None);
    assert_eq!(decision.status.phase, Phase::Succeeded);
    assert_eq!(decision.actions, []);
}

#[test]
fn a_claim_of_somebody_else_is_left_alone() {
    let mut foreign = claim("Bound");
    foreign.metadata.owner_references = None;
    let decision = look(&volume(), Some(&foreign), None);
    assert_eq!(decision.actions, []);
    assert_eq!(decision.status.phase, Phase::Pending);
    assert_eq!(reason(&decision, "Bound"), "ErrResourceExists");
    let adopts = annotated("allowClaimAdoption", "true");
    assert_eq!(
        look(&adopts, Some(&foreign), None).status.phase,
        Phase::Succeeded
    );
}

#[test]
fn a_lost_claim_is_the_end() {
    let pod = running();
    let decision = look(&volume(), Some(&claim("Lost")), Some(&pod));
    assert_eq!(decision.status.phase, Phase::Failed);
    assert_eq!(decision.actions, [Action::DeletePod { uid: "pod".into() }]);
}

#[test]
fn what_goes_is_left_alone() {
    let mut going = volume();
    going.metadata.deletion_timestamp = Some(at(0));
    assert_eq!(look(&going, None, None).actions, []);
    let mut claim = claim("Bound");
    claim.metadata.deletion_timestamp = Some(at(0));
    assert_eq!(look(&volume(), Some(&claim), None).actions, []);
}

#[test]
fn what_nobody_can_import_makes_no_claim() {
    let mut volume = volume();
    volume.spec.source = serde_json::from_value(json!({"s3": {}})).unwrap();
    let decision = look(&volume, None, None);
    assert_eq!(decision.actions, []);
    assert_eq!(look(&volume, Some(&claim("Bound")), None).actions, []);
    assert_eq!(look(&DataVolume::default(), None, None).actions, []);
}

#[test]
fn a_copy_waits_until_its_source_can_be_copied() {
    let mut copy = volume();
    copy.spec = serde_json::from_value(json!({
        "source": {"pvc": {"name": "golden"}}, "storage": {},
    }))
    .unwrap();
    let (own, source, pending) = (claim("Bound"), claim("Bound"), claim("Pending"));
    let of = |claim, state, user| Source { claim, state, user };
    let look = |claim, source| {
        let mut observed = observe(&copy, claim, None);
        observed.source = Some(source);
        decide(&observed)
    };
    let missing = look(None, of(None, None, None));
    assert_eq!((&missing.actions[..], missing.again), (&[][..], Some(LOOK)));
    let made = look(None, of(Some(&source), None, None));
    let [Action::CreateClaim(made)] = &made.actions[..] else {
        panic!("{made:?}");
    };
    let made = made.spec.as_ref().unwrap().resources.as_ref().unwrap();
    // The source's 1084 MiB and what a file system takes of them.
    assert_eq!(made.requests.as_ref().unwrap()["storage"].0, "1148Mi");
    for (source, word) in [
        (of(None, None, None), "CloneWithoutSource"),
        (of(Some(&pending), None, None), "CloneSourceNotReady"),
        (
            of(Some(&source), Some(VolumeState::Filling), None),
            "CloneSourceNotReady",
        ),
        (of(Some(&source), None, Some("x")), "CloneSourceInUse"),
    ] {
        let decision = look(Some(&own), source);
        assert_eq!(
            (&decision.actions[..], decision.again),
            (&[][..], Some(LOOK))
        );
        assert_eq!(decision.status.phase, Phase::CloneScheduled);
        assert_eq!(reason(&decision, "Running"), word);
    }
    let decision = look(
        Some(&own),
        of(Some(&source), Some(VolumeState::Ready), None),
    );
    assert!(matches!(&decision.actions[..], [Action::CreatePod(_)]));
    assert_eq!(decision.status.phase, Phase::CloneScheduled);
    let runs = running();
    let mut observed = observe(&copy, Some(&own), Some(&runs));
    observed.source = Some(of(Some(&source), None, Some("x")));
    assert_eq!(decide(&observed).status.phase, Phase::CloneInProgress);
}

/// Annotates a claim as a merge does.
fn annotate(claim: &mut PersistentVolumeClaim, marks: &Value) {
    let annotations = claim.metadata.annotations.get_or_insert_default();
    for (name, value) in marks.as_object().unwrap() {
        match value.as_str() {
            Some(value) => annotations.insert(name.clone(), value.to_owned()),
            None => annotations.remove(name),
        };
    }
}

fn upload() -> DataVolume {
    let mut volume = volume();
    volume.spec.source = serde_json::from_value(json!({"upload": {}})).unwrap();
    volume
}

#[test]
fn an_upload_is_ready_when_its_claim_says_where_it_goes() {
    let volume = upload();
    let mut claim = claim::claim(&volume, None).unwrap();
    claim.metadata.uid = Some("c".to_owned());
    claim.status = serde_json::from_value(json!({"phase": "Bound"})).unwrap();
    let annotations = claim.metadata.annotations.clone().unwrap();
    assert!(annotations.contains_key(crate::upload::TARGET));
    let decision = look(&volume, Some(&claim), None);
    let [Action::CreateCredentials, Action::CreatePod(made)] = &decision.actions[..] else {
        panic!("{decision:?}")
    };
    assert_eq!(decision.status.phase, Phase::UploadScheduled);
    let with = |status: Value| {
        let mut pod = (**made).clone();
        pod.metadata.uid = Some("pod".to_owned());
        pod.status = serde_json::from_value(status).unwrap();
        pod
    };
    let container = |ready: bool| {
        json!([{
            "name": "importer", "image": "", "imageID": "", "ready": ready, "restartCount": 0,
            "state": {"running": {}},
        }])
    };
    let running = |ready: bool| {
        with(json!({
            "phase": "Running", "podIP": "10.0.0.1", "containerStatuses": container(ready),
        }))
    };
    let decision = look(&volume, Some(&claim), Some(&running(false)));
    assert_eq!(decision.status.phase, Phase::UploadScheduled);
    let decision = look(&volume, Some(&claim), Some(&running(true)));
    let [Action::MarkUpload(marks)] = &decision.actions[..] else {
        panic!("{decision:?}")
    };
    assert_eq!(marks[crate::upload::ADDRESS], "10.0.0.1");
    assert_eq!(decision.status.phase, Phase::UploadScheduled);
    annotate(&mut claim, marks);
    let decision = look(&volume, Some(&claim), Some(&running(true)));
    assert_eq!(decision.actions, []);
    assert_eq!(decision.status.phase, Phase::UploadReady);

    let failed = with(json!({"phase": "Failed"}));
    let decision = look(&volume, Some(&claim), Some(&failed));
    assert_eq!(decision.status.phase, Phase::UploadScheduled);
    let unmarks = |action: &Action| {
        matches!(action, Action::MarkUpload(marks) if marks[crate::upload::READY] == "false"
            && marks[crate::upload::ADDRESS].is_null())
    };
    assert!(decision.actions.iter().any(unmarks), "{decision:?}");
    let done = with(json!({"phase": "Succeeded"}));
    let decision = look(&volume, Some(&claim), Some(&done));
    assert_eq!(decision.actions, [Action::MarkClaim]);
    annotate(&mut claim, &pod::marks(&volume));
    let decision = look(&volume, Some(&claim), Some(&done));
    assert_eq!(decision.status.phase, Phase::Succeeded);
}

/// A cluster of one DataVolume, in which each step may be the last of its controller.
#[derive(Debug)]
struct Cluster {
    volume: DataVolume,
    claim: Option<PersistentVolumeClaim>,
    pod: Option<Pod>,
    runs: u32,
    seed: u64,
}

impl Cluster {
    fn random(&mut self, below: u64) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.seed >> 33) % below
    }

    /// A look of the controller, which is killed after some of its writes.
    fn act(&mut self, second: i64) {
        let claim = self.claim.clone();
        let pod = self.pod.clone();
        let mut observed = observe(&self.volume, claim.as_ref(), pod.as_ref());
        observed.now = at(second);
        let decision = decide(&observed);
        let mut left = self.random(4);
        if left == 0 {
            return;
        }
        self.volume.status = decision.status;
        for action in decision.actions {
            left -= 1;
            if left == 0 {
                return;
            }
            match action {
                Action::CreateClaim(claim) => {
                    self.claim.get_or_insert(*claim);
                }
                Action::CreatePod(pod) if self.pod.is_none() => {
                    assert!(!self.claim.as_ref().is_some_and(is_filled));
                    let mut pod = *pod;
                    pod.metadata.uid = Some(format!("pod-{second}"));
                    pod.metadata.creation_timestamp = Some(at(second));
                    self.pod = Some(pod);
                }
                Action::CreatePod(_) => {}
                Action::MarkUpload(marks) => {
                    let claim = self.claim.as_mut().unwrap();
                    assert!(!is_filled(claim));
                    annotate(claim, &marks);
                }
                Action::CreateCredentials => assert!(self.claim.is_some()),
                Action::MarkClaim => {
                    assert!(self.runs > 0, "nothing was imported");
                    let claim = self.claim.as_mut().unwrap();
                    annotate(claim, &pod::marks(&self.volume));
                }
                Action::ReleaseClaim | Action::Delete => panic!("nobody asked for it"),
                Action::HoldForCopy(_)
                | Action::CreateSource(_)
                | Action::CreateSourceCredentials
                | Action::EndSource { .. }
                | Action::EndCopy => panic!("nothing is in another namespace"),
                Action::DeletePod { uid } => {
                    self.pod = self.pod.take().filter(|pod| pod.metadata.uid != Some(uid));
                }
            }
        }
    }

    /// Something happens to the claim or to the pod.
    fn happen(&mut self) {
        let what = self.random(6);
        if let Some(claim) = &mut self.claim
            && claim.status.is_none()
        {
            claim.status = serde_json::from_value(json!({"phase": "Bound"})).unwrap();
            return;
        }
        let Some(pod) = &mut self.pod else { return };
        let status = |of: Pod| of.status;
        pod.status = match what {
            0 => status(super::tests::pod(json!({"phase": "Failed"}))),
            1 => status(with_state("Running", 1, json!({"waiting": {}}), json!({}))),
            2 => {
                self.runs += 1;
                status(super::tests::pod(json!({"phase": "Succeeded"})))
            }
            3 => {
                self.pod = None;
                return;
            }
            _ => status(running()),
        };
    }
}

#[test]
fn whatever_happens_in_between_a_claim_is_filled_once_and_stays_so() {
    for seed in 0..300 {
        let mut cluster = Cluster {
            volume: match seed % 2 {
                0 => volume(),
                _ => upload(),
            },
            claim: None,
            pod: None,
            runs: 0,
            seed,
        };
        let mut second = 0;
        while cluster.volume.status.phase != Phase::Succeeded {
            second += 20;
            assert!(second < 20_000, "{cluster:#?}");
            cluster.act(second);
            cluster.happen();
        }
        let restarts = cluster.volume.status.restart_count.unwrap_or(0);
        for _ in 0..10 {
            second += 20;
            cluster.volume.status = match cluster.random(2) {
                0 => DataVolumeStatus::default(),
                _ => cluster.volume.status.clone(),
            };
            cluster.act(second);
        }
        assert!(restarts >= 0 && is_filled(cluster.claim.as_ref().unwrap()));
    }
}

#[test]
fn what_is_named_is_waited_for_before_a_claim_is_made() {
    let volume = volume();
    let mut observed = observe(&volume, None, None);
    observed.unresolved = Some("DataSource d does not exist");
    let decision = decide(&observed);
    assert!(decision.actions.is_empty());
    assert_eq!(reason(&decision, "Running"), "CloneWithoutSource");
    assert_eq!(decision.again, Some(LOOK));
}

#[test]
fn a_claim_of_a_snapshot_is_filled_by_its_driver() {
    let mut volume = volume();
    volume.spec.source = serde_json::from_value(json!({"snapshot": {"name": "s"}})).unwrap();
    let decision = look(&volume, None, None);
    let [Action::CreateClaim(claim)] = &decision.actions[..] else {
        panic!("{decision:?}")
    };
    let mut claim = (**claim).clone();
    let source = claim.spec.as_ref().unwrap().data_source.as_ref().unwrap();
    assert_eq!((&*source.kind, &*source.name), ("VolumeSnapshot", "s"));
    let phase = |claim: &PersistentVolumeClaim, waits: bool| {
        let mut observed = observe(&volume, Some(claim), None);
        observed.waits_for_consumer = waits;
        let decision = decide(&observed);
        assert!(decision.actions.is_empty(), "no importer: {decision:?}");
        decision.status.phase
    };
    assert_eq!(phase(&claim, true), Phase::WaitForFirstConsumer);
    assert_eq!(
        phase(&claim, false),
        Phase::CloneFromSnapshotSourceInProgress
    );
    claim.status = serde_json::from_value(json!({"phase": "Bound"})).unwrap();
    assert_eq!(phase(&claim, false), Phase::Succeeded);
}
