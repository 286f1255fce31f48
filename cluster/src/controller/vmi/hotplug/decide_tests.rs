use serde_json::{Value, json};

use super::*;
use crate::controller::claims::VolumeMode;
use crate::objects::{ATTACHMENT_ANNOTATION, HOTPLUG};

const BLOCK: Claim = Claim {
    mode: VolumeMode::Block,
    is_shared: false,
};

/// An instance that runs on a node, with these volumes plugged in, and what is reported of them.
fn instance(volumes: &[&str], entries: Value) -> VirtualMachineInstance {
    let of = |name: &&str| {
        json!({
            "name": name, "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true},
        })
    };
    let disk = |name: &&str| json!({"name": name, "disk": {}});
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "a", "namespace": "n", "uid": "u"},
        "spec": {
            "domain": {
                "memory": {"guest": "1Gi"},
                "devices": {"disks": volumes.iter().map(disk).collect::<Vec<_>>()},
            },
            "volumes": volumes.iter().map(of).collect::<Vec<_>>(),
        },
        "status": {"phase": "Running", "nodeName": "node", "volumeStatus": entries},
    }))
    .unwrap()
}

/// An instance with a claim for dumps.
fn dumped(entries: Value) -> Seen {
    let mut seen = Seen::new(&[], entries);
    let volume =
        json!({"name": "dumps", "memoryDump": {"claimName": "dumps", "hotpluggable": true}});
    seen.vmi.spec["volumes"] = json!([volume]);
    seen.claim = Some(Claim {
        mode: VolumeMode::Filesystem,
        is_shared: false,
    });
    seen
}

fn own_pod() -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "own", "uid": "own"},
        "spec": {"nodeName": "node", "containers": []},
        "status": {"containerStatuses": [status_of(json!({"running": {}}))]},
    }))
    .unwrap()
}

fn status_of(state: Value) -> Value {
    json!({
        "name": "compute", "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "state": state,
    })
}

/// How far a keeper is.
#[derive(Clone, Copy, PartialEq)]
enum Far {
    New,
    OnNode,
    Runs,
    Failed,
    Going,
}

/// The pod that an earlier decision has made, as far as this.
fn made(pod: &Pod, uid: &str, far: Far) -> Arc<Pod> {
    let mut pod = serde_json::to_value(pod).unwrap();
    pod["metadata"]["uid"] = json!(uid);
    if far != Far::New {
        pod["spec"]["nodeName"] = json!("node");
    }
    match far {
        Far::Runs | Far::Going => {
            let running = status_of(json!({"running": {}}));
            pod["status"] = json!({"phase": "Running", "containerStatuses": [running]});
        }
        Far::Failed => pod["status"] = json!({"phase": "Failed"}),
        Far::New | Far::OnNode => {}
    }
    if far == Far::Going {
        pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    }
    Arc::new(serde_json::from_value(pod).unwrap())
}

struct Seen {
    vmi: VirtualMachineInstance,
    pod: Option<Pod>,
    keepers: Vec<Arc<Pod>>,
    claim: Option<Claim>,
    volume: Option<VolumeState>,
}

impl Seen {
    fn new(volumes: &[&str], entries: Value) -> Self {
        Self {
            vmi: instance(volumes, entries),
            pod: Some(own_pod()),
            keepers: Vec::new(),
            claim: Some(BLOCK),
            volume: None,
        }
    }

    fn with(volumes: &[&str], before: &Decision, keepers: &[Arc<Pod>]) -> Self {
        Self {
            keepers: keepers.to_vec(),
            ..Self::new(volumes, Value::Array(before.entries.clone()))
        }
    }

    fn decide(&self) -> Decision {
        let spec = serde_json::from_value(self.vmi.spec.clone()).unwrap();
        decide(&Observed {
            vmi: &self.vmi,
            spec: &spec,
            pod: self.pod.as_ref(),
            keepers: &self.keepers,
            claim: &|_| self.claim,
            volume: &|_| self.volume,
            now: Time("2026-11-30T12:00:00Z".parse().unwrap()),
        })
    }
}

fn phases(decision: &Decision) -> Vec<&str> {
    let entries = decision.entries.iter();
    entries
        .filter(|entry| entry.get("hotplugVolume").is_some())
        .map(|entry| entry["phase"].as_str().unwrap_or_default())
        .collect()
}

fn keeper_made(decision: &Decision) -> &Pod {
    let [Action::Keep(pod)] = decision.actions.as_slice() else {
        panic!("{:?}", decision.actions);
    };
    pod
}

/// As the node has done it.
fn done(mut decision: Decision, step: Step) -> Decision {
    for entry in &mut decision.entries {
        entry["phase"] = json!(step.word());
    }
    decision.actions.clear();
    decision
}

#[test]
fn a_volume_comes_by_a_pod_of_its_own_on_the_vms_node() {
    let first = Seen::new(&["data"], json!([])).decide();
    assert_eq!(phases(&first), ["Bound"]);
    let pod = keeper_made(&first).clone();
    let text = serde_json::to_value(&pod).unwrap();
    let (meta, spec) = (&text["metadata"], &text["spec"]);
    assert_eq!(meta["labels"]["kubevirt.io"], HOTPLUG);
    assert_eq!(meta["ownerReferences"][0]["uid"], "u");
    let kept: Value =
        serde_json::from_str(meta["annotations"][ATTACHMENT_ANNOTATION].as_str().unwrap()).unwrap();
    let wanted = json!({
        "instance": "u", "volume": "data", "claim": "c", "serial": "data", "readOnly": false,
    });
    assert_eq!(kept, wanted);
    assert_eq!(spec["runtimeClassName"], "podvisor-vm");
    assert_eq!(
        spec["containers"][0]["volumeDevices"][0]["devicePath"],
        "/podvisor/devices/data"
    );
    let terms = spec.pointer(
        "/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms",
    );
    assert_eq!(
        terms.unwrap()[0]["matchFields"][0]["values"],
        json!(["node"])
    );
    let name = first.entries[0]["hotplugVolume"]["attachPodName"].clone();
    assert_eq!(name, meta["name"]);
    assert!(name.as_str().unwrap().starts_with("hp-volume-a-"));
    // It is made once.
    let mut before = first;
    for (far, phase) in [
        (Far::New, "Bound"),
        (Far::OnNode, "AttachedToNode"),
        (Far::Runs, "MountedToPod"),
    ] {
        let decision = Seen::with(&["data"], &before, &[made(&pod, "k", far)]).decide();
        assert_eq!(phases(&decision), [phase]);
        before = decision;
    }
    let plug = Action::Plug {
        volume: "data".to_owned(),
        serial: "data".to_owned(),
        keeper: "k".to_owned(),
    };
    assert_eq!(before.actions, [plug]);
    assert_eq!(before.entries[0]["hotplugVolume"]["attachPodUID"], "k");
    // It stays as it is.
    let ready = done(before, Step::Ready);
    let keepers = [made(&pod, "k", Far::Runs)];
    assert_eq!(Seen::with(&["data"], &ready, &keepers).decide(), ready);
}

#[test]
fn a_volume_waits_for_its_claim_its_contents_and_the_vm() {
    let reason = |seen: &Seen| {
        let decision = seen.decide();
        let entry = decision.entries[0].clone();
        assert_eq!(entry["phase"], "Pending");
        assert_eq!(decision.actions, []);
        entry["reason"].as_str().unwrap().to_owned()
    };
    let mut seen = Seen::new(&["data"], json!([]));
    seen.claim = None;
    assert_eq!(reason(&seen), "PVCNotFound");
    seen.claim = Some(BLOCK);
    seen.volume = Some(VolumeState::Filling);
    assert_eq!(reason(&seen), "DataVolumeNotReady");
    seen.volume = None;
    seen.vmi.status.phase = Phase::Scheduled;
    assert_eq!(reason(&seen), "VmNotRunning");
    // Who waits for a consumer gets one, which is not plugged in before it is filled.
    seen.vmi.status.phase = Phase::Running;
    seen.volume = Some(VolumeState::WaitsForConsumer);
    let first = seen.decide();
    let pod = keeper_made(&first).clone();
    let mut seen = Seen::with(&["data"], &first, &[made(&pod, "k", Far::Runs)]);
    seen.volume = Some(VolumeState::Filling);
    let decision = seen.decide();
    assert_eq!(phases(&decision), ["AttachedToNode"]);
    assert_eq!(decision.actions, []);
}

#[test]
fn a_volume_that_is_removed_leaves_the_guest_before_its_pod_goes() {
    let first = Seen::new(&["data"], json!([])).decide();
    let keepers = [made(keeper_made(&first), "k", Far::Runs)];
    let ready = done(
        Seen::with(&["data"], &first, &keepers).decide(),
        Step::Ready,
    );
    let leaves = Seen::with(&[], &ready, &keepers).decide();
    assert_eq!(phases(&leaves), ["Detaching"]);
    let unplug = Action::Unplug {
        volume: "data".to_owned(),
        serial: "data".to_owned(),
    };
    assert_eq!(leaves.actions, [unplug]);
    // A controller that was killed asks again.
    let again = Seen::with(&[], &leaves, &keepers).decide();
    assert_eq!(again.actions, leaves.actions);
    let unmounted = done(leaves, Step::Unmounted);
    let goes = Seen::with(&[], &unmounted, &keepers).decide();
    assert_eq!(phases(&goes), ["UnMountedFromPod"]);
    let name = keepers[0].metadata.name.clone().unwrap();
    let uid = "k".to_owned();
    assert_eq!(goes.actions, [Action::Release { name, uid }]);
    let gone = Seen::with(&[], &goes, &[]).decide();
    assert_eq!(gone, Decision::default());
}

#[test]
fn another_claim_under_the_same_name_comes_when_the_first_has_left() {
    let first = Seen::new(&["data"], json!([])).decide();
    let keepers = [made(keeper_made(&first), "k", Far::Runs)];
    let ready = done(
        Seen::with(&["data"], &first, &keepers).decide(),
        Step::Ready,
    );
    let mut seen = Seen::with(&["data"], &ready, &keepers);
    seen.vmi.spec["volumes"][0]["persistentVolumeClaim"]["claimName"] = json!("other");
    let decision = seen.decide();
    assert_eq!(phases(&decision), ["Detaching"]);
    assert!(matches!(decision.actions[..], [Action::Unplug { .. }]));
}

#[test]
fn a_pod_that_goes_by_itself_is_made_again_after_the_guest_lost_the_disk() {
    let first = Seen::new(&["data"], json!([])).decide();
    let pod = keeper_made(&first).clone();
    let keepers = [made(&pod, "k", Far::Runs)];
    let ready = done(
        Seen::with(&["data"], &first, &keepers).decide(),
        Step::Ready,
    );
    for keepers in [
        vec![],
        vec![made(&pod, "k", Far::Going)],
        vec![made(&pod, "k", Far::Failed)],
    ] {
        let lost = Seen::with(&["data"], &ready, &keepers).decide();
        assert_eq!(phases(&lost), ["Detaching"]);
        assert!(matches!(lost.actions[..], [Action::Unplug { .. }]));
        let unmounted = done(lost, Step::Unmounted);
        let next = Seen::with(&["data"], &unmounted, &keepers).decide();
        match keepers.first() {
            None => assert!(matches!(next.actions[..], [Action::Keep(_)])),
            Some(pod) if pod.metadata.deletion_timestamp.is_some() => {
                assert_eq!(next.actions, []);
            }
            Some(_) => assert!(matches!(next.actions[..], [Action::Release { .. }])),
        }
    }
    // One that was removed and made again within a moment is asked for again.
    let again = [made(&pod, "k2", Far::Runs)];
    let decision = Seen::with(&["data"], &ready, &again).decide();
    assert!(matches!(&decision.actions[..], [Action::Plug { keeper, .. }] if keeper == "k2"));
}

#[test]
fn what_an_instance_has_goes_with_it_and_not_before() {
    let first = Seen::new(&["data"], json!([])).decide();
    let keepers = [made(keeper_made(&first), "k", Far::Runs)];
    let ready = done(
        Seen::with(&["data"], &first, &keepers).decide(),
        Step::Ready,
    );
    let mut seen = Seen::with(&["data"], &ready, &keepers);
    let deletion = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
    let deletion: VirtualMachineInstance = serde_json::from_value(deletion).unwrap();
    seen.vmi.metadata.deletion_timestamp = deletion.metadata.deletion_timestamp;
    assert_eq!(seen.decide(), ready, "its guest shuts down");
    seen.pod = None;
    assert!(matches!(
        seen.decide().actions[..],
        [Action::Release { .. }]
    ));
    let mut seen = Seen::with(&["data"], &ready, &keepers);
    seen.vmi.status.phase = Phase::Failed;
    let decision = seen.decide();
    assert_eq!(decision.entries, ready.entries);
    assert!(matches!(decision.actions[..], [Action::Release { .. }]));
}

/// The guest keeps its disks while it moves: both nodes have them until it is on one for certain.
#[test]
fn a_volume_is_kept_on_both_nodes_while_its_vm_moves() {
    let first = Seen::new(&["data"], json!([])).decide();
    let here = made(keeper_made(&first), "here", Far::Runs);
    let plugged = done(
        Seen::with(&["data"], &first, &[Arc::clone(&here)]).decide(),
        Step::Ready,
    );
    let state = |node: &str, state: Value, keepers: &[Arc<Pod>]| {
        let mut seen = Seen::with(&["data"], &plugged, keepers);
        seen.vmi.status.node_name = node.to_owned();
        seen.vmi.status.migration_state = Some(serde_json::from_value(state).unwrap());
        seen
    };
    let open = json!({"migrationUid": "m", "sourceNode": "node", "targetNode": "other"});
    let moves = |keepers: &[Arc<Pod>]| state("node", open.clone(), keepers);
    let begins = moves(&[Arc::clone(&here)]).decide();
    let there = keeper_made(&begins);
    assert_ne!(there.metadata.name, here.metadata.name);
    assert_eq!(begins.entries, plugged.entries);
    let vmi = moves(&[]).vmi;
    let why = plugs_at(&vmi, &[Arc::clone(&here)], "other").unwrap_err();
    assert!(why.contains("data"), "{why}");
    let new = made(there, "there", Far::New);
    assert!(plugs_at(&vmi, &[Arc::clone(&here), new], "other").is_err());
    let there = made(there, "there", Far::Runs);
    let both = [Arc::clone(&there), Arc::clone(&here)];
    assert_eq!(plugs_at(&vmi, &both, "other").unwrap(), ["there"]);
    // Also when the pod that it leaves says that it has ended.
    let mut gone = moves(&both);
    for is_gone in [false, true] {
        if is_gone {
            gone.pod = None;
        }
        let decision = gone.decide();
        assert_eq!(decision.actions, []);
        assert_eq!(decision.entries, plugged.entries);
    }
    let ended = |is_failed: bool| {
        let mut state = open.clone();
        state["endTimestamp"] = json!("2026-01-01T00:00:00Z");
        state["completed"] = json!(true);
        state["failed"] = json!(is_failed);
        state
    };
    let release = |uid: &str, pod: &Pod| Action::Release {
        name: pod.metadata.name.clone().unwrap(),
        uid: uid.to_owned(),
    };
    let failed = state("node", ended(true), &both).decide();
    assert_eq!(failed.actions, [release("there", &there)]);
    // The node has it already, and says so.
    let moved = state("other", ended(false), &both).decide();
    let plug = Action::Plug {
        volume: "data".to_owned(),
        serial: "data".to_owned(),
        keeper: "there".to_owned(),
    };
    assert_eq!(moved.actions, [plug, release("here", &here)]);
}

#[test]
fn what_nobody_asked_for_is_released_and_other_volumes_are_left_alone() {
    let root = json!([{"name": "root", "target": ""}]);
    let first = Seen::new(&["data"], root.clone()).decide();
    assert_eq!(first.entries.len(), 2);
    assert_eq!(first.entries[0], root[0]);
    let mut seen = Seen::new(&[], root.clone());
    seen.keepers = vec![made(keeper_made(&first), "k", Far::Runs)];
    let decision = seen.decide();
    assert!(matches!(decision.actions[..], [Action::Release { .. }]));
    assert_eq!(Value::Array(decision.entries), root);
}

#[test]
fn a_serial_number_has_twenty_characters_at_most() {
    let mut seen = Seen::new(&["data"], json!([]));
    let serial = |seen: &Seen| kept_by(keeper_made(&seen.decide())).unwrap().serial;
    seen.vmi.spec["domain"]["devices"]["disks"][0]["serial"] = json!("a".repeat(30));
    assert_eq!(serial(&seen), "a".repeat(20));
    seen.vmi.spec["domain"]["devices"]["disks"][0]["serial"] = json!("a b");
    assert_eq!(serial(&seen), "data");
}

#[test]
fn a_dump_has_a_name_before_it_is_asked_for_and_stays_what_it_became() {
    let first = dumped(json!([])).decide();
    assert_eq!(phases(&first), ["Bound"]);
    let pod = keeper_made(&first).clone();
    let kept = kept_by(&pod).unwrap();
    assert!(kept.memory_dump, "{kept:?}");
    let text = serde_json::to_value(&pod).unwrap();
    let mount = &text["spec"]["containers"][0]["volumeMounts"][0];
    assert_eq!(mount["mountPath"], "/podvisor/volumes/dumps");
    let runs = [made(&pod, "k", Far::Runs)];
    let with = |before: &Decision, keepers: &[Arc<Pod>]| Seen {
        keepers: keepers.to_vec(),
        ..dumped(Value::Array(before.entries.clone()))
    };
    let begun = with(&first, &runs).decide();
    assert_eq!(phases(&begun), ["MemoryDumpInProgress"]);
    assert_eq!(begun.actions, []);
    let file = "a-dumps-20261130-120000.memory.dump";
    let dump = json!({
        "claimName": "dumps", "startTimestamp": "2026-11-30T12:00:00Z", "targetFileName": file,
    });
    assert_eq!(begun.entries[0]["memoryDumpVolume"], dump);
    let goes_on = with(&begun, &runs).decide();
    let asked = Action::Dump {
        volume: "dumps".to_owned(),
        file: file.to_owned(),
        keeper: "k".to_owned(),
    };
    assert_eq!(
        (goes_on.entries, goes_on.actions),
        (begun.entries.clone(), vec![asked])
    );

    // Its pod ends before the dump is there.
    for keepers in [
        &[][..],
        &[made(&pod, "k", Far::Going)],
        &[made(&pod, "k", Far::Failed)],
    ] {
        let failed = with(&begun, keepers).decide();
        assert_eq!(phases(&failed), ["MemoryDumpFailed"]);
        assert_eq!(failed.actions, []);
        let end = &failed.entries[0]["memoryDumpVolume"]["endTimestamp"];
        assert_eq!(*end, "2026-11-30T12:00:00Z");
    }
    for step in [Step::Dumped, Step::DumpFailed] {
        let over = done(begun.clone(), step);
        let same = with(&over, &runs).decide();
        assert_eq!((same.entries, same.actions), (over.entries.clone(), vec![]));
        // When the volume goes, its pod does, and nothing is taken from the guest.
        let mut gone = with(&over, &runs);
        gone.vmi.spec["volumes"] = json!([]);
        let gone = gone.decide();
        assert!(
            matches!(gone.actions.as_slice(), [Action::Release { .. }]),
            "{gone:?}"
        );
    }
}

#[test]
fn a_dump_needs_a_file_system() {
    let mut seen = dumped(json!([]));
    seen.claim = Some(BLOCK);
    let failed = seen.decide();
    assert_eq!(phases(&failed), ["MemoryDumpFailed"]);
    let message = failed.entries[0]["message"].as_str().unwrap();
    assert!(message.contains("no file system"), "{message}");
}

#[test]
fn names_of_files_are_not_too_long() {
    let mut vmi = instance(&[], json!([]));
    vmi.metadata.name = Some("v".repeat(253));
    let now = Time("2026-11-30T12:00:00Z".parse().unwrap());
    let name = file_name(&vmi, &"c".repeat(253), &now);
    assert!(name.len() <= 240, "{name}");
    assert!(name.ends_with("-20261130-120000.memory.dump"), "{name}");
}
