//! A claim that a user marked as the target of an upload → a DataVolume that takes the upload.
//!
//! The DataVolume has the claim's name, is owned by the claim, and goes when the claim is filled.

use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::PostParams;
use kube::runtime::controller;
use kube::{Api, Resource as _};
use podvisor_cluster_types::datavolume::{GROUP, VERSION};
use serde_json::json;

use super::claim::CLAIM;
use crate::controller::Context;
use crate::controller::claims::awaits_upload;
use crate::controller::error::{Error, code};
use crate::objects::DataVolume;

/// The reason of an event that says why there is no upload: that for which `virtctl` looks.
const REASON: &str = "ProvisioningFailed";

/// Annotation of a claim: what it is to hold. Without it, a disk.
const CONTENT: &str = "cdi.kubevirt.io/storage.contentType";

/// Has the upload to a claim taken.
pub(in crate::controller) async fn reconcile(
    claim: Arc<PersistentVolumeClaim>,
    context: Arc<Context>,
) -> Result<controller::Action, Error> {
    context.check().await?;
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    if !awaits_upload(&claim) || context.world.volume(namespace, name).is_some() {
        return Ok(controller::Action::await_change());
    }
    let volume = volume(&claim).map_err(|source| Error::Serialize {
        what: "DataVolume",
        source,
    })?;
    let volumes: Api<DataVolume> = context.world.api(namespace);
    match volumes.create(&PostParams::default(), &volume).await {
        Ok(_) => {}
        Err(error) if code(&error) == Some(409) => {}
        Err(error) => {
            let note = format!("no upload can be taken: {error}");
            context.warn(&*claim, REASON, "Upload", note).await;
            return Err(Error::request("take the upload to", &*claim, error));
        }
    }
    Ok(controller::Action::await_change())
}

fn volume(claim: &PersistentVolumeClaim) -> Result<DataVolume, serde_json::Error> {
    let meta = claim.meta();
    let spec = claim.spec.clone().unwrap_or_default();
    // One is all that a DataVolume may ask for; it changes nothing for a claim that exists.
    let modes: Vec<String> = spec.access_modes.into_iter().flatten().take(1).collect();
    let resources = spec.resources.unwrap_or_default();
    let request = resources.requests.and_then(|mut all| all.remove("storage"));
    // What is not supported is refused as in any DataVolume.
    let annotations = meta.annotations.as_ref();
    let content = annotations.and_then(|annotations| annotations.get(CONTENT));
    serde_json::from_value(json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "DataVolume",
        "metadata": {
            "name": meta.name,
            "namespace": meta.namespace,
            "annotations": {format!("{GROUP}/storage.deleteAfterCompletion"): "true"},
            "ownerReferences": [{
                "apiVersion": "v1", "kind": CLAIM, "name": meta.name, "uid": meta.uid,
            }],
        },
        "spec": {
            "source": {"upload": {}},
            "contentType": content,
            "pvc": {"accessModes": modes, "resources": {"requests": {"storage": request}}},
        },
    }))
}

#[cfg(test)]
mod tests {
    use podvisor_cluster_types::FieldPath;

    use super::*;
    use crate::controller::datavolume::claim::is_of_claim;
    use crate::upload;

    fn claim(metadata: serde_json::Value) -> PersistentVolumeClaim {
        let mut metadata = metadata;
        metadata["name"] = json!("a");
        metadata["uid"] = json!("u");
        serde_json::from_value(json!({
            "metadata": metadata,
            "spec": {
                "accessModes": ["ReadWriteMany", "ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }))
        .unwrap()
    }

    #[test]
    fn a_claim_waits_that_is_marked_and_neither_filled_nor_a_data_volumes() {
        let marked = |more: serde_json::Value| {
            let mut annotations = json!({upload::TARGET: ""});
            json_patch::merge(&mut annotations, &more);
            json!({"annotations": annotations})
        };
        assert!(awaits_upload(&claim(marked(json!({})))));
        assert!(!awaits_upload(&claim(json!({}))));
        let filled = json!({upload::PHASE: "Succeeded"});
        assert!(!awaits_upload(&claim(marked(filled))));
        let mut owned = marked(json!({}));
        owned["ownerReferences"] = json!([{
            "apiVersion": "x", "kind": "DataVolume", "name": "a", "uid": "v",
        }]);
        assert!(!awaits_upload(&claim(owned)));
    }

    #[test]
    fn its_data_volume_is_one_that_admission_takes() {
        let volume = volume(&claim(json!({}))).unwrap();
        assert_eq!(volume.spec.validate(&FieldPath::new("spec")), []);
        assert_eq!(volume.spec.disk_size(), Some(1 << 30));
        assert!(is_of_claim(&volume) && volume.spec.is_upload());
    }

    #[test]
    fn a_claim_for_an_archive_is_not_filled_with_it_as_a_disk() {
        let fields = |content: &str| {
            let volume = volume(&claim(json!({"annotations": {CONTENT: content}}))).unwrap();
            let causes = volume.spec.validate(&FieldPath::new("spec"));
            let fields = causes.into_iter().map(|cause| cause.field);
            fields.collect::<Vec<_>>()
        };
        assert_eq!(fields("archive"), ["spec.contentType"]);
        assert!(fields("kubevirt").is_empty());
    }
}
