//! What is decided, by what was observed.

use serde_json::{Value, json};

use super::*;

const START: i64 = 1_000_000;

fn at(second: i64) -> Time {
    Time(Timestamp::from_second(second).unwrap())
}

fn export(spec: Value) -> VirtualMachineExport {
    let mut export: VirtualMachineExport = serde_json::from_value(json!({
        "metadata": {"name": "e", "namespace": "n", "uid": "u"}, "spec": spec,
    }))
    .unwrap();
    export.metadata.creation_timestamp = Some(at(START));
    export
}

fn of_claim() -> VirtualMachineExport {
    export(json!({"source": {"apiGroup": "", "kind": "PersistentVolumeClaim", "name": "a"}}))
}

fn available() -> Source {
    Source::Available(vec![Volume {
        name: "a".to_owned(),
        claim: "a".to_owned(),
        content: Content::Disk,
    }])
}

fn in_use() -> Source {
    Source::Waits(Obstacle::InUse("pvc n/a is in use by the pod p".to_owned()))
}

fn meta(name: &str, of: &str) -> Value {
    let owner = json!({
        "apiVersion": "export.kubevirt.io/v1beta1", "kind": "VirtualMachineExport",
        "name": "e", "uid": of, "controller": true,
    });
    let own = format!("{name}-uid");
    json!({"name": name, "namespace": "n", "uid": own, "ownerReferences": [owner]})
}

fn service(of: &str) -> Service {
    serde_json::from_value(json!({"metadata": meta("virt-export-e", of)})).unwrap()
}

fn pod(phase: &str, is_ready: bool) -> Pod {
    let ready = if is_ready { "True" } else { "False" };
    serde_json::from_value(json!({
        "metadata": meta("pod", "u"),
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": ready}]},
    }))
    .unwrap()
}

/// What is observed a minute after the export was made.
struct Scene {
    export: VirtualMachineExport,
    source: Source,
    pod: Option<Pod>,
    service: Option<Service>,
    now: i64,
}

impl Scene {
    fn new(export: VirtualMachineExport, source: Source) -> Self {
        Self {
            export,
            source,
            pod: None,
            service: Some(service("u")),
            now: START + 60,
        }
    }

    fn with(pod: Pod, source: Source) -> Self {
        Self {
            pod: Some(pod),
            ..Self::new(of_claim(), source)
        }
    }

    fn decide(&self) -> Decision {
        decide(&Observed {
            export: &self.export,
            source: &self.source,
            machine: None,
            pod: self.pod.as_ref(),
            service: self.service.as_ref(),
            authorities: Some("PEM\n"),
            now: at(self.now),
        })
    }
}

/// The phase, the reason of `Ready`, and the reason of the source's condition.
fn state(decision: &Decision) -> (ExportPhase, &str, &str) {
    let reason = |kinds: &[&str]| {
        let mut conditions = decision.status.conditions.iter();
        let found = conditions.find(|of| kinds.contains(&of.kind.as_str()));
        found.map_or("", |of| of.reason.as_str())
    };
    (
        decision.status.phase,
        reason(&["Ready"]),
        reason(&["PVCReady", "VolumesCreated"]),
    )
}

#[test]
fn a_claim_at_rest_gets_a_service_a_token_and_a_pod() {
    let mut scene = Scene::new(of_claim(), available());
    scene.service = None;
    let decision = scene.decide();
    assert_eq!(
        decision.actions,
        [
            Action::CreateService,
            Action::CreateToken,
            Action::CreatePod {
                volumes: match available() {
                    Source::Available(volumes) => volumes,
                    _ => unreachable!(),
                },
                until: START + 7200,
            },
        ]
    );
    assert_eq!(
        state(&decision),
        (ExportPhase::Pending, "PodPending", "PVCBound")
    );
    let status = &decision.status;
    assert_eq!(status.token_secret_ref.as_deref(), Some("export-token-e"));
    assert_eq!(status.service_name, "virt-export-e");
    assert_eq!(status.ttl_expiration_time, Some(at(START + 7200)));
}

#[test]
fn a_token_that_is_given_is_not_made() {
    let export = export(json!({
        "source": {"kind": "PersistentVolumeClaim", "name": "a"}, "tokenSecretRef": "mine",
    }));
    let decision = Scene::new(export, available()).decide();
    assert!(!decision.actions.contains(&Action::CreateToken));
    assert_eq!(decision.status.token_secret_ref.as_deref(), Some("mine"));
}

#[test]
fn a_pod_gets_its_certificate_while_it_waits_for_it() {
    let decision = Scene::with(pod("Pending", false), available()).decide();
    assert_eq!(decision.actions, [Action::CreateCredentials]);
    assert_eq!(state(&decision).1, "PodPending");
}

#[test]
fn links_are_there_while_the_pod_is_ready() {
    let decision = Scene::with(pod("Running", true), available()).decide();
    assert_eq!(decision.actions, []);
    assert_eq!(
        state(&decision),
        (ExportPhase::Ready, "PodReady", "PVCBound")
    );
    let link = decision.status.links.clone().unwrap().internal.unwrap();
    assert_eq!(link.cert, "PEM");
    let formats: Vec<_> = link.volumes[0]
        .formats
        .iter()
        .map(|of| (of.format.as_str(), of.url.as_str()))
        .collect();
    let host = "https://virt-export-e.n.svc/volumes/a";
    let expected = [
        ("raw", format!("{host}/disk.img")),
        ("gzip", format!("{host}/disk.img.gz")),
    ];
    assert_eq!(
        formats,
        expected
            .each_ref()
            .map(|(format, url)| (*format, url.as_str()))
    );

    let mut scene = Scene::with(pod("Running", false), available());
    scene.export.status = decision.status;
    let decision = scene.decide();
    assert_eq!(
        (decision.status.links.as_ref(), state(&decision).0),
        (None, ExportPhase::Pending)
    );
}

#[test]
fn a_claim_in_use_is_waited_for_and_its_pod_ends() {
    let decision = Scene::new(of_claim(), in_use()).decide();
    assert_eq!(decision.actions, []);
    assert_eq!(
        state(&decision),
        (ExportPhase::Pending, "InUse", "PVCBound")
    );
    assert_eq!(decision.again, Some(PATIENCE));
    let decision = Scene::with(pod("Running", true), in_use()).decide();
    let ends = Action::DeletePod {
        uid: Some("pod-uid".to_owned()),
        reason: "ExportPaused",
        message: "pvc n/a is in use by the pod p".to_owned(),
    };
    assert_eq!(decision.actions, [ends]);
    assert_eq!(decision.status.links, None);
    let missing = Source::Waits(Obstacle::Missing("pvc n/a not found".to_owned()));
    let decision = Scene::new(of_claim(), missing).decide();
    assert_eq!(
        state(&decision),
        (ExportPhase::Pending, "Initializing", "PVCNotFound")
    );
}

#[test]
fn what_has_nothing_to_export_is_skipped() {
    let nothing = Source::Nothing {
        reason: "VMSnapshotNoVolumes",
        message: "none".to_owned(),
    };
    let export = export(json!({"source": {
        "apiGroup": "snapshot.kubevirt.io", "kind": "VirtualMachineSnapshot", "name": "s",
    }}));
    let decision = Scene::new(export, nothing).decide();
    assert_eq!(decision.actions, []);
    let reason = "VMSnapshotNoVolumes";
    assert_eq!(state(&decision), (ExportPhase::Skipped, reason, reason));
}

#[test]
fn a_pod_that_ended_is_replaced() {
    for (phase, of) in [
        ("Succeeded", ExportPhase::Terminated),
        ("Failed", ExportPhase::Pending),
    ] {
        let decision = Scene::with(pod(phase, false), available()).decide();
        let [Action::DeletePod { uid, reason, .. }] = &decision.actions[..] else {
            panic!("{decision:?}");
        };
        assert_eq!(
            (uid.as_deref(), *reason),
            (Some("pod-uid"), "ExporterPodFailedOrCompleted")
        );
        assert_eq!(state(&decision).0, of);
    }
    let mut goes = pod("Running", true);
    goes.metadata.deletion_timestamp = Some(at(START));
    for source in [available(), in_use()] {
        let decision = Scene::with(goes.clone(), source).decide();
        assert_eq!(
            (&decision.actions[..], state(&decision).0),
            (&[][..], ExportPhase::Pending)
        );
    }
}

#[test]
fn what_another_made_is_left_alone() {
    let mut scene = Scene::new(of_claim(), available());
    scene.service = Some(service("other"));
    let decision = scene.decide();
    assert_eq!(
        (&decision.actions[..], decision.again),
        (&[][..], Some(LOOK))
    );
    let mut other = pod("Running", true);
    other.metadata.owner_references = None;
    for source in [available(), in_use()] {
        let decision = Scene::with(other.clone(), source).decide();
        assert_eq!(decision.actions, []);
        assert_eq!(decision.status.links, None);
    }
}

#[test]
fn an_export_is_deleted_when_its_time_is_over() {
    for source in [available(), in_use()] {
        let mut scene = Scene::with(pod("Running", true), source);
        scene.now = START + 7199;
        assert_eq!(scene.decide().again, Some(Duration::from_secs(1)));
        assert!(!scene.decide().actions.contains(&Action::Delete));
        scene.now = START + 7200;
        assert_eq!(scene.decide().actions, [Action::Delete]);
        scene.export.metadata.deletion_timestamp = Some(at(START));
        assert_eq!(scene.decide().actions, []);
    }
}

#[test]
fn a_pod_does_not_outlive_its_certificate() {
    let export = export(json!({
        "source": {"kind": "PersistentVolumeClaim", "name": "a"}, "ttlDuration": "876000h",
    }));
    let scene = Scene::new(export, available());
    let decision = scene.decide();
    let until = decision.actions.iter().find_map(|action| match action {
        Action::CreatePod { until, .. } => Some(*until),
        _ => None,
    });
    assert_eq!(until, Some(scene.now + POD_LIFE.as_secs()));
    assert_eq!(decision.again, Some(Duration::from_secs(24 * 3600)));
}

#[test]
fn a_status_is_decided_once() {
    for source in [available(), in_use()] {
        let mut scene = Scene::with(pod("Running", true), source);
        let first = scene.decide();
        scene.export.status = first.status.clone();
        scene.now += 5;
        assert_eq!(scene.decide().status, first.status);
    }
}

/// All that a pod can be: of this export or another's, going or not, in each phase.
fn pods() -> Vec<Option<Pod>> {
    let mut pods = vec![None];
    for phase in ["Pending", "Running", "Succeeded", "Failed", "Unknown"] {
        for (is_ready, is_own, goes) in [
            (false, true, false),
            (true, true, false),
            (true, true, true),
            (true, false, false),
        ] {
            let mut pod = pod(phase, is_ready);
            pod.metadata.deletion_timestamp = goes.then(|| at(START));
            if !is_own {
                pod.metadata.owner_references = None;
            }
            pods.push(Some(pod));
        }
    }
    pods
}

#[test]
fn whatever_is_observed_only_what_is_at_rest_is_served() {
    let waits = |obstacle: fn(String) -> Obstacle| Source::Waits(obstacle("x".to_owned()));
    let nothing = Source::Nothing {
        reason: "VMNoVolumes",
        message: "x".to_owned(),
    };
    let sources = [
        available(),
        waits(Obstacle::Missing),
        waits(Obstacle::Unfilled),
        waits(Obstacle::InUse),
        nothing,
    ];
    for source in sources {
        let is_available = matches!(source, Source::Available(_));
        for pod in pods() {
            for service in [None, Some(service("u")), Some(service("other"))] {
                let mut scene = Scene::new(of_claim(), source.clone());
                (scene.pod, scene.service) = (pod.clone(), service);
                let decision = scene.decide();
                let does = |is: fn(&Action) -> bool| decision.actions.iter().any(is);
                let makes = does(|action| matches!(action, Action::CreatePod { .. }));
                assert!(
                    !makes || is_available && scene.pod.is_none(),
                    "{decision:?}"
                );
                let ends = does(|action| matches!(action, Action::DeletePod { .. }));
                let own = scene
                    .pod
                    .as_ref()
                    .filter(|pod| owns(&scene.export, &pod.metadata));
                let own = own.filter(|pod| pod.metadata.deletion_timestamp.is_none());
                assert!(!ends || own.is_some(), "{decision:?}");
                let is_ready = decision.status.phase == ExportPhase::Ready;
                assert_eq!(is_ready, decision.status.links.is_some(), "{decision:?}");
                let may = is_available && own.is_some_and(is_ready_and_runs);
                assert!(!is_ready || may, "{decision:?}");
            }
        }
    }
}

fn is_ready_and_runs(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    is_ready(pod) && phase == Some("Running")
}

#[test]
fn files_are_served_as_an_archive_and_disks_as_they_are() {
    let mut source = available();
    let links_of = |source: &Source| {
        let Source::Available(volumes) = source else {
            panic!("{source:?}");
        };
        let links = links(&of_claim(), volumes, "ca").internal.unwrap();
        let formats = links.volumes[0].formats.iter();
        let formats = formats.map(|format| (format.format.clone(), format.url.clone()));
        formats.collect::<Vec<_>>()
    };
    let names = |links: &[(String, String)]| -> Vec<String> {
        links.iter().map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(names(&links_of(&source)), ["raw", "gzip"]);
    if let Source::Available(volumes) = &mut source {
        volumes[0].content = Content::Files;
    }
    let links = links_of(&source);
    assert_eq!(names(&links), ["tar.gz"]);
    assert_eq!(
        links[0].1,
        "https://virt-export-e.n.svc/volumes/a/disk.tar.gz"
    );
}
