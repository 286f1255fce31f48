//! Who may make a pod that is a VM, and what nodes may write about their VMs.
//!
//! The specification of a VM reaches the node as an annotation of its pod. A user who could write
//! it would choose devices and host disks past all validation, so the API server itself lets only
//! the controller's account use it, or the runtime class that reads it.
//!
//! The controller makes Secrets wherever there are uploads, copies and exports. Roles cannot say
//! which ones an account creates, so a policy does.
//!
//! A node acts as its kubelet. All kubelets have the same rights, and the name of one is its
//! node's: so a policy keeps each to the instances of its node, and to what only a node knows of
//! them.

use serde_json::{Value, json};

use crate::certificates;

/// The annotation that carries the metadata and the specification of a VMI.
pub const ANNOTATION: &str = "podvisor.io/vmi";

/// The annotation of a pod that waits for a VM from another node.
const MIGRATION: &str = "podvisor.io/migration";

/// The annotation of a pod that keeps a claim for a VM.
const ATTACHMENT: &str = "podvisor.io/attachment";

/// What of a pod's requests can change its annotations, or its class.
const OF_PODS: [&str; 4] = [
    "pods",
    "pods/status",
    "pods/ephemeralcontainers",
    "pods/resize",
];

/// The runtime class, and the handler of the runtime, of pods that are VMs.
pub const RUNTIME_CLASS: &str = "podvisor-vm";

const PODS: &str = "podvisor-vm-pods";
const BINDINGS: &str = "podvisor-vm-bindings";
const NODES: &str = "podvisor-vm-nodes";
const SECRETS: &str = "podvisor-importer-secrets";

/// What of an instance's status is a node's.
const OF_NODES: [&str; 5] = [
    "conditions",
    "interfaces",
    "guestOSInfo",
    "fsFreezeStatus",
    "VSOCKCID",
];

/// Conditions that are a node's.
const CONDITIONS: [&str; 4] = [
    "Paused",
    "AgentConnected",
    "AgentVersionNotSupported",
    "AccessCredentialsSynchronized",
];

/// The policies, their bindings and the runtime class.
#[must_use]
pub fn policies(namespace: &str) -> Vec<Value> {
    vec![
        runtime_class(),
        pod_policy(namespace),
        binding(PODS),
        binding_policy(),
        binding(BINDINGS),
        node_policy(),
        binding(NODES),
        secret_policy(namespace),
        binding(SECRETS),
    ]
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
    let class = |object: &str| {
        format!(
            "(has({object}.spec.runtimeClassName) && \
             {object}.spec.runtimeClassName == '{RUNTIME_CLASS}')"
        )
    };
    let create = "request.operation == 'CREATE'";
    let unused = format!("({} && !{})", without("object"), class("object"));
    let same = |name| format!("{} == {}", value("object", name), value("oldObject", name));
    let unchanged = format!(
        "(oldObject != null && {} && {} && {})",
        same(ANNOTATION),
        same(MIGRATION),
        same(ATTACHMENT)
    );
    let requests = Requests {
        operations: &["CREATE", "UPDATE"],
        ..Requests::created(&OF_PODS)
    };
    let made = format!(
        "only the controller of VMs makes pods with the runtime class {RUNTIME_CLASS} or the \
         annotations {ANNOTATION}, {MIGRATION} and {ATTACHMENT}: create a VirtualMachine instead"
    );
    let changed =
        format!("the annotations {ANNOTATION}, {MIGRATION} and {ATTACHMENT} cannot change");
    let rules = [
        rule(
            format!("!({create}) || {unused} || request.userInfo.username == '{controller}'"),
            &made,
        ),
        rule(format!("({create}) || {unchanged}"), &changed),
    ];
    policy(PODS, &requests, &rules)
}

/// The value of an object's annotation, or an empty text.
fn value(object: &str, name: &str) -> String {
    format!(
        "(has({object}.metadata.annotations) && '{name}' in {object}.metadata.annotations \
         ? {object}.metadata.annotations['{name}'] : '')"
    )
}

/// That an object has none of the annotations.
fn without(object: &str) -> String {
    format!(
        "{} == '' && {} == '' && {} == ''",
        value(object, ANNOTATION),
        value(object, MIGRATION),
        value(object, ATTACHMENT)
    )
}

/// A binding gives its annotations to its pod.
fn binding_policy() -> Value {
    let requests = Requests::created(&["pods/binding", "bindings"]);
    let message = format!("a binding does not set {ANNOTATION}, {MIGRATION} or {ATTACHMENT}");
    policy(BINDINGS, &requests, &[rule(without("object"), &message)])
}

/// Of Secrets, the controller makes the authority's, such as have a certificate and go with an
/// importer, the pod that sends to it or one that serves an export, and tokens of exports. None of
/// them is the token of an account.
fn secret_policy(namespace: &str) -> Value {
    let controller = format!("system:serviceaccount:{namespace}:podvisor-controller");
    let authority = format!(
        "(request.namespace == '{namespace}' && object.metadata.name == '{}')",
        certificates::SECRET
    );
    let owned = |prefix: &str, kind: &str| {
        format!(
            "(object.metadata.name.startsWith('{prefix}-') \
             && has(object.metadata.ownerReferences) \
             && object.metadata.ownerReferences.all(owner, owner.kind == '{kind}') \
             && object.metadata.ownerReferences.size() == 1)"
        )
    };
    let token = owned("export-token", "VirtualMachineExport");
    let by_controller = format!("request.userInfo.username == '{controller}'");
    let requests = Requests {
        condition: Some(("is-the-controller", &by_controller)),
        ..Requests::created(&["secrets"])
    };
    let rules = [
        rule(
            format!(
                "has(object.data) && (object.type == 'kubernetes.io/tls' \
                 ? object.data.all(key, key in ['tls.crt', 'tls.key', 'ca.crt']) \
                 : object.type == 'Opaque' && object.data.all(key, key == '{}') && {token})",
                crate::export::TOKEN
            ),
            "the controller of VMs makes Secrets with certificates or tokens of exports only",
        ),
        rule(
            format!(
                "{authority} || {} || {} || {} || {token}",
                owned("upload", "DataVolume"),
                owned("source", "Pod"),
                owned("virt-export", "Pod")
            ),
            "the controller of VMs makes Secrets for uploads, copies and exports only",
        ),
    ];
    policy(SECRETS, &requests, &rules)
}

fn node_policy() -> Value {
    let is_node = "has(request.userInfo.groups) && 'system:nodes' in request.userInfo.groups";
    // An instance without a status is no node's.
    let own = "has(oldObject.status) && has(oldObject.status.nodeName) \
               && request.userInfo.username == 'system:node:' + oldObject.status.nodeName";
    let list = |words: &[&str]| format!("['{}']", words.join("','"));
    let same = |a: &str, b: &str| {
        format!(
            "has({a}.status) && {a}.status.all(key, key in {} \
             || (key in {b}.status && {a}.status[key] == {b}.status[key]))",
            list(&OF_NODES)
        )
    };
    let others = |object: &str| {
        format!(
            "(has({object}.status.conditions) \
             ? {object}.status.conditions.filter(c, !(c.type in {})) : [])",
            list(&CONDITIONS)
        )
    };
    let conditions = format!("{} == {}", others("object"), others("oldObject"));
    let requests = Requests {
        group: super::crds::GROUP,
        version: "*",
        operations: &["*"],
        resources: &["virtualmachineinstances", "virtualmachineinstances/status"],
        condition: Some(("is-a-node", is_node)),
    };
    let rules = [
        rule(
            format!("request.operation == 'UPDATE' && oldObject != null && {own}"),
            "a node reports of its own VMs only",
        ),
        rule(
            format!(
                "{} && {}",
                same("object", "oldObject"),
                same("oldObject", "object")
            ),
            "a node writes only what is a node's into the status of its VMs",
        ),
        rule(conditions, "a node sets only conditions that are a node's"),
    ];
    policy(NODES, &requests, &rules)
}

/// The requests that a policy judges.
struct Requests<'a> {
    group: &'a str,
    version: &'a str,
    operations: &'a [&'a str],
    resources: &'a [&'a str],
    /// The name of a condition, and the condition. Without one, everybody's are judged.
    condition: Option<(&'a str, &'a str)>,
}

impl<'a> Requests<'a> {
    /// Those of everybody that create objects of Kubernetes' own.
    const fn created(resources: &'a [&'a str]) -> Self {
        Self {
            group: "",
            version: "v1",
            operations: &["CREATE"],
            resources,
            condition: None,
        }
    }
}

/// What a request must fulfil, and why it is refused if it does not.
fn rule(expression: String, message: &str) -> Value {
    json!({ "expression": expression, "message": message, "reason": "Forbidden" })
}

fn policy(name: &str, requests: &Requests<'_>, rules: &[Value]) -> Value {
    let mut policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": { "name": name },
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "resourceRules": [{
                    "apiGroups": [requests.group],
                    "apiVersions": [requests.version],
                    "operations": requests.operations,
                    "resources": requests.resources,
                    "scope": "Namespaced",
                }],
            },
            "validations": rules,
        },
    });
    if let Some((name, expression)) = requests.condition {
        policy["spec"]["matchConditions"] = json!([{ "name": name, "expression": expression }]);
    }
    policy
}

fn binding(name: &str) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": { "name": name },
        "spec": { "policyName": name, "validationActions": ["Deny"] },
    })
}
