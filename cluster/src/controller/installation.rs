//! The KubeVirt object: there is one, and its status says whether the components answer.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use podvisor_cluster_types::config::ARCHITECTURE;
use podvisor_cluster_types::kubevirt::KubeVirtSpec;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::sleep;

use super::error::Error;
use super::patch;
use crate::installation::Seen;
use crate::objects::{Condition, KubeVirt, KubeVirtStatus, set_condition};
use crate::served::{self, VERSION};

/// The object's name, where nobody has made one.
const NAME: &str = "kubevirt";

/// How often components that do not answer are asked.
const LOOK: Duration = Duration::from_secs(5);

/// How often those that do are asked.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// Keeps the object of a namespace, until its watch ends.
pub(super) async fn keep(client: Client, namespace: &str, mut seen: watch::Receiver<Seen>) {
    let api: Api<KubeVirt> = Api::namespaced(client.clone(), namespace);
    loop {
        let now = seen.borrow_and_update().clone();
        let done = match now {
            Seen {
                object: Some(object),
                ..
            } => report(&api, &client, &object).await,
            Seen { is_known: true, .. } => create(&api).await.map(|()| LOOK),
            Seen { .. } => Ok(LOOK_AGAIN),
        };
        let wait = done.unwrap_or_else(|error| {
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                "the cluster's configuration is looked at again"
            );
            LOOK
        });
        tokio::select! {
            changed = seen.changed() => if changed.is_err() {
                return;
            },
            () = sleep(wait) => {}
        }
    }
}

/// Makes one that says nothing.
async fn create(api: &Api<KubeVirt>) -> Result<(), Error> {
    let metadata = ObjectMeta {
        name: Some(NAME.to_owned()),
        ..ObjectMeta::default()
    };
    let object = KubeVirt::new(metadata, KubeVirtSpec::default());
    match api.create(&PostParams::default(), &object).await {
        // Another replica has made it.
        Err(kube::Error::Api(refused)) if refused.code == 409 => Ok(()),
        made => made
            .map(drop)
            .map_err(|source| Error::request("create", &object, source)),
    }
}

/// Says how the components are; returns when to look again.
async fn report(
    api: &Api<KubeVirt>,
    client: &Client,
    observed: &Arc<KubeVirt>,
) -> Result<Duration, Error> {
    let object = &**observed;
    if object.metadata.deletion_timestamp.is_some() {
        return Ok(LOOK);
    }
    let fault = fault(api, client, object).await;
    let status = status(object, fault.as_deref());
    patch::status(api, object, &object.status, &status).await?;
    Ok(if fault.is_some() { LOOK } else { LOOK_AGAIN })
}

/// Asks the webhooks and the API, by way of the API server; returns what is wrong with them.
async fn fault(api: &Api<KubeVirt>, client: &Client, object: &KubeVirt) -> Option<String> {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let nothing = Patch::Merge(json!({ "spec": object.spec }));
    let params = PatchParams::default().dry_run();
    if let Err(error) = api.patch(name, &params, &nothing).await {
        return Some(format!(
            "the webhooks do not answer, or refuse this object: {error}"
        ));
    }
    let path = format!("/apis/{}/{}", served::GROUP, served::VERSIONS[0]);
    let request = http::Request::get(path).body(Vec::new()).ok()?;
    let discovered = client.request_text(request).await;
    let error = discovered.err()?;
    Some(format!("the API of subresources does not answer: {error}"))
}

fn status(object: &KubeVirt, fault: Option<&str>) -> KubeVirtStatus {
    let mut status = object.status.clone();
    let version = Some(VERSION.to_owned());
    status.observed_kube_virt_version.clone_from(&version);
    status.target_kube_virt_version.clone_from(&version);
    status.operator_version = version;
    status.default_architecture = Some(ARCHITECTURE.to_owned());
    status.observed_generation = object.metadata.generation;
    if fault.is_none() {
        status.phase = Some("Deployed".to_owned());
    } else if status.phase.is_none() {
        status.phase = Some("Deploying".to_owned());
    }
    // What was deployed once and does not answer now is degraded; before, it is on its way.
    let was_deployed = status.phase.as_deref() == Some("Deployed");
    let states = [
        ("Available", fault.is_none()),
        ("Progressing", fault.is_some() && !was_deployed),
        ("Degraded", fault.is_some() && was_deployed),
    ];
    let (reason, message) = match fault {
        None => ("AllComponentsReady", "All components are ready."),
        Some(fault) => ("ComponentsNotReady", fault),
    };
    let now = Time(Timestamp::now());
    for (kind, is_so) in states {
        let condition = match is_so {
            true => Condition {
                reason: reason.to_owned(),
                message: message.to_owned(),
                ..Condition::yes(kind)
            },
            false => Condition::no(kind, reason, message),
        };
        set_condition(&mut status.conditions, condition, &now);
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    fn states(status: &KubeVirtStatus) -> Vec<(&str, &str)> {
        let conditions = status.conditions.iter();
        conditions
            .map(|one| (one.kind.as_str(), one.status.as_str()))
            .collect()
    }

    #[test]
    fn components_are_on_their_way_then_there_then_degraded() {
        let mut object = KubeVirt::default();
        object.status = status(&object, Some("no webhook"));
        assert_eq!(object.status.phase.as_deref(), Some("Deploying"));
        let on_its_way = [
            ("Available", "False"),
            ("Progressing", "True"),
            ("Degraded", "False"),
        ];
        assert_eq!(states(&object.status), on_its_way);
        object.status = status(&object, None);
        assert_eq!(object.status.phase.as_deref(), Some("Deployed"));
        let there = [
            ("Available", "True"),
            ("Progressing", "False"),
            ("Degraded", "False"),
        ];
        assert_eq!(states(&object.status), there);
        let again = status(&object, None);
        assert_eq!(again, object.status, "it is written once");
        object.status = status(&object, Some("no webhook"));
        assert_eq!(object.status.phase.as_deref(), Some("Deployed"));
        let degraded = [
            ("Available", "False"),
            ("Progressing", "False"),
            ("Degraded", "True"),
        ];
        assert_eq!(states(&object.status), degraded);
    }
}
