//! VirtualMachineSnapshot → what it contains, and the snapshots of the volumes.
//!
//! `decide` says what has to be done, `content` what is made, and this file does it.
//! docs/cluster-snapshots.md has the table of phases. Volumes are taken by their CSI driver: by
//! objects of the group `snapshot.storage.k8s.io`, which a cluster may not have.

mod content;
mod decide;
mod guest;
mod indications;
mod statuses;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::runtime::controller;
use serde_json::json;

pub(super) use content::{claim_of, claims, name as content_name};
pub use decide::{Action, Decision, Observed, SNAPSHOT_FINALIZER, SOURCE_FINALIZER, decide};
pub(super) use decide::{locked_by, restored_by};
pub(super) use statuses::{has_claims, statuses};

use super::classes::Classes;
use super::error::{Error, code, is_gone};
use super::{Context, expectations, machines, patch};
use crate::objects::{
    ContentStatus, SnapshotError, SnapshotPhase, VirtualMachine, VirtualMachineInstance,
    VirtualMachineSnapshot, VirtualMachineSnapshotContent, VmSpec, VolumeSnapshot,
};

/// How long after a failure of the guest's agent it is asked again.
const RETRY: Duration = Duration::from_secs(5);

/// Brings a snapshot one step further.
pub(super) async fn reconcile(
    observed: Arc<VirtualMachineSnapshot>,
    context: Arc<Context>,
) -> Result<controller::Action, Error> {
    context.check().await?;
    let snapshot = &*observed;
    let namespace = snapshot.metadata.namespace.as_deref().unwrap_or_default();
    let content = context.world.content(namespace, &content::name(snapshot));
    if context
        .expectations
        .are_pending(snapshot, content.as_deref())
    {
        return Ok(controller::Action::requeue(expectations::LIMIT));
    }
    let source = snapshot.spec.source.clone().unwrap_or_default();
    let vm = context.world.vm(namespace, &source.name);
    let vm = vm.filter(|_| source.is_vm());
    let vmi = match &vm {
        Some(_) => context.world.instance(namespace, &source.name),
        None => None,
    };
    let volumes = match &content {
        Some(content) => volumes(snapshot, content, &context).await?,
        None => BTreeMap::new(),
    };
    let user = match (&vm, &vmi) {
        (Some(vm), None) if snapshot.status.phase == SnapshotPhase::InProgress => {
            user(snapshot, vm, &context).await?
        }
        _ => None,
    };
    let decision = decide(&Observed {
        snapshot,
        vm: vm.as_deref(),
        vmi: vmi.as_deref(),
        content: content.as_deref(),
        volumes: &volumes,
        user: user.as_deref(),
        now: Time(Timestamp::now()),
    });
    let pass = Pass {
        snapshot,
        vm: vm.as_deref(),
        vmi: vmi.as_deref(),
        content: content.as_deref(),
        context: &context,
    };
    pass.carry_out(decision).await
}

/// Returns those snapshots of volumes that exist.
async fn volumes(
    snapshot: &VirtualMachineSnapshot,
    content: &VirtualMachineSnapshotContent,
    context: &Context,
) -> Result<BTreeMap<String, VolumeSnapshot>, Error> {
    let namespace = snapshot.metadata.namespace.as_deref().unwrap_or_default();
    let api: Api<VolumeSnapshot> = context.world.api(namespace);
    let mut found = BTreeMap::new();
    for name in decide::volume_names(content) {
        // Where the cluster has no such kind, it has no such object.
        let volume = api
            .get_opt(name)
            .await
            .map_err(|source| Error::request("look for the volumes of", snapshot, source))?;
        if let Some(volume) = volume {
            found.insert(name.to_owned(), volume);
        }
    }
    Ok(found)
}

/// Returns a pod that may write to a claim of a machine that does not run.
async fn user(
    snapshot: &VirtualMachineSnapshot,
    vm: &VirtualMachine,
    context: &Context,
) -> Result<Option<String>, Error> {
    let claims: Vec<&str> = content::claims(&vm.spec).map(|(_, claim)| claim).collect();
    if claims.is_empty() {
        return Ok(None);
    }
    let namespace = snapshot.metadata.namespace.as_deref().unwrap_or_default();
    let writer = context.world.writer(namespace, &claims).await;
    writer.map_err(|source| Error::request("look for users of the claims of", vm, source))
}

/// One look at a snapshot, and what is done.
struct Pass<'a> {
    snapshot: &'a VirtualMachineSnapshot,
    vm: Option<&'a VirtualMachine>,
    vmi: Option<&'a VirtualMachineInstance>,
    content: Option<&'a VirtualMachineSnapshotContent>,
    context: &'a Context,
}

impl Pass<'_> {
    fn namespace(&self) -> &str {
        let namespace = self.snapshot.metadata.namespace.as_deref();
        namespace.unwrap_or_default()
    }

    async fn carry_out(self, mut decision: Decision) -> Result<controller::Action, Error> {
        let api: Api<VirtualMachineSnapshot> = self.context.world.api(self.namespace());
        let mut snapshot = self.snapshot.clone();
        let waits = |action: &Action| matches!(action, Action::Freeze(_) | Action::Thaw { .. });
        let mut share = None;
        if decision.actions.iter().any(waits) {
            share = self.context.waiting.snapshots.take(self.namespace());
            if share.is_none() {
                // Others of the namespace wait for their guests: its turn comes.
                return Ok(controller::Action::requeue(RETRY));
            }
        }
        let (first, last): (Vec<_>, Vec<_>) =
            decision.actions.drain(..).partition(Action::is_first);
        for action in first {
            if action == Action::AddFinalizer {
                let change = patch::finalizer(&snapshot, SNAPSHOT_FINALIZER, true);
                snapshot = patch::object(&api, &snapshot, change).await?;
                self.context.expectations.wrote(&snapshot);
            } else if let Err(failure) = self.act(action).await? {
                self.record(&mut decision, failure);
                break;
            }
        }
        drop(share);
        if let (Some(content), Some(status)) = (self.content, &decision.content) {
            let contents: Api<VirtualMachineSnapshotContent> =
                self.context.world.api(self.namespace());
            patch::status(&contents, content, &content.status, status).await?;
        }
        let before = snapshot.status.clone();
        if let Some(written) = patch::status(&api, &snapshot, &before, &decision.status).await? {
            snapshot = written;
            self.context.expectations.wrote(&snapshot);
            tell(&snapshot, before.phase, self.context).await;
        }
        for action in last {
            match action {
                Action::Unlock => self.unlock().await?,
                Action::DeleteContent { uid } => self.delete_content(uid).await?,
                Action::RemoveFinalizer => {
                    let change = patch::finalizer(&snapshot, SNAPSHOT_FINALIZER, false);
                    snapshot = patch::object(&api, &snapshot, change).await?;
                }
                _ => {}
            }
        }
        Ok(match decision.again {
            Some(wait) => controller::Action::requeue(wait),
            None => controller::Action::await_change(),
        })
    }

    /// Does something; what the guest refuses is no error of ours.
    async fn act(&self, action: Action) -> Result<Result<(), String>, Error> {
        match action {
            Action::Lock => self.lock().await?,
            Action::CreateContent => self.create_content().await?,
            Action::Freeze(limit) => return self.freeze(limit).await,
            Action::CreateVolume(name) => return self.create_volume(&name).await,
            Action::Thaw { must_succeed } => {
                let Some(vmi) = self.vmi else {
                    return Ok(Ok(()));
                };
                if let Err(why) = guest::thaw(self.context.world.client(), vmi).await {
                    let note = format!("The guest's file systems cannot be thawed: {why}");
                    let snapshot = self.snapshot;
                    self.context
                        .warn(snapshot, "FreezeError", "Thaw", note)
                        .await;
                    if must_succeed {
                        return Ok(Err(why));
                    }
                }
            }
            _ => {}
        }
        Ok(Ok(()))
    }

    /// Records that a step failed: it is tried again, and nothing after it was done.
    fn record(&self, decision: &mut Decision, message: String) {
        let error = SnapshotError {
            time: Some(Time(Timestamp::now())),
            message: Some(message),
        };
        decision.status = self.snapshot.status.clone();
        decision.status.phase = SnapshotPhase::InProgress;
        decision.status.ready_to_use = Some(false);
        decision.status.error = Some(error.clone());
        let known = self.content.map(|content| content.status.clone());
        decision.content = known.map(|known| ContentStatus {
            ready_to_use: Some(false),
            error: Some(error),
            ..known
        });
        decision.again = Some(decision.again.map_or(RETRY, |again| again.min(RETRY)));
    }

    async fn lock(&self) -> Result<(), Error> {
        let Some(vm) = self.vm else { return Ok(()) };
        let api: Api<VirtualMachine> = self.context.world.api(self.namespace());
        let change = patch::finalizer(vm, SOURCE_FINALIZER, true);
        let vm = patch::object(&api, vm, change).await?;
        let mut status = vm.status.clone();
        let name = json!(self.snapshot.metadata.name);
        status.rest.insert("snapshotInProgress".to_owned(), name);
        patch::status(&api, &vm, &vm.status, &status).await?;
        Ok(())
    }

    async fn unlock(&self) -> Result<(), Error> {
        let Some(vm) = self.vm else { return Ok(()) };
        let api: Api<VirtualMachine> = self.context.world.api(self.namespace());
        let mut status = vm.status.clone();
        status.rest.remove("snapshotInProgress");
        let written = patch::status(&api, vm, &vm.status, &status).await?;
        let vm = written.as_ref().unwrap_or(vm);
        let change = patch::finalizer(vm, SOURCE_FINALIZER, false);
        patch::object(&api, vm, change).await.map(drop)
    }

    /// Stores the virtual machine and its claims as they are. The name is given: what was done
    /// before this controller was killed is not done twice.
    async fn create_content(&self) -> Result<(), Error> {
        let Some(machine) = self.vm else {
            return Ok(());
        };
        let spec = self.spec(machine).await?;
        let classes = Classes::read(self.context.world.client()).await;
        let classes =
            classes.map_err(|source| Error::request("look for classes for", machine, source))?;
        let mut volumes = Vec::new();
        for (volume, claim) in content::claims(&spec) {
            let claim = self.context.world.claim_of(self.namespace(), claim);
            if let Some(claim) = claim.filter(|claim| classes.of(claim).is_some()) {
                volumes.push((volume.to_owned(), (*claim).clone()));
            }
        }
        let content = content::content(self.snapshot, machine, spec, volumes);
        let api: Api<VirtualMachineSnapshotContent> = self.context.world.api(self.namespace());
        match api.create(&PostParams::default(), &content).await {
            Ok(made) => {
                self.context.expectations.made(self.snapshot, &made);
                let name = made.metadata.name.unwrap_or_default();
                let reason = "SuccessfulVirtualMachineSnapshotContentCreate";
                let note = format!("Created the VirtualMachineSnapshotContent {name}");
                let snapshot = self.snapshot;
                self.context.event(snapshot, reason, "Create", note).await;
                Ok(())
            }
            Err(error) if code(&error) == Some(409) => Ok(()),
            Err(error) => Err(Error::request(
                "store the contents of",
                self.snapshot,
                error,
            )),
        }
    }

    /// The specification that runs, if one runs; else the one that would.
    async fn spec(&self, machine: &VirtualMachine) -> Result<VmSpec, Error> {
        let revision = self.vmi.and_then(|vmi| {
            let is_older = machines::generation_of(vmi) != machine.metadata.generation;
            machines::revision_of(vmi).filter(|_| is_older)
        });
        let Some(revision) = revision else {
            return Ok(machine.spec.clone());
        };
        let api: Api<ControllerRevision> = self.context.world.api(self.namespace());
        let found = api
            .get_opt(&revision)
            .await
            .map_err(|source| Error::request("read the revision of", machine, source))?;
        let spec = found
            .and_then(|found| found.data)
            .and_then(|RawExtension(data)| data.get("spec").cloned())
            .and_then(|spec| serde_json::from_value(spec).ok());
        Ok(spec.unwrap_or_else(|| machine.spec.clone()))
    }

    /// Freezes the guest; until when at most is stored first.
    async fn freeze(&self, limit: Duration) -> Result<Result<(), String>, Error> {
        let (Some(vmi), Some(content)) = (self.vmi, self.content) else {
            return Ok(Ok(()));
        };
        let limit_signed = SignedDuration::try_from(limit).unwrap_or_default();
        let until = Timestamp::now().saturating_add(limit_signed);
        let until = until.unwrap_or(Timestamp::MAX).to_string();
        let change = json!({"metadata": {"annotations": {decide::FROZEN_UNTIL: until}}});
        let api: Api<VirtualMachineSnapshotContent> = self.context.world.api(self.namespace());
        let name = content.metadata.name.as_deref().unwrap_or_default();
        let patch = kube::api::Patch::Merge(change);
        api.patch(name, &kube::api::PatchParams::default(), &patch)
            .await
            .map_err(|source| Error::request("mark", content, source))?;
        let frozen = guest::freeze(self.context.world.client(), vmi, limit).await;
        if let Err(why) = &frozen {
            let note = format!("The guest's file systems cannot be frozen: {why}");
            let snapshot = self.snapshot;
            self.context
                .warn(snapshot, "FreezeError", "Freeze", note)
                .await;
        }
        Ok(frozen)
    }

    async fn create_volume(&self, name: &str) -> Result<Result<(), String>, Error> {
        let Some(content) = self.content else {
            return Ok(Ok(()));
        };
        let classes = Classes::read(self.context.world.client()).await;
        let classes =
            classes.map_err(|source| Error::request("look for classes for", content, source))?;
        let backups = &content.spec.volume_backups;
        let mut backups = backups.iter();
        let backup = backups.find(|of| of.volume_snapshot_name.as_deref() == Some(name));
        let class = backup.and_then(|of| classes.of_spec(&of.persistent_volume_claim.spec));
        let Some(class) = class else {
            return Ok(Err(format!("no VolumeSnapshotClass is left for {name}")));
        };
        let Some(volume) = content::volume_snapshot(content, name, &class) else {
            return Ok(Err(format!("the contents have no volume {name}")));
        };
        let api: Api<VolumeSnapshot> = self.context.world.api(self.namespace());
        match api.create(&PostParams::default(), &volume).await {
            Ok(_) => {
                let note = format!("Created the VolumeSnapshot {name}");
                let reason = "SuccessfulVolumeSnapshotCreate";
                self.context.event(content, reason, "Create", note).await;
                Ok(Ok(()))
            }
            Err(error) if code(&error) == Some(409) => Ok(Ok(())),
            Err(error) => Ok(Err(format!(
                "the VolumeSnapshot {name} cannot be made: {error}"
            ))),
        }
    }

    async fn delete_content(&self, uid: String) -> Result<(), Error> {
        let Some(content) = self.content else {
            return Ok(());
        };
        let params = DeleteParams::background().preconditions(Preconditions {
            uid: Some(uid),
            resource_version: None,
        });
        let api: Api<VirtualMachineSnapshotContent> = self.context.world.api(self.namespace());
        let name = content.metadata.name.as_deref().unwrap_or_default();
        match api.delete(name, &params).await {
            Ok(_) => Ok(()),
            Err(error) if is_gone(&error) => Ok(()),
            Err(error) => Err(Error::request(
                "delete the contents of",
                self.snapshot,
                error,
            )),
        }
    }
}

/// Tells people how it went.
async fn tell(snapshot: &VirtualMachineSnapshot, before: SnapshotPhase, context: &Context) {
    let phase = snapshot.status.phase;
    if phase == before {
        return;
    }
    match phase {
        SnapshotPhase::Succeeded => {
            let note = "The snapshot was taken".to_owned();
            let reason = "VirtualMachineSnapshotComplete";
            context.event(snapshot, reason, "Snapshot", note).await;
        }
        SnapshotPhase::Failed => {
            let error = snapshot.status.error.as_ref();
            let message = error.and_then(|error| error.message.clone());
            let reason = "VirtualMachineSnapshotError";
            let note = message.unwrap_or_default();
            context.warn(snapshot, reason, "Snapshot", note).await;
        }
        _ => {}
    }
}
