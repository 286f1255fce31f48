//! What a cluster has before the controllers run: the kinds of objects, and the runtime class.

use anyhow::{Context, Result};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::PostParams;
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client};
use podvisor_cluster::manifests;

/// Installs them as `podvisor-cluster install` prints them, and waits until they are served.
pub(super) async fn install(client: &Client) -> Result<()> {
    let api = Api::<CustomResourceDefinition>::all(client.clone());
    for definition in manifests::crds() {
        let definition: CustomResourceDefinition = serde_json::from_value(definition)?;
        let name = definition.metadata.name.clone().unwrap_or_default();
        api.create(&PostParams::default(), &definition).await?;
        await_condition(api.clone(), &name, conditions::is_crd_established())
            .await
            .with_context(|| format!("{name} is not served"))?;
    }
    let classes = manifests::policies("podvisor").into_iter();
    for class in classes.filter(|item| item["kind"] == "RuntimeClass") {
        let class: RuntimeClass = serde_json::from_value(class)?;
        Api::all(client.clone())
            .create(&PostParams::default(), &class)
            .await?;
    }
    Ok(())
}
