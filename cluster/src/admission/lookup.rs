//! What validation asks the cluster.

use std::future::Future;

use k8s_openapi::api::{
    authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
    core::v1::Pod,
};
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use podvisor_cluster_types::{
    Cause, Causes, FieldPath, datavolume,
    migration::{MigrationStatus, SELECTOR_LABEL},
    vmi::VmiStatus,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::User;
use crate::{
    instancetypes::Specs,
    objects::{VirtualMachineRestore, is_true},
};

/// A VMI, as far as an eviction is concerned.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Evicted {
    /// Its unique id.
    pub uid: String,
    /// What is to happen when its pod is evicted.
    pub strategy: String,
    /// Its status.
    pub status: VmiStatus,
}

/// What validation asks the cluster.
pub trait Lookup: Specs {
    /// The status of a VMI; `None` where there is no such VMI.
    fn vmi_status(
        &self,
        namespace: &str,
        name: &str,
    ) -> impl Future<Output = Result<Option<VmiStatus>, kube::Error>> + Send;

    /// A pod.
    fn pod(
        &self,
        namespace: &str,
        name: &str,
    ) -> impl Future<Output = Result<Option<Pod>, kube::Error>> + Send;

    /// A VMI whose pod is evicted.
    fn evicted(
        &self,
        namespace: &str,
        name: &str,
    ) -> impl Future<Output = Result<Option<Evicted>, kube::Error>> + Send;

    /// Marks the VMI with this unique id as one that has to leave a node.
    fn evacuate(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        node: &str,
    ) -> impl Future<Output = Result<(), kube::Error>> + Send;

    /// The name of a restore to this VM that is not over.
    fn active_restore(
        &self,
        namespace: &str,
        vm: &str,
    ) -> impl Future<Output = Result<Option<String>, kube::Error>> + Send;

    /// The name of a migration of this VMI that is not over.
    fn active_migration(
        &self,
        namespace: &str,
        vmi: &str,
    ) -> impl Future<Output = Result<Option<String>, kube::Error>> + Send;

    /// Whether a user may copy a claim of this namespace: the one of a name, or any.
    fn may_copy(
        &self,
        user: &User,
        namespace: &str,
        claim: Option<&str>,
    ) -> impl Future<Output = Result<bool, kube::Error>> + Send;

    /// What a disk is made of: a PersistentVolumeClaim, a DataVolume or a DataSource.
    fn source(
        &self,
        kind: &'static str,
        namespace: &str,
        name: &str,
    ) -> impl Future<Output = Result<Option<Value>, kube::Error>> + Send;
}

/// Asks the API server.
#[derive(Clone)]
pub struct ClusterLookup(Client);

impl std::fmt::Debug for ClusterLookup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClusterLookup")
    }
}

impl ClusterLookup {
    /// Asks by this client.
    #[must_use]
    pub const fn new(client: Client) -> Self {
        Self(client)
    }

    fn api(&self, namespace: &str, kind: &str) -> Api<DynamicObject> {
        let gvk = GroupVersionKind::gvk("kubevirt.io", "v1", kind);
        Api::namespaced_with(self.0.clone(), namespace, &ApiResource::from_gvk(&gvk))
    }
}

impl Specs for ClusterLookup {
    async fn spec_of(
        &self,
        kind: &'static str,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Option<Value>, kube::Error> {
        self.0.spec_of(kind, namespace, name).await
    }
}

impl Lookup for ClusterLookup {
    async fn vmi_status(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<VmiStatus>, kube::Error> {
        let found = self
            .api(namespace, "VirtualMachineInstance")
            .get_opt(name)
            .await?;
        Ok(found.map(|vmi| part(&vmi.data, "status").unwrap_or_default()))
    }

    async fn pod(&self, namespace: &str, name: &str) -> Result<Option<Pod>, kube::Error> {
        Api::namespaced(self.0.clone(), namespace)
            .get_opt(name)
            .await
    }

    async fn evicted(&self, namespace: &str, name: &str) -> Result<Option<Evicted>, kube::Error> {
        let found = self
            .api(namespace, "VirtualMachineInstance")
            .get_opt(name)
            .await?;
        Ok(found.map(|vmi| {
            let strategy = vmi.data.pointer("/spec/evictionStrategy");
            Evicted {
                uid: vmi.metadata.uid.clone().unwrap_or_default(),
                strategy: strategy
                    .and_then(Value::as_str)
                    .unwrap_or_default()
                    .to_owned(),
                status: part(&vmi.data, "status").unwrap_or_default(),
            }
        }))
    }

    async fn evacuate(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        node: &str,
    ) -> Result<(), kube::Error> {
        let mark = Patch::Merge(mark(uid, node));
        self.api(namespace, "VirtualMachineInstance")
            .patch_status(name, &PatchParams::default(), &mark)
            .await
            .map(drop)
    }

    async fn active_restore(
        &self,
        namespace: &str,
        vm: &str,
    ) -> Result<Option<String>, kube::Error> {
        let restores: Api<VirtualMachineRestore> = Api::namespaced(self.0.clone(), namespace);
        let restores = restores.list(&ListParams::default()).await?.items;
        let active = restores.into_iter().find(|restore| {
            let target = restore.spec.target.as_ref();
            target.is_some_and(|target| target.is_vm() && target.name == vm)
                && restore.status.complete != Some(true)
                && !is_true(&restore.status.conditions, "Failure")
        });
        Ok(active.and_then(|restore| restore.metadata.name))
    }

    async fn active_migration(
        &self,
        namespace: &str,
        vmi: &str,
    ) -> Result<Option<String>, kube::Error> {
        let params = ListParams::default().labels(&format!("{SELECTOR_LABEL}={vmi}"));
        let api = self.api(namespace, "VirtualMachineInstanceMigration");
        let active = api
            .list(&params)
            .await?
            .items
            .into_iter()
            .find(|migration| {
                let status: MigrationStatus = part(&migration.data, "status").unwrap_or_default();
                !status.is_final()
            });
        Ok(active.and_then(|migration| migration.metadata.name))
    }

    async fn may_copy(
        &self,
        user: &User,
        namespace: &str,
        claim: Option<&str>,
    ) -> Result<bool, kube::Error> {
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(user.username.clone()),
                groups: Some(user.groups.clone()),
                extra: Some(user.extra.clone()),
                resource_attributes: Some(ResourceAttributes {
                    group: Some(datavolume::GROUP.to_owned()),
                    version: Some(datavolume::VERSION.to_owned()),
                    namespace: Some(namespace.to_owned()),
                    resource: Some("datavolumes".to_owned()),
                    subresource: Some("source".to_owned()),
                    name: claim.map(str::to_owned),
                    verb: Some("create".to_owned()),
                    ..Default::default()
                }),
                ..Default::default()
            },
            ..Default::default()
        };
        let api: Api<SubjectAccessReview> = Api::all(self.0.clone());
        let answer = api.create(&PostParams::default(), &review).await?;
        Ok(answer.status.is_some_and(|status| status.allowed))
    }

    async fn source(
        &self,
        kind: &'static str,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Value>, kube::Error> {
        let gvk = match kind {
            "PersistentVolumeClaim" => GroupVersionKind::gvk("", "v1", kind),
            _ => GroupVersionKind::gvk(datavolume::GROUP, datavolume::VERSION, kind),
        };
        let resource = ApiResource::from_gvk(&gvk);
        let api: Api<DynamicObject> = Api::namespaced_with(self.0.clone(), namespace, &resource);
        let found = api.get_opt(name).await?;
        // What cannot be written as JSON has no labels.
        Ok(found.map(|object| serde_json::to_value(object).unwrap_or_default()))
    }
}

/// Reads a part of an object; one that is missing is empty.
pub(super) fn part<T: DeserializeOwned + Default>(object: &Value, name: &str) -> Result<T, Cause> {
    let Some(value) = object.get(name) else {
        return Ok(T::default());
    };
    serde_json::from_value(value.clone()).map_err(|error| {
        let mut causes = Causes::default();
        causes.invalid(
            &FieldPath::new(name),
            format_args!("cannot be read: {error}"),
        );
        causes.into_vec().remove(0)
    })
}

/// The patch that marks a VMI; it is refused if the VMI is another one.
fn mark(uid: &str, node: &str) -> Value {
    json!({
        "metadata": { "uid": uid },
        "status": { "evacuationNodeName": node },
    })
}
