//! The pod of an instance, which is the VM itself (docs/adr/0041-vmi-is-a-pod.md).
//!
//! A pure function of the instance and of the claims that exist. The specification travels as an
//! annotation; what Kubernetes provides (images, claims, secrets, addresses, resources) is asked
//! for in the pod's own terms, so that quotas, admission and the scheduler see it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use podvisor_cluster_types::Quantity;
use podvisor_cluster_types::vmi::{Probe, ProbeHandler, VmiSpec};
use ring::digest::SHA1_FOR_LEGACY_USE_ONLY;
use serde_json::{Map, Value, json};

use super::pod_error::PodError;
use super::volumes;
use crate::controller::claims::VolumeMode;
use crate::controller::instances::RUNTIME_CLASS;
use crate::controller::names;
use crate::objects::{
    COMPONENT_LABEL, CREATED_BY_LABEL, ID_LABEL, LAUNCHER, NAME_LABEL, UNPAUSED_GATE,
    VMI_ANNOTATION, VirtualMachineInstance, name_label,
};

/// The name of a pod's one container.
pub const CONTAINER: &str = "compute";

/// The image of an instance that boots from none: its name tells the node to take the disks of
/// the specification.
pub const NO_IMAGE: &str = "podvisor.io/boot-from-volume:v1";

/// Beginnings of names of an instance's annotations that its pod does not get: those of `kubectl
/// apply`, and those by which a node is told what a pod is.
const NOT_PASSED_ON: [&str; 3] = [
    "kubectl.kubernetes.io/",
    "podvisor.io/",
    "kubernetes.io/target-runtime",
];

/// What a container may do. It has no meaning for a VM, but namespaces with the profile
/// `restricted` ask for it.
pub(super) fn restricted() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": true,
        "runAsUser": 107,
        "seccompProfile": {"type": "RuntimeDefault"},
    })
}

/// What the process around a guest takes, at most.
const FIXED_OVERHEAD: u64 = 32 << 20;

/// Page tables of the host and of the guest's second stage: each an eighth of a per cent of the
/// guest's memory, with pages of 4 KiB.
const TABLES_SHIFT: u32 = 8;

/// Of a vCPU, as much is requested as KubeVirt does: a tenth.
const MILLICORES_OF_VCPU: u64 = 100;

/// How long a guest may take to power off, in seconds, if its specification does not say.
const DEFAULT_GRACE: i64 = 30;

/// Returns the name of an instance's pod: one per unique id, so that it cannot be created twice.
#[must_use]
pub fn name(vmi: &VirtualMachineInstance) -> String {
    name_for(vmi, vmi.metadata.uid.as_deref().unwrap_or_default())
}

/// Returns the name of a pod that is made for an instance because of the object with this unique
/// id.
pub(super) fn name_for(vmi: &VirtualMachineInstance, uid: &str) -> String {
    let name = vmi.metadata.name.as_deref().unwrap_or_default();
    // A pod's name is a host name as well.
    let room = 63 - LAUNCHER.len() - 2 - names::HASH;
    let short: String = name.chars().take(room).collect();
    let short = short.trim_end_matches(['-', '.']);
    format!("{LAUNCHER}-{short}-{}", names::hash(uid))
}

/// Returns how long the guest may take to power off, in seconds.
///
/// With 0 the API server would forget the pod before its node has ended it.
#[must_use]
pub(super) fn grace(spec: &VmiSpec) -> i64 {
    spec.termination_grace_period_seconds
        .unwrap_or(DEFAULT_GRACE)
        .max(1)
}

/// Reads an instance's specification.
///
/// # Errors
///
/// A field has the wrong type.
pub(super) fn specification(vmi: &VirtualMachineInstance) -> Result<VmiSpec, PodError> {
    serde_json::from_value(vmi.spec.clone()).map_err(|error| PodError::Malformed {
        field: "spec".to_owned(),
        problem: error.to_string(),
    })
}

/// Returns an instance's pod; `claim` says how a claim of its namespace can be used, if it
/// exists.
///
/// # Errors
///
/// See [`PodError`].
pub fn pod(
    vmi: &VirtualMachineInstance,
    claim: &dyn Fn(&str) -> Option<VolumeMode>,
) -> Result<Pod, PodError> {
    let spec = specification(vmi)?;
    let volumes = volumes::of(&spec, claim)?;
    let mut container = json!({
        "name": CONTAINER,
        "image": volumes.image.as_deref().unwrap_or(NO_IMAGE),
        "imagePullPolicy": volumes.pull_policy.as_deref().unwrap_or("IfNotPresent"),
        "resources": resources_of(&spec)?,
        "volumeMounts": volumes.mounts,
        "volumeDevices": volumes.devices,
        "securityContext": restricted(),
    });
    for (field, probe) in [
        ("readinessProbe", &spec.readiness_probe),
        ("livenessProbe", &spec.liveness_probe),
    ] {
        if let Some(probe) = probe {
            container[field] = probe_of(probe)?;
        }
    }
    let account = spec
        .service_account_name
        .clone()
        .or(volumes.service_account);
    let mut pod_spec = json!({
        "runtimeClassName": RUNTIME_CLASS,
        "containers": [container],
        "volumes": volumes.volumes,
        "restartPolicy": "Never",
        "readinessGates": [{"conditionType": UNPAUSED_GATE}],
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": grace(&spec),
        "hostname": host_name(vmi, &spec),
        "nodeSelector": spec.node_selector,
        "tolerations": spec.tolerations,
        "topologySpreadConstraints": spec.topology_spread_constraints,
        "imagePullSecrets": volumes.pull_secrets.iter()
            .map(|name| json!({"name": name})).collect::<Vec<_>>(),
    });
    let metadata = metadata(vmi, &spec);
    let optional = [
        ("subdomain", spec.subdomain.map(Value::from)),
        ("affinity", spec.affinity),
        ("schedulerName", spec.scheduler_name.map(Value::from)),
        (
            "priorityClassName",
            spec.priority_class_name.map(Value::from),
        ),
        ("serviceAccountName", account.map(Value::from)),
        ("dnsPolicy", spec.dns_policy.map(Value::from)),
        ("dnsConfig", spec.dns_config.map(|dns| json!(dns))),
    ];
    for (field, value) in optional {
        if let Some(value) = value {
            pod_spec[field] = value;
        }
    }
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": pod_spec,
    });
    serde_json::from_value(pod).map_err(|error| PodError::Malformed {
        field: "spec".to_owned(),
        problem: format!("{error} (in a field that is passed on to the pod)"),
    })
}

/// The value of [`ID_LABEL`], as KubeVirt's clients compute it: the name, or where that is longer
/// than a label its beginning and a part of its hash.
fn instance_id(name: &str) -> String {
    const HASHED: usize = 54;
    if name.len() <= 63 {
        return name.to_owned();
    }
    let hash = ring::digest::digest(&SHA1_FOR_LEGACY_USE_ONLY, name.as_bytes());
    let hash = hash.as_ref().iter().take(4);
    let hash: String = hash.map(|byte| format!("{byte:02x}")).collect();
    let beginning: String = name.chars().take(HASHED).collect();
    format!("{beginning}-{hash}")
}

fn metadata(vmi: &VirtualMachineInstance, spec: &VmiSpec) -> Value {
    let meta = &vmi.metadata;
    let mut labels = meta.labels.clone().unwrap_or_default();
    let uid = meta.uid.clone().unwrap_or_default();
    let vmi_name = meta.name.clone().unwrap_or_default();
    labels.insert(COMPONENT_LABEL.into(), LAUNCHER.into());
    labels.insert(CREATED_BY_LABEL.into(), uid.clone());
    // A label is shorter than a name may be.
    labels.insert(NAME_LABEL.into(), name_label(&vmi_name));
    labels.insert(ID_LABEL.into(), instance_id(&vmi_name));
    let mut annotations = meta.annotations.clone().unwrap_or_default();
    annotations.retain(|name, _| !NOT_PASSED_ON.iter().any(|start| name.starts_with(start)));
    annotations.insert("kubevirt.io/domain".into(), vmi_name.clone());
    annotations.insert(VMI_ANNOTATION.into(), annotation(vmi).to_string());
    // The node counts the pod's interfaces in the same way.
    let attachments: Vec<Value> = spec
        .attached_networks()
        .filter_map(|network| network.multus.as_ref())
        .filter(|multus| multus.default != Some(true))
        .enumerate()
        .map(|(index, multus)| attachment(&multus.network_name, index))
        .collect();
    if !attachments.is_empty() {
        annotations.insert(
            "k8s.v1.cni.cncf.io/networks".into(),
            Value::from(attachments).to_string(),
        );
    }
    let default = spec
        .networks
        .iter()
        .filter_map(|network| network.multus.as_ref())
        .find(|multus| multus.default == Some(true));
    if let Some(multus) = default {
        annotations.insert(
            "v1.multus-cni.io/default-network".into(),
            multus.network_name.clone(),
        );
    }
    json!({
        "name": name(vmi),
        "namespace": meta.namespace,
        "labels": labels,
        "annotations": annotations,
        "ownerReferences": [{
            "apiVersion": vmi.api_version,
            "kind": vmi.kind,
            "name": vmi_name,
            "uid": uid,
            "controller": true,
            "blockOwnerDeletion": true,
        }],
    })
}

fn attachment(network: &str, index: usize) -> Value {
    let interface = format!("net{}", index + 1);
    match network.split_once('/') {
        Some((namespace, name)) => {
            json!({"name": name, "namespace": namespace, "interface": interface})
        }
        None => json!({"name": network, "interface": interface}),
    }
}

/// Returns what the node gets of the instance: enough to run it, without what changes.
fn annotation(vmi: &VirtualMachineInstance) -> Value {
    let meta = &vmi.metadata;
    let mut metadata = Map::new();
    for (field, value) in [
        ("name", json!(meta.name)),
        ("namespace", json!(meta.namespace)),
        ("uid", json!(meta.uid)),
        ("labels", json!(meta.labels)),
        ("annotations", json!(meta.annotations)),
    ] {
        if !value.is_null() {
            metadata.insert(field.to_owned(), value);
        }
    }
    if let Some(Value::Object(annotations)) = metadata.get_mut("annotations") {
        annotations.retain(|name, _| !name.starts_with("kubectl.kubernetes.io/"));
    }
    json!({"metadata": metadata, "spec": without_plugged(vmi.spec.clone())})
}

/// Returns a specification without the volumes that come when the VM runs, and without lists that
/// are empty then.
pub(in crate::controller) fn without_plugged(mut spec: Value) -> Value {
    let is_plugged = |volume: &Value| {
        let sources = ["persistentVolumeClaim", "dataVolume"].into_iter();
        let mut marks = sources.map(|source| &volume[source]["hotpluggable"]);
        marks.any(|mark| mark == &Value::Bool(true)) || volume.get("memoryDump").is_some()
    };
    let volumes = spec.get("volumes").and_then(Value::as_array);
    let plugged: Vec<Value> = volumes
        .into_iter()
        .flatten()
        .filter(|volume| is_plugged(volume))
        .map(|volume| volume["name"].clone())
        .collect();
    for (of, list) in [("", "volumes"), ("/domain/devices", "disks")] {
        let Some(Value::Object(of)) = spec.pointer_mut(of) else {
            continue;
        };
        if let Some(Value::Array(list)) = of.get_mut(list) {
            list.retain(|one| !plugged.contains(&one["name"]));
        }
        // As it was before there were any.
        if of
            .get(list)
            .and_then(Value::as_array)
            .is_some_and(Vec::is_empty)
        {
            of.remove(list);
        }
    }
    if let Some(Value::Object(domain)) = spec.get_mut("domain")
        && domain.get("devices") == Some(&json!({}))
    {
        domain.remove("devices");
    }
    spec
}

fn host_name(vmi: &VirtualMachineInstance, spec: &VmiSpec) -> String {
    let name = spec.hostname.clone().unwrap_or_else(|| {
        let name = vmi.metadata.name.as_deref().unwrap_or_default();
        name.split('.').next().unwrap_or_default().to_owned()
    });
    let short: String = name.chars().take(63).collect();
    short.trim_end_matches('-').to_owned()
}

/// Returns how much memory a guest has.
pub(super) fn guest_memory(spec: &VmiSpec) -> Option<&Quantity> {
    let domain = &spec.domain;
    let memory = domain.memory.as_ref();
    let resources = &domain.resources;
    memory
        .and_then(|memory| memory.guest.as_ref())
        .or_else(|| resources.requests.get("memory"))
        .or_else(|| resources.limits.get("memory"))
        .or_else(|| memory?.hugepages.as_ref()?.page_size.as_ref())
}

/// Returns the resources of the container that is the VM.
///
/// # Errors
///
/// See [`PodError`].
pub(super) fn resources_of(spec: &VmiSpec) -> Result<Value, PodError> {
    resources(spec, &Memory::of(spec)?)
}

/// What a guest has, and what it costs.
#[derive(Debug)]
struct Memory {
    guest: u64,
    overhead: u64,
}

impl Memory {
    fn of(spec: &VmiSpec) -> Result<Self, PodError> {
        let malformed = |problem: String| PodError::Malformed {
            field: "spec.domain.memory.guest".to_owned(),
            problem,
        };
        let Some(guest) = guest_memory(spec) else {
            return Err(malformed("no memory is asked for".to_owned()));
        };
        let guest = guest
            .bytes()
            .filter(|bytes| (1 << 20..1 << 50).contains(bytes))
            .ok_or_else(|| malformed(format!("{} is no size of a guest", guest.as_str())))?;
        Ok(Self {
            guest,
            overhead: FIXED_OVERHEAD + (guest >> TABLES_SHIFT),
        })
    }
}

fn resources(spec: &VmiSpec, memory: &Memory) -> Result<Value, PodError> {
    let given = &spec.domain.resources;
    let bytes = |field: &str, quantity: &Quantity| {
        quantity.bytes().ok_or_else(|| PodError::Malformed {
            field: format!("spec.domain.resources.{field}.memory"),
            problem: format!("{} is no size", quantity.as_str()),
        })
    };
    let others = |list: &BTreeMap<String, Quantity>| -> Map<String, Value> {
        list.iter()
            .map(|(name, quantity)| (name.clone(), quantity.as_str().into()))
            .collect()
    };
    let mut requests = others(&given.requests);
    let mut limits = others(&given.limits);
    let overhead = if given.overcommit_guest_overhead == Some(true) {
        0
    } else {
        memory.overhead
    };
    // A user may ask for less than the guest has: it is overcommitted then.
    let request = match given.requests.get("memory") {
        Some(request) => bytes("requests", request)?,
        None => memory.guest,
    };
    let page_size = spec
        .domain
        .memory
        .as_ref()
        .and_then(|memory| memory.hugepages.as_ref()?.page_size.as_ref());
    if let Some(size) = page_size {
        // They are counted on their own, and both must be equal.
        let name = format!("hugepages-{}", size.as_str());
        let guest = Value::from(memory.guest.to_string());
        requests.insert(name.clone(), guest.clone());
        limits.insert(name, guest);
        requests.insert("memory".into(), overhead.to_string().into());
    } else {
        requests.insert("memory".into(), (request + overhead).to_string().into());
    }
    if let Some(limit) = given.limits.get("memory") {
        let limit = bytes("limits", limit)?.max(memory.guest) + memory.overhead;
        limits.insert("memory".into(), limit.to_string().into());
    }
    if !requests.contains_key("cpu") {
        let request = match limits.get("cpu") {
            Some(limit) => limit.clone(),
            None => format!("{}m", vcpus(spec).saturating_mul(MILLICORES_OF_VCPU)).into(),
        };
        requests.insert("cpu".into(), request);
    }
    Ok(json!({"requests": requests, "limits": limits}))
}

fn vcpus(spec: &VmiSpec) -> u64 {
    let Some(cpu) = &spec.domain.cpu else {
        return 1;
    };
    [cpu.cores, cpu.sockets, cpu.threads]
        .into_iter()
        .map(|count| u64::try_from(count.unwrap_or(1)).unwrap_or(1).clamp(1, 512))
        .product::<u64>()
        .min(512)
}

/// Returns a probe in a container's terms. What runs in the guest is an exec of its container.
fn probe_of(probe: &Probe) -> Result<Value, PodError> {
    let mut value = serde_json::to_value(probe).map_err(|error| PodError::Malformed {
        field: "spec.readinessProbe".to_owned(),
        problem: error.to_string(),
    })?;
    if let Some(fields) = value.as_object_mut()
        && probe.guest_agent_ping == Some(ProbeHandler {})
    {
        fields.remove("guestAgentPing");
        fields.insert("exec".into(), json!({"command": ["true"]}));
    }
    Ok(value)
}

#[cfg(test)]
#[path = "pod_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "pod_fixture_tests.rs"]
mod fixture_tests;
