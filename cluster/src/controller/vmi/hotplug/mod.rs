//! Volumes that are plugged into an instance while its VM runs, and unplugged again; and claims to
//! which its memory is dumped.
//!
//! `decide` says what has to be done, `keeper` what the pods are that keep claims on the VM's node,
//! and this file does it: pods by the API server, disks by the node. What it asks for may be asked
//! for twice, so that a controller that is killed anywhere continues from the status.

mod decide;
mod keeper;

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use podvisor_cluster_types::vmi::Volume;
use serde_json::{Value, json};

use super::pod;
use crate::contact::disks::{
    DumpAnswer, DumpRequest, DumpState, PlugRequest, UnplugAnswer, UnplugRequest,
};
use crate::controller::error::{Error, code, is_gone};
use crate::controller::instances::entries;
use crate::controller::nodes::CallError;
use crate::controller::{Context, patch};
use crate::objects::VirtualMachineInstance;
pub(in crate::controller) use decide::plugs_at;
use decide::{Action, Observed, Step, decide, dump_failed, is_of, target};

/// Seconds that a guest has to release a disk, after which it is taken away.
const RELEASE_LIMIT: u32 = 20;

/// When a node is asked again how far a dump is.
const PROGRESS: Duration = Duration::from_secs(2);

/// When a node is asked again that did not do it.
const RETRY: Duration = Duration::from_secs(5);

/// Brings the volumes that are plugged into an instance nearer to what its specification says;
/// returns when to look again, if nothing else leads to it.
pub(super) async fn keep(
    vmi: &VirtualMachineInstance,
    pod: Option<&Pod>,
    pods: &Api<Pod>,
    context: &Context,
) -> Result<Option<Duration>, Error> {
    let Ok(spec) = pod::specification(vmi) else {
        return Ok(None);
    };
    let keepers = context.world.keepers_of(vmi);
    let before = entries(vmi);
    let is_reported = before
        .iter()
        .any(|entry| entry.get("hotplugVolume").is_some());
    if keepers.is_empty() && !is_reported && !spec.volumes.iter().any(Volume::is_hotpluggable) {
        return Ok(None);
    }
    let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
    let decision = decide(&Observed {
        vmi,
        spec: &spec,
        pod,
        keepers: &keepers,
        claim: &|claim| context.world.claim(namespace, claim),
        volume: &|name| Some(context.world.volume(namespace, name)?.state()),
        now: Time(Timestamp::now()),
    });
    let unplugs = |action: &Action| matches!(action, Action::Unplug { .. });
    let mut turn = Turn {
        vmi: vmi.clone(),
        entries: decision.entries,
        before,
        retry: None,
    };
    if decision.actions.iter().any(unplugs) {
        // It takes the guest a while.
        turn.report(context).await?;
    }
    let mut failed = None;
    let waits = |action: &Action| matches!(action, Action::Plug { .. } | Action::Unplug { .. });
    let share = match decision.actions.iter().any(waits) {
        true => context.waiting.disks.take(namespace),
        false => None,
    };
    for action in decision.actions {
        if share.is_none() && waits(&action) {
            // Others of the namespace wait for their guests: its turn comes.
            turn.retry = Some(RETRY);
            continue;
        }
        if let Err(error) = turn.carry_out(action, pods, context).await {
            failed = Some(error);
        }
    }
    turn.report(context).await?;
    match failed {
        Some(error) => Err(error),
        None => Ok(turn.retry),
    }
}

/// One look at an instance's volumes.
struct Turn {
    vmi: VirtualMachineInstance,
    entries: Vec<Value>,
    /// What was reported at first.
    before: Vec<Value>,
    retry: Option<Duration>,
}

impl Turn {
    /// Writes what is known into the status.
    async fn report(&mut self, context: &Context) -> Result<(), Error> {
        let namespace = self.vmi.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<VirtualMachineInstance> = context.world.api(namespace);
        let mut status = self.vmi.status.clone();
        let list = json!(self.entries);
        status.rest.insert("volumeStatus".to_owned(), list);
        let written = patch::status(&api, &self.vmi, &self.vmi.status, &status).await?;
        if let Some(written) = written {
            context.expectations.wrote(&written);
            self.vmi = written;
        }
        Ok(())
    }

    async fn carry_out(
        &mut self,
        action: Action,
        pods: &Api<Pod>,
        context: &Context,
    ) -> Result<(), Error> {
        match action {
            Action::Keep(pod) => match pods.create(&PostParams::default(), &pod).await {
                Ok(made) => {
                    let name = made.metadata.name.unwrap_or_default();
                    let note = format!("Created the pod {name}, which keeps a volume");
                    context
                        .event(&self.vmi, "SuccessfulCreate", "Create", note)
                        .await;
                    Ok(())
                }
                // It was made before, and is not seen yet.
                Err(error) if code(&error) == Some(409) => {
                    self.retry = Some(RETRY);
                    Ok(())
                }
                Err(error) => {
                    let name = &pod.metadata.name;
                    let keeps = |entry: &&mut Value| {
                        entry["hotplugVolume"]["attachPodName"].as_str() == name.as_deref()
                    };
                    if let Some(entry) = self.entries.iter_mut().find(keeps) {
                        entry["phase"] = json!(Step::Pending.word());
                        entry["reason"] = json!("FailedCreate");
                        entry["message"] = json!(error.to_string());
                    }
                    let what = "make a pod that keeps a volume of";
                    Err(Error::request(what, &self.vmi, error))
                }
            },
            Action::Release { name, uid } => {
                let mut params = DeleteParams::background();
                params.preconditions = Some(Preconditions {
                    uid: Some(uid),
                    resource_version: None,
                });
                match pods.delete(&name, &params).await {
                    Ok(_) => Ok(()),
                    Err(error) if is_gone(&error) => Ok(()),
                    Err(error) => {
                        let what = "delete a pod that keeps a volume of";
                        Err(Error::request(what, &self.vmi, error))
                    }
                }
            }
            Action::Plug {
                volume,
                serial,
                keeper,
            } => {
                let with = PlugRequest { pod_uid: keeper };
                match context.nodes.change(&self.vmi, "disks/plug", &with).await {
                    Ok(_) => {
                        self.write(&volume, Step::Ready, |entry| {
                            entry["target"] = json!(target(&serial));
                        });
                        let note = format!("Volume {volume} is plugged in, as {serial}");
                        context.event(&self.vmi, "VolumeReady", "Plug", note).await;
                    }
                    Err(error) => self.failed(&volume, &error, context).await,
                }
                Ok(())
            }
            Action::Dump {
                volume,
                file,
                keeper,
            } => {
                self.dump(&volume, file, keeper, context).await;
                Ok(())
            }
            Action::Unplug { volume, serial } => {
                let with = UnplugRequest {
                    serial,
                    limit_seconds: RELEASE_LIMIT,
                };
                match context.nodes.change(&self.vmi, "disks/unplug", &with).await {
                    Ok(answer) => {
                        self.write(&volume, Step::Unmounted, |entry| {
                            entry["target"] = json!("");
                        });
                        let answer: UnplugAnswer =
                            serde_json::from_value(answer).unwrap_or_default();
                        self.tell_unplugged(&volume, answer.is_forced, context)
                            .await;
                    }
                    Err(error) => self.failed(&volume, &error, context).await,
                }
                Ok(())
            }
        }
    }

    /// Has the node dump the memory, or tells what has become of that.
    async fn dump(&mut self, volume: &str, file: String, keeper: String, context: &Context) {
        let with = DumpRequest {
            pod_uid: keeper,
            file: file.clone(),
        };
        let answer = context.nodes.change(&self.vmi, "disks/dump", &with).await;
        let answer = answer.map(|answer| {
            // What cannot be read says nothing, and is asked for again.
            serde_json::from_value::<DumpAnswer>(answer).unwrap_or_default()
        });
        let now = Time(Timestamp::now());
        let why = match answer {
            Ok(answer) if answer.state == DumpState::Writing => {
                self.retry = Some(PROGRESS);
                if let Some(percent) = (answer.done * 100).checked_div(answer.total) {
                    let message = format!("{percent} % of the memory is written");
                    self.change(volume, |entry| {
                        entry["message"] = json!(message);
                        if let Some(entry) = entry.as_object_mut() {
                            entry.remove("reason");
                        }
                    });
                }
                return;
            }
            Ok(answer) if answer.state == DumpState::Done => {
                self.write(volume, Step::Dumped, |entry| {
                    entry["memoryDumpVolume"]["endTimestamp"] = json!(now);
                });
                let note = format!("The memory is dumped to the file {file} of volume {volume}");
                context
                    .event(&self.vmi, "MemoryDumpCompleted", "Dump", note)
                    .await;
                return;
            }
            Ok(answer) => answer.message,
            Err(CallError::Refused(why)) => why,
            Err(error @ CallError::Unreachable(_)) => {
                return self.failed(volume, &error, context).await;
            }
        };
        self.change(volume, |entry| dump_failed(entry, &why, &now));
        let note = format!("The memory is not dumped to volume {volume}: {why}");
        context
            .warn(&self.vmi, "MemoryDumpError", "Dump", note)
            .await;
    }

    fn write(&mut self, volume: &str, step: Step, change: impl FnOnce(&mut Value)) {
        let entry = self.entries.iter_mut().find(|entry| is_of(entry, volume));
        let Some(entry) = entry else { return };
        entry["phase"] = json!(step.word());
        if let Some(entry) = entry.as_object_mut() {
            entry.remove("reason");
            entry.remove("message");
        }
        change(entry);
    }

    fn change(&mut self, volume: &str, change: impl FnOnce(&mut Value)) {
        let entry = self.entries.iter_mut().find(|entry| is_of(entry, volume));
        if let Some(entry) = entry {
            change(entry);
        }
    }

    /// The node did not do it, and is asked again.
    async fn failed(&mut self, volume: &str, error: &CallError, context: &Context) {
        self.retry = Some(RETRY);
        let reason = match error {
            CallError::Refused(_) => "HotplugFailed",
            CallError::Unreachable(_) => "NodeUnresponsive",
        };
        let message = error.to_string();
        let known = self
            .before
            .iter()
            .any(|entry| is_of(entry, volume) && entry.get("message") == Some(&json!(message)));
        let entry = self.entries.iter_mut().find(|entry| is_of(entry, volume));
        if let Some(entry) = entry {
            entry["reason"] = json!(reason);
            entry["message"] = json!(message);
        }
        if !known {
            let note = format!("Volume {volume}: {message}");
            context.warn(&self.vmi, reason, "Plug", note).await;
        }
    }

    async fn tell_unplugged(&self, volume: &str, is_forced: bool, context: &Context) {
        match is_forced {
            false => {
                let note = format!("Volume {volume} is unplugged");
                context
                    .event(&self.vmi, "VolumeUnplugged", "Unplug", note)
                    .await;
            }
            true => {
                let note = format!(
                    "Volume {volume} was taken away: the guest did not release it within \
                     {RELEASE_LIMIT} s"
                );
                context
                    .warn(&self.vmi, "VolumeForciblyUnplugged", "Unplug", note)
                    .await;
            }
        }
    }
}
