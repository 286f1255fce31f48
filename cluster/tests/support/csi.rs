//! What a cluster has whose volumes' driver takes snapshots.

use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, PostParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

/// The class of claims whose driver takes snapshots.
pub const CLASS: &str = "snapshots";

const DRIVER: &str = "csi.example.com";

/// Installs the kinds and the classes, once.
pub async fn install(client: &Client) {
    static INSTALLED: OnceCell<()> = OnceCell::const_new();
    INSTALLED.get_or_init(|| install_all(client)).await;
}

async fn install_all(client: &Client) {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    let params = PostParams::default();
    for (kind, scope) in [
        ("VolumeSnapshot", "Namespaced"),
        ("VolumeSnapshotClass", "Cluster"),
    ] {
        let definition = definition(kind, scope);
        let made = api.create(&params, &definition).await.unwrap();
        let name = made.metadata.name.unwrap();
        let served = await_condition(api.clone(), &name, conditions::is_crd_established());
        served.await.unwrap();
    }
    let class: StorageClass = serde_json::from_value(json!({
        "metadata": {"name": CLASS}, "provisioner": DRIVER,
    }))
    .unwrap();
    Api::all(client.clone())
        .create(&params, &class)
        .await
        .unwrap();
    let kind = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshotClass");
    let kind = ApiResource::from_gvk_with_plural(&kind, "volumesnapshotclasses");
    let class = DynamicObject::new("fast", &kind);
    let class = class.data(json!({"driver": DRIVER, "deletionPolicy": "Delete"}));
    let classes: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
    classes.create(&params, &class).await.unwrap();
}

fn definition(kind: &str, scope: &str) -> CustomResourceDefinition {
    let singular = kind.to_ascii_lowercase();
    let plural = match singular.ends_with('s') {
        true => format!("{singular}es"),
        false => format!("{singular}s"),
    };
    let open = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let subresources: Value = match scope {
        "Namespaced" => json!({"status": {}}),
        _ => json!({}),
    };
    serde_json::from_value(json!({
        "metadata": {
            "name": format!("{plural}.snapshot.storage.k8s.io"),
            // Or the API server takes nobody's definition of this group.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": "snapshot.storage.k8s.io", "scope": scope,
            "names": {
                "kind": kind, "listKind": format!("{kind}List"),
                "plural": plural, "singular": singular,
            },
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": open}, "subresources": subresources,
            }],
        },
    }))
    .unwrap()
}
