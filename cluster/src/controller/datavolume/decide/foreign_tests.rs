use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::controller::datavolume::decide::{Source, decide};
use crate::objects::{DataVolume, condition};

/// What there is of a copy from another namespace.
struct Scene {
    volume: DataVolume,
    claim: Option<PersistentVolumeClaim>,
    importer: Option<Pod>,
    sender: Option<Pod>,
    source: PersistentVolumeClaim,
    user: Option<&'static str>,
    is_granted: bool,
}

fn of<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn status(name: &str, phase: &str, restarts: i32, state: &Value) -> Value {
    json!({"phase": phase, "podIP": "10.0.0.1", "containerStatuses": [{
        "name": name, "image": "", "imageID": "", "ready": true, "restartCount": restarts,
        "state": state,
    }]})
}

fn importer(phase: &str, state: Value) -> Pod {
    of(json!({
        "metadata": {"name": "importer-a", "uid": "importer"},
        "status": status("importer", phase, 0, &state),
    }))
}

fn sender(address: &str, phase: &str, restarts: i32, state: Value) -> Pod {
    of(json!({
        "metadata": {
            "name": "source-a", "namespace": "golden", "uid": "sender",
            "annotations": {"podvisor.io/clone-address": address},
        },
        "status": status("source", phase, restarts, &state),
    }))
}

fn runs() -> Value {
    json!({"running": {}})
}

impl Scene {
    /// The importer is ready, and nothing sends yet.
    fn new() -> Self {
        let source = json!({"pvc": {"name": "debian", "namespace": "golden"}});
        let claim = |uid: &str| {
            json!({
                "metadata": {"name": "a", "uid": uid, "ownerReferences": [{
                    "apiVersion": "x", "kind": "DataVolume", "name": "a", "uid": "u",
                    "controller": true,
                }]},
                "spec": {"resources": {"requests": {"storage": "2Gi"}}},
                "status": {"phase": "Bound"},
            })
        };
        Self {
            volume: of(json!({
                "metadata": {
                    "name": "a", "namespace": "n", "uid": "u",
                    "finalizers": ["podvisor.io/clone-source"],
                },
                "spec": {"source": source, "storage": {}},
            })),
            claim: Some(of(claim("c"))),
            importer: Some(importer("Running", runs())),
            sender: None,
            source: of(claim("s")),
            user: None,
            is_granted: true,
        }
    }

    fn look(&self) -> Decision {
        decide(&Observed {
            volume: &self.volume,
            claim: self.claim.as_ref(),
            pod: self.importer.as_ref(),
            source: self.is_granted.then_some(Source {
                claim: Some(&self.source),
                state: None,
                user: self.user,
            }),
            foreign: Some(Foreign {
                namespace: "golden",
                is_granted: self.is_granted,
                pod: self.sender.as_ref(),
            }),
            unresolved: None,
            waits_for_consumer: false,
            default_class: None,
            progress: None,
            image: "image",
            now: Time(Timestamp::from_second(1_000_000).unwrap()),
        })
    }
}

fn reason(decision: &Decision) -> &str {
    &condition(&decision.status.conditions, "Running")
        .unwrap()
        .reason
}

#[test]
fn without_its_token_nothing_is_made_and_what_was_made_goes() {
    let mut scene = Scene::new();
    scene.is_granted = false;
    let decision = scene.look();
    assert_eq!(reason(&decision), "CloneUnauthorized");
    let ended = [
        Action::DeletePod {
            uid: "importer".into(),
        },
        Action::EndCopy,
    ];
    assert_eq!(decision.actions, ended);
    scene.importer = None;
    scene.claim = None;
    scene.volume.metadata.finalizers = None;
    let decision = scene.look();
    assert_eq!(
        (decision.actions.len(), decision.status.phase),
        (0, Phase::Pending)
    );
    // Not even the size of the source is told.
    assert_eq!(decision.status.progress, "N/A");
}

#[test]
fn a_copy_is_held_before_anything_is_made_beside_its_source() {
    let mut scene = Scene::new();
    scene.importer = None;
    let [Action::CreateCredentials, Action::CreatePod(made)] = &scene.look().actions[..] else {
        panic!("{:?}", scene.look());
    };
    let args = made.spec.as_ref().unwrap().containers[0]
        .args
        .clone()
        .unwrap();
    assert!(args.contains(&"--sender=c.copy.podvisor.internal".to_owned()));
    assert!(args.contains(&"--size=2147483648".to_owned()), "{args:?}");

    let mut scene = Scene::new();
    scene.volume.metadata.finalizers = None;
    assert_eq!(scene.look().actions, [Action::HoldForCopy(FINALIZER)]);
    let decision = Scene::new().look();
    let [Action::CreateSource(made)] = &decision.actions[..] else {
        panic!("{decision:?}");
    };
    assert_eq!(made.metadata.namespace.as_deref(), Some("golden"));
    assert_eq!(decision.status.phase, Phase::CloneScheduled);
}

#[test]
fn a_source_that_is_used_meanwhile_is_waited_for() {
    let mut scene = Scene::new();
    scene.user = Some("vm");
    let decision = scene.look();
    assert_eq!(decision.actions, []);
    assert_eq!(reason(&decision), "CloneSourceInUse");
    scene.user = None;
    // An importer that cannot be reached yet is waited for, too.
    scene.importer = Some(importer("Pending", json!({"waiting": {}})));
    assert_eq!(scene.look().actions, []);
}

#[test]
fn who_sends_is_looked_after_until_the_importer_is_done() {
    let mut scene = Scene::new();
    scene.sender = Some(sender("10.0.0.1", "Running", 0, runs()));
    let decision = scene.look();
    assert_eq!(decision.actions, []);
    assert_eq!(decision.status.phase, Phase::CloneInProgress);
    assert_eq!(reason(&decision), "Pod is running");

    // Its Secret may have been forgotten by a controller that was killed.
    let waits = json!({"waiting": {"reason": "ContainerCreating"}});
    scene.sender = Some(sender("10.0.0.1", "Pending", 0, waits));
    let decision = scene.look();
    assert_eq!(decision.actions, [Action::CreateSourceCredentials]);
    assert_eq!(decision.status.phase, Phase::CloneScheduled);

    let crash = json!({"waiting": {"reason": "CrashLoopBackOff"}});
    scene.sender = Some(sender("10.0.0.1", "Running", 3, crash));
    let decision = scene.look();
    assert_eq!((reason(&decision), decision.actions.len()), ("Error", 0));
    assert_eq!(decision.status.restart_count, Some(3));

    let ends = |uid: &str| Action::EndSource { uid: uid.into() };
    // The importer was replaced.
    scene.sender = Some(sender("10.0.0.9", "Running", 0, runs()));
    assert_eq!(scene.look().actions, [ends("sender")]);
    // It has sent all, to an importer that was killed before its end.
    for (second, actions) in [(-5, vec![]), (-60, vec![ends("sender")])] {
        let at = Timestamp::from_second(1_000_000 + second).unwrap();
        let done = json!({"terminated": {"exitCode": 0, "finishedAt": at.to_string()}});
        scene.sender = Some(sender("10.0.0.1", "Succeeded", 0, done));
        assert_eq!(scene.look().actions, actions);
    }
    scene.importer = Some(importer(
        "Succeeded",
        json!({"terminated": {"exitCode": 0}}),
    ));
    assert_eq!(scene.look().actions, [Action::MarkClaim]);
}

#[test]
fn what_is_beside_the_source_goes_before_the_volume_and_after_the_copy() {
    let mut scene = Scene::new();
    scene.sender = Some(sender("10.0.0.1", "Running", 0, runs()));
    scene.volume.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    assert_eq!(scene.look().actions, [Action::EndCopy]);
    scene.volume.metadata.deletion_timestamp = None;
    let done = "cdi.kubevirt.io/storage.pod.phase".to_owned();
    let claim = scene.claim.as_mut().unwrap();
    claim.metadata.annotations = Some([(done, "Succeeded".to_owned())].into());
    let decision = scene.look();
    assert_eq!(decision.status.phase, Phase::Succeeded);
    assert!(decision.actions.contains(&Action::EndCopy));
    scene.volume.metadata.finalizers = None;
    assert!(!scene.look().actions.contains(&Action::EndCopy));
}
