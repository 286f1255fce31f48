//! VirtualMachineRestore → claims of the snapshots of volumes, and a virtual machine with them.
//!
//! `decide` says what has to be done, `claims` and `target` what is made, and this file does it.
//! docs/cluster-snapshots.md has the table of conditions.

mod claims;
mod decide;
mod patches;
mod target;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::runtime::controller;
use kube::{Api, Resource};
use serde_json::json;

pub(super) use claims::claim_spec;
pub use decide::{Action, Decision, Observed, decide};

use super::error::{Error, code, is_gone};
use super::machines::owner_reference;
use super::{Context, expectations, patch};
use crate::objects::{
    DataVolume, VirtualMachine, VirtualMachineInstance, VirtualMachineRestore, VolumeSnapshot,
    is_true,
};

/// Finalizer of a restore: its target is unlocked first.
pub const RESTORE_FINALIZER: &str = "snapshot.kubevirt.io/vmrestore-protection";

/// Annotation of a virtual machine and of claims: the restore that made them.
const LAST_RESTORE: &str = "restore.kubevirt.io/lastRestoreUID";

/// Why a restore fails for good.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// A patch is not JSON of that form.
    #[error("spec.patches[{index}] cannot be read")]
    Malformed {
        /// Which one.
        index: usize,
        /// What is wrong.
        #[source]
        source: serde_json::Error,
    },
    /// A patch does not fit the virtual machine.
    #[error("spec.patches[{index}] cannot be applied")]
    Patch {
        /// Which one.
        index: usize,
        /// What is wrong.
        #[source]
        source: json_patch::PatchError,
    },
    /// The patches copy too much, or nest it too deep.
    #[error("spec.patches[{index}] makes the virtual machine too large or too deep")]
    TooLarge {
        /// Which one.
        index: usize,
    },
    /// What the patches make is no virtual machine.
    #[error("the patches do not leave a virtual machine")]
    Serialize(#[source] serde_json::Error),
}

/// Brings a restore one step further.
pub(super) async fn reconcile(
    observed: Arc<VirtualMachineRestore>,
    context: Arc<Context>,
) -> Result<controller::Action, Error> {
    context.check().await?;
    let restore = &*observed;
    if context
        .expectations
        .are_pending(restore, None::<&VirtualMachine>)
    {
        return Ok(controller::Action::requeue(expectations::LIMIT));
    }
    let facts = Facts::of(restore, &context).await?;
    let decision = decide(&facts.observed(restore));
    let again = decision.again;
    facts.carry_out(restore, decision, &context).await?;
    Ok(match again {
        Some(wait) => controller::Action::requeue(wait),
        None => controller::Action::await_change(),
    })
}

/// What is known of a restore.
struct Facts {
    target: Option<Arc<VirtualMachine>>,
    vmi: Option<Arc<VirtualMachineInstance>>,
    snapshot: Option<Arc<crate::objects::VirtualMachineSnapshot>>,
    content: Option<Arc<crate::objects::VirtualMachineSnapshotContent>>,
    claims: BTreeMap<String, Arc<PersistentVolumeClaim>>,
    waiting: BTreeSet<String>,
    volumes: BTreeMap<String, VolumeSnapshot>,
    data_volumes: Vec<Arc<DataVolume>>,
}

impl Facts {
    async fn of(restore: &VirtualMachineRestore, context: &Context) -> Result<Self, Error> {
        let world = &context.world;
        let namespace = restore.metadata.namespace.as_deref().unwrap_or_default();
        let name = &restore.spec.target.clone().unwrap_or_default().name;
        let target = world.vm(namespace, name);
        let snapshot = world.snapshot(namespace, &restore.spec.virtual_machine_snapshot_name);
        let content = snapshot
            .as_ref()
            .and_then(|snapshot| {
                let status = &snapshot.status;
                status.virtual_machine_snapshot_content_name.clone()
            })
            .and_then(|name| world.content(namespace, &name));
        let mut facts = Self {
            vmi: world.instance(namespace, name).filter(|_| target.is_some()),
            snapshot,
            content,
            claims: BTreeMap::new(),
            waiting: BTreeSet::new(),
            volumes: BTreeMap::new(),
            data_volumes: match target.as_ref().and_then(|vm| vm.metadata.uid.as_deref()) {
                Some(uid) => world.volumes_of(uid),
                None => Vec::new(),
            },
            target,
        };
        let status = &restore.status;
        if status.complete == Some(true) || is_true(&status.conditions, "Failure") {
            return Ok(facts);
        }
        let taken: Api<VolumeSnapshot> = world.api(namespace);
        for of in &status.restores {
            if let Some(volume) = world.volume(namespace, &of.claim)
                && !facts
                    .data_volumes
                    .iter()
                    .any(|known| Arc::ptr_eq(known, &volume))
            {
                facts.data_volumes.push(volume);
            }
            match world.claim_of(namespace, &of.claim) {
                Some(claim) => {
                    if waits(restore, &claim, context).await? {
                        facts.waiting.insert(of.claim.clone());
                    }
                    facts.claims.insert(of.claim.clone(), claim);
                }
                None => {
                    let name = &of.volume_snapshot_name;
                    let found = taken.get_opt(name).await.map_err(|source| {
                        Error::request("look for the volumes of", restore, source)
                    })?;
                    facts
                        .volumes
                        .extend(found.map(|found| (name.clone(), found)));
                }
            }
        }
        Ok(facts)
    }

    fn observed<'a>(&'a self, restore: &'a VirtualMachineRestore) -> Observed<'a> {
        Observed {
            restore,
            target: self.target.as_deref(),
            vmi: self.vmi.as_deref(),
            snapshot: self.snapshot.as_deref(),
            content: self.content.as_deref(),
            claims: &self.claims,
            waiting: &self.waiting,
            volumes: &self.volumes,
            data_volumes: &self.data_volumes,
            now: Time(Timestamp::now()),
        }
    }

    async fn carry_out(
        &self,
        observed: &VirtualMachineRestore,
        decision: Decision,
        context: &Context,
    ) -> Result<(), Error> {
        let namespace = observed.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<VirtualMachineRestore> = context.world.api(namespace);
        let mut restore = observed.clone();
        let (last, first): (Vec<_>, Vec<_>) = decision
            .actions
            .into_iter()
            .partition(|action| *action == Action::RemoveFinalizer);
        for action in first {
            if action == Action::Adopt {
                restore = self.adopt(&api, &restore).await?;
                context.expectations.wrote(&restore);
            } else {
                self.act(&restore, action, context).await?;
            }
        }
        let before = restore.status.clone();
        if let Some(written) = patch::status(&api, &restore, &before, &decision.status).await? {
            restore = written;
            context.expectations.wrote(&restore);
            tell(&restore, &before.conditions, context).await;
        }
        if !last.is_empty() {
            let change = patch::finalizer(&restore, RESTORE_FINALIZER, false);
            patch::object(&api, &restore, change).await?;
        }
        Ok(())
    }

    async fn adopt(
        &self,
        api: &Api<VirtualMachineRestore>,
        restore: &VirtualMachineRestore,
    ) -> Result<VirtualMachineRestore, Error> {
        let mut change = patch::finalizer(restore, RESTORE_FINALIZER, true);
        let owners = restore.metadata.owner_references.as_ref();
        if let Some(target) = &self.target
            && owners.is_none_or(Vec::is_empty)
        {
            change["metadata"]["ownerReferences"] = json!([owner_reference(target)]);
        }
        patch::object(api, restore, change).await
    }

    async fn act(
        &self,
        restore: &VirtualMachineRestore,
        action: Action,
        context: &Context,
    ) -> Result<(), Error> {
        let namespace = restore.metadata.namespace.as_deref().unwrap_or_default();
        let world = &context.world;
        let claims: Api<PersistentVolumeClaim> = world.api(namespace);
        let vms: Api<VirtualMachine> = world.api(namespace);
        let target = self.target.as_deref();
        match (action, target) {
            (Action::Stop, Some(vm)) => stop(&vms, vm).await,
            (Action::Lock, Some(vm)) => mark(&vms, vm, restore.metadata.name.as_deref()).await,
            (Action::Unlock, Some(vm)) => mark(&vms, vm, None).await,
            (Action::DeleteVolume { name, uid }, _) => {
                let volumes: Api<DataVolume> = world.api(namespace);
                delete(restore, &volumes, &name, uid).await
            }
            (Action::DeleteClaim { name, uid }, _) => delete(restore, &claims, &name, uid).await,
            (Action::CreateClaim(claim), _) => {
                match claims.create(&PostParams::default(), &claim).await {
                    Ok(_) => Ok(()),
                    Err(error) if code(&error) == Some(409) => Ok(()),
                    Err(error) => Err(Error::request("make a claim of", restore, error)),
                }
            }
            (Action::CreateTarget(made), _) => {
                match vms.create(&PostParams::default(), &made).await {
                    Ok(_) => Ok(()),
                    Err(error) if code(&error) == Some(409) => Ok(()),
                    Err(error) => Err(Error::request("make the target of", restore, error)),
                }
            }
            (Action::UpdateTarget(spec), Some(vm)) => {
                let value = |spec| {
                    let what = "specification";
                    serde_json::to_value(spec).map_err(|source| Error::Serialize { what, source })
                };
                let difference = patch::difference(&value(&vm.spec)?, &value(&spec)?);
                let uid = restore.metadata.uid.as_deref();
                let change = json!({
                    "metadata": {"annotations": {LAST_RESTORE: uid}},
                    "spec": difference.unwrap_or_else(|| json!({})),
                });
                patch::object(&vms, vm, change).await.map(drop)
            }
            (Action::OwnClaim(name), Some(vm)) => {
                let Some(claim) = self.claims.get(&name) else {
                    return Ok(());
                };
                let mut owners = claim.metadata.owner_references.clone().unwrap_or_default();
                owners.push(owner_reference(vm));
                let change = json!({"metadata": {"ownerReferences": owners}});
                patch::object(&claims, claim, change).await.map(drop)
            }
            _ => Ok(()),
        }
    }
}

/// Returns whether a claim gets its volume when somebody uses it.
async fn waits(
    restore: &VirtualMachineRestore,
    claim: &PersistentVolumeClaim,
    context: &Context,
) -> Result<bool, Error> {
    let status = claim.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    let class = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.storage_class_name.as_deref());
    let (Some(class), true) = (class, matches!(phase, None | Some("Pending"))) else {
        return Ok(false);
    };
    let classes: Api<StorageClass> = Api::all(context.world.client().clone());
    let class = classes
        .get_opt(class)
        .await
        .map_err(|source| Error::request("look for the storage class of", restore, source))?;
    let mode = class.and_then(|class| class.volume_binding_mode);
    Ok(mode.as_deref() == Some("WaitForFirstConsumer"))
}

/// Halts a virtual machine.
async fn stop(vms: &Api<VirtualMachine>, vm: &VirtualMachine) -> Result<(), Error> {
    let change = match (&vm.spec.run_strategy, vm.spec.running) {
        (Some(strategy), _) if strategy == "Halted" => return Ok(()),
        (None, Some(false)) => return Ok(()),
        (Some(_), _) => json!({"spec": {"runStrategy": "Halted"}}),
        (None, _) => json!({"spec": {"running": false}}),
    };
    patch::object(vms, vm, change).await.map(drop)
}

/// Locks a virtual machine, or unlocks it.
async fn mark(
    vms: &Api<VirtualMachine>,
    vm: &VirtualMachine,
    restore: Option<&str>,
) -> Result<(), Error> {
    let mut status = vm.status.clone();
    match restore {
        Some(name) => status
            .rest
            .insert("restoreInProgress".to_owned(), json!(name)),
        None => status.rest.remove("restoreInProgress"),
    };
    patch::status(vms, vm, &vm.status, &status).await.map(drop)
}

async fn delete<K>(
    restore: &VirtualMachineRestore,
    api: &Api<K>,
    name: &str,
    uid: String,
) -> Result<(), Error>
where
    K: Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let params = DeleteParams::background().preconditions(Preconditions {
        uid: Some(uid),
        resource_version: None,
    });
    match api.delete(name, &params).await {
        Ok(_) => Ok(()),
        Err(error) if is_gone(&error) => Ok(()),
        Err(error) => Err(Error::request("delete the old volumes of", restore, error)),
    }
}

/// Tells people how it went.
async fn tell(
    restore: &VirtualMachineRestore,
    before: &[crate::objects::Condition],
    context: &Context,
) {
    let now = &restore.status.conditions;
    if is_true(now, "Ready") && !is_true(before, "Ready") {
        let reason = "VirtualMachineRestoreComplete";
        let note = "The virtual machine was restored".to_owned();
        context.event(restore, reason, "Restore", note).await;
    }
    if is_true(now, "Failure") && !is_true(before, "Failure") {
        let failure = crate::objects::condition(now, "Failure");
        let note = failure.map(|failure| failure.reason.clone());
        let reason = "VirtualMachineRestoreError";
        let note = note.unwrap_or_default();
        context.warn(restore, reason, "Restore", note).await;
    }
}
