//! What a cluster has before the controllers run: the kinds of objects, and the runtime class.

use anyhow::{Context, Result};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::PostParams;
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client};
use serde_json::{Value, json};

/// Installs them, and waits until they are served.
pub(super) async fn install(client: &Client) -> Result<()> {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    for (kind, plural) in [
        ("VirtualMachine", "virtualmachines"),
        ("VirtualMachineInstance", "virtualmachineinstances"),
        (
            "VirtualMachineInstanceReplicaSet",
            "virtualmachineinstancereplicasets",
        ),
    ] {
        let definition = serde_json::from_value(definition(kind, plural))?;
        api.create(&PostParams::default(), &definition).await?;
        let name = format!("{plural}.kubevirt.io");
        await_condition(api.clone(), &name, conditions::is_crd_established())
            .await
            .with_context(|| format!("{name} is not served"))?;
    }
    let class: RuntimeClass = serde_json::from_value(json!({
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "podvisor-vm"},
        "handler": "podvisor-vm",
    }))?;
    Api::all(client.clone())
        .create(&PostParams::default(), &class)
        .await?;
    Ok(())
}

fn definition(kind: &str, plural: &str) -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.kubevirt.io")},
        "spec": {
            "group": "kubevirt.io",
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": format!("{kind}List"),
                "plural": plural,
                "singular": kind.to_lowercase(),
            },
            "versions": [{
                "name": "v1",
                "served": true,
                "storage": true,
                "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {
                    "type": "object",
                    "x-kubernetes-preserve-unknown-fields": true,
                }},
            }],
        },
    })
}
