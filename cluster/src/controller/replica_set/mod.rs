//! VirtualMachineInstanceReplicaSet → VirtualMachineInstances.

mod decide;

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::runtime::controller;

pub use decide::{Decision, decide};

use super::error::{Error, code, is_gone};
use super::{Context, patch};
use crate::objects::{
    Condition, ReplicaSetStatus, VMI_FINALIZER, VirtualMachineInstance,
    VirtualMachineInstanceReplicaSet, clear_condition, set_condition,
};

/// Brings a set one step nearer to what is asked of it.
pub(super) async fn reconcile(
    set: Arc<VirtualMachineInstanceReplicaSet>,
    context: Arc<Context>,
) -> Result<controller::Action, Error> {
    context.check().await?;
    let owned = context
        .world
        .vmis_of(set.metadata.uid.as_deref().unwrap_or_default());
    let now = Time(Timestamp::now());
    let Decision {
        mut status,
        create,
        delete,
    } = decide(&set, &owned, &now);
    let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
    let instances: Api<VirtualMachineInstance> = context.world.api(namespace);
    let result = carry_out(&set, create, delete, &instances, &context).await;
    match &result {
        Ok(()) => clear_condition(&mut status.conditions, "ReplicaFailure"),
        Err(error) => {
            let mut message = error.to_string();
            if let Some(source) = std::error::Error::source(error) {
                message = format!("{message}: {source}");
            }
            let failure = Condition {
                reason: "FailedCreate".to_owned(),
                message,
                ..Condition::yes("ReplicaFailure")
            };
            set_condition(&mut status.conditions, failure, &now);
        }
    }
    let sets: Api<VirtualMachineInstanceReplicaSet> = context.world.api(namespace);
    patch::status::<_, ReplicaSetStatus>(&sets, &set, &set.status, &status).await?;
    result?;
    Ok(controller::Action::await_change())
}

async fn carry_out(
    set: &VirtualMachineInstanceReplicaSet,
    create: Vec<String>,
    delete: Vec<(String, String)>,
    instances: &Api<VirtualMachineInstance>,
    context: &Context,
) -> Result<(), Error> {
    for (name, uid) in delete {
        let params = DeleteParams::background().preconditions(Preconditions {
            uid: Some(uid),
            resource_version: None,
        });
        match instances.delete(&name, &params).await {
            Ok(_) => {
                let note = format!("Deleted the instance {name}");
                context.event(set, "SuccessfulDelete", "Delete", note).await;
            }
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(Error::request("delete an instance of", set, error)),
        }
    }
    for name in create {
        let instance = instance(set, name.clone());
        match instances.create(&PostParams::default(), &instance).await {
            Ok(_) => {
                let note = format!("Created the instance {name}");
                context.event(set, "SuccessfulCreate", "Create", note).await;
            }
            // Made before, and not seen yet; or somebody else's, and in the way until it is seen.
            Err(error) if code(&error) == Some(409) => {}
            Err(error) => return Err(Error::request("make an instance of", set, error)),
        }
    }
    Ok(())
}

fn instance(set: &VirtualMachineInstanceReplicaSet, name: String) -> VirtualMachineInstance {
    let template = set.spec.template.clone().unwrap_or_default();
    let of_template = template.metadata.unwrap_or_default();
    let owner = OwnerReference {
        api_version: set.api_version.clone(),
        kind: set.kind.clone(),
        name: set.metadata.name.clone().unwrap_or_default(),
        uid: set.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    };
    let metadata = ObjectMeta {
        name: Some(name),
        namespace: set.metadata.namespace.clone(),
        labels: of_template.labels,
        annotations: of_template.annotations,
        finalizers: Some(vec![VMI_FINALIZER.to_owned()]),
        owner_references: Some(vec![owner]),
        ..ObjectMeta::default()
    };
    VirtualMachineInstance::new(metadata, template.spec)
}
