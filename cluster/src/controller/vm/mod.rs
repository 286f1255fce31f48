//! VirtualMachine → VirtualMachineInstance.
//!
//! `decide` says what has to be done, `printable` how the state is called, and this file does it.
//! docs/cluster-controllers.md has the table of states.

mod decide;
mod dump;
mod live;
mod printable;
mod volumes;

use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::runtime::controller;
use podvisor_cluster_types::FieldPath;
use podvisor_cluster_types::vm::Matcher;
use serde_json::{Value, json};

pub use decide::{Action, Decision, Observed, RunStrategy, decide};
pub use volumes::Volumes;

use super::claims::is_filled;
use super::error::{Error, code, is_gone};
use super::machines::{
    GENERATION_ANNOTATION, generation_of, owner_reference, revision_name, revision_of,
};
use super::{Context, expectations, patch, snapshot};
use crate::instancetypes::{self, ExpandError};
use crate::objects::{
    Condition, DataVolume, VM_FINALIZER, VMI_FINALIZER, VirtualMachine, VirtualMachineInstance,
    VmStatus, set_condition,
};

/// Label of an instance: the name of its virtual machine.
const VM_LABEL: &str = "kubevirt.io/vm";

/// Brings a virtual machine one step nearer to what is asked of it.
pub(super) async fn reconcile(
    observed: Arc<VirtualMachine>,
    context: Arc<Context>,
) -> Result<controller::Action, Error> {
    context.check().await?;
    let vmi = context.world.vmi(&observed);
    if context.expectations.are_pending(&*observed, vmi.as_deref()) {
        return Ok(controller::Action::requeue(expectations::LIMIT));
    }
    let started_with = match &vmi {
        Some(vmi) => started_with(&observed, vmi, &context).await?,
        None => None,
    };
    let namespace = observed.metadata.namespace.as_deref().unwrap_or_default();
    let volumes = volumes::of(
        &observed,
        &|name| context.world.volume(namespace, name),
        &|name| {
            let claim = context.world.claim_of(namespace, name);
            claim.is_some_and(|claim| is_filled(&claim))
        },
    );
    let now = Time(Timestamp::now());
    let mut decision = decide(&Observed {
        vm: &observed,
        vmi: vmi.as_deref(),
        started_with: started_with.as_deref(),
        is_live: context.is_live(),
        volumes: &volumes,
        now: now.clone(),
        jitter: context.jitter(),
    });
    snapshot_statuses(&observed, &mut decision.status, &context).await?;
    let again = decision.again;
    let dump = dump::decide(&observed, vmi.as_deref(), &now);
    if let Some(dump) = &dump {
        dump.write(&mut decision.status);
    }
    let vm = carry_out(&observed, vmi.as_deref(), decision, &context).await?;
    if let Some(dump) = dump {
        dump.carry_out(&vm, vmi.as_deref(), &context).await?;
    }
    Ok(match again {
        Some(wait) => controller::Action::requeue(wait),
        None => controller::Action::await_change(),
    })
}

/// Says of which volumes snapshots can be taken.
async fn snapshot_statuses(
    vm: &VirtualMachine,
    status: &mut VmStatus,
    context: &Context,
) -> Result<(), Error> {
    const NAME: &str = "volumeSnapshotStatuses";
    if vm.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
    let classes = match snapshot::has_claims(vm) {
        true => context.classes().await,
        false => Ok(Arc::default()),
    };
    let classes = classes.map_err(|source| Error::request("look for classes for", vm, source))?;
    let claim = |name: &str| context.world.claim_of(namespace, name);
    let statuses = snapshot::statuses(vm, &claim, &classes);
    match statuses.is_empty() {
        true => status.rest.remove(NAME),
        false => status.rest.insert(NAME.to_owned(), Value::from(statuses)),
    };
    Ok(())
}

/// Returns the virtual machine as it is then.
async fn carry_out(
    observed: &VirtualMachine,
    vmi: Option<&VirtualMachineInstance>,
    mut decision: Decision,
    context: &Context,
) -> Result<VirtualMachine, Error> {
    let namespace = observed.metadata.namespace.as_deref().unwrap_or_default();
    let api: Api<VirtualMachine> = context.world.api(namespace);
    let mut vm = observed.clone();
    if decision.actions.contains(&Action::AddFinalizer) {
        let change = patch::finalizer(&vm, VM_FINALIZER, true);
        vm = patch::object(&api, &vm, change).await?;
        context.expectations.wrote(&vm);
    }
    let before = vm.status.clone();
    // The instance that is made now leads to the next look, and to a status with it. Only what
    // must not be forgotten meanwhile is written before.
    let starts = decision
        .actions
        .iter()
        .any(|action| matches!(action, Action::Start { .. }));
    let is_known = before.state_change_requests == decision.status.state_change_requests
        && before.start_failure == decision.status.start_failure;
    if !(starts && is_known)
        && let Some(written) = patch::status(&api, &vm, &before, &decision.status).await?
    {
        vm = written;
        context.expectations.wrote(&vm);
    }
    for action in std::mem::take(&mut decision.actions) {
        match action {
            Action::AddFinalizer => {}
            Action::CreateVolume(volume) => {
                create_volume(&api, &vm, &volume, &decision.status, context).await?;
            }
            Action::RemoveFinalizer => {
                let change = patch::finalizer(&vm, VM_FINALIZER, false);
                vm = patch::object(&api, &vm, change).await?;
            }
            Action::Start { paused } => {
                start(&api, &vm, paused, &decision.status, context).await?;
            }
            Action::Stop { uid } => {
                if let Some(vmi) = vmi {
                    stop(&vm, vmi, uid, context).await?;
                }
            }
            Action::Orphan => {
                if let Some(vmi) = vmi {
                    orphan(&vm, vmi, context).await?;
                }
            }
            Action::Change(change) => {
                if let Some(vmi) = vmi {
                    let instances: Api<VirtualMachineInstance> = context.world.api(namespace);
                    let changed = patch::object(&instances, vmi, change).await?;
                    context.expectations.made(&vm, &changed);
                    let note = "Gave the instance the CPUs and the memory of the template";
                    context
                        .event(&vm, "SuccessfulUpdate", "Update", note.to_owned())
                        .await;
                }
            }
            Action::SwitchToAlways => {
                let change = match vm.spec.run_strategy {
                    Some(_) => json!({"spec": {"runStrategy": "Always"}}),
                    None => json!({"spec": {"running": true}}),
                };
                vm = patch::object(&api, &vm, change).await?;
            }
        }
    }
    Ok(vm)
}

/// Makes a DataVolume of a virtual machine. Its name is given: what was done before this controller
/// was killed is not done twice.
async fn create_volume(
    api: &Api<VirtualMachine>,
    vm: &VirtualMachine,
    volume: &DataVolume,
    wanted: &VmStatus,
    context: &Context,
) -> Result<(), Error> {
    let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
    let volumes: Api<DataVolume> = context.world.api(namespace);
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    match volumes.create(&PostParams::default(), volume).await {
        Ok(_) => {
            let note = format!("Created the DataVolume {name}");
            let reason = "SuccessfulDataVolumeCreate";
            context.event(vm, reason, "Create", note).await;
            Ok(())
        }
        Err(error) if code(&error) == Some(409) => Ok(()),
        Err(error) => {
            let mut status = wanted.clone();
            let message = format!("the DataVolume {name} cannot be made: {error}");
            set_failure(&mut status, "FailedCreate", message.clone());
            let written = patch::status(api, vm, &vm.status, &status).await?;
            if written.is_some() {
                let reason = "FailedDataVolumeCreate";
                context.warn(vm, reason, "Create", message).await;
            }
            Err(Error::request("make a DataVolume of", vm, error))
        }
    }
}

/// Returns the template's specification that an instance was started with, if the virtual
/// machine has changed since.
async fn started_with(
    vm: &VirtualMachine,
    vmi: &VirtualMachineInstance,
    context: &Context,
) -> Result<Option<Arc<Value>>, Error> {
    let Some(revision) = revision_of(vmi) else {
        return Ok(None);
    };
    if generation_of(vmi) == vm.metadata.generation {
        return Ok(None);
    }
    if let Some(known) = context.revision(&revision) {
        return Ok(known);
    }
    let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
    let api: Api<ControllerRevision> = context.world.api(namespace);
    let found = api
        .get_opt(&revision)
        .await
        .map_err(|source| Error::request("read the revision of", vm, source))?;
    let template = found
        .and_then(|found| found.data)
        .map(|RawExtension(data)| Arc::new(data["spec"]["template"]["spec"].clone()));
    context.keep_revision(revision, template.clone());
    Ok(template)
}

/// Stores the specification, and makes an instance of it. Both names are given: what was done
/// before this controller was killed is not done twice.
async fn start(
    api: &Api<VirtualMachine>,
    vm: &VirtualMachine,
    paused: bool,
    wanted: &VmStatus,
    context: &Context,
) -> Result<(), Error> {
    let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
    let revisions: Api<ControllerRevision> = context.world.api(namespace);
    let is_there = |error: &kube::Error| code(error) == Some(409);
    match revisions
        .create(&PostParams::default(), &revision(vm))
        .await
    {
        Err(error) if !is_there(&error) => {
            return Err(Error::request("store the revision of", vm, error));
        }
        _ => {}
    }
    let made = match expanded(vm, paused, context).await {
        Ok(made) => made,
        Err(error) => {
            let mut status = wanted.clone();
            set_failure(&mut status, "FailedFindInstancetype", error.to_string());
            patch::status(api, vm, &vm.status, &status).await?;
            return Err(Error::expand(vm, error));
        }
    };
    let instances: Api<VirtualMachineInstance> = context.world.api(namespace);
    match instances.create(&PostParams::default(), &made).await {
        Ok(vmi) => {
            context.expectations.made(vm, &vmi);
            let name = vmi.metadata.name.unwrap_or_default();
            let note = format!("Started the virtual machine by creating the instance {name}");
            context.event(vm, "SuccessfulCreate", "Create", note).await;
            drop_revision(vm, &revisions).await;
            Ok(())
        }
        Err(error) if is_there(&error) => Ok(()),
        Err(error) => {
            let mut status = wanted.clone();
            set_failure(&mut status, "FailedCreate", error.to_string());
            patch::status(api, vm, &vm.status, &status).await?;
            Err(Error::request("make the instance of", vm, error))
        }
    }
}

/// Records why there is no instance.
fn set_failure(status: &mut VmStatus, reason: &str, message: String) {
    let failure = Condition {
        reason: reason.to_owned(),
        message,
        ..Condition::yes("Failure")
    };
    set_condition(&mut status.conditions, failure, &Time(Timestamp::now()));
}

/// Returns an instance of a virtual machine, with its instance type and its preference applied.
async fn expanded(
    vm: &VirtualMachine,
    paused: bool,
    context: &Context,
) -> Result<VirtualMachineInstance, ExpandError> {
    let mut made = instance(vm, paused);
    let matcher = |name: &str| -> Option<Matcher> {
        let value = vm.spec.rest.get(name).filter(|value| !value.is_null())?;
        // What cannot be read names nothing, which is refused as such.
        Some(serde_json::from_value(value.clone()).unwrap_or_default())
    };
    let (instancetype, preference) = (matcher("instancetype"), matcher("preference"));
    if instancetype.is_none() && preference.is_none() {
        return Ok(made);
    }
    let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
    let found = instancetypes::find(
        context.world.client(),
        namespace,
        instancetype.as_ref(),
        preference.as_ref(),
        &FieldPath::new("spec"),
    )
    .await?;
    found.apply_to(&mut made.spec, &FieldPath::new("spec.template.spec"))?;
    let annotations = made.metadata.annotations.get_or_insert_default();
    for (name, value) in found.annotations() {
        annotations.entry(name).or_insert(value);
    }
    Ok(made)
}

/// Drops the revision that the last instance was made of, unless it is still the current one. It
/// is no harm if that fails: all go with the virtual machine.
async fn drop_revision(vm: &VirtualMachine, revisions: &Api<ControllerRevision>) {
    let (Some(uid), Some(last)) = (&vm.metadata.uid, vm.status.observed_generation) else {
        return;
    };
    if vm.status.created && Some(last) != vm.metadata.generation {
        let name = revision_name(uid, last);
        let _ = revisions.delete(&name, &DeleteParams::default()).await;
    }
}

fn revision(vm: &VirtualMachine) -> ControllerRevision {
    let uid = vm.metadata.uid.as_deref().unwrap_or_default();
    let generation = vm.metadata.generation.unwrap_or_default();
    ControllerRevision {
        metadata: ObjectMeta {
            name: Some(revision_name(uid, generation)),
            namespace: vm.metadata.namespace.clone(),
            owner_references: Some(vec![owner_reference(vm)]),
            ..ObjectMeta::default()
        },
        data: Some(RawExtension(json!({"spec": vm.spec}))),
        revision: generation,
    }
}

/// Returns an instance of a virtual machine.
fn instance(vm: &VirtualMachine, paused: bool) -> VirtualMachineInstance {
    let template = vm.spec.template.clone().unwrap_or_default();
    let of_template = template.metadata.unwrap_or_default();
    let name = vm.metadata.name.clone().unwrap_or_default();
    let mut labels = of_template.labels.unwrap_or_default();
    labels.insert(VM_LABEL.into(), name.chars().take(63).collect());
    let mut annotations = of_template.annotations.unwrap_or_default();
    let generation = vm.metadata.generation.unwrap_or_default();
    annotations.insert(GENERATION_ANNOTATION.into(), generation.to_string());
    let metadata = ObjectMeta {
        name: Some(name),
        namespace: vm.metadata.namespace.clone(),
        labels: Some(labels),
        annotations: Some(annotations),
        finalizers: Some(vec![VMI_FINALIZER.to_owned()]),
        owner_references: Some(vec![owner_reference(vm)]),
        ..ObjectMeta::default()
    };
    let mut spec = template.spec;
    if paused && let Some(spec) = spec.as_object_mut() {
        spec.insert("startStrategy".into(), "Paused".into());
    }
    if let Some(Value::Array(volumes)) = spec.get_mut("volumes") {
        // They come when a dump is asked for.
        volumes.retain(|volume| volume.get("memoryDump").is_none());
    }
    set_uuid(&mut spec, vm.metadata.uid.as_deref());
    VirtualMachineInstance::new(metadata, spec)
}

/// Gives the machine the same identity at each start: that of the object, if the user chose none.
fn set_uuid(spec: &mut Value, uid: Option<&str>) {
    let (Some(uid), Some(spec)) = (uid, spec.as_object_mut()) else {
        return;
    };
    let domain = spec.entry("domain").or_insert_with(|| json!({}));
    let Some(domain) = domain.as_object_mut() else {
        return;
    };
    let firmware = domain.entry("firmware").or_insert_with(|| json!({}));
    if let Some(firmware) = firmware.as_object_mut() {
        firmware.entry("uuid").or_insert_with(|| uid.into());
    }
}

async fn stop(
    vm: &VirtualMachine,
    vmi: &VirtualMachineInstance,
    uid: String,
    context: &Context,
) -> Result<(), Error> {
    let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
    let name = vmi.metadata.name.clone().unwrap_or_default();
    let params = DeleteParams::background().preconditions(Preconditions {
        uid: Some(uid),
        resource_version: None,
    });
    let api: Api<VirtualMachineInstance> = context.world.api(namespace);
    match api.delete(&name, &params).await {
        Ok(_) => {
            let note = format!("Stopped the virtual machine by deleting the instance {name}");
            context.event(vm, "SuccessfulDelete", "Delete", note).await;
            Ok(())
        }
        Err(error) if is_gone(&error) => Ok(()),
        Err(error) => Err(Error::request("delete the instance of", vm, error)),
    }
}

async fn orphan(
    vm: &VirtualMachine,
    vmi: &VirtualMachineInstance,
    context: &Context,
) -> Result<(), Error> {
    let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
    let mut owners = vmi.metadata.owner_references.clone().unwrap_or_default();
    owners.retain(|owner| Some(&owner.uid) != vm.metadata.uid.as_ref());
    let change = json!({"metadata": {"ownerReferences": owners}});
    let api: Api<VirtualMachineInstance> = context.world.api(namespace);
    patch::object(&api, vmi, change).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(value: Value) -> VirtualMachine {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn an_instance_has_what_its_template_says_and_a_stable_identity() {
        let vm = vm(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": "a", "namespace": "n", "uid": "u", "generation": 3},
            "spec": {"template": {
                "metadata": {"labels": {"l": "1"}, "annotations": {"x": "2"}},
                "spec": {
                    "domain": {"memory": {"guest": "1Gi"}}, "unknown": 1,
                    "volumes": [{"name": "d", "memoryDump": {"claimName": "d"}}],
                },
            }},
        }));
        let vmi = instance(&vm, true);
        assert_eq!(vmi.spec["domain"]["firmware"]["uuid"], "u");
        assert_eq!(vmi.spec["startStrategy"], "Paused");
        assert_eq!(vmi.spec["unknown"], 1);
        assert_eq!(vmi.spec["volumes"], json!([]), "dumps are asked for");
        let meta = &vmi.metadata;
        assert_eq!(meta.labels.as_ref().unwrap()["l"], "1");
        assert_eq!(meta.annotations.as_ref().unwrap()["x"], "2");
        assert_eq!(generation_of(&vmi), Some(3));
        assert_eq!(revision_of(&vmi).as_deref(), Some("revision-start-vm-u-3"));
        assert_eq!(
            revision(&vm).metadata.name.as_deref(),
            Some("revision-start-vm-u-3")
        );
    }

    #[test]
    fn a_users_own_uuid_is_kept() {
        let mut spec = json!({"domain": {"firmware": {"uuid": "own"}}});
        set_uuid(&mut spec, Some("u"));
        assert_eq!(spec["domain"]["firmware"]["uuid"], "own");
        // What is no object is refused later, by its path.
        let mut spec = json!({"domain": "wrong"});
        set_uuid(&mut spec, Some("u"));
        assert_eq!(spec, json!({"domain": "wrong"}));
    }
}
