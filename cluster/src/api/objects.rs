//! Reading objects of KubeVirt's group, part by part.

use kube::{
    Api, Client,
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde::de::DeserializeOwned;

/// The objects of a kind in a namespace.
pub(super) fn api(client: &Client, namespace: &str, kind: &str) -> Api<DynamicObject> {
    let gvk = GroupVersionKind::gvk("kubevirt.io", "v1", kind);
    Api::namespaced_with(client.clone(), namespace, &ApiResource::from_gvk(&gvk))
}

/// The part of an object under a name; empty where it is missing or malformed.
pub(super) fn part<T: DeserializeOwned + Default>(object: &DynamicObject, name: &str) -> T {
    let part = object.data.get(name).cloned().unwrap_or_default();
    serde_json::from_value(part).unwrap_or_default()
}
