//! Dumps of a virtual machine's memory: how the request in its status goes on. A pure function of
//! the objects, and what carries its decision out.
//!
//! The claim becomes a volume of the template, where it stays, and of the instance, whose node then
//! writes the dump and reports it in `volumeStatus`; it leaves the instance when that is over.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Api;
use kube::api::{Patch, PatchParams};
use podvisor_cluster_types::memory_dump::{MemoryDumpPhase, MemoryDumpRequest};
use serde_json::{Value, json};

use crate::controller::error::{Error, is_gone};
use crate::controller::{Context, patch};
use crate::objects::{
    MEMORY_DUMP_ANNOTATION, Phase, VirtualMachine, VirtualMachineInstance, VmStatus,
};

/// The field of the status.
const REQUEST: &str = "memoryDumpRequest";

/// What is written on a claim instead of the last dump's name.
const NONE: &str = "Memory dump failed";

/// What is to be written and done.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Decision {
    /// What becomes of the request.
    request: Option<MemoryDumpRequest>,
    /// The template's volumes, if they change.
    template: Option<Value>,
    /// The instance's volumes, if they change.
    instance: Option<Value>,
    /// A claim, and what is to be written on it.
    claim: Option<(String, String)>,
}

/// Decides; `None` if nothing was asked for.
pub(super) fn decide(
    vm: &VirtualMachine,
    vmi: Option<&VirtualMachineInstance>,
    now: &Time,
) -> Option<Decision> {
    let request = vm.status.rest.get(REQUEST)?;
    let request: MemoryDumpRequest = serde_json::from_value(request.clone()).ok()?;
    let seen = Seen::of(vm, vmi, &request.claim_name);
    let mut decision = Decision {
        request: Some(request.clone()),
        ..Decision::default()
    };
    if vm.metadata.deletion_timestamp.is_none() {
        go_on(&mut decision, &seen, now);
    }
    Some(decision)
}

/// What is seen of a claim.
struct Seen<'a> {
    /// The guest runs.
    runs: bool,
    template: &'a [Value],
    instance: &'a [Value],
    claim: &'a str,
    /// What is reported of it.
    entry: Option<&'a Value>,
}

impl<'a> Seen<'a> {
    fn of(vm: &'a VirtualMachine, vmi: Option<&'a VirtualMachineInstance>, claim: &'a str) -> Self {
        fn list(value: Option<&Value>) -> &[Value] {
            let list = value.and_then(Value::as_array);
            list.map(Vec::as_slice).unwrap_or_default()
        }
        let template = vm.spec.template.as_ref();
        let status = vmi.and_then(|vmi| vmi.status.rest.get("volumeStatus"));
        Self {
            runs: vmi.is_some_and(|vmi| {
                vmi.status.phase == Phase::Running && vmi.metadata.deletion_timestamp.is_none()
            }),
            template: list(template.and_then(|template| template.spec.get("volumes"))),
            instance: list(vmi.and_then(|vmi| vmi.spec.get("volumes"))),
            claim,
            entry: list(status).iter().find(|entry| entry["name"] == claim),
        }
    }

    fn has(&self, volumes: &[Value]) -> bool {
        volumes.iter().any(|volume| volume["name"] == self.claim)
    }

    fn with(&self, volumes: &[Value]) -> Option<Value> {
        (!self.has(volumes)).then(|| {
            let source = json!({"claimName": self.claim, "hotpluggable": true});
            let volume = json!({"name": self.claim, "memoryDump": source});
            Value::from([volumes, &[volume]].concat())
        })
    }

    fn without(&self, volumes: &[Value]) -> Option<Value> {
        self.has(volumes).then(|| {
            let others = volumes.iter().filter(|volume| volume["name"] != self.claim);
            others.cloned().collect()
        })
    }

    /// The phase of the dump, as the node has reported it.
    fn dump(&self) -> &str {
        self.entry
            .and_then(|entry| entry["phase"].as_str())
            .unwrap_or_default()
    }

    /// Whether the dump that is reported is over.
    fn is_over(&self) -> bool {
        matches!(self.dump(), "MemoryDumpCompleted" | "MemoryDumpFailed")
    }
}

fn go_on(decision: &mut Decision, seen: &Seen<'_>, now: &Time) {
    let Some(request) = &mut decision.request else {
        return;
    };
    if request.remove {
        request.phase = MemoryDumpPhase::Dissociating;
    }
    let report = |name: &str| {
        let value = &seen.entry?["memoryDumpVolume"][name];
        value.as_str().map(str::to_owned)
    };
    let text = |value: &Time| json!(value).as_str().map(str::to_owned);
    match request.phase {
        MemoryDumpPhase::Associating | MemoryDumpPhase::InProgress
            if !seen.runs && !seen.is_over() =>
        {
            fail(request, "the virtual machine does not run", text(now));
        }
        MemoryDumpPhase::Associating => {
            if seen.is_over() {
                // It is the dump before: the claim comes anew.
                decision.instance = seen.without(seen.instance);
            } else if seen.has(seen.instance) && seen.has(seen.template) {
                request.phase = MemoryDumpPhase::InProgress;
            } else if seen.has(seen.instance) || seen.entry.is_none() {
                decision.template = seen.with(seen.template);
                decision.instance = seen.with(seen.instance);
            }
        }
        MemoryDumpPhase::InProgress => {
            request.start_timestamp = report("startTimestamp");
            match seen.dump() {
                "MemoryDumpCompleted" => {
                    request.phase = MemoryDumpPhase::Unmounting;
                    request.end_timestamp = report("endTimestamp");
                    request.file_name = report("targetFileName");
                }
                "MemoryDumpFailed" => {
                    let message = seen.entry.and_then(|entry| entry["message"].as_str());
                    let message = message.unwrap_or_default().to_owned();
                    fail(request, &message, report("endTimestamp"));
                }
                _ if !seen.has(seen.instance) => {
                    let why = "the claim was taken from the virtual machine";
                    fail(request, why, text(now));
                }
                _ => {}
            }
        }
        MemoryDumpPhase::Unmounting | MemoryDumpPhase::Failed => {
            let text = match request.phase {
                MemoryDumpPhase::Unmounting => request.file_name.clone(),
                _ => Some(NONE.to_owned()),
            };
            decision.claim = text.map(|text| (request.claim_name.clone(), text));
            decision.instance = seen.without(seen.instance);
            let is_gone = !seen.has(seen.instance) && seen.entry.is_none();
            if request.phase == MemoryDumpPhase::Unmounting && (is_gone || !seen.runs) {
                request.phase = MemoryDumpPhase::Completed;
            }
        }
        MemoryDumpPhase::Dissociating => {
            if seen.runs && seen.dump() == "MemoryDumpInProgress" {
                // Who writes the file has the claim until then.
                return;
            }
            decision.instance = seen.without(seen.instance);
            decision.template = seen.without(seen.template);
            let is_gone = !seen.runs || (!seen.has(seen.instance) && seen.entry.is_none());
            if is_gone && !seen.has(seen.template) {
                decision.request = None;
            }
        }
        _ => {}
    }
}

fn fail(request: &mut MemoryDumpRequest, why: &str, at: Option<String>) {
    request.phase = MemoryDumpPhase::Failed;
    request.message = why.to_owned();
    request.end_timestamp = at;
}

impl Decision {
    /// Writes into a status what becomes of the request.
    pub(super) fn write(&self, status: &mut VmStatus) {
        match self.request.as_ref().map(|request| json!(request)) {
            Some(request) => status.rest.insert(REQUEST.to_owned(), request),
            None => status.rest.remove(REQUEST),
        };
    }

    /// Changes the volumes, of the virtual machine as it is now and of its instance as it was seen.
    pub(super) async fn carry_out(
        self,
        vm: &VirtualMachine,
        vmi: Option<&VirtualMachineInstance>,
        context: &Context,
    ) -> Result<(), Error> {
        let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
        if let Some(volumes) = self.template {
            let api: Api<VirtualMachine> = context.world.api(namespace);
            let change = json!({"spec": {"template": {"spec": {"volumes": volumes}}}});
            let changed = patch::object(&api, vm, change).await?;
            context.expectations.wrote(&changed);
        }
        if let (Some(volumes), Some(vmi)) = (self.instance, vmi) {
            let api: Api<VirtualMachineInstance> = context.world.api(namespace);
            let change = json!({"spec": {"volumes": volumes}});
            let changed = patch::object(&api, vmi, change).await?;
            context.expectations.made(vm, &changed);
        }
        let Some((name, text)) = self.claim else {
            return Ok(());
        };
        let claim = context.world.claim_of(namespace, &name);
        let is_written = claim.is_none_or(|claim| {
            let annotations = claim.metadata.annotations.as_ref();
            annotations.and_then(|all| all.get(MEMORY_DUMP_ANNOTATION)) == Some(&text)
        });
        if is_written {
            return Ok(());
        }
        let api: Api<PersistentVolumeClaim> = context.world.api(namespace);
        let change = json!({"metadata": {"annotations": {MEMORY_DUMP_ANNOTATION: text}}});
        let (params, change) = (PatchParams::default(), Patch::Merge(change));
        match api.patch(&name, &params, &change).await {
            Ok(_) => Ok(()),
            Err(error) if is_gone(&error) => Ok(()),
            Err(error) => Err(Error::request(
                "annotate the claim of the dump of",
                vm,
                error,
            )),
        }
    }
}

#[cfg(test)]
#[path = "dump_tests.rs"]
mod tests;
