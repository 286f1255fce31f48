//! DataSource → whether what it names is there: its condition `Ready`.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::runtime::controller;

use super::datavolume::follow;
use super::error::Error;
use super::{Context, patch};
use crate::objects::{Condition, DataSource, VolumeSnapshot, VolumeState, set_condition};

/// How often a snapshot is looked at that is not ready.
const LOOK: std::time::Duration = std::time::Duration::from_secs(10);

/// Says whether a DataSource can be used.
pub(super) async fn reconcile(
    observed: Arc<DataSource>,
    context: Arc<Context>,
) -> Result<controller::Action, Error> {
    context.check().await?;
    let source = &*observed;
    if source.metadata.deletion_timestamp.is_some() {
        return Ok(controller::Action::await_change());
    }
    let namespace = source.metadata.namespace.as_deref().unwrap_or_default();
    let name = source.metadata.name.as_deref().unwrap_or_default();
    let state = state(source, namespace, name, &context).await?;
    let condition = match &state {
        Ok(()) => Condition {
            reason: "Ready".to_owned(),
            message: "DataSource is ready to be consumed".to_owned(),
            ..Condition::yes("Ready")
        },
        Err(why) => Condition::no("Ready", "NotFound", why.as_str()),
    };
    let mut status = source.status.clone();
    status.source.clone_from(&source.spec.source);
    set_condition(&mut status.conditions, condition, &Time(Timestamp::now()));
    let api: Api<DataSource> = context.world.api(namespace);
    patch::status(&api, source, &source.status, &status).await?;
    Ok(match state {
        Ok(()) => controller::Action::await_change(),
        Err(_) => controller::Action::requeue(LOOK),
    })
}

async fn state(
    source: &DataSource,
    namespace: &str,
    name: &str,
    context: &Context,
) -> Result<Result<(), String>, Error> {
    let world = &context.world;
    let found = match follow(namespace, name, &|name| world.source(namespace, name)) {
        Ok(found) => found,
        Err(why) => return Ok(Err(why)),
    };
    if let Some(claim) = found.pvc {
        let name = claim.name;
        if world.claim_of(namespace, &name).is_none() {
            return Ok(Err(format!("PersistentVolumeClaim {name} does not exist")));
        }
        let volume = world.volume(namespace, &name);
        let is_ready = volume.is_none_or(|volume| volume.state() == VolumeState::Ready);
        return Ok(match is_ready {
            true => Ok(()),
            false => Err(format!("PersistentVolumeClaim {name} is not filled yet")),
        });
    }
    let name = found.snapshot.map(|snapshot| snapshot.name);
    let name = name.unwrap_or_default();
    let api: Api<VolumeSnapshot> = world.api(namespace);
    let found = api.get_opt(&name).await;
    let found =
        found.map_err(|error| Error::request("look for what is named by", source, error))?;
    Ok(match found {
        Some(found) if found.status.ready_to_use == Some(true) => Ok(()),
        Some(_) => Err(format!("VolumeSnapshot {name} is not ready to use")),
        None => Err(format!("VolumeSnapshot {name} does not exist")),
    })
}
