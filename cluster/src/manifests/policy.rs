//! Who may make a pod that is a VM.
//!
//! The specification of a VM reaches the node as an annotation of its pod. A user who could write
//! it would choose devices and host disks past all validation, so the API server itself lets only
//! the controller's account use it, or the runtime class that reads it.

use serde_json::{Value, json};

/// The annotation that carries the metadata and the specification of a VMI.
pub const ANNOTATION: &str = "podvisor.io/vmi";

/// The runtime class, and the handler of the runtime, of pods that are VMs.
pub const RUNTIME_CLASS: &str = "podvisor-vm";

const PODS: &str = "podvisor-vm-pods";

/// The policies, their bindings and the runtime class.
#[must_use]
pub fn policies(namespace: &str) -> Vec<Value> {
    vec![runtime_class(), pod_policy(namespace), binding(PODS)]
}

fn runtime_class() -> Value {
    json!({
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": { "name": RUNTIME_CLASS },
        "handler": RUNTIME_CLASS,
    })
}

fn pod_policy(namespace: &str) -> Value {
    let controller = format!("system:serviceaccount:{namespace}:podvisor-controller");
    let of = |object: &str| {
        format!(
            "(has({object}.metadata.annotations) && '{ANNOTATION}' in {object}.metadata.annotations \
             ? {object}.metadata.annotations['{ANNOTATION}'] : '')"
        )
    };
    let class = |object: &str| {
        format!(
            "(has({object}.spec.runtimeClassName) && \
             {object}.spec.runtimeClassName == '{RUNTIME_CLASS}')"
        )
    };
    let create = "request.operation == 'CREATE'";
    let unused = format!("({} == '' && !{})", of("object"), class("object"));
    let unchanged = format!(
        "(oldObject != null && {} == {})",
        of("object"),
        of("oldObject")
    );
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": { "name": PODS },
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "resourceRules": [{
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": ["pods"],
                    "scope": "Namespaced",
                }],
            },
            "validations": [
                {
                    "expression": format!(
                        "!({create}) || {unused} || request.userInfo.username == '{controller}'"
                    ),
                    "message": format!(
                        "only the controller of VMs makes pods with the runtime class \
                         {RUNTIME_CLASS} or the annotation {ANNOTATION}: create a \
                         VirtualMachine instead"
                    ),
                    "reason": "Forbidden",
                },
                {
                    "expression": format!("({create}) || {unchanged}"),
                    "message": format!("the annotation {ANNOTATION} cannot change"),
                    "reason": "Forbidden",
                },
            ],
        },
    })
}

fn binding(name: &str) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": { "name": name },
        "spec": { "policyName": name, "validationActions": ["Deny"] },
    })
}
