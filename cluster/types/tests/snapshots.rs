//! Snapshots and restores: each cause by the path of its field.

use podvisor_cluster_types::{
    CauseReason, FieldPath,
    clone::CloneSpec,
    duration,
    snapshot::{FAILURE_DEADLINE, Naming, Readiness, RestoreSpec, SnapshotSpec},
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn vm(name: &str) -> Value {
    json!({ "apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": name })
}

fn snapshot(spec: Value) -> SnapshotSpec {
    serde_json::from_value(spec).unwrap()
}

fn restore(spec: Value) -> RestoreSpec {
    serde_json::from_value(spec).unwrap()
}

fn of_snapshot(spec: Value) -> Vec<String> {
    let causes = snapshot(spec).validate(&FieldPath::new("spec"));
    causes.into_iter().map(|cause| cause.field).collect()
}

fn of_restore(spec: Value) -> Vec<String> {
    let causes = restore(spec).validate(&FieldPath::new("spec"));
    causes.into_iter().map(|cause| cause.field).collect()
}

#[test]
fn a_snapshot_is_of_a_virtual_machine() {
    let none: [&str; 0] = [];
    assert_eq!(of_snapshot(json!({ "source": vm("a") })), none);
    let missing = json!({ "source": { "kind": "VirtualMachine", "name": "a" } });
    let causes = snapshot(missing).validate(&FieldPath::new("spec"));
    assert_eq!(causes[0].field, "spec.source.apiGroup");
    assert_eq!(causes[0].reason, CauseReason::NotFound);
    let other = json!({ "apiGroup": "apps", "kind": "Deployment", "name": "a" });
    assert_eq!(
        of_snapshot(json!({ "source": other })),
        ["spec.source.apiGroup"]
    );
    let mut kind = vm("a");
    kind["kind"] = json!("VirtualMachineInstance");
    assert_eq!(of_snapshot(json!({ "source": kind })), ["spec.source.kind"]);
    assert_eq!(
        of_snapshot(json!({ "source": vm("a/b") })),
        ["spec.source.name"]
    );
    let all = ["spec.source.apiGroup", "spec.source.name"];
    assert_eq!(of_snapshot(json!({})), all);
}

#[test]
fn what_a_snapshot_cannot_do_is_refused_by_its_path() {
    let spec = json!({
        "source": vm("a"), "deletionPolicy": "Keep", "failureDeadline": "soon",
        "snapshotMode": "External", "overlayScratchSize": "1Gi",
    });
    let fields = [
        "deletionPolicy",
        "failureDeadline",
        "snapshotMode",
        "overlayScratchSize",
    ];
    assert_eq!(
        of_snapshot(spec),
        fields.map(|field| format!("spec.{field}"))
    );
}

#[test]
fn a_snapshot_has_five_minutes_unless_it_says_otherwise() {
    let deadline = |text: Value| snapshot(json!({ "failureDeadline": text })).deadline();
    assert_eq!(snapshot(json!({})).deadline(), Some(FAILURE_DEADLINE));
    assert_eq!(deadline(json!("1m30s")).unwrap().as_secs(), 90);
    assert_eq!(deadline(json!("0s")), None);
    assert!(!snapshot(json!({})).retains());
    assert!(snapshot(json!({ "deletionPolicy": "Retain" })).retains());
}

#[test]
fn a_restore_names_its_target_and_its_snapshot() {
    let none: [&str; 0] = [];
    let spec = json!({ "target": vm("a"), "virtualMachineSnapshotName": "s" });
    assert_eq!(of_restore(spec.clone()), none);
    let spec = restore(spec);
    assert_eq!(spec.readiness(), Readiness::WaitGracePeriod);
    assert_eq!(spec.naming(), Naming::Random);
    assert!(spec.owns_claims());
    let all = [
        "spec.target.apiGroup",
        "spec.target.name",
        "spec.virtualMachineSnapshotName",
    ];
    assert_eq!(of_restore(json!({})), all);
}

#[test]
fn unknown_policies_and_empty_overrides_are_refused() {
    let spec = json!({
        "target": vm("a"), "virtualMachineSnapshotName": "s",
        "targetReadinessPolicy": "Hope", "volumeRestorePolicy": "x",
        "volumeOwnershipPolicy": "Me",
        "volumeRestoreOverrides": [
            { "volumeName": "root", "restoreName": "fine" },
            { "restoreName": "No/Name" },
            { "volumeName": "root" },
        ],
    });
    let fields = [
        "targetReadinessPolicy",
        "volumeRestorePolicy",
        "volumeOwnershipPolicy",
        "volumeRestoreOverrides[1].volumeName",
        "volumeRestoreOverrides[1].restoreName",
        "volumeRestoreOverrides[2]",
    ];
    assert_eq!(
        of_restore(spec),
        fields.map(|field| format!("spec.{field}"))
    );
}

#[test]
fn a_patch_changes_the_specification_labels_and_annotations_alone() {
    let fields = |patch: &str| {
        let spec = json!({
            "target": vm("a"), "virtualMachineSnapshotName": "s", "patches": [patch],
        });
        of_restore(spec)
    };
    let none: [&str; 0] = [];
    for patch in [
        r#"{"op": "replace", "path": "/spec/template/spec/hostname", "value": "a:b, c"}"#,
        r#"{"op": "remove", "path": "/metadata/labels/app"}"#,
        r#"{"op": "add", "path": "/metadata/annotations/x", "value": "1"}"#,
    ] {
        assert_eq!(fields(patch), none, "{patch}");
    }
    for (patch, field) in [
        ("nonsense", ""),
        ("[]", ""),
        (
            r#"{"op": "replace", "path": "/metadata/name", "value": "x"}"#,
            ".path",
        ),
        (
            r#"{"op": "replace", "path": "/status", "value": "x"}"#,
            ".path",
        ),
        (r#"{"op": "remove", "path": "/specious"}"#, ".path"),
        (r#"{"op": "break", "path": "/spec/x"}"#, ".op"),
        (r#"{"op": "add", "path": "/spec/x"}"#, ".value"),
        (
            r#"{"op": "copy", "path": "/spec/x", "from": "/metadata/uid"}"#,
            ".from",
        ),
    ] {
        assert_eq!(
            fields(patch),
            [format!("spec.patches[0]{field}")],
            "{patch}"
        );
    }
}

#[test]
fn a_list_of_patches_has_an_end() {
    let patch = r#"{"op": "remove", "path": "/spec/a"}"#;
    let of = |count: usize| {
        let spec = json!({
            "target": vm("a"), "virtualMachineSnapshotName": "s", "patches": vec![patch; count],
        });
        of_restore(spec)
    };
    let none: [&str; 0] = [];
    assert_eq!(of(1000), none);
    assert_eq!(of(1001), ["spec.patches"]);
}

#[test]
fn specifications_do_not_change() {
    let path = FieldPath::new("spec");
    let (old, new) = (
        snapshot(json!({ "source": vm("a") })),
        snapshot(json!({ "source": vm("b") })),
    );
    assert!(old.validate_update(&old, &path).is_empty());
    assert_eq!(new.validate_update(&old, &path)[0].field, "spec");
    let (old, new) = (restore(json!({})), restore(json!({ "patches": ["x"] })));
    assert_eq!(new.validate_update(&old, &path)[0].field, "spec");
}

proptest! {
    #[test]
    fn texts_of_any_kind_are_judged(text in ".{0,64}", json in "[\\[\\]{}\":,a-z/0-9]{0,64}") {
        let _ = duration::parse(&text);
        let spec = json!({
            "source": { "apiGroup": text, "kind": text, "name": text },
            "target": { "apiGroup": text, "kind": text, "name": text },
            "failureDeadline": text, "deletionPolicy": text, "snapshotMode": text,
            "virtualMachineSnapshotName": text, "patches": [text, json],
            "volumeRestoreOverrides": [{ "volumeName": text, "restoreName": text }],
            "labelFilters": [text], "newMacAddresses": { "default": text },
        });
        let _ = of_snapshot(spec.clone());
        let _ = of_restore(spec.clone());
        let spec: CloneSpec = serde_json::from_value(spec).unwrap();
        let _ = spec.validate(&FieldPath::new("spec"));
    }
}
