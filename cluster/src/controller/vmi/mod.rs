//! VirtualMachineInstance → pod.
//!
//! `decide` says what has to be done, `pod` and `volumes` what the pod is, and this file does it;
//! `hotplug` does the same for volumes that come while the VM runs, and `size` for CPUs and memory.
//! docs/cluster-controllers.md has the table of phases.

mod budget;
mod consumer;
mod decide;
mod decision;
mod evacuate;
mod filled;
mod hotplug;
mod links;
mod migratable;
mod pod;
mod pod_error;
mod size;
mod target;
mod volumes;

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::controller;
use podvisor_cluster_types::Quantity;
use serde_json::json;

pub use decide::decide;
pub(super) use decide::{container, node, terminated};
pub use decision::{Action, Decision, Observed, Other};
pub(super) use hotplug::plugs_at;
pub use migratable::{Method, Obstacle, migratable};
pub(super) use pod::without_plugged;
pub use pod::{CONTAINER, NO_IMAGE, name as pod_name, pod};
pub use pod_error::PodError;
pub use target::{name as target_name, target};
pub use volumes::{DEVICES, MOUNTS};

use super::error::{Error, code, is_gone};
use super::instances::is_of;
use super::{Context, expectations, patch};
use crate::objects::{
    MIGRATION_NAME_ANNOTATION, MIGRATION_UID_LABEL, MigrationState, NODE_NAME_LABEL, Phase,
    UNPAUSED_GATE, VMI_FINALIZER, VirtualMachineInstance, VirtualMachineInstanceMigration,
    VmiStatus,
};

/// Brings an instance one step nearer to what is asked of it.
pub(super) async fn reconcile(
    observed: Arc<VirtualMachineInstance>,
    context: Arc<Context>,
) -> Result<controller::Action, Error> {
    context.check().await?;
    let namespace = observed.metadata.namespace.clone().unwrap_or_default();
    let known = context.world.pod(&namespace, &active_pod(&observed));
    if context
        .expectations
        .are_pending(&*observed, known.as_deref())
    {
        return Ok(controller::Action::requeue(expectations::LIMIT));
    }
    let pods: Api<Pod> = context.world.api(&namespace);
    let pod = find_pod(&observed, known, &pods).await?;
    let others = others(&observed, pod.as_deref(), &context).await?;
    let decision = decide(&Observed {
        vmi: &observed,
        pod: pod.as_deref(),
        others: &others,
        is_migration_known: is_migration_known(&observed, &context).await?,
        claim: &|claim| context.world.claim(&namespace, claim),
        volume: &|name| Some(context.world.volume(&namespace, name)?.state()),
        now: Time(Timestamp::now()),
    });
    let vmi = carry_out(&observed, decision, &pods, &context).await?;
    let plugs = hotplug::keep(&vmi, pod.as_deref(), &pods, &context).await?;
    let sizes = size::keep(&vmi, pod.as_deref(), &pods, &context).await?;
    let links = links::keep(&vmi, &context).await?;
    keep_budget(&observed, &others, &context).await?;
    let evacuation = evacuate::evacuate(&observed, &context).await?;
    Ok(
        match [plugs, sizes, links, evacuation]
            .into_iter()
            .flatten()
            .min()
        {
            Some(wait) => controller::Action::requeue(wait),
            None => controller::Action::await_change(),
        },
    )
}

/// Brings the disruption budget of an instance into the state that it has to have.
async fn keep_budget(
    vmi: &VirtualMachineInstance,
    others: &[Other],
    context: &Context,
) -> Result<(), Error> {
    let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
    let name = budget::name(vmi);
    let found = context.world.budget(namespace, &name);
    let pods = 1 + others.iter().filter(|other| other.is_wanted).count();
    let api: Api<PodDisruptionBudget> = context.world.api(namespace);
    let result = match budget::change(vmi, pods, found.as_deref()) {
        None => return Ok(()),
        Some(budget::Change::Write(budget)) if found.is_none() => {
            api.create(&PostParams::default(), &budget).await.map(drop)
        }
        Some(budget::Change::Write(budget)) => api
            .replace(&name, &PostParams::default(), &budget)
            .await
            .map(drop),
        Some(budget::Change::Delete) => api
            .delete(&name, &DeleteParams::background())
            .await
            .map(drop),
    };
    match result {
        Ok(()) => Ok(()),
        // What is not seen yet leads to the next look.
        Err(error) if is_gone(&error) => Ok(()),
        Err(source) => Err(Error::request(
            "write the disruption budget of",
            vmi,
            source,
        )),
    }
}

/// Returns how much memory an instance's guest has.
pub(super) fn guest_memory_of(vmi: &VirtualMachineInstance) -> Option<Quantity> {
    let spec = pod::specification(vmi).ok()?;
    pod::guest_memory(&spec).cloned()
}

/// Returns the name of the pod that an instance is in.
#[must_use]
pub fn active_pod(vmi: &VirtualMachineInstance) -> String {
    let state = vmi.status.migration_state.as_ref();
    let moved = state.map(MigrationState::pod).filter(|pod| !pod.is_empty());
    moved.map_or_else(|| pod_name(vmi), str::to_owned)
}

/// Returns the pods of an instance that it is not in, and whether each is wanted.
async fn others(
    vmi: &VirtualMachineInstance,
    active: Option<&Pod>,
    context: &Context,
) -> Result<Vec<Other>, Error> {
    let active = active.and_then(|pod| pod.metadata.uid.as_deref());
    let mut others = Vec::new();
    for pod in context.world.pods_of(vmi) {
        if pod.metadata.uid.as_deref() == active || pod.metadata.name == Some(active_pod(vmi)) {
            continue;
        }
        let labels = pod.metadata.labels.as_ref();
        let migration = labels.and_then(|labels| labels.get(MIGRATION_UID_LABEL));
        let annotations = pod.metadata.annotations.as_ref();
        let name = annotations.and_then(|names| names.get(MIGRATION_NAME_ANNOTATION));
        let is_wanted = match (migration, name) {
            (Some(uid), Some(name)) => migration_goes_on(vmi, name, uid, context).await?,
            _ => false,
        };
        others.push(Other { pod, is_wanted });
    }
    Ok(others)
}

/// Whether the migration that an instance's status is about exists.
async fn is_migration_known(
    vmi: &VirtualMachineInstance,
    context: &Context,
) -> Result<bool, Error> {
    let state = vmi.status.migration_state.as_ref();
    let Some(state) = state.filter(|state| state.is_open()) else {
        return Ok(true);
    };
    let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
    let of_target = context.world.pod(namespace, &state.target_pod);
    let name = of_target.as_ref().and_then(|pod| {
        pod.metadata
            .annotations
            .as_ref()?
            .get(MIGRATION_NAME_ANNOTATION)
    });
    let known = context.world.migrations_of(vmi);
    if known
        .iter()
        .any(|migration| migration.metadata.uid.as_deref() == Some(&state.migration_uid))
    {
        return Ok(true);
    }
    match name {
        Some(name) => exists(vmi, name, &state.migration_uid, context)
            .await
            .map(|found| found.is_some()),
        None => Ok(false),
    }
}

/// Whether a migration is there and not over. That it is not there is asked of the API server: a
/// watch may be late, and its target's pod is deleted but once.
async fn migration_goes_on(
    vmi: &VirtualMachineInstance,
    name: &str,
    uid: &str,
    context: &Context,
) -> Result<bool, Error> {
    let known = context.world.migrations_of(vmi);
    let known = known
        .into_iter()
        .find(|migration| migration.metadata.uid.as_deref() == Some(uid));
    let found = match known {
        Some(migration) => Some((*migration).clone()),
        None => exists(vmi, name, uid, context).await?,
    };
    Ok(found.is_some_and(|migration| !migration.status.phase.is_final()))
}

async fn exists(
    vmi: &VirtualMachineInstance,
    name: &str,
    uid: &str,
    context: &Context,
) -> Result<Option<VirtualMachineInstanceMigration>, Error> {
    let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
    let api: Api<VirtualMachineInstanceMigration> = context.world.api(namespace);
    let found = api
        .get_opt(name)
        .await
        .map_err(|source| Error::request("look for the migration of", vmi, source))?;
    Ok(found.filter(|migration| migration.metadata.uid.as_deref() == Some(uid)))
}

/// Returns an instance's pod. That one which was there is gone is asked of the API server: a
/// watch may be late, and an instance fails but once.
async fn find_pod(
    vmi: &VirtualMachineInstance,
    known: Option<Arc<Pod>>,
    pods: &Api<Pod>,
) -> Result<Option<Arc<Pod>>, Error> {
    let is_deleted = vmi.metadata.deletion_timestamp.is_some();
    let expected = is_deleted
        || matches!(
            vmi.status.phase,
            Phase::Scheduling | Phase::Scheduled | Phase::Running
        );
    let pod = match known {
        None if expected => pods
            .get_opt(&active_pod(vmi))
            .await
            .map_err(|source| Error::request("look for the pod of", vmi, source))?
            .map(Arc::new),
        known => known,
    };
    Ok(pod.filter(|pod| is_of(pod, vmi)))
}

/// Does what was decided, and returns the instance as it is then.
async fn carry_out(
    observed: &VirtualMachineInstance,
    mut decision: Decision,
    pods: &Api<Pod>,
    context: &Context,
) -> Result<VirtualMachineInstance, Error> {
    let namespace = observed.metadata.namespace.as_deref().unwrap_or_default();
    let api: Api<VirtualMachineInstance> = context.world.api(namespace);
    let mut vmi = observed.clone();
    if decision.actions.contains(&Action::AddFinalizer) {
        let change = patch::finalizer(&vmi, VMI_FINALIZER, true);
        vmi = patch::object(&api, &vmi, change).await?;
        context.expectations.wrote(&vmi);
    }
    let before = vmi.status.clone();
    // The pod that is made now leads to the next look, and to a status with it.
    let creates = before.phase == Phase::Unset
        && decision
            .actions
            .iter()
            .any(|action| matches!(action, Action::CreatePod(_)));
    if !creates && let Some(written) = patch::status(&api, &vmi, &before, &decision.status).await? {
        let begins = before.phase != Phase::Running && written.status.phase == Phase::Running;
        vmi = written;
        context.expectations.wrote(&vmi);
        if begins {
            let note = format!("The virtual machine runs on {}", vmi.status.node_name);
            context.event(&vmi, "Started", "Start", note).await;
        }
    }
    for action in std::mem::take(&mut decision.actions) {
        match action {
            Action::AddFinalizer => {}
            Action::RemoveFinalizer => {
                let change = patch::finalizer(&vmi, VMI_FINALIZER, false);
                vmi = patch::object(&api, &vmi, change).await?;
            }
            Action::SetNodeLabel(node) => {
                let change = json!({"metadata": {"labels": {NODE_NAME_LABEL: node}}});
                vmi = patch::object(&api, &vmi, change).await?;
                context.expectations.wrote(&vmi);
            }
            Action::SetGate { pod, is_paused } => {
                set_gate(&vmi, &pod, is_paused, pods, context).await?
            }
            Action::CreatePod(pod) => {
                create(&api, &vmi, &pod, &decision.status, pods, context).await?;
            }
            Action::CreateConsumer(own) => {
                let image = context.importers().image();
                let made = consumer::consumer(&vmi, *own, image);
                match pods.create(&PostParams::default(), &made).await {
                    Ok(_) => {}
                    Err(error) if code(&error) == Some(409) => {}
                    Err(error) => {
                        let what = "make the pod that binds the claims of";
                        return Err(Error::request(what, &vmi, error));
                    }
                }
            }
            Action::DeleteConsumer => {
                let (name, params) = (consumer::name(&vmi), DeleteParams::background());
                match pods.delete(&name, &params).await {
                    Ok(_) => {}
                    Err(error) if is_gone(&error) => {}
                    Err(error) => {
                        let what = "delete the pod that bound the claims of";
                        return Err(Error::request(what, &vmi, error));
                    }
                }
            }
            Action::DeletePod { name, uid, grace } => {
                delete(&vmi, &name, uid, grace, pods, context).await?;
            }
        }
    }
    Ok(vmi)
}

/// Writes into the pod whether the VM is paused.
async fn set_gate(
    vmi: &VirtualMachineInstance,
    pod: &str,
    is_paused: bool,
    pods: &Api<Pod>,
    context: &Context,
) -> Result<(), Error> {
    let (status, reason) = match is_paused {
        true => ("False", "Paused"),
        false => ("True", "NotPaused"),
    };
    let condition = json!({
        "type": UNPAUSED_GATE,
        "status": status,
        "reason": reason,
        "message": "",
        "lastTransitionTime": Time(Timestamp::now()),
    });
    // Merged by type: the other conditions are the kubelet's.
    let patch = Patch::Strategic(json!({"status": {"conditions": [condition]}}));
    match pods
        .patch_status(pod, &PatchParams::default(), &patch)
        .await
    {
        Ok(written) => {
            context.expectations.made(vmi, &written);
            Ok(())
        }
        Err(error) if is_gone(&error) => Ok(()),
        Err(error) => Err(Error::request("write the readiness gate of", vmi, error)),
    }
}

async fn create(
    api: &Api<VirtualMachineInstance>,
    vmi: &VirtualMachineInstance,
    pod: &Pod,
    wanted: &VmiStatus,
    pods: &Api<Pod>,
    context: &Context,
) -> Result<(), Error> {
    let error = match pods.create(&PostParams::default(), pod).await {
        Ok(made) => {
            context.expectations.made(vmi, &made);
            let note = format!("Created the pod {}", pod_name(vmi));
            context.event(vmi, "SuccessfulCreate", "Create", note).await;
            return Ok(());
        }
        Err(error) => error,
    };
    if code(&error) == Some(409) {
        // Made before this controller was killed, most likely.
        let found = pods
            .get_opt(&pod_name(vmi))
            .await
            .map_err(|source| Error::request("look for the pod of", vmi, source))?;
        if found.is_some_and(|found| is_of(&found, vmi)) {
            return Ok(());
        }
    }
    let mut status = wanted.clone();
    let refused = PodError::Refused {
        message: error.to_string(),
    };
    decide::set_failure(&mut status, &refused, &Time(Timestamp::now()));
    if patch::status(api, vmi, &vmi.status, &status)
        .await?
        .is_some()
    {
        let note = refused.to_string();
        context.warn(vmi, "FailedCreate", "Create", note).await;
    }
    Err(Error::request("make the pod of", vmi, error))
}

async fn delete(
    vmi: &VirtualMachineInstance,
    name: &str,
    uid: String,
    grace: i64,
    pods: &Api<Pod>,
    context: &Context,
) -> Result<(), Error> {
    let params = DeleteParams {
        grace_period_seconds: u32::try_from(grace).ok(),
        ..DeleteParams::background()
    }
    .preconditions(Preconditions {
        uid: Some(uid),
        resource_version: None,
    });
    match pods.delete(name, &params).await {
        Ok(_) => {
            let note = format!("Deleted the pod {name}");
            context.event(vmi, "SuccessfulDelete", "Delete", note).await;
            Ok(())
        }
        Err(error) if is_gone(&error) => Ok(()),
        Err(error) => Err(Error::request("delete the pod of", vmi, error)),
    }
}
