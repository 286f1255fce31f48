//! VirtualMachineClone → a snapshot, and a restore of it into another virtual machine.
//!
//! `decide` says what has to be done, `patches` what differs in the copy, and this file does it.
//! docs/cluster-snapshots.md has the table of phases.

mod decide;
mod patches;

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::controller;
use kube::{Api, Resource};

pub use decide::{Action, Decision, Observed, decide};

use super::error::{Error, code, is_gone};
use super::{Context, expectations, patch};
use crate::objects::{
    ClonePhase, VirtualMachineClone, VirtualMachineRestore, VirtualMachineSnapshot,
};

/// Brings a copy one step further.
pub(super) async fn reconcile(
    observed: Arc<VirtualMachineClone>,
    context: Arc<Context>,
) -> Result<controller::Action, Error> {
    context.check().await?;
    let clone = &*observed;
    let none = None::<&VirtualMachineSnapshot>;
    if context.expectations.are_pending(clone, none) {
        return Ok(controller::Action::requeue(expectations::LIMIT));
    }
    let world = &context.world;
    let namespace = clone.metadata.namespace.as_deref().unwrap_or_default();
    let source = clone.spec.source.clone().unwrap_or_default();
    let source = world.vm(namespace, &source.name).filter(|_| source.is_vm());
    let snapshot = world.snapshot(namespace, &decide::snapshot_name(clone));
    let content = snapshot
        .as_ref()
        .and_then(|snapshot| {
            let status = &snapshot.status;
            status.virtual_machine_snapshot_content_name.clone()
        })
        .and_then(|name| world.content(namespace, &name));
    let restore = world.restore(namespace, &decide::restore_name(clone));
    let restores = restore.iter().flat_map(|restore| &restore.status.restores);
    let mut claims = restores.map(|of| world.claim_of(namespace, &of.claim));
    let are_bound = claims.all(|claim| {
        let status = claim.as_ref().and_then(|claim| claim.status.as_ref());
        status.is_some_and(|status| status.phase.as_deref() == Some("Bound"))
    });
    let target = world.vm(namespace, &decide::target_name(clone));
    let decision = decide(&Observed {
        clone,
        source: source.as_deref(),
        snapshot: snapshot.as_deref(),
        content: content.as_deref(),
        restore: restore.as_deref(),
        are_bound,
        has_target: target.is_some(),
        now: Time(Timestamp::now()),
    });
    carry_out(clone, decision, &context).await
}

async fn carry_out(
    clone: &VirtualMachineClone,
    decision: Decision,
    context: &Context,
) -> Result<controller::Action, Error> {
    let namespace = clone.metadata.namespace.as_deref().unwrap_or_default();
    let snapshots: Api<VirtualMachineSnapshot> = context.world.api(namespace);
    let restores: Api<VirtualMachineRestore> = context.world.api(namespace);
    for action in decision.actions {
        match action {
            Action::CreateSnapshot(made) => create(clone, &snapshots, &made, context).await?,
            Action::CreateRestore(made) => create(clone, &restores, &made, context).await?,
            Action::DeleteRestore(name) => delete(clone, &restores, &name).await?,
            Action::DeleteSnapshot(name) => delete(clone, &snapshots, &name).await?,
        }
    }
    let api: Api<VirtualMachineClone> = context.world.api(namespace);
    let before = &clone.status;
    if let Some(written) = patch::status(&api, clone, before, &decision.status).await? {
        context.expectations.wrote(&written);
        tell(&written, before.phase, context).await;
    }
    Ok(match decision.again {
        Some(wait) => controller::Action::requeue(wait),
        None => controller::Action::await_change(),
    })
}

/// Makes something. Its name is given: what was done before this controller was killed is not done
/// twice.
async fn create<K>(
    clone: &VirtualMachineClone,
    api: &Api<K>,
    made: &K,
    context: &Context,
) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug,
    K: serde::Serialize + serde::de::DeserializeOwned,
{
    match api.create(&PostParams::default(), made).await {
        Ok(_) => {
            let kind = K::kind(&());
            let name = made.meta().name.as_deref().unwrap_or_default();
            let note = format!("Created the {kind} {name}");
            context.event(clone, "Created", "Clone", note).await;
            Ok(())
        }
        Err(error) if code(&error) == Some(409) => Ok(()),
        Err(error) => {
            let note = format!("the API server refused a step: {error}");
            context.warn(clone, "FailedCreate", "Clone", note).await;
            Err(Error::request("take a step of", clone, error))
        }
    }
}

async fn delete<K>(clone: &VirtualMachineClone, api: &Api<K>, name: &str) -> Result<(), Error>
where
    K: Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    match api.delete(name, &DeleteParams::background()).await {
        Ok(_) => Ok(()),
        Err(error) if is_gone(&error) => Ok(()),
        Err(error) => Err(Error::request("clean up after", clone, error)),
    }
}

/// Tells people how it went.
async fn tell(clone: &VirtualMachineClone, before: ClonePhase, context: &Context) {
    let status = &clone.status;
    if status.phase == before {
        return;
    }
    match status.phase {
        ClonePhase::Succeeded => {
            let name = status.target_name.as_deref().unwrap_or_default();
            let note = format!("Created the VirtualMachine {name}");
            context.event(clone, "TargetVMCreated", "Clone", note).await;
        }
        ClonePhase::Failed => {
            let why = status.conditions.first();
            let note = why.map_or_else(String::new, |why| why.message.clone());
            context.warn(clone, "CloneFailed", "Clone", note).await;
        }
        _ => {}
    }
}
