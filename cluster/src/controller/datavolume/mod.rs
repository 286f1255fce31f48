//! DataVolume → claim, and the importer that fills it.
//!
//! `decide` says what has to be done, `claim` and `pod` what is made, and this file does it.
//! docs/datavolumes.md has the table of phases.

mod claim;
mod credentials;
mod decide;
mod foreign;
mod pod;
mod progress;
mod sources;
pub(super) mod target;

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams, Preconditions};
use kube::runtime::controller;
use serde_json::json;

pub use decide::{Action, Decision, Foreign, Observed, Source, decide};

pub(super) use pod::confined;
pub(super) use sources::follow;

use foreign::Facts;
use sources::Resolved;

use super::claims::is_filled;
use super::error::{Error, code, is_gone};
use super::{Context, expectations, patch};
use crate::objects::{
    DataVolume, DataVolumePhase as Phase, DataVolumeStatus, VolumeState, condition,
};

/// Annotation of the class for disks of VMs.
const VIRT_CLASS: &str = "storageclass.kubevirt.io/is-default-virt-class";

/// Brings a DataVolume one step nearer to what is asked of it.
pub(super) async fn reconcile(
    observed: Arc<DataVolume>,
    context: Arc<Context>,
) -> Result<controller::Action, Error> {
    context.check().await?;
    let namespace = observed.metadata.namespace.as_deref().unwrap_or_default();
    let name = observed.metadata.name.as_deref().unwrap_or_default();
    let claim = context.world.claim_of(namespace, name);
    // What is filled is not copied again, and what goes is not copied any longer.
    let is_over =
        observed.metadata.deletion_timestamp.is_some() || claim.as_deref().is_some_and(is_filled);
    let foreign = match observed.spec.foreign_source(namespace) {
        Some(source) if !is_over => Some(Facts::of(&observed, &source, &context).await?),
        _ => None,
    };
    let is_granted = foreign.as_ref().is_none_or(|foreign| foreign.is_granted);
    let resolved = match is_granted && !is_over {
        true => sources::resolve(&observed, claim.is_some(), &context).await?,
        false => Resolved::as_it_is(&observed),
    };
    let volume = &resolved.volume;
    let pod = context.world.importer(namespace, &pod::name(volume));
    let pod = pod.filter(|pod| claim::owns(volume, &pod.metadata));
    // Of what was made, the claim comes first.
    let is_pending = match &pod {
        Some(pod) => context.expectations.are_pending(volume, Some(&**pod)),
        None => context.expectations.are_pending(volume, claim.as_deref()),
    };
    if is_pending {
        return Ok(controller::Action::requeue(expectations::LIMIT));
    }
    let classes: Api<StorageClass> = Api::all(context.world.client().clone());
    let waits_for_consumer = match &claim {
        Some(claim) if pod.is_none() => waits(volume, claim, &classes).await?,
        _ => false,
    };
    let default_class = match &claim {
        None => default_class(volume, &classes).await?,
        Some(_) => None,
    };
    let source = match volume
        .spec
        .cloned_claim()
        .filter(|_| is_granted && !is_over)
    {
        Some((_, source)) => {
            let begins = match &foreign {
                Some(foreign) => foreign.pod.is_none(),
                None => pod.is_none(),
            };
            let other = foreign.as_ref().map(|foreign| foreign.namespace.as_str());
            Some(SourceFacts::of(volume, other, source, begins, &context).await?)
        }
        None => None,
    };
    let progress = match pod.as_deref().and_then(address) {
        Some(address) => match context.waiting.importers.take(namespace) {
            Some(_share) => progress::ask(address, pod::PORT).await,
            None => None,
        },
        None => None,
    };
    let decision = decide(&Observed {
        volume,
        claim: claim.as_deref(),
        pod: pod.as_deref(),
        source: source.as_ref().map(SourceFacts::source),
        foreign: foreign.as_ref().map(|facts| Foreign {
            namespace: &facts.namespace,
            is_granted: facts.is_granted,
            pod: facts.pod.as_ref(),
        }),
        unresolved: resolved.obstacle.as_deref(),
        waits_for_consumer,
        default_class: default_class.as_deref(),
        progress,
        image: context.importers().image(),
        now: Time(Timestamp::now()),
    });
    let again = decision.again;
    let sender = foreign.as_ref().and_then(|foreign| foreign.pod.as_ref());
    carry_out(volume, claim.as_deref(), sender, decision, &context).await?;
    Ok(match again {
        Some(wait) => controller::Action::requeue(wait),
        None => controller::Action::await_change(),
    })
}

/// What is known of a claim that is to be copied.
#[derive(Debug)]
struct SourceFacts {
    claim: Option<Arc<PersistentVolumeClaim>>,
    state: Option<VolumeState>,
    user: Option<String>,
}

impl SourceFacts {
    /// `begins`: who uses the claim matters still. A claim of another namespace is asked for.
    async fn of(
        volume: &DataVolume,
        other: Option<&str>,
        name: &str,
        begins: bool,
        context: &Context,
    ) -> Result<Self, Error> {
        let failed = |source| Error::request("look for the source of", volume, source);
        let own = volume.metadata.namespace.as_deref().unwrap_or_default();
        let namespace = other.unwrap_or(own);
        let (claim, of_claim) = match other {
            None => (
                context.world.claim_of(namespace, name),
                context.world.volume(namespace, name),
            ),
            Some(_) => {
                let claims: Api<PersistentVolumeClaim> = context.world.api(namespace);
                let volumes: Api<DataVolume> = context.world.api(namespace);
                let claim = claims.get_opt(name).await.map_err(failed)?;
                let of_claim = volumes.get_opt(name).await.map_err(failed)?;
                (claim.map(Arc::new), of_claim.map(Arc::new))
            }
        };
        let user = if begins && claim.is_some() {
            let writer = context.world.writer(namespace, &[name]).await;
            writer.map_err(|source| {
                Error::request("look for users of the source of", volume, source)
            })?
        } else {
            None
        };
        Ok(Self {
            claim,
            state: of_claim.map(|volume| volume.state()),
            user,
        })
    }

    fn source(&self) -> Source<'_> {
        Source {
            claim: self.claim.as_deref(),
            state: self.state,
            user: self.user.as_deref(),
        }
    }
}

/// Returns where a running importer is reached.
fn address(pod: &Pod) -> Option<std::net::IpAddr> {
    let status = pod.status.as_ref()?;
    let running = status.phase.as_deref() == Some("Running");
    status.pod_ip.as_ref().filter(|_| running)?.parse().ok()
}

/// Returns whether the class of a claim that is not bound waits for a consumer.
async fn waits(
    volume: &DataVolume,
    claim: &PersistentVolumeClaim,
    classes: &Api<StorageClass>,
) -> Result<bool, Error> {
    let phase = claim
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    let class = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.storage_class_name.as_deref());
    let (Some(class), false) = (
        class.filter(|class| !class.is_empty()),
        phase == Some("Bound"),
    ) else {
        return Ok(false);
    };
    let found = classes
        .get_opt(class)
        .await
        .map_err(|source| Error::request("look for the storage class of", volume, source))?;
    let mode = found.and_then(|class| class.volume_binding_mode);
    Ok(mode.as_deref() == Some("WaitForFirstConsumer"))
}

/// Returns the cluster's class for disks of VMs, if the claim that is to be made names none.
async fn default_class(
    volume: &DataVolume,
    classes: &Api<StorageClass>,
) -> Result<Option<String>, Error> {
    let storage = volume.spec.storage.as_ref();
    if storage.is_none_or(|storage| storage.storage_class_name.is_some()) {
        return Ok(None);
    }
    let found = classes
        .list(&ListParams::default())
        .await
        .map_err(|source| Error::request("look for the storage class of", volume, source))?;
    let is_default = |class: &&StorageClass| {
        let annotations = class.metadata.annotations.as_ref();
        annotations
            .and_then(|all| all.get(VIRT_CLASS))
            .map(String::as_str)
            == Some("true")
    };
    let class = found.items.iter().find(is_default);
    Ok(class.and_then(|class| class.metadata.name.clone()))
}

async fn carry_out(
    observed: &DataVolume,
    claim: Option<&PersistentVolumeClaim>,
    sender: Option<&Pod>,
    decision: Decision,
    context: &Context,
) -> Result<(), Error> {
    let namespace = observed.metadata.namespace.as_deref().unwrap_or_default();
    let api: Api<DataVolume> = context.world.api(namespace);
    let before = &observed.status;
    let mut volume = observed.clone();
    if let Some(written) = patch::status(&api, &volume, before, &decision.status).await? {
        volume = written;
        // What it names is known already.
        volume.spec.clone_from(&observed.spec);
        context.expectations.wrote(&volume);
        tell(&volume, before, context).await;
    }
    let claims: Api<PersistentVolumeClaim> = context.world.api(namespace);
    let pods: Api<Pod> = context.world.api(namespace);
    for action in decision.actions {
        match action {
            Action::CreateClaim(claim) => create_claim(&volume, &claim, &claims, context).await?,
            Action::MarkClaim => {
                if let Some(claim) = claim {
                    let marks = json!({"metadata": {"annotations": pod::marks(&volume)}});
                    patch::object(&claims, claim, marks).await?;
                }
            }
            Action::MarkUpload(marks) => {
                if let Some(claim) = claim {
                    let marks = json!({"metadata": {"annotations": marks}});
                    patch::object(&claims, claim, marks).await?;
                }
            }
            Action::CreateCredentials => {
                if let Some(claim) = claim {
                    let secrets: Api<Secret> = context.world.api(namespace);
                    let importers = context.importers();
                    importers.make_credentials(&volume, claim, &secrets).await?;
                }
            }
            Action::ReleaseClaim => {
                if let Some(claim) = claim {
                    patch::object(&claims, claim, claim::release(&volume)).await?;
                }
            }
            Action::Delete => {
                let params = DeleteParams::background().preconditions(Preconditions {
                    uid: volume.metadata.uid.clone(),
                    resource_version: None,
                });
                let name = volume.metadata.name.as_deref().unwrap_or_default();
                match api.delete(name, &params).await {
                    Ok(_) => {}
                    Err(error) if is_gone(&error) => {}
                    Err(error) => return Err(Error::request("delete", &volume, error)),
                }
            }
            Action::HoldForCopy(finalizer) => {
                let change = patch::finalizer(&volume, finalizer, true);
                let held = patch::object(&api, &volume, change).await?;
                context.expectations.wrote(&held);
                volume.metadata = held.metadata;
            }
            Action::CreateSource(sender) => {
                if let Some(claim) = claim {
                    foreign::create(&volume, &sender, claim, context).await?;
                }
            }
            Action::CreateSourceCredentials => {
                if let (Some(claim), Some(sender)) = (claim, sender) {
                    foreign::create_credentials(&volume, sender, claim, context).await?;
                }
            }
            Action::EndSource { uid } => {
                if let Some(sender) = sender {
                    let namespace = sender.metadata.namespace.as_deref().unwrap_or_default();
                    foreign::delete(&volume, namespace, Some(uid), context).await?;
                }
            }
            Action::EndCopy => foreign::release(&volume, context).await?,
            Action::CreatePod(pod) => create_pod(&volume, &pod, &pods, context).await?,
            Action::DeletePod { uid } => {
                let params = DeleteParams::background().preconditions(Preconditions {
                    uid: Some(uid),
                    resource_version: None,
                });
                match pods.delete(&pod::name(&volume), &params).await {
                    Ok(_) => {}
                    Err(error) if is_gone(&error) => {}
                    Err(error) => {
                        return Err(Error::request("delete the importer of", &volume, error));
                    }
                }
            }
        }
    }
    Ok(())
}

async fn create_claim(
    volume: &DataVolume,
    claim: &PersistentVolumeClaim,
    claims: &Api<PersistentVolumeClaim>,
    context: &Context,
) -> Result<(), Error> {
    match claims.create(&PostParams::default(), claim).await {
        Ok(made) => {
            context.expectations.made(volume, &made);
            Ok(())
        }
        // Made before this controller was killed, or by others: that is seen soon.
        Err(error) if code(&error) == Some(409) => Ok(()),
        Err(error) => {
            let note = format!("the API server refused the claim: {error}");
            context
                .warn(volume, "ErrExceededQuota", "Create", note)
                .await;
            Err(Error::request("make the claim of", volume, error))
        }
    }
}

async fn create_pod(
    volume: &DataVolume,
    pod: &Pod,
    pods: &Api<Pod>,
    context: &Context,
) -> Result<(), Error> {
    match pods.create(&PostParams::default(), pod).await {
        Ok(made) => {
            context.expectations.made(volume, &made);
            let note = format!("Created the importer {}", pod::name(volume));
            context
                .event(volume, event_of(volume, "ImportScheduled"), "Import", note)
                .await;
            Ok(())
        }
        Err(error) if code(&error) == Some(409) => Ok(()),
        Err(error) => {
            let note = format!("the API server refused the importer: {error}");
            context.warn(volume, "Error", "Import", note).await;
            Err(Error::request("make the importer of", volume, error))
        }
    }
}

/// Returns the event of a copy or of an upload that corresponds to one of an import.
fn event_of(volume: &DataVolume, import: &'static str) -> &'static str {
    if volume.spec.is_upload() {
        return match import {
            "ImportScheduled" => "UploadScheduled",
            "ImportInProgress" => "UploadReady",
            "ImportSucceeded" => "UploadSucceeded",
            _ => import,
        };
    }
    match (volume.spec.cloned_claim(), import) {
        (Some(_), "ImportScheduled") => "CloneScheduled",
        (Some(_), "ImportInProgress") => "CloneInProgress",
        (Some(_), "ImportSucceeded") => "CloneSucceeded",
        _ => import,
    }
}

/// Tells people what changed.
async fn tell(volume: &DataVolume, before: &DataVolumeStatus, context: &Context) {
    let status = &volume.status;
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    if before.phase != status.phase {
        match status.phase {
            Phase::ImportInProgress | Phase::CloneInProgress | Phase::UploadReady => {
                let note = match volume.spec.is_upload() {
                    true => format!("PersistentVolumeClaim {name} waits for its upload"),
                    false => format!("PersistentVolumeClaim {name} is being filled"),
                };
                context
                    .event(volume, event_of(volume, "ImportInProgress"), "Import", note)
                    .await;
            }
            Phase::Succeeded => {
                let note = format!("PersistentVolumeClaim {name} is filled");
                context
                    .event(volume, event_of(volume, "ImportSucceeded"), "Import", note)
                    .await;
            }
            _ => {}
        }
    }
    for (kind, reasons) in [
        (
            "Running",
            &[
                "Error",
                "ImagePullFailed",
                "CloneWithoutSource",
                "CloneSourceInUse",
                "CloneUnauthorized",
            ][..],
        ),
        ("Bound", &["ErrResourceExists", "ClaimLost"][..]),
    ] {
        let Some(now) = condition(&status.conditions, kind) else {
            continue;
        };
        let was = condition(&before.conditions, kind);
        let is_new =
            was.is_none_or(|was| (&was.reason, &was.message) != (&now.reason, &now.message));
        if now.status == "False" && is_new && reasons.contains(&now.reason.as_str()) {
            let reason = match now.reason.as_str() {
                "ClaimLost" => "ErrClaimLost",
                reason => reason,
            };
            context
                .warn(volume, reason, "Import", now.message.clone())
                .await;
        }
    }
}
