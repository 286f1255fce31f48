//! Fills in what a user left out, and undoes what a user may not change.

use std::io::Read as _;

use podvisor_cluster_types::{
    Cause, CauseReason, migration::SELECTOR_LABEL, vm::VmSpec, vmi::VmiSpec,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use super::{Policy, Request, Response};
use crate::typed;

/// Finalizers by kind: each is taken away by the controller of that kind.
const FINALIZERS: [(&str, &str); 3] = [
    (
        "VirtualMachine",
        "kubevirt.io/virtualMachineControllerFinalize",
    ),
    (
        "VirtualMachineInstance",
        "kubevirt.io/foregroundDeleteVirtualMachine",
    ),
    (
        "VirtualMachineInstanceMigration",
        "kubevirt.io/migrationJobFinalize",
    ),
];

/// The answer of the mutating webhook.
#[must_use]
pub fn mutate(request: &Request, policy: &Policy) -> Response {
    mutate_into(request, request.object.clone(), policy)
}

/// The answer of the mutating webhook that has changed the object already.
pub(super) fn mutate_into(request: &Request, mut object: Value, policy: &Policy) -> Response {
    if request.sub_resource.as_deref() == Some("status") {
        return restore_status(request, policy);
    }
    if request.is_going() {
        return Response::allowed();
    }
    let defaults = &policy.config.defaults;
    let result = match (request.kind.kind.as_str(), request.operation.as_str()) {
        ("VirtualMachineInstance", "CREATE") => default_spec(&mut object, |spec: &mut VmiSpec| {
            spec.apply_defaults(defaults);
            spec.set_firmware_uuid(random_uuid);
        }),
        ("VirtualMachine", "CREATE" | "UPDATE") => {
            default_spec(&mut object, |spec: &mut VmSpec| {
                keep_uuid(&request.old_object, spec);
                spec.apply_defaults(defaults, random_uuid);
            })
        }
        ("VirtualMachineInstanceMigration", "CREATE") => {
            label_with_vmi(&mut object);
            Ok(())
        }
        _ => Ok(()),
    };
    if let Err(cause) = result {
        return Response::Invalid(vec![cause]);
    }
    if request.operation == "CREATE" {
        add_finalizer(&mut object, &request.kind.kind);
    }
    patched(&request.object, &object)
}

/// What the types cannot read is a wrong shape, which the schema tells better where it can.
fn unreadable(error: &serde_json::Error) -> Cause {
    Cause {
        reason: CauseReason::Invalid,
        message: format!("spec cannot be read: {error}"),
        field: "spec".to_owned(),
    }
}

fn default_spec<T: Serialize + DeserializeOwned>(
    object: &mut Value,
    apply: impl FnOnce(&mut T),
) -> Result<(), Cause> {
    let Some(object) = object.as_object_mut() else {
        return Ok(());
    };
    let spec = object.entry("spec").or_insert_with(|| json!({}));
    typed::change(spec, apply).map_err(|error| unreadable(&error))
}

/// An update that says nothing of the UUID keeps the one that the VM has.
fn keep_uuid(old: &Value, spec: &mut VmSpec) {
    let uuid = old
        .pointer("/spec/template/spec/domain/firmware/uuid")
        .and_then(Value::as_str);
    if let (Some(uuid), Some(template)) = (uuid, &mut spec.template) {
        template.spec.set_firmware_uuid(|| uuid.to_owned());
    }
}

fn metadata(object: &mut Value) -> Option<&mut Map<String, Value>> {
    let object = object.as_object_mut()?;
    object
        .entry("metadata")
        .or_insert_with(|| json!({}))
        .as_object_mut()
}

fn add_finalizer(object: &mut Value, kind: &str) {
    let Some((_, finalizer)) = FINALIZERS.iter().find(|(of, _)| *of == kind) else {
        return;
    };
    let Some(metadata) = metadata(object) else {
        return;
    };
    let finalizers = metadata.entry("finalizers").or_insert_with(|| json!([]));
    if let Some(finalizers) = finalizers.as_array_mut()
        && !finalizers.iter().any(|known| known == finalizer)
    {
        finalizers.push(json!(finalizer));
    }
}

/// The label by which a VMI's migrations are found.
fn label_with_vmi(object: &mut Value) {
    let Some(name) = object
        .pointer("/spec/vmiName")
        .and_then(Value::as_str)
        .map(str::to_owned)
    else {
        return;
    };
    let Some(metadata) = metadata(object) else {
        return;
    };
    if let Some(labels) = metadata
        .entry("labels")
        .or_insert_with(|| json!({}))
        .as_object_mut()
    {
        labels.insert(SELECTOR_LABEL.to_owned(), json!(name));
    }
}

/// A status is the system's: what others write into it is undone, without a word, as clients
/// that send whole objects mean no harm.
fn restore_status(request: &Request, policy: &Policy) -> Response {
    if policy.may_report(&request.user_info) {
        return Response::allowed();
    }
    let mut object = request.object.clone();
    if let Some(object) = object.as_object_mut() {
        match request.old_object.get("status") {
            Some(status) => object.insert("status".to_owned(), status.clone()),
            None => object.remove("status"),
        };
    }
    patched(&request.object, &object)
}

pub(super) fn patched(before: &Value, after: &Value) -> Response {
    let patch = json_patch::diff(before, after);
    if patch.is_empty() {
        Response::allowed()
    } else {
        Response::Patched(patch)
    }
}

/// A random UUID (RFC 9562, version 4).
fn random_uuid() -> String {
    let mut bytes = [0; 16];
    if let Err(error) =
        std::fs::File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut bytes))
    {
        // Without randomness there is no TLS either: the process does not get this far.
        tracing::error!(%error, "failed to read /dev/urandom");
    }
    let number = u128::from_be_bytes(bytes);
    let number = number & !(0xf000 << 64) & !(0xc000 << 48) | 0x4000 << 64 | 0x8000 << 48;
    let hex = format!("{number:032x}");
    let group = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    [
        group(0, 8),
        group(8, 12),
        group(12, 16),
        group(16, 20),
        group(20, 32),
    ]
    .join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: &str, operation: &str, object: Value) -> Request {
        let mut request = Request {
            object,
            operation: operation.to_owned(),
            ..Default::default()
        };
        request.kind.kind = kind.to_owned();
        request
    }

    fn apply(request: &Request) -> Value {
        let policy = Policy::new(Default::default(), "podvisor");
        let mut object = request.object.clone();
        match mutate(request, &policy) {
            Response::Allowed(_) => {}
            Response::Patched(patch) => json_patch::patch(&mut object, &patch).unwrap(),
            other => panic!("refused: {other:?}"),
        }
        object
    }

    #[test]
    fn a_vmi_gets_its_defaults_its_uuid_and_its_finalizer() {
        let object = json!({
            "metadata": { "name": "a" },
            "spec": { "domain": { "devices": {}, "resources": { "requests": { "memory": "1Gi" } } },
                "unknown": [1] },
        });
        let object = apply(&request("VirtualMachineInstance", "CREATE", object));
        assert_eq!(object["spec"]["domain"]["memory"]["guest"], "1Gi");
        assert_eq!(object["spec"]["networks"][0]["name"], "default");
        assert_eq!(
            object["spec"]["unknown"],
            json!([1]),
            "what is not known stays"
        );
        let uuid = object["spec"]["domain"]["firmware"]["uuid"]
            .as_str()
            .unwrap();
        assert_eq!(uuid.len(), 36);
        assert_eq!(uuid.as_bytes()[14], b'4');
        assert!(b"89ab".contains(&uuid.as_bytes()[19]));
        let finalizer = "kubevirt.io/foregroundDeleteVirtualMachine";
        assert_eq!(object["metadata"]["finalizers"], json!([finalizer]));
    }

    #[test]
    fn a_vm_keeps_its_uuid_when_it_is_applied_again() {
        let plain = json!({
            "metadata": { "name": "a" },
            "spec": { "running": true, "template": { "spec": { "domain": {} } } },
        });
        let first = apply(&request("VirtualMachine", "CREATE", plain.clone()));
        let uuid = &first["spec"]["template"]["spec"]["domain"]["firmware"]["uuid"];
        assert!(uuid.is_string());
        let mut update = request("VirtualMachine", "UPDATE", plain);
        update.old_object = first.clone();
        let second = apply(&update);
        assert_eq!(
            &second["spec"]["template"]["spec"]["domain"]["firmware"]["uuid"],
            uuid
        );
        assert_eq!(
            apply(&request("VirtualMachine", "UPDATE", first.clone())),
            first
        );
    }

    #[test]
    fn an_object_that_goes_is_left_alone() {
        let object = json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } });
        let request = request("VirtualMachine", "UPDATE", object.clone());
        assert_eq!(apply(&request), object);
    }

    #[test]
    fn a_status_by_others_is_undone_and_the_systems_is_kept() {
        let mut request = request(
            "VirtualMachineInstance",
            "UPDATE",
            json!({
                "status": { "phase": "Running" },
            }),
        );
        request.sub_resource = Some("status".to_owned());
        request.old_object = json!({ "status": { "phase": "Pending" } });
        request.user_info.username = "mallory".to_owned();
        assert_eq!(apply(&request)["status"]["phase"], "Pending");
        request.user_info.username = "system:serviceaccount:other:podvisor-controller".to_owned();
        assert_eq!(apply(&request)["status"]["phase"], "Pending");
        request.user_info.username =
            "system:serviceaccount:podvisor:podvisor-controller".to_owned();
        assert_eq!(apply(&request)["status"]["phase"], "Running");
    }

    #[test]
    fn a_migration_is_labelled_with_its_vmi() {
        let object = json!({ "metadata": { "name": "m" }, "spec": { "vmiName": "a" } });
        let object = apply(&request(
            "VirtualMachineInstanceMigration",
            "CREATE",
            object,
        ));
        assert_eq!(object["metadata"]["labels"][SELECTOR_LABEL], "a");
        let finalizer = "kubevirt.io/migrationJobFinalize";
        assert_eq!(object["metadata"]["finalizers"], json!([finalizer]));
    }

    #[test]
    fn what_cannot_be_read_is_refused_by_its_path() {
        let object = json!({ "spec": { "domain": { "cpu": { "cores": "many" } } } });
        let policy = Policy::default();
        let response = mutate(
            &request("VirtualMachineInstance", "CREATE", object),
            &policy,
        );
        let Response::Invalid(causes) = response else {
            panic!("{response:?}")
        };
        assert_eq!(causes[0].field, "spec");
    }

    #[test]
    fn objects_of_any_shape_are_answered() {
        for object in [
            json!(null),
            json!([]),
            json!("a"),
            json!({ "metadata": 3, "spec": [] }),
        ] {
            for kind in ["VirtualMachine", "VirtualMachineInstance", "Pod", ""] {
                for operation in ["CREATE", "UPDATE", "DELETE", ""] {
                    let _ = mutate(
                        &request(kind, operation, object.clone()),
                        &Policy::default(),
                    );
                }
            }
        }
    }
}
