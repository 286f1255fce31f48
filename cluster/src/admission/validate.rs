//! Judges objects: every cause to refuse one, at once.

use std::future::Future;

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams},
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use podvisor_cluster_types::{
    Cause, Causes, FieldPath,
    datavolume::DataVolumeSpec,
    migration::{self, MigrationPolicySpec, MigrationSpec, MigrationStatus, SELECTOR_LABEL},
    replica_set::ReplicaSetSpec,
    vm::VmSpec,
    vmi::{
        RESERVED_LABELS, VmiSpec, VmiStatus, validate_meta, validate_spec_update,
        validate_system_spec_update,
    },
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Evicted, Policy, Request, Response, evict};
use crate::instancetypes::{self, ExpandError, Specs};

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

    /// The name of a migration of this VMI that is not over.
    fn active_migration(
        &self,
        namespace: &str,
        vmi: &str,
    ) -> impl Future<Output = Result<Option<String>, kube::Error>> + Send;
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
        let mark = Patch::Merge(evict::mark(uid, node));
        self.api(namespace, "VirtualMachineInstance")
            .patch_status(name, &PatchParams::default(), &mark)
            .await
            .map(drop)
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
}

fn part<T: DeserializeOwned + Default>(object: &Value, name: &str) -> Result<T, Cause> {
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

/// The answer of the validating webhook.
pub async fn validate(request: &Request, policy: &Policy, lookup: &impl Lookup) -> Response {
    if request.kind.kind == "Eviction" {
        return evict::evict(request, lookup).await;
    }
    // A finalizer must come off whatever else is wrong, and a status has its own guard.
    if request.is_going() || request.sub_resource.is_some() {
        return Response::allowed();
    }
    let result = match (request.kind.kind.as_str(), request.operation.as_str()) {
        ("VirtualMachineInstance", "CREATE") => create_vmi(request, policy),
        ("VirtualMachineInstance", "UPDATE") => update_vmi(request, policy),
        ("VirtualMachine", "CREATE" | "UPDATE") => {
            let judged = vm(request, policy);
            match &judged {
                Ok(Response::Allowed(_)) => match expanded_vm(request, policy, lookup).await {
                    Some(refused) => Ok(refused),
                    None => judged,
                },
                _ => judged,
            }
        }
        ("VirtualMachineInstanceReplicaSet", "CREATE" | "UPDATE") => replica_set(request, policy),
        ("VirtualMachineInstanceMigration", "CREATE") => {
            return create_migration(request, policy, lookup).await;
        }
        ("VirtualMachineInstanceMigration", "UPDATE") => update_migration(request),
        ("MigrationPolicy", "CREATE" | "UPDATE") => migration_policy(request),
        ("DataVolume", "CREATE") => create_volume(request),
        ("DataVolume", "UPDATE") => update_volume(request),
        _ => Ok(Response::allowed()),
    };
    result.unwrap_or_else(|cause| Response::Invalid(vec![cause]))
}

fn judged(causes: Vec<Cause>) -> Response {
    if causes.is_empty() {
        Response::allowed()
    } else {
        Response::Invalid(causes)
    }
}

fn create_vmi(request: &Request, policy: &Policy) -> Result<Response, Cause> {
    let spec: VmiSpec = part(&request.object, "spec")?;
    let path = FieldPath::new("spec");
    let mut causes = Causes::default();
    if !policy.is_system(&request.user_info) {
        validate_meta(&request.meta(), &FieldPath::new("metadata"), &mut causes);
    }
    let mut causes = causes.into_vec();
    causes.extend(spec.validate(&policy.config.rules, &path));
    if causes.is_empty() {
        return Ok(Response::Allowed(spec.warnings(&path)));
    }
    Ok(Response::Invalid(causes))
}

fn update_vmi(request: &Request, policy: &Policy) -> Result<Response, Cause> {
    let old: VmiSpec = part(&request.old_object, "spec")?;
    let new: VmiSpec = part(&request.object, "spec")?;
    let path = FieldPath::new("spec");
    if policy.is_system(&request.user_info) {
        return Ok(judged(validate_system_spec_update(&old, &new, &path)));
    }
    let mut causes = Causes::default();
    let (old_labels, labels) = (request.old_meta().labels, request.meta().labels);
    for label in RESERVED_LABELS
        .iter()
        .filter(|label| old_labels.get(**label) != labels.get(**label))
    {
        causes.forbidden(
            &FieldPath::new("metadata.labels"),
            format_args!("must not change {label}, which only the system sets"),
        );
    }
    let mut causes = causes.into_vec();
    causes.extend(validate_spec_update(&old, &new, &path));
    Ok(judged(causes))
}

fn vm(request: &Request, policy: &Policy) -> Result<Response, Cause> {
    // An object that was right under older rules can still be labelled.
    if request.operation == "UPDATE" && request.object.get("spec") == request.old_object.get("spec")
    {
        return Ok(Response::allowed());
    }
    let spec: VmSpec = part(&request.object, "spec")?;
    let path = FieldPath::new("spec");
    let mut causes = spec.validate(&policy.config.defaults, &policy.config.rules, &path);
    causes.extend(spec.foreign_sources(&request.namespace, &path));
    if !causes.is_empty() {
        return Ok(Response::Invalid(causes));
    }
    let path = path.child("template.spec");
    Ok(Response::Allowed(
        spec.template
            .map_or_else(Vec::new, |t| t.spec.warnings(&path)),
    ))
}

/// Judges a VM with its instance type and its preference; `None` where it has neither, or nothing
/// is wrong.
async fn expanded_vm(request: &Request, policy: &Policy, lookup: &impl Lookup) -> Option<Response> {
    if request.object.get("spec") == request.old_object.get("spec") {
        return None;
    }
    let spec: VmSpec = part(&request.object, "spec").ok()?;
    let (instancetype, preference) = (spec.instancetype.as_ref(), spec.preference.as_ref());
    if instancetype.is_none() && preference.is_none() {
        return None;
    }
    let path = FieldPath::new("spec");
    let namespace = &request.namespace;
    let found = instancetypes::find(lookup, namespace, instancetype, preference, &path).await;
    let path = path.child("template.spec");
    let causes = match found {
        Ok(found) => {
            let mut spec = spec.template?.spec;
            let mut causes = found.apply(&mut spec, &path);
            if causes.is_empty() {
                spec.apply_defaults(&policy.config.defaults);
                causes = spec.validate(&policy.config.rules, &path);
            }
            causes
        }
        Err(ExpandError::Refused(causes)) => causes,
        Err(ExpandError::Request(error)) => {
            tracing::error!(%error, "failed to look up the instance type of a VM");
            return Some(Response::Refused {
                code: 500,
                reason: "InternalError",
                message: "the instance type cannot be looked up: try again".to_owned(),
            });
        }
    };
    (!causes.is_empty()).then_some(Response::Invalid(causes))
}

fn replica_set(request: &Request, policy: &Policy) -> Result<Response, Cause> {
    let spec: ReplicaSetSpec = part(&request.object, "spec")?;
    let path = FieldPath::new("spec");
    Ok(judged(spec.validate(
        &policy.config.defaults,
        &policy.config.rules,
        &path,
    )))
}

fn migration_policy(request: &Request) -> Result<Response, Cause> {
    let spec: MigrationPolicySpec = part(&request.object, "spec")?;
    let path = FieldPath::new("spec");
    Ok(judged(spec.validate(&path)))
}

async fn create_migration(request: &Request, policy: &Policy, lookup: &impl Lookup) -> Response {
    let spec: MigrationSpec = match part(&request.object, "spec") {
        Ok(spec) => spec,
        Err(cause) => return Response::Invalid(vec![cause]),
    };
    let mut causes = spec.validate(&FieldPath::new("spec"));
    if spec.priority.is_some() && !policy.is_system(&request.user_info) {
        let mut more = Causes::default();
        more.forbidden(
            &FieldPath::new("spec.priority"),
            "is set by the controllers alone",
        );
        causes.extend(more.into_vec());
    }
    if !causes.is_empty() {
        return Response::Invalid(causes);
    }
    let refused = |code, reason, message| Response::Refused {
        code,
        reason,
        message,
    };
    let failed = |error: kube::Error| {
        tracing::error!(%error, "failed to look up what a migration is of");
        refused(
            500,
            "InternalError",
            "the VMI cannot be looked up: try again".to_owned(),
        )
    };
    let (namespace, vmi) = (&request.namespace, &spec.vmi_name);
    match lookup.vmi_status(namespace, vmi).await {
        Err(error) => return failed(error),
        Ok(None) => {
            let message = format!("the VMI \"{namespace}/{vmi}\" does not exist");
            return refused(404, "NotFound", message);
        }
        Ok(Some(status)) => {
            if let Some(message) = migration::refusal(&status) {
                let mut causes = Causes::default();
                causes.invalid(&FieldPath::new("spec.vmiName"), message);
                return Response::Invalid(causes.into_vec());
            }
        }
    }
    match lookup.active_migration(namespace, vmi).await {
        Err(error) => failed(error),
        Ok(None) => Response::allowed(),
        Ok(Some(other)) => refused(
            409,
            "Conflict",
            format!("in-flight migration detected: {namespace}/{other} migrates the VMI {vmi}"),
        ),
    }
}

fn create_volume(request: &Request) -> Result<Response, Cause> {
    let spec: DataVolumeSpec = part(&request.object, "spec")?;
    Ok(judged(
        spec.validate_in(&request.namespace, &FieldPath::new("spec")),
    ))
}

fn update_volume(request: &Request) -> Result<Response, Cause> {
    // What was valid under older rules can still be labelled.
    if request.object.get("spec") == request.old_object.get("spec") {
        return Ok(Response::allowed());
    }
    let old: DataVolumeSpec = part(&request.old_object, "spec")?;
    let new: DataVolumeSpec = part(&request.object, "spec")?;
    Ok(judged(new.validate_update(&old, &FieldPath::new("spec"))))
}

fn update_migration(request: &Request) -> Result<Response, Cause> {
    let old: MigrationSpec = part(&request.old_object, "spec")?;
    let new: MigrationSpec = part(&request.object, "spec")?;
    let mut causes = new.validate_update(&old, &FieldPath::new("spec"));
    let label =
        |labels: &std::collections::BTreeMap<String, String>| labels.get(SELECTOR_LABEL).cloned();
    if label(&request.meta().labels) != label(&request.old_meta().labels) {
        let mut more = Causes::default();
        more.forbidden(
            &FieldPath::new("metadata.labels"),
            format_args!("must not change {SELECTOR_LABEL}"),
        );
        causes.extend(more.into_vec());
    }
    Ok(judged(causes))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A cluster with one VMI `a` and at most one active migration of it.
    struct Known {
        status: VmiStatus,
        active: Option<String>,
    }

    impl Specs for Known {
        async fn spec_of(
            &self,
            kind: &'static str,
            namespace: Option<&str>,
            name: &str,
        ) -> Result<Option<Value>, kube::Error> {
            let spec = match (kind, namespace, name) {
                ("VirtualMachineClusterInstancetype", None, "small") => {
                    json!({ "cpu": { "guest": 1 }, "memory": { "guest": "128Mi" } })
                }
                ("VirtualMachinePreference", Some("n"), "large") => {
                    json!({ "requirements": { "cpu": { "guest": 2 } } })
                }
                _ => return Ok(None),
            };
            Ok(Some(spec))
        }
    }

    impl Lookup for Known {
        async fn vmi_status(&self, _: &str, name: &str) -> Result<Option<VmiStatus>, kube::Error> {
            Ok((name == "a").then(|| self.status.clone()))
        }

        async fn pod(&self, _: &str, _: &str) -> Result<Option<Pod>, kube::Error> {
            Ok(None)
        }

        async fn evicted(&self, _: &str, _: &str) -> Result<Option<Evicted>, kube::Error> {
            Ok(None)
        }

        async fn evacuate(&self, _: &str, _: &str, _: &str, _: &str) -> Result<(), kube::Error> {
            Ok(())
        }

        async fn active_migration(&self, _: &str, _: &str) -> Result<Option<String>, kube::Error> {
            Ok(self.active.clone())
        }
    }

    fn request(kind: &str, operation: &str, object: Value, old_object: Value) -> Request {
        let operation = operation.to_owned();
        let mut request = Request {
            object,
            old_object,
            operation,
            ..Default::default()
        };
        request.kind.kind = kind.to_owned();
        request
    }

    fn known(status: Value, active: Option<&str>) -> Known {
        let status = serde_json::from_value(status).unwrap();
        Known {
            status,
            active: active.map(str::to_owned),
        }
    }

    async fn fields(request: &Request) -> Vec<String> {
        let policy = Policy::new(Default::default(), "podvisor");
        match validate(request, &policy, &known(json!({}), None)).await {
            Response::Allowed(_) => Vec::new(),
            Response::Invalid(causes) => causes.into_iter().map(|cause| cause.field).collect(),
            other => panic!("{other:?}"),
        }
    }

    fn vmi(labels: Value, domain: Value) -> Value {
        json!({ "metadata": { "name": "a", "labels": labels }, "spec": { "domain": domain } })
    }

    #[tokio::test]
    async fn a_vm_is_judged_with_its_instance_type() {
        let fields = async |instancetype: Value, preference: Value, domain: Value| {
            let spec = json!({
                "runStrategy": "Halted",
                "instancetype": instancetype,
                "preference": preference,
                "template": { "spec": { "domain": domain } },
            });
            let mut request = request(
                "VirtualMachine",
                "CREATE",
                json!({ "spec": spec }),
                json!(null),
            );
            request.namespace = "n".to_owned();
            fields(&request).await
        };
        let small = || json!({ "name": "small" });
        let none = || Value::Null;
        let nothing: [&str; 0] = [];
        assert_eq!(fields(small(), none(), json!({})).await, nothing);
        let memory = json!({ "memory": { "guest": "1Gi" } });
        let found = fields(small(), none(), memory.clone()).await;
        assert_eq!(found, ["spec.template.spec.domain.memory"]);
        let missing = json!({ "name": "small", "kind": "virtualmachineinstancetypes" });
        let found = fields(missing, none(), json!({})).await;
        assert_eq!(found, ["spec.instancetype.name"]);
        let found = fields(json!({ "name": "x", "kind": "Moon" }), none(), json!({})).await;
        assert_eq!(found, ["spec.instancetype.kind"]);
        let large = || json!({ "name": "large", "kind": "VirtualMachinePreference" });
        let found = fields(none(), large(), memory).await;
        assert_eq!(found, ["spec.template.spec.domain.cpu"]);
        let revision = json!({ "name": "small", "revisionName": "r" });
        let found = fields(revision, none(), json!({})).await;
        assert_eq!(found, ["spec.instancetype.revisionName"]);
    }

    #[tokio::test]
    async fn a_vmi_is_refused_with_all_causes_at_once() {
        let labels = json!({ "kubevirt.io/nodeName": "n" });
        let domain = json!({ "cpu": { "cores": -1 }, "devices": { "tpm": {} } });
        let mut request = request(
            "VirtualMachineInstance",
            "CREATE",
            vmi(labels, domain),
            Value::Null,
        );
        let spec = [
            "spec.domain.memory.guest",
            "spec.domain.cpu.cores",
            "spec.domain.devices.tpm",
        ];
        let mut all = vec!["metadata.labels"];
        all.extend(spec);
        assert_eq!(fields(&request).await, all);
        request.user_info.username = "system:serviceaccount:podvisor:podvisor-controller".into();
        assert_eq!(
            fields(&request).await,
            spec,
            "the system may set its labels"
        );
    }

    #[tokio::test]
    async fn a_vmi_changes_by_the_system_alone() {
        let old = vmi(
            json!({ "kubevirt.io/nodeName": "n" }),
            json!({ "cpu": { "sockets": 1 } }),
        );
        let new = vmi(
            json!({ "kubevirt.io/nodeName": "m" }),
            json!({ "cpu": { "sockets": 2 } }),
        );
        let mut request = request("VirtualMachineInstance", "UPDATE", new, old);
        assert_eq!(fields(&request).await, ["metadata.labels", "spec"]);
        request.user_info.username = "system:serviceaccount:podvisor:podvisor-controller".into();
        assert_eq!(fields(&request).await, [""; 0]);
        request.user_info.username = "system:serviceaccount:evil:podvisor-controller".into();
        assert_eq!(fields(&request).await, ["metadata.labels", "spec"]);
    }

    #[tokio::test]
    async fn a_finalizer_comes_off_an_invalid_object() {
        let mut object = vmi(json!({}), json!({ "cpu": { "cores": -1 } }));
        object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        let request = request("VirtualMachineInstance", "UPDATE", object, json!({}));
        assert_eq!(fields(&request).await, [""; 0]);
    }

    #[tokio::test]
    async fn an_old_vm_that_would_be_refused_today_can_be_labelled() {
        let old = json!({ "metadata": {}, "spec": { "runStrategy": "Gone" } });
        let mut new = old.clone();
        new["metadata"]["labels"] = json!({ "a": "b" });
        let request_of =
            |new: &Value| request("VirtualMachine", "UPDATE", new.clone(), old.clone());
        assert_eq!(fields(&request_of(&new)).await, [""; 0]);
        new["spec"]["running"] = json!(true);
        assert!(!fields(&request_of(&new)).await.is_empty());
    }

    #[tokio::test]
    async fn a_migration_takes_a_vmi_that_can_move_and_does_not_yet() {
        let policy = Policy::default();
        let spec = |vmi: &str| json!({ "spec": { "vmiName": vmi } });
        let create = |vmi: &str| {
            request(
                "VirtualMachineInstanceMigration",
                "CREATE",
                spec(vmi),
                json!({}),
            )
        };
        let code = |response: &Response| match response {
            Response::Refused { code, .. } => *code,
            Response::Invalid(_) => 422,
            _ => 200,
        };
        let running = || known(json!({ "phase": "Running" }), None);
        for (vmi, cluster, expected) in [
            ("a", running(), 200),
            ("b", running(), 404),
            ("", running(), 422),
            ("a", known(json!({ "phase": "Succeeded" }), None), 422),
            (
                "a",
                known(json!({ "phase": "Running" }), Some("other")),
                409,
            ),
        ] {
            let response = validate(&create(vmi), &policy, &cluster).await;
            assert_eq!(code(&response), expected, "{vmi}: {response:?}");
        }
    }

    #[tokio::test]
    async fn objects_of_any_shape_are_judged() {
        for object in [
            json!(null),
            json!([]),
            json!({ "spec": 3 }),
            json!({ "metadata": [] }),
        ] {
            for kind in [
                "VirtualMachine",
                "VirtualMachineInstance",
                "DataVolume",
                "Pod",
            ] {
                for operation in ["CREATE", "UPDATE"] {
                    let request = request(kind, operation, object.clone(), object.clone());
                    let policy = Policy::default();
                    let _ = validate(&request, &policy, &known(json!({}), None)).await;
                }
            }
        }
    }
}
