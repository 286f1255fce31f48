//! The claim of a DataVolume.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use podvisor_cluster_types::Quantity;
use podvisor_cluster_types::datavolume::GROUP;
use serde_json::{Value, json};

use crate::controller::claims::{is_filled, takes_upload};
use crate::objects::{DataVolume, annotation};
use crate::upload;

/// What a claim is called in references.
pub(super) const CLAIM: &str = "PersistentVolumeClaim";

/// Annotation of a DataVolume: take a claim that exists.
const ADOPTS: &str = "allowClaimAdoption";

/// How a claim may be used that says nothing of it.
const DEFAULT_MODE: &str = "ReadWriteOnce";

/// What is known of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// It was made for the DataVolume, and is to be filled.
    Empty,
    /// It is filled.
    Filled,
    /// It is somebody else's.
    Foreign,
}

/// Returns whether a claim has its contents, or is to get them.
pub(super) fn content(volume: &DataVolume, claim: &PersistentVolumeClaim) -> Content {
    let name = volume.metadata.name.as_deref();
    let of_claim = |name: &str| annotation(&claim.metadata, name);
    // A claim that a user marked is filled through a DataVolume of its name.
    let is_owned = owns(volume, &claim.metadata)
        || volume.spec.is_upload() && is_of_claim(volume) && takes_upload(claim);
    let names = ["storage.populatedFor", "storage.prePopulated"];
    let is_prepared = name.is_some() && names.into_iter().any(|key| of_claim(key) == name);
    if is_prepared || is_owned && is_filled(claim) {
        Content::Filled
    } else if is_owned {
        Content::Empty
    } else if volume.annotation(ADOPTS) == Some("true") {
        Content::Filled
    } else {
        Content::Foreign
    }
}

/// Returns whether a DataVolume was made for a claim, and so never makes one.
pub(super) fn is_of_claim(volume: &DataVolume) -> bool {
    let owners = volume.metadata.owner_references.iter().flatten();
    owners.into_iter().any(|owner| owner.kind == CLAIM)
}

/// Returns whether an object was made for a DataVolume.
pub(super) fn owns(volume: &DataVolume, meta: &ObjectMeta) -> bool {
    let owners = meta.owner_references.iter().flatten();
    let mut owners = owners.filter(|owner| owner.controller == Some(true));
    owners.any(|owner| Some(&owner.uid) == volume.metadata.uid.as_ref())
}

/// Returns the change by which a claim outlives its DataVolume, and is known as filled by its name.
pub(super) fn release(volume: &DataVolume) -> Value {
    let name = volume.metadata.name.as_deref();
    json!({"metadata": {
        "ownerReferences": volume.metadata.owner_references,
        "annotations": {format!("{GROUP}/storage.populatedFor"): name},
    }})
}

/// Returns a reference to the DataVolume that something is made for.
pub(super) fn owner(volume: &DataVolume) -> OwnerReference {
    OwnerReference {
        api_version: format!("{GROUP}/{}", podvisor_cluster_types::datavolume::VERSION),
        kind: "DataVolume".to_owned(),
        name: volume.metadata.name.clone().unwrap_or_default(),
        uid: volume.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// Returns the claim of a DataVolume; `default_class` is the cluster's class for disks of VMs.
pub(super) fn claim(
    volume: &DataVolume,
    default_class: Option<&str>,
) -> Result<PersistentVolumeClaim, serde_json::Error> {
    let spec = &volume.spec;
    let template = spec.claim().cloned().unwrap_or_default();
    let request = match (&spec.pvc, spec.claim_size()) {
        (None, Some(size)) => Some(Quantity::from_bytes(size)),
        _ => template.request().cloned(),
    };
    let modes = match template.access_modes.is_empty() {
        true => vec![DEFAULT_MODE.to_owned()],
        false => template.access_modes,
    };
    let own = default_class
        .filter(|_| spec.pvc.is_none())
        .map(str::to_owned);
    let mut of_claim = json!({
        "accessModes": modes,
        "resources": {"requests": {"storage": request.unwrap_or_default().as_str()}},
    });
    let limits = template.resources.map(|resources| resources.limits);
    let limit = limits.and_then(|limits| limits.get("storage").cloned());
    let optional = [
        ("volumeMode", template.volume_mode.map(Value::from)),
        (
            "storageClassName",
            template.storage_class_name.or(own).map(Value::from),
        ),
        ("selector", template.selector),
        ("volumeName", template.volume_name.map(Value::from)),
        (
            "volumeAttributesClassName",
            template.volume_attributes_class_name.map(Value::from),
        ),
    ];
    for (field, value) in optional {
        if let Some(value) = value {
            of_claim[field] = value;
        }
    }
    let snapshot = spec.restored_snapshot();
    if let Some(snapshot) = snapshot {
        of_claim["dataSource"] = json!({
            "apiGroup": "snapshot.storage.k8s.io",
            "kind": "VolumeSnapshot",
            "name": snapshot.name,
        });
    }
    if let Some(limit) = limit {
        of_claim["resources"]["limits"]["storage"] = limit.as_str().into();
    }
    let meta = &volume.metadata;
    let mut labels = meta.labels.clone().unwrap_or_default();
    labels.insert("app".into(), "containerized-data-importer".into());
    let mut annotations = annotations(volume);
    if snapshot.is_some() {
        // Its driver fills it, before it has a volume.
        let name = meta.name.clone().unwrap_or_default();
        annotations.insert(format!("{GROUP}/storage.populatedFor"), name);
    }
    Ok(PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: meta.name.clone(),
            namespace: meta.namespace.clone(),
            labels: Some(labels),
            annotations: Some(annotations),
            owner_references: Some(vec![owner(volume)]),
            ..ObjectMeta::default()
        },
        spec: Some(serde_json::from_value(of_claim)?),
        ..PersistentVolumeClaim::default()
    })
}

/// The DataVolume's annotations, without those that say what was done.
fn annotations(volume: &DataVolume) -> BTreeMap<String, String> {
    let mut annotations = volume.metadata.annotations.clone().unwrap_or_default();
    annotations.retain(|name, _| {
        let own = name
            .strip_prefix(GROUP)
            .and_then(|rest| rest.strip_prefix('/'));
        let is_state = own.is_some_and(|own| {
            [
                "storage.pod.phase",
                "storage.pod.ready",
                "storage.populatedFor",
                "storage.prePopulated",
                "storage.upload.target",
                "storage.uploadPodName",
                "storage.clone.token",
            ]
            .contains(&own)
        });
        !is_state && name != upload::ADDRESS && !name.starts_with("kubectl.kubernetes.io/")
    });
    if volume.spec.is_upload() {
        annotations.insert(upload::TARGET.to_owned(), String::new());
    }
    annotations.insert(
        format!("{GROUP}/storage.contentType"),
        "kubevirt".to_owned(),
    );
    annotations
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(spec: Value, annotations: Value) -> DataVolume {
        serde_json::from_value(json!({
            "metadata": {"name": "a", "namespace": "n", "uid": "u", "annotations": annotations},
            "spec": spec,
        }))
        .unwrap()
    }

    fn sized() -> Value {
        json!({"requests": {"storage": "1Gi"}})
    }

    #[test]
    fn a_claim_has_what_is_asked_for_and_defaults() {
        let spec = json!({"storage": {"resources": sized()}});
        let claim = claim(&volume(spec, json!({})), Some("disks")).unwrap();
        let spec = claim.spec.unwrap();
        assert_eq!(spec.access_modes.unwrap(), ["ReadWriteOnce"]);
        assert_eq!(spec.storage_class_name.as_deref(), Some("disks"));
        assert_eq!(spec.volume_mode, None);
        let size = &spec.resources.unwrap().requests.unwrap()["storage"];
        assert_eq!(size.0, "1084Mi");
    }

    #[test]
    fn a_claim_by_pvc_is_taken_as_it_is() {
        let pvc = json!({
            "accessModes": ["ReadWriteMany"], "volumeMode": "Block", "storageClassName": "",
            "resources": {"requests": {"storage": "1000M"}, "limits": {"storage": "2G"}},
            "selector": {"matchLabels": {"a": "b"}},
        });
        let given = volume(json!({"pvc": pvc}), json!({"x": "1"}));
        let claim = claim(&given, Some("disks")).unwrap();
        assert_eq!(serde_json::to_value(&claim.spec).unwrap(), pvc);
        assert_eq!(claim.metadata.annotations.unwrap()["x"], "1");
    }

    #[test]
    fn a_user_cannot_say_that_a_claim_is_filled_by_chance() {
        let said = json!({"cdi.kubevirt.io/storage.pod.phase": "Succeeded"});
        let volume = volume(json!({"storage": {"resources": sized()}}), said);
        let made = claim(&volume, None).unwrap();
        assert_eq!(content(&volume, &made), Content::Empty);
    }

    #[test]
    fn claims_of_others_are_taken_only_if_somebody_says_so() {
        let spec = || json!({"storage": {"resources": sized()}});
        let plain = volume(spec(), json!({}));
        let adopts = volume(
            spec(),
            json!({"cdi.kubevirt.io/allowClaimAdoption": "true"}),
        );
        let mut found = claim(&plain, None).unwrap();
        assert_eq!(content(&plain, &found), Content::Empty);
        found.metadata.owner_references = None;
        assert_eq!(content(&plain, &found), Content::Foreign);
        assert_eq!(content(&adopts, &found), Content::Filled);
        let annotations = found.metadata.annotations.get_or_insert_default();
        annotations.insert("cdi.kubevirt.io/storage.populatedFor".into(), "a".into());
        assert_eq!(content(&plain, &found), Content::Filled);
    }
}
