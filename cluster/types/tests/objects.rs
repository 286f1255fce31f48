//! Rules of VirtualMachine, migration, replica set, and of updates.

use podvisor_cluster_types::{
    Cause, CauseReason, Causes, ClusterConfig, ClusterDefaults, FieldPath,
    meta::Meta,
    migration::{MigrationSpec, refusal},
    replica_set::ReplicaSetSpec,
    vm::{RunStrategy, VmSpec},
    vmi::{VmiSpec, VmiStatus, validate_meta, validate_spec_update, validate_system_spec_update},
};
use serde_json::{Value, json};

fn template() -> Value {
    json!({
        "metadata": { "labels": { "app": "a" } },
        "spec": {
            "domain": { "memory": { "guest": "128Mi" } },
            "volumes": [{ "name": "root", "dataVolume": { "name": "root-disk" } }],
        },
    })
}

fn fields(causes: &[Cause]) -> Vec<&str> {
    causes.iter().map(|cause| cause.field.as_str()).collect()
}

fn vm(spec: Value) -> Vec<Cause> {
    let spec: VmSpec = serde_json::from_value(spec).unwrap();
    spec.validate(
        &ClusterDefaults::default(),
        &ClusterConfig::default(),
        &FieldPath::new("spec"),
    )
}

#[test]
fn a_vm_takes_one_run_strategy() {
    assert_eq!(vm(json!({ "running": true, "template": template() })), []);
    assert_eq!(
        vm(json!({ "runStrategy": "Manual", "template": template() })),
        []
    );
    let both = json!({ "running": true, "runStrategy": "Always", "template": template() });
    assert_eq!(fields(&vm(both)), ["spec.running"]);
    assert_eq!(
        fields(&vm(json!({ "template": template() }))),
        ["spec.running"]
    );
    let odd = json!({ "runStrategy": "Sometimes", "template": template() });
    assert_eq!(fields(&vm(odd)), ["spec.runStrategy"]);
}

#[test]
fn a_vm_takes_a_template_that_is_right_with_its_defaults() {
    assert_eq!(fields(&vm(json!({ "running": true }))), ["spec.template"]);
    let mut spec = json!({ "running": true, "template": template() });
    spec["template"]["spec"]["domain"]["devices"] = json!({ "tpm": {} });
    spec["template"]["metadata"]["labels"]["kubevirt.io/nodeName"] = json!("a");
    assert_eq!(
        fields(&vm(spec)),
        [
            "spec.template.metadata.labels",
            "spec.template.spec.domain.devices.tpm"
        ]
    );
}

#[test]
fn a_data_volume_template_has_a_name_and_a_user() {
    let size = json!({ "resources": { "requests": { "storage": "1Gi" } } });
    let spec = json!({ "source": { "blank": {} }, "storage": size });
    let list = json!([
        { "metadata": { "name": "root-disk" }, "spec": spec },
        {},
        { "metadata": { "name": "b" }, "spec": spec },
        { "metadata": { "name": "b" }, "spec": { "source": { "blank": {} } } },
    ]);
    let spec = json!({ "running": true, "template": template(), "dataVolumeTemplates": list });
    assert_eq!(
        fields(&vm(spec)),
        [
            "spec.dataVolumeTemplates[1].metadata.name",
            "spec.dataVolumeTemplates[2]",
            "spec.dataVolumeTemplates[3].metadata.name",
            "spec.dataVolumeTemplates[3]",
            "spec.dataVolumeTemplates[3].spec.PVC"
        ]
    );
}

#[test]
fn the_older_field_running_names_a_strategy() {
    let strategy = |spec: Value| serde_json::from_value::<VmSpec>(spec).unwrap().strategy();
    assert_eq!(
        strategy(json!({ "running": true })),
        Some(RunStrategy::Always)
    );
    assert_eq!(
        strategy(json!({ "running": false })),
        Some(RunStrategy::Halted)
    );
    for name in ["Always", "Halted", "Manual", "RerunOnFailure", "Once"] {
        let strategy = strategy(json!({ "runStrategy": name })).unwrap();
        assert_eq!(strategy.name(), name);
    }
    assert_eq!(strategy(json!({ "runStrategy": "x" })), None);
}

#[test]
fn users_may_not_set_the_systems_labels() {
    let meta: Meta = serde_json::from_value(json!({
        "labels": { "kubevirt.io/nodeName": "a", "app": "b" },
        "annotations": { "hooks.kubevirt.io/hookSidecars": "[]" },
    }))
    .unwrap();
    let mut causes = Causes::default();
    validate_meta(&meta, &FieldPath::new("metadata"), &mut causes);
    let causes = causes.into_vec();
    assert_eq!(fields(&causes), ["metadata.labels", "metadata.annotations"]);
    assert_eq!(causes[0].reason, CauseReason::Forbidden);
}

fn vmi(domain: Value) -> VmiSpec {
    serde_json::from_value(json!({ "domain": domain })).unwrap()
}

#[test]
fn a_users_vmi_does_not_change() {
    let path = FieldPath::new("spec");
    let old = vmi(json!({ "cpu": { "sockets": 1 } }));
    let new = vmi(json!({ "cpu": { "sockets": 2 } }));
    assert_eq!(validate_spec_update(&old, &old, &path), []);
    let causes = validate_spec_update(&old, &new, &path);
    assert!(causes[0].message.contains("restricted"), "{causes:?}");
}

#[test]
fn the_system_changes_what_can_be_plugged_and_never_the_bounds() {
    let path = FieldPath::new("spec");
    let old = vmi(json!({
        "cpu": { "sockets": 1, "maxSockets": 4 },
        "memory": { "guest": "1Gi", "maxGuest": "4Gi" },
    }));
    let plugged = vmi(json!({
        "cpu": { "sockets": 2, "maxSockets": 4 },
        "memory": { "guest": "2Gi", "maxGuest": "4Gi" },
        "devices": { "disks": [{ "name": "new", "disk": {} }] },
    }));
    assert_eq!(validate_system_spec_update(&old, &plugged, &path), []);
    let beyond = vmi(json!({
        "cpu": { "sockets": 1, "maxSockets": 5 },
        "memory": { "guest": "1Gi", "maxGuest": "5Gi" },
    }));
    let causes = validate_system_spec_update(&old, &beyond, &path);
    assert_eq!(
        fields(&causes),
        ["spec.domain.cpu.maxSockets", "spec.domain.memory.maxGuest"]
    );
    let other = vmi(json!({ "cpu": { "sockets": 1, "maxSockets": 4, "model": "x" } }));
    assert!(fields(&validate_system_spec_update(&old, &other, &path)).contains(&"spec"));
}

#[test]
fn a_migration_names_a_vmi_and_does_not_change() {
    let path = FieldPath::new("spec");
    let spec = |name: &str| MigrationSpec {
        vmi_name: name.to_owned(),
        ..Default::default()
    };
    assert_eq!(spec("a").validate(&path), []);
    assert_eq!(fields(&spec("").validate(&path)), ["spec.vmiName"]);
    assert_eq!(fields(&spec("../a").validate(&path)), ["spec.vmiName"]);
    let mut away = spec("a");
    away.send_to = Some(json!({ "migrationID": "m", "connectURL": "10.0.0.1:9185" }));
    assert_eq!(fields(&away.validate(&path)), ["spec.sendTo"]);
    assert_eq!(
        fields(&spec("b").validate_update(&spec("a"), &path)),
        ["spec"]
    );
}

#[test]
fn a_vmi_that_cannot_migrate_says_why() {
    let status = |json: Value| serde_json::from_value::<VmiStatus>(json).unwrap();
    assert_eq!(refusal(&status(json!({ "phase": "Running" }))), None);
    assert!(refusal(&status(json!({ "phase": "Failed" }))).is_some());
    let message = refusal(&status(json!({ "phase": "Running", "conditions": [{
        "type": "LiveMigratable", "status": "False",
        "reason": "DisksNotLiveMigratable", "message": "the claim is not shared",
    }] })))
    .unwrap();
    assert!(message.contains("DisksNotLiveMigratable") && message.contains("not shared"));
}

#[test]
fn a_replica_set_selects_what_it_makes() {
    let causes = |spec: Value| {
        let spec: ReplicaSetSpec = serde_json::from_value(spec).unwrap();
        let path = FieldPath::new("spec");
        spec.validate(
            &ClusterDefaults::default(),
            &ClusterConfig::default(),
            &path,
        )
    };
    let selector = json!({ "matchLabels": { "app": "a" } });
    assert_eq!(
        causes(json!({ "selector": selector, "template": template() })),
        []
    );
    let other =
        json!({ "matchExpressions": [{ "key": "app", "operator": "NotIn", "values": ["a"] }] });
    assert_eq!(
        fields(&causes(
            json!({ "replicas": -1, "selector": other, "template": template() })
        )),
        ["spec.replicas", "spec.selector"]
    );
    assert_eq!(
        fields(&causes(json!({ "template": template() }))),
        ["spec.selector"]
    );
    // The system makes its VMIs, and a user must not set this.
    let mut reserved = template();
    reserved["metadata"]["labels"]["kubevirt.io/nodeName"] = json!("a");
    let spec = json!({ "selector": selector, "template": reserved });
    assert_eq!(fields(&causes(spec)), ["spec.template.metadata.labels"]);
}

#[test]
fn fields_have_kubevirts_spelling() {
    let spec = json!({
        "domain": {
            "devices": {
                "autoattachVSOCK": true,
                "disks": [{ "name": "a", "dedicatedIOThread": true, "disk": { "readonly": true } }],
                "interfaces": [{ "name": "a", "macAddress": "02:00:00:00:00:01", "masquerade": {} }],
            },
            "ioThreads": { "supplementalPoolThreadCount": 2 },
        },
        "networks": [{ "name": "a", "pod": { "vmNetworkCIDR": "10.0.0.0/8" } }],
        "volumes": [
            { "name": "a", "downwardAPI": { "fields": [{ "path": "x" }] } },
            { "name": "b", "cloudInitNoCloud": { "userDataBase64": "YQ==" } },
            { "name": "c", "persistentVolumeClaim": { "claimName": "c", "readOnly": true } },
        ],
        "topologySpreadConstraints": [{ "maxSkew": 1 }],
    });
    let read: VmiSpec = serde_json::from_value(spec.clone()).unwrap();
    assert_eq!(serde_json::to_value(read).unwrap(), spec);
}
