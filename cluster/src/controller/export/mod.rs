//! VirtualMachineExport → a pod that serves volumes, and how it is reached.
//!
//! `source` says what is exported, `decide` what has to be done, `object` what is made, and this
//! file does it. docs/exports.md has the table of phases.

mod decide;
mod object;
mod source;

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::runtime::controller;
use podvisor_cluster_types::export::ExportSource;

pub use decide::{Action, Decision, Observed, decide};
pub use source::{Obstacle, Source, Volume};

use super::error::{Error, code, is_gone};
use super::{Context, expectations, patch, snapshot};
use crate::objects::{
    ExportPhase, VirtualMachineExport, VirtualMachineSnapshotContent, VolumeBackup, VolumeSnapshot,
};
use source::{Claim, content_of, of_claims};

/// Brings an export one step further.
pub(super) async fn reconcile(
    observed: Arc<VirtualMachineExport>,
    context: Arc<Context>,
) -> Result<controller::Action, Error> {
    context.check().await?;
    let export = &*observed;
    let namespace = export.metadata.namespace.as_deref().unwrap_or_default();
    let pod = context.world.exporter(namespace, &object::pod_name(export));
    if context.expectations.are_pending(export, pod.as_deref()) {
        return Ok(controller::Action::requeue(expectations::LIMIT));
    }
    let found = find(export, namespace, &context).await?;
    let services: Api<Service> = context.world.api(namespace);
    let service = services.get_opt(&object::service_name(export)).await;
    let service =
        service.map_err(|source| Error::request("look for the Service of", export, source))?;
    let authorities = match pod.as_deref().is_some_and(decide::is_ready) {
        true => Some(context.importers().authorities(export).await?),
        false => None,
    };
    let decision = decide(&Observed {
        export,
        source: &found.source,
        machine: found.machine.as_deref(),
        pod: pod.as_deref(),
        service: service.as_ref(),
        authorities: authorities.as_deref(),
        now: Time(Timestamp::now()),
    });
    carry_out(export, pod.as_deref(), decision, &context).await
}

/// What an export is of, and the virtual machine that this is of.
struct Found {
    source: Source,
    machine: Option<String>,
}

impl Found {
    fn waits(obstacle: Obstacle, machine: Option<&str>) -> Self {
        Self {
            source: Source::Waits(obstacle),
            machine: machine.map(str::to_owned),
        }
    }
}

async fn find(
    export: &VirtualMachineExport,
    namespace: &str,
    context: &Context,
) -> Result<Found, Error> {
    let world = &context.world;
    match export.spec.source() {
        Some(ExportSource::Claim(name)) => Ok(Found {
            source: claims(export, namespace, &[name], context).await?,
            machine: None,
        }),
        Some(ExportSource::Machine(name)) => {
            let missing = || format!("Virtual Machine {namespace}/{name} not found");
            let Some(vm) = world.vm(namespace, name) else {
                return Ok(Found::waits(Obstacle::Missing(missing()), Some(name)));
            };
            let names: Vec<&str> = snapshot::claims(&vm.spec).map(|(_, claim)| claim).collect();
            let runs = world
                .vmi(&vm)
                .is_some_and(|vmi| !vmi.status.phase.is_final());
            let source = if names.is_empty() {
                Source::Nothing {
                    reason: "VMNoVolumes",
                    message: format!("Virtual Machine {namespace}/{name} has no claims"),
                }
            } else if runs {
                let message = format!("Virtual Machine {namespace}/{name} is running");
                Source::Waits(Obstacle::InUse(message))
            } else {
                claims(export, namespace, &names, context).await?
            };
            Ok(Found {
                source,
                machine: Some(name.to_owned()),
            })
        }
        Some(ExportSource::Snapshot(name)) => of_snapshot(export, namespace, name, context).await,
        None => {
            let message = "the source is nothing that can be exported".to_owned();
            Ok(Found::waits(Obstacle::Missing(message), None))
        }
    }
}

/// Looks at claims.
async fn claims(
    export: &VirtualMachineExport,
    namespace: &str,
    names: &[&str],
    context: &Context,
) -> Result<Source, Error> {
    let world = &context.world;
    let mut found = Vec::new();
    for &name in names {
        let writer = world.writer(namespace, &[name]).await;
        let writer = writer
            .map_err(|source| Error::request("look for users of the claims of", export, source))?;
        let state = world.volume(namespace, name).map(|volume| volume.state());
        found.push((name, world.claim_of(namespace, name), state, writer));
    }
    let claims: Vec<Claim<'_>> = found
        .iter()
        .map(|(name, claim, state, writer)| Claim {
            name,
            claim: claim.as_deref(),
            state: *state,
            writer: writer.as_deref(),
        })
        .collect();
    Ok(of_claims(namespace, &claims))
}

/// Looks at the claims that are made of a snapshot's volumes, and makes those that are missing.
async fn of_snapshot(
    export: &VirtualMachineExport,
    namespace: &str,
    name: &str,
    context: &Context,
) -> Result<Found, Error> {
    let world = &context.world;
    let of = format!("VirtualMachineSnapshot {namespace}/{name}");
    let Some(taken) = world.snapshot(namespace, name) else {
        let message = format!("{of} does not exist");
        return Ok(Found::waits(Obstacle::Missing(message), None));
    };
    let machine = taken.spec.source.as_ref().map(|source| &*source.name);
    let content = world.content(namespace, &snapshot::content_name(&taken));
    let (Some(content), Some(true)) = (content, taken.status.ready_to_use) else {
        let message = format!("{of} is not ready to use");
        return Ok(Found::waits(Obstacle::Unfilled(message), machine));
    };
    let source = of_content(export, namespace, &of, &content, context).await?;
    Ok(Found {
        source,
        machine: machine.map(str::to_owned),
    })
}

async fn of_content(
    export: &VirtualMachineExport,
    namespace: &str,
    of: &str,
    content: &VirtualMachineSnapshotContent,
    context: &Context,
) -> Result<Source, Error> {
    let mut volumes = Vec::new();
    let backups = content.spec.volume_backups.iter();
    for backup in backups.filter(|backup| backup.volume_snapshot_name.is_some()) {
        let name = object::claim_name(export, backup);
        let claim = match context.world.claim_of(namespace, &name) {
            Some(claim) => (*claim).clone(),
            None => match make_claim(export, namespace, backup, context).await? {
                Some(made) => made,
                None => {
                    let message = "Not all PVCs have been successfully restored".to_owned();
                    return Ok(Source::Waits(Obstacle::Unfilled(message)));
                }
            },
        };
        if !object::owns(export, &claim.metadata) {
            let message = format!("pvc {namespace}/{name} is not of this export");
            return Ok(Source::Waits(Obstacle::InUse(message)));
        }
        let was = &backup.persistent_volume_claim.metadata.name;
        volumes.push(Volume {
            name: was.clone().unwrap_or_default(),
            claim: name,
            content: content_of(&claim),
        });
    }
    Ok(match volumes.is_empty() {
        true => Source::Nothing {
            reason: "VMSnapshotNoVolumes",
            message: format!("{of} does not contain any volume snapshots"),
        },
        false => Source::Available(volumes),
    })
}

/// Makes the claim of a volume of a snapshot; `None` if that is gone, or was made just now.
async fn make_claim(
    export: &VirtualMachineExport,
    namespace: &str,
    backup: &VolumeBackup,
    context: &Context,
) -> Result<Option<PersistentVolumeClaim>, Error> {
    let is_over = export.metadata.deletion_timestamp.is_some();
    let name = backup.volume_snapshot_name.as_deref().filter(|_| !is_over);
    let Some(name) = name else { return Ok(None) };
    let snapshots: Api<VolumeSnapshot> = context.world.api(namespace);
    let taken = snapshots.get_opt(name).await;
    let taken =
        taken.map_err(|source| Error::request("look for the volumes of", export, source))?;
    let Some(taken) = taken else { return Ok(None) };
    let claims: Api<PersistentVolumeClaim> = context.world.api(namespace);
    let claim = object::claim(export, backup, &taken);
    match claims.create(&PostParams::default(), &claim).await {
        Ok(made) => Ok(Some(made)),
        Err(error) if code(&error) == Some(409) => Ok(None),
        Err(error) => {
            let note = format!("the API server refused a claim: {error}");
            context.warn(export, "FailedCreate", "Export", note).await;
            Err(Error::request("make a claim of", export, error))
        }
    }
}

async fn carry_out(
    export: &VirtualMachineExport,
    pod: Option<&Pod>,
    decision: Decision,
    context: &Context,
) -> Result<controller::Action, Error> {
    let namespace = export.metadata.namespace.as_deref().unwrap_or_default();
    let api: Api<VirtualMachineExport> = context.world.api(namespace);
    for action in decision.actions {
        match action {
            Action::Delete => {
                let params = of_uid(export.metadata.uid.clone());
                let name = export.metadata.name.as_deref().unwrap_or_default();
                match api.delete(name, &params).await {
                    Ok(_) => {}
                    Err(error) if is_gone(&error) => {}
                    Err(error) => return Err(Error::request("delete", export, error)),
                }
            }
            Action::CreateService => create_service(export, context).await?,
            Action::CreateToken => create_token(export, context).await?,
            Action::CreatePod { volumes, until } => {
                create_pod(export, &volumes, until, context).await?;
            }
            Action::CreateCredentials => {
                if let Some(pod) = pod {
                    let secrets: Api<Secret> = context.world.api(namespace);
                    let service = object::service_name(export);
                    let importers = context.importers();
                    importers
                        .make_exporter_credentials(export, &service, pod, &secrets)
                        .await?;
                }
            }
            Action::DeletePod {
                uid,
                reason,
                message,
            } => {
                let pods: Api<Pod> = context.world.api(namespace);
                match pods.delete(&object::pod_name(export), &of_uid(uid)).await {
                    Ok(_) => context.warn(export, reason, "Export", message).await,
                    Err(error) if is_gone(&error) => {}
                    Err(error) => return Err(Error::request("delete the pod of", export, error)),
                }
            }
        }
    }
    let before = &export.status;
    if let Some(written) = patch::status(&api, export, before, &decision.status).await? {
        context.expectations.wrote(&written);
        if written.status.phase == ExportPhase::Ready && before.phase != ExportPhase::Ready {
            let note = "Volumes can be downloaded".to_owned();
            context.event(export, "ExportReady", "Export", note).await;
        }
    }
    Ok(match decision.again {
        Some(wait) => controller::Action::requeue(wait),
        None => controller::Action::await_change(),
    })
}

fn of_uid(uid: Option<String>) -> DeleteParams {
    DeleteParams::background().preconditions(Preconditions {
        uid,
        resource_version: None,
    })
}

async fn create_service(export: &VirtualMachineExport, context: &Context) -> Result<(), Error> {
    let namespace = export.metadata.namespace.as_deref().unwrap_or_default();
    let services: Api<Service> = context.world.api(namespace);
    let service = object::service(export).map_err(unwritable("Service"))?;
    match services.create(&PostParams::default(), &service).await {
        Ok(_) => Ok(()),
        // Made before this controller was killed.
        Err(error) if code(&error) == Some(409) => Ok(()),
        Err(error) => Err(refused(export, "the Service", error, context).await),
    }
}

async fn create_token(export: &VirtualMachineExport, context: &Context) -> Result<(), Error> {
    let namespace = export.metadata.namespace.as_deref().unwrap_or_default();
    let secrets: Api<Secret> = context.world.api(namespace);
    let token = crate::token::random();
    let token = token.map_err(|source| Error::new_token(export, source))?;
    let secret = object::token(export, token);
    match secrets.create(&PostParams::default(), &secret).await {
        Ok(_) => {
            let note = format!("Created the Secret {}", object::token_name(export));
            context.event(export, "SecretCreated", "Export", note).await;
            Ok(())
        }
        // It has one.
        Err(error) if code(&error) == Some(409) => Ok(()),
        Err(error) => Err(refused(export, "the Secret with the token", error, context).await),
    }
}

async fn create_pod(
    export: &VirtualMachineExport,
    volumes: &[Volume],
    until: i64,
    context: &Context,
) -> Result<(), Error> {
    let namespace = export.metadata.namespace.as_deref().unwrap_or_default();
    let pods: Api<Pod> = context.world.api(namespace);
    let image = context.importers().image();
    let pod = object::pod(export, volumes, image, until).map_err(unwritable("pod"))?;
    match pods.create(&PostParams::default(), &pod).await {
        Ok(made) => {
            context.expectations.made(export, &made);
            let note = format!("Created the exporter pod {}", object::pod_name(export));
            context
                .event(export, "ExporterPodCreated", "Export", note)
                .await;
            Ok(())
        }
        Err(error) if code(&error) == Some(409) => Ok(()),
        Err(error) => Err(refused(export, "the exporter pod", error, context).await),
    }
}

fn unwritable(what: &'static str) -> impl FnOnce(serde_json::Error) -> Error {
    move |source| Error::Serialize { what, source }
}

/// Tells people that something was not made.
async fn refused(
    export: &VirtualMachineExport,
    what: &str,
    error: kube::Error,
    context: &Context,
) -> Error {
    let note = format!("the API server refused {what}: {error}");
    context.warn(export, "FailedCreate", "Export", note).await;
    Error::request("take a step of", export, error)
}
