//! What has to be done for the volumes that are plugged into an instance: a pure function of what
//! was observed.
//!
//! Each volume has a pod of its own that keeps its claim on the VM's node, the keeper. What the
//! status says of a volume is what was done; nothing else is remembered. While the VM moves, the
//! volumes that its guest has are kept on the other node, too.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use podvisor_cluster_types::vmi::{VmiSpec, Volume};
use serde_json::{Value, json};

use super::super::decide::{container, node, terminated};
use super::keeper::{Kept, keeper, kept_by, name, node_of};
use crate::controller::claims::{Claim, VolumeMode};
use crate::controller::instances::{PLUGGED, entries};
use crate::objects::{Phase, VirtualMachineInstance, VolumeState};

/// Where a volume is on its way into the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Pending,
    Bound,
    Attached,
    Mounted,
    Ready,
    Detaching,
    Unmounted,
    /// Of a claim for a dump of the memory.
    Dumping,
    Dumped,
    DumpFailed,
}

impl Step {
    const ALL: [Self; 10] = [
        Self::Pending,
        Self::Bound,
        Self::Attached,
        Self::Mounted,
        Self::Ready,
        Self::Detaching,
        Self::Unmounted,
        Self::Dumping,
        Self::Dumped,
        Self::DumpFailed,
    ];

    /// The word for it in the status.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Bound => "Bound",
            Self::Attached => "AttachedToNode",
            Self::Mounted => "MountedToPod",
            Self::Ready => PLUGGED,
            Self::Detaching => "Detaching",
            Self::Unmounted => "UnMountedFromPod",
            Self::Dumping => "MemoryDumpInProgress",
            Self::Dumped => "MemoryDumpCompleted",
            Self::DumpFailed => "MemoryDumpFailed",
        }
    }

    fn of(entry: &Value) -> Option<Self> {
        let word = entry.get("phase")?.as_str()?;
        Self::ALL.into_iter().find(|step| step.word() == word)
    }
}

/// What was observed.
pub(super) struct Observed<'a> {
    pub(super) vmi: &'a VirtualMachineInstance,
    pub(super) spec: &'a VmiSpec,
    /// The pod that it is in.
    pub(super) pod: Option<&'a Pod>,
    /// The pods that keep claims for it.
    pub(super) keepers: &'a [Arc<Pod>],
    /// What is known of a claim of the namespace, if it exists.
    pub(super) claim: &'a dyn Fn(&str) -> Option<Claim>,
    /// What a DataVolume of the namespace means for those who use its claim, if it exists.
    pub(super) volume: &'a dyn Fn(&str) -> Option<VolumeState>,
    /// The time.
    pub(super) now: Time,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Action {
    /// Make a keeper.
    Keep(Box<Pod>),
    /// Have the node plug a keeper's claim into the guest.
    Plug {
        volume: String,
        serial: String,
        /// Unique id of the keeper.
        keeper: String,
    },
    /// Have the node take a disk from the guest.
    Unplug { volume: String, serial: String },
    /// Have the node dump the guest's memory to a keeper's claim, or say how far that is.
    Dump {
        volume: String,
        file: String,
        /// Unique id of the keeper.
        keeper: String,
    },
    /// Delete a keeper.
    Release { name: String, uid: String },
}

/// What is to be done, and to be written of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Decision {
    /// The entries of `volumeStatus`, those of other volumes among them.
    pub(super) entries: Vec<Value>,
    pub(super) actions: Vec<Action>,
}

/// A volume that is to be plugged in.
struct Wanted<'a> {
    volume: &'a Volume,
    kept: Kept,
}

/// Decides.
pub(super) fn decide(observed: &Observed<'_>) -> Decision {
    let before = entries(observed.vmi);
    let wanted = wanted(observed);
    let mut decision = Decision {
        // What others say of other volumes stays.
        entries: before
            .iter()
            .filter(|entry| entry.get("hotplugVolume").is_none())
            .filter(|entry| wanted.iter().all(|one| !is_of(entry, &one.kept.volume)))
            .cloned()
            .collect(),
        actions: Vec::new(),
    };
    let has_ended = has_ended(observed);
    if has_ended || observed.vmi.metadata.deletion_timestamp.is_some() {
        // A guest that shuts down keeps what it has, and its status stays as it was.
        decision.entries = before;
        let keepers = observed.keepers.iter().filter(|_| has_ended);
        decision.actions = keepers.filter_map(|pod| release(pod)).collect();
        return decision;
    }
    let target = target_node(observed.vmi);
    for one in &wanted {
        let entry = before.iter().find(|entry| is_of(entry, &one.kept.volume));
        plug(observed, one, entry, &mut decision);
        if let (Some(target), Some(Step::Ready)) = (target, entry.and_then(Step::of)) {
            keep_at_target(observed, one, target, &mut decision);
        }
    }
    let is_wanted = |volume: &str| wanted.iter().any(|one| one.kept.volume == volume);
    for entry in &before {
        let volume = entry
            .get("name")
            .and_then(Value::as_str)
            .unwrap_or_default();
        if entry.get("hotplugVolume").is_some() && !is_wanted(volume) {
            let keeper = keeper_of(observed, volume);
            unplug(volume, entry, keeper, &mut decision);
        }
    }
    for pod in observed.keepers {
        if is_elsewhere(observed, pod) {
            // The VM has left that node, or goes there.
            let is_needed = target.is_some() && node_of(pod) == target;
            decision.actions.extend(release(pod).filter(|_| !is_needed));
            continue;
        }
        // A controller that was killed may have made one, and not said so.
        let volume = kept_by(pod).map(|kept| kept.volume).unwrap_or_default();
        if !is_wanted(&volume) && !before.iter().any(|entry| is_of(entry, &volume)) {
            decision.actions.extend(release(pod));
        }
    }
    decision
}

/// Returns what is reported of an instance's volumes.
pub(super) fn is_of(entry: &Value, volume: &str) -> bool {
    entry.get("name").and_then(Value::as_str) == Some(volume)
}

/// Whether there is no guest that could have anything.
fn has_ended(observed: &Observed<'_>) -> bool {
    let phase = observed.vmi.status.phase;
    let was_there = !matches!(phase, Phase::Unset | Phase::Pending);
    if target_node(observed.vmi).is_some() {
        // Its pod may have ended because the guest runs on the other node.
        return phase.is_final();
    }
    phase.is_final()
        || (was_there && observed.pod.is_none())
        || observed.pod.is_some_and(|pod| terminated(pod).is_some())
}

fn wanted<'a>(observed: &Observed<'a>) -> Vec<Wanted<'a>> {
    let disks = &observed.spec.domain.devices.disks;
    let plugged = observed
        .spec
        .volumes
        .iter()
        .filter(|volume| volume.is_hotpluggable());
    plugged
        .filter_map(|volume| {
            let of_dumps = Kept::of_dumps(observed.vmi, volume);
            let of_disk = || {
                let disk = disks.iter().find(|disk| disk.name == volume.name)?;
                Kept::of(observed.vmi, volume, disk)
            };
            let kept = of_dumps.or_else(of_disk)?;
            Some(Wanted { volume, kept })
        })
        .collect()
}

fn keeper_of<'a>(observed: &'a Observed<'_>, volume: &str) -> Option<&'a Pod> {
    let mut keepers = observed.keepers.iter();
    keepers
        .find(|pod| {
            !is_elsewhere(observed, pod) && kept_by(pod).is_some_and(|kept| kept.volume == volume)
        })
        .map(|pod| &**pod)
}

/// Whether a keeper is for another node than the one that the instance runs on.
fn is_elsewhere(observed: &Observed<'_>, keeper: &Pod) -> bool {
    let home = &observed.vmi.status.node_name;
    !home.is_empty() && node_of(keeper).is_some_and(|node| node != home)
}

/// Returns the node that an instance is about to move to.
fn target_node(vmi: &VirtualMachineInstance) -> Option<&str> {
    let state = vmi.status.migration_state.as_ref()?;
    let is_one = state.is_open() && !state.target_node.is_empty();
    (is_one && state.target_node != vmi.status.node_name).then_some(&*state.target_node)
}

/// Has a volume that the guest has be kept on the node that it moves to.
fn keep_at_target(observed: &Observed<'_>, one: &Wanted<'_>, target: &str, to: &mut Decision) {
    let Wanted { volume, kept } = one;
    let mut keepers = observed.keepers.iter();
    let is_kept =
        keepers.any(|pod| node_of(pod) == Some(target) && kept_by(pod).as_ref() == Some(kept));
    let Some(claim) = (observed.claim)(&kept.claim).filter(|_| !is_kept) else {
        return;
    };
    // What the pod cannot be was told when the first one was made.
    if let Ok(pod) = keeper(
        observed.vmi,
        observed.spec,
        volume,
        kept,
        claim.mode,
        target,
    ) {
        to.actions.push(Action::Keep(Box::new(pod)));
    }
}

/// Returns the unique ids of the keepers whose claims have to be plugged into a VM before it comes
/// to this node: those of all volumes that its guest has.
///
/// # Errors
/// Why they cannot be plugged in yet.
pub(in crate::controller) fn plugs_at(
    vmi: &VirtualMachineInstance,
    keepers: &[Arc<Pod>],
    target: &str,
) -> Result<Vec<String>, String> {
    let mut plugs = Vec::new();
    for entry in entries(vmi) {
        let volume = entry.get("name").and_then(Value::as_str);
        let volume = volume.unwrap_or_default();
        match Step::of(&entry).filter(|_| entry.get("hotplugVolume").is_some()) {
            Some(Step::Ready) => {}
            Some(Step::Mounted | Step::Detaching) => {
                return Err(format!("the volume {volume} comes or goes just now"));
            }
            _ => continue,
        }
        let keeper = keepers.iter().find(|pod| {
            node_of(pod) == Some(target) && kept_by(pod).is_some_and(|kept| kept.volume == volume)
        });
        let runs = |pod: &&Arc<Pod>| {
            let running = container(pod).is_some_and(|state| state.running.is_some());
            running && pod.metadata.deletion_timestamp.is_none()
        };
        let uid = keeper.filter(runs).and_then(|pod| pod.metadata.uid.clone());
        plugs.push(uid.ok_or_else(|| format!("the volume {volume} is not on the target's node"))?);
    }
    Ok(plugs)
}

/// Brings a volume one step nearer to the guest.
fn plug(observed: &Observed<'_>, one: &Wanted<'_>, before: Option<&Value>, to: &mut Decision) {
    let Wanted { volume, kept } = one;
    let keeper_pod = keeper_of(observed, &kept.volume);
    let was = before.and_then(Step::of);
    if kept.memory_dump
        && let Some(entry) = before
        && goes_on_dumping(observed, entry, keeper_pod, to)
    {
        return;
    }
    // Another claim, or another serial number, under the name of one that is there.
    if let (Some(pod), Some(entry)) = (keeper_pod, before)
        && kept_by(pod).as_ref() != Some(kept)
    {
        return unplug(&kept.volume, entry, Some(pod), to);
    }
    let take = || Action::Unplug {
        volume: kept.volume.clone(),
        serial: kept.serial.clone(),
    };
    let write = |step: Step, reason: &str, message: String, pod: Option<&Pod>| {
        entry(observed.vmi, one, step, reason, message, pod)
    };
    let waits = |reason: &str, message: String| write(Step::Pending, reason, message, None);
    let claim_name = &kept.claim;
    if keeper_pod.is_none() {
        let is_there = |step: Option<Step>| {
            matches!(step, Some(Step::Mounted | Step::Ready | Step::Detaching))
        };
        if is_there(was) {
            // Its pod is gone, and the guest may have it all the same.
            to.actions.push(take());
            let message = "its pod was removed: it is taken from the guest first".to_owned();
            to.entries
                .push(write(Step::Detaching, "PodRemoved", message, None));
            return;
        }
        let runs = observed.vmi.status.phase == Phase::Running;
        let Some(on) = observed.pod.and_then(node).filter(|_| runs) else {
            let message = "the virtual machine does not run yet".to_owned();
            to.entries.push(waits("VmNotRunning", message));
            return;
        };
        let Some(claim) = (observed.claim)(claim_name) else {
            let message = format!("PersistentVolumeClaim {claim_name} does not exist; create it");
            to.entries.push(waits("PVCNotFound", message));
            return;
        };
        match (observed.volume)(claim_name) {
            None | Some(VolumeState::Ready | VolumeState::WaitsForConsumer) => {}
            Some(_) => {
                let message = format!("DataVolume {claim_name} is not filled");
                to.entries.push(waits("DataVolumeNotReady", message));
                return;
            }
        }
        if kept.memory_dump && claim.mode == VolumeMode::Block {
            let mut entry = write(Step::Pending, "", String::new(), None);
            let why = format!("PersistentVolumeClaim {claim_name} is no file system");
            dump_failed(&mut entry, &why, &observed.now);
            to.entries.push(entry);
            return;
        }
        match keeper(observed.vmi, observed.spec, volume, kept, claim.mode, on) {
            Ok(pod) => {
                to.entries
                    .push(write(Step::Bound, "", String::new(), Some(&pod)));
                to.actions.push(Action::Keep(Box::new(pod)));
            }
            Err(error) => to.entries.push(waits("HotplugFailed", error.to_string())),
        }
        return;
    }
    let Some(pod) = keeper_pod else { return };
    let is_going = pod.metadata.deletion_timestamp.is_some();
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    if is_going || matches!(phase, Some("Failed" | "Succeeded")) {
        // It is made anew when it is gone.
        match was {
            Some(Step::Mounted | Step::Ready | Step::Detaching) => {
                to.actions.push(take());
                let message = "its pod ends: it is taken from the guest first".to_owned();
                to.entries
                    .push(write(Step::Detaching, "PodEnded", message, Some(pod)));
            }
            _ => {
                to.actions.extend(release(pod));
                let message = "its pod ends, and is made again".to_owned();
                to.entries
                    .push(write(Step::Bound, "PodEnded", message, Some(pod)));
            }
        }
        return;
    }
    if node(pod).is_none() {
        let waits_for = pod.status.as_ref().and_then(|status| {
            let conditions = status.conditions.as_ref()?;
            let found = conditions
                .iter()
                .find(|found| found.type_ == "PodScheduled")?;
            found.message.clone().filter(|_| found.status == "False")
        });
        to.entries.push(write(
            Step::Bound,
            "",
            waits_for.unwrap_or_default(),
            Some(pod),
        ));
        return;
    }
    let runs = container(pod).is_some_and(|state| state.running.is_some());
    let is_filled = (observed.volume)(claim_name).is_none_or(|state| state == VolumeState::Ready);
    if !runs || !is_filled {
        let message = match runs {
            false => String::new(),
            true => format!("DataVolume {claim_name} is not filled"),
        };
        to.entries
            .push(write(Step::Attached, "", message, Some(pod)));
        return;
    }
    if kept.memory_dump {
        // The name of the file is known to all before it is there.
        let mut entry = write(Step::Dumping, "", String::new(), Some(pod));
        entry["memoryDumpVolume"] = json!({
            "claimName": kept.claim,
            "startTimestamp": observed.now,
            "targetFileName": file_name(observed.vmi, &kept.claim, &observed.now),
        });
        to.entries.push(entry);
        return;
    }
    let uid = pod.metadata.uid.clone().unwrap_or_default();
    let same = before.is_some_and(|entry| {
        let known = entry.pointer("/hotplugVolume/attachPodUID");
        known.and_then(Value::as_str) == Some(&uid)
    });
    if was == Some(Step::Ready) && same {
        to.entries.extend(before.cloned());
        return;
    }
    to.actions.push(Action::Plug {
        volume: kept.volume.clone(),
        serial: kept.serial.clone(),
        keeper: uid,
    });
    to.entries
        .push(write(Step::Mounted, "", String::new(), Some(pod)));
}

/// Looks after a dump that has begun, whatever becomes of its claim's pod; `false` if none has.
fn goes_on_dumping(
    observed: &Observed<'_>,
    before: &Value,
    keeper: Option<&Pod>,
    to: &mut Decision,
) -> bool {
    let mut entry = before.clone();
    match Step::of(before) {
        Some(Step::Dumped | Step::DumpFailed) => {}
        Some(Step::Dumping) => {
            let text = |name: &str| before.pointer(name).and_then(Value::as_str);
            let file = text("/memoryDumpVolume/targetFileName");
            let runs = |pod: &&Pod| {
                let runs = container(pod).is_some_and(|state| state.running.is_some());
                runs && pod.metadata.deletion_timestamp.is_none()
            };
            let keeper = keeper.filter(runs).and_then(|pod| pod.metadata.uid.clone());
            match (file, keeper, text("/name")) {
                (Some(file), Some(keeper), Some(volume)) => to.actions.push(Action::Dump {
                    volume: volume.to_owned(),
                    file: file.to_owned(),
                    keeper,
                }),
                _ => {
                    let why = "the pod that keeps the claim has ended";
                    dump_failed(&mut entry, why, &observed.now);
                }
            }
        }
        _ => return false,
    }
    to.entries.push(entry);
    true
}

/// Writes of a dump that there is none.
pub(super) fn dump_failed(entry: &mut Value, why: &str, now: &Time) {
    entry["phase"] = json!(Step::DumpFailed.word());
    entry["message"] = json!(why);
    entry["memoryDumpVolume"]["endTimestamp"] = json!(now);
}

/// The name of a dump's file, with as much of each name as there is room for.
fn file_name(vmi: &VirtualMachineInstance, claim: &str, now: &Time) -> String {
    const ROOM: usize = 100;
    let cut = |name: &str| name.chars().take(ROOM).collect::<String>();
    let vm = cut(vmi.metadata.name.as_deref().unwrap_or_default());
    let at = now.0.strftime("%Y%m%d-%H%M%S");
    format!("{vm}-{}-{at}.memory.dump", cut(claim))
}

/// Brings a volume one step farther from the guest.
fn unplug(volume: &str, before: &Value, keeper: Option<&Pod>, to: &mut Decision) {
    let serial = keeper
        .and_then(kept_by)
        .map(|kept| kept.serial)
        .unwrap_or_else(|| serial_in(before, volume));
    let mut entry = before.clone();
    let is_in_guest = matches!(
        Step::of(before),
        Some(Step::Mounted | Step::Ready | Step::Detaching)
    );
    if is_in_guest {
        entry["phase"] = json!(Step::Detaching.word());
        to.actions.push(Action::Unplug {
            volume: volume.to_owned(),
            serial,
        });
        to.entries.push(entry);
        return;
    }
    // Without its pod nothing is left of it.
    if let Some(pod) = keeper {
        to.actions.extend(release(pod));
        entry["phase"] = json!(Step::Unmounted.word());
        to.entries.push(entry);
    }
}

fn release(pod: &Pod) -> Option<Action> {
    if pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    Some(Action::Release {
        name: pod.metadata.name.clone()?,
        uid: pod.metadata.uid.clone()?,
    })
}

/// Where a guest's Linux finds a disk, below `/dev`.
pub(super) fn target(serial: &str) -> String {
    format!("disk/by-id/virtio-{serial}")
}

fn serial_in(entry: &Value, volume: &str) -> String {
    let target = entry.get("target").and_then(Value::as_str);
    let serial = target.and_then(|target| target.strip_prefix("disk/by-id/virtio-"));
    serial.map_or_else(|| super::keeper::cut(volume), str::to_owned)
}

fn entry(
    vmi: &VirtualMachineInstance,
    one: &Wanted<'_>,
    step: Step,
    reason: &str,
    message: String,
    pod: Option<&Pod>,
) -> Value {
    let metadata = pod.map(|pod| &pod.metadata);
    let name = metadata
        .and_then(|metadata| metadata.name.clone())
        .unwrap_or_else(|| name(vmi, &one.kept.volume, &vmi.status.node_name));
    let mut entry = json!({
        "name": one.kept.volume,
        "target": "",
        "phase": step.word(),
        "persistentVolumeClaimInfo": {"claimName": one.kept.claim},
        "hotplugVolume": {"attachPodName": name},
    });
    if matches!(step, Step::Ready | Step::Detaching) {
        entry["target"] = json!(target(&one.kept.serial));
    }
    if let Some(uid) = metadata.and_then(|metadata| metadata.uid.clone()) {
        entry["hotplugVolume"]["attachPodUID"] = json!(uid);
    }
    if !reason.is_empty() {
        entry["reason"] = json!(reason);
    }
    if !message.is_empty() {
        entry["message"] = json!(message);
    }
    entry
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
