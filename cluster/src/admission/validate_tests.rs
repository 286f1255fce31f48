//! Which objects are refused, and by which fields.

use k8s_openapi::api::core::v1::Pod;
use podvisor_cluster_types::vmi::VmiStatus;
use serde_json::json;

use super::super::{Evicted, User};
use super::*;
use crate::instancetypes::Specs;

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

    async fn active_restore(&self, _: &str, _: &str) -> Result<Option<String>, kube::Error> {
        Ok(self.active.clone())
    }

    async fn active_migration(&self, _: &str, _: &str) -> Result<Option<String>, kube::Error> {
        Ok(self.active.clone())
    }

    async fn may_copy(&self, user: &User, _: &str, _: Option<&str>) -> Result<bool, kube::Error> {
        Ok(user.username == "system:serviceaccount:n:copier")
    }

    async fn source(
        &self,
        _: &'static str,
        _: &str,
        _: &str,
    ) -> Result<Option<Value>, kube::Error> {
        Ok(None)
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
    assert_eq!(found, ["spec.template.spec.domain.memory.guest"]);
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
    let mut old = object.clone();
    old["metadata"]["finalizers"] = json!(["a/b"]);
    let request = request("VirtualMachineInstance", "UPDATE", object, old);
    assert_eq!(fields(&request).await, [""; 0]);
}

#[tokio::test]
async fn what_its_owner_keeps_from_going_is_judged_as_ever() {
    let going = |spec: Value| {
        let metadata = json!({
            "name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a/b"],
        });
        json!({ "metadata": metadata, "spec": spec })
    };
    let source = |namespace: &str| {
        let pvc = json!({ "namespace": namespace, "name": "c" });
        json!({ "source": { "pvc": pvc }, "storage": {} })
    };
    let (old, new) = (going(source("own")), going(source("other")));
    let update = request("DataVolume", "UPDATE", new, old);
    assert_eq!(fields(&update).await, ["spec"]);
    let cores = |cores: u32| going(json!({ "domain": { "cpu": { "cores": cores } } }));
    let update = request("VirtualMachineInstance", "UPDATE", cores(2), cores(1));
    assert_eq!(fields(&update).await, ["spec"]);
    let vmi = |name: &str| going(json!({ "vmiName": name }));
    let migration = "VirtualMachineInstanceMigration";
    let update = request(migration, "UPDATE", vmi("b"), vmi("a"));
    assert_eq!(fields(&update).await, ["spec"]);
}

#[tokio::test]
async fn an_old_vm_that_would_be_refused_today_can_be_labelled() {
    let old = json!({ "metadata": {}, "spec": { "runStrategy": "Gone" } });
    let mut new = old.clone();
    new["metadata"]["labels"] = json!({ "a": "b" });
    let request_of = |new: &Value| request("VirtualMachine", "UPDATE", new.clone(), old.clone());
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

fn restore_of(target: &str) -> Value {
    let target = json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": target});
    json!({"spec": {"target": target, "virtualMachineSnapshotName": "s"}})
}

#[tokio::test]
async fn one_restore_at_a_time_goes_to_a_vm() {
    let policy = Policy::default();
    let create = request(
        "VirtualMachineRestore",
        "CREATE",
        restore_of("a"),
        json!({}),
    );
    let free = known(json!({}), None);
    assert!(validate(&create, &policy, &free).await.is_allowed());
    let busy = known(json!({}), Some("other"));
    match validate(&create, &policy, &busy).await {
        Response::Invalid(causes) => {
            assert_eq!(causes[0].field, "spec.target");
            assert!(causes[0].message.contains("other"), "{}", causes[0]);
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn snapshots_and_restores_do_not_change() {
    for kind in [
        "VirtualMachineSnapshot",
        "VirtualMachineRestore",
        "VirtualMachineClone",
    ] {
        let labelled = json!({"metadata": {"labels": {"a": "b"}}, "spec": {}});
        let same = request(kind, "UPDATE", labelled, json!({"spec": {}}));
        assert_eq!(fields(&same).await, [""; 0]);
        let source = json!({"name": "a"});
        let new = json!({"spec": {"source": source, "target": source}});
        let changed = request(kind, "UPDATE", new, json!({"spec": {}}));
        assert_eq!(fields(&changed).await, ["spec"], "{kind}");
    }
}

#[tokio::test]
async fn a_locked_vm_keeps_its_volumes() {
    let domain = json!({"memory": {"guest": "128Mi"}});
    let volumes = json!([{"name": "a", "emptyDisk": {"capacity": "1Gi"}}]);
    let vm = |volumes: Value, strategy: &str, status: Value| {
        let spec = json!({"domain": domain, "volumes": volumes});
        json!({"spec": {"runStrategy": strategy, "template": {"spec": spec}}, "status": status})
    };
    let none = || json!([]);
    for (lock, new, expected) in [
        ("x", vm(volumes.clone(), "Halted", json!({})), false),
        (
            "snapshotInProgress",
            vm(volumes.clone(), "Halted", json!({})),
            true,
        ),
        ("restoreInProgress", vm(volumes, "Halted", json!({})), true),
        ("snapshotInProgress", vm(none(), "Always", json!({})), false),
        ("restoreInProgress", vm(none(), "Always", json!({})), true),
    ] {
        let old = vm(none(), "Halted", json!({lock: "s"}));
        let mut request = request("VirtualMachine", "UPDATE", new, old);
        let found = fields(&request).await;
        assert_eq!(
            found.contains(&"spec".to_owned()),
            expected,
            "{lock}: {found:?}"
        );
        request.user_info.username = "system:serviceaccount:podvisor:podvisor-controller".into();
        assert_eq!(fields(&request).await, [""; 0], "the system restores it");
    }
}

#[tokio::test]
async fn what_a_template_copies_from_another_namespace_is_its_accounts_to_copy() {
    let vm = |account: Option<&str>| {
        let source = json!({ "pvc": { "namespace": "golden", "name": "a" } });
        let mut volumes = vec![json!({ "name": "disk", "dataVolume": { "name": "root" } })];
        let account = account.map(
            |name| json!({ "name": "account", "serviceAccount": { "serviceAccountName": name } }),
        );
        volumes.extend(account);
        json!({ "spec": {
            "runStrategy": "Halted",
            "dataVolumeTemplates": [{
                "metadata": { "name": "root" },
                "spec": { "source": source, "storage": {} },
            }],
            "template": { "spec": {
                "domain": { "memory": { "guest": "64Mi" } }, "volumes": volumes,
            } },
        } })
    };
    let judge = async |operation: &str, object: Value, old: Value| {
        let mut request = request("VirtualMachine", operation, object, old);
        request.namespace = "n".to_owned();
        fields(&request).await
    };
    let refused = ["spec.dataVolumeTemplates[0]"];
    assert_eq!(judge("CREATE", vm(None), Value::Null).await, refused);
    let none: [&str; 0] = [];
    assert_eq!(judge("CREATE", vm(Some("copier")), Value::Null).await, none);
    // What was asked before is not asked again, unless it is another account's.
    let mut started = vm(None);
    started["spec"]["runStrategy"] = json!("Always");
    assert_eq!(judge("UPDATE", started, vm(None)).await, none);
    let other = vm(Some("another"));
    assert_eq!(judge("UPDATE", other, vm(Some("copier"))).await, refused);
    // One that a restore makes has its disks, or its DataVolumes are judged.
    let mut restored = request("VirtualMachine", "CREATE", vm(None), Value::Null);
    restored.namespace = "n".to_owned();
    restored.user_info.username = "system:serviceaccount:podvisor:podvisor-controller".into();
    assert_eq!(fields(&restored).await, none);
}
