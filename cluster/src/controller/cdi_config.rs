//! The CDIConfig object: where uploads go. Clients that upload disks look it up.
//!
//! An administrator writes the URL under which the upload proxy is reached from outside into its
//! `spec`; what is in its `status` is read by other clients.

use std::time::Duration;

use kube::api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use podvisor_cluster_types::datavolume::{GROUP, VERSION};
use serde_json::{Value, json};
use tokio::time::sleep;

/// The only object's name.
const NAME: &str = "config";

/// How often it is looked at, and how often after an error.
const LOOK: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Keeps the object until this is dropped.
pub(super) async fn keep(client: Client) {
    let gvk = GroupVersionKind::gvk(GROUP, VERSION, "CDIConfig");
    let api = Api::all_with(client, &ApiResource::from_gvk(&gvk));
    loop {
        let wait = match reconcile(&api).await {
            Ok(()) => LOOK,
            Err(error) => {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "the configuration of uploads is looked at again"
                );
                LOOK_AGAIN
            }
        };
        sleep(wait).await;
    }
}

async fn reconcile(api: &Api<DynamicObject>) -> Result<(), kube::Error> {
    let object = match api.get_opt(NAME).await? {
        Some(object) => object,
        None => {
            let gvk = GroupVersionKind::gvk(GROUP, VERSION, "CDIConfig");
            let object = DynamicObject::new(NAME, &ApiResource::from_gvk(&gvk));
            let object = object.data(json!({ "spec": {} }));
            match api.create(&PostParams::default(), &object).await {
                // Another replica has made it.
                Err(kube::Error::Api(refused)) if refused.code == 409 => return Ok(()),
                // Clients that make claims read its status, and do not wait for it.
                made => made?,
            }
        }
    };
    let status = status(&object.data["spec"]);
    let observed = &object.data["status"];
    let differs = |(name, value): (&String, &Value)| observed[name] != *value;
    if status.as_object().into_iter().flatten().any(differs) {
        let patch = Patch::Merge(json!({ "status": status }));
        api.patch(NAME, &PatchParams::default(), &patch).await?;
    }
    Ok(())
}

/// What is reported of a specification.
fn status(spec: &Value) -> Value {
    let url = spec["uploadProxyURLOverride"].as_str();
    json!({
        "filesystemOverhead": { "global": "0.055" },
        "uploadProxyURL": url.filter(|url| !url.is_empty()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_of_uploads_is_reported_where_one_is_given() {
        let given = json!({ "uploadProxyURLOverride": "https://uploads.example:8443" });
        assert_eq!(
            status(&given)["uploadProxyURL"],
            "https://uploads.example:8443"
        );
        let empty = json!({ "uploadProxyURLOverride": "" });
        assert_eq!(status(&empty)["uploadProxyURL"], Value::Null);
        assert_eq!(status(&Value::Null)["uploadProxyURL"], Value::Null);
    }
}
