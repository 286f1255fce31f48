//! What belongs to a VM or an instance: the objects that it is made of and that it needs, as a
//! tree. Backups and user interfaces ask for it (`objectgraph`).
//!
//! Nothing but the object itself and its pod is read: what it names need not exist.

use std::collections::BTreeMap;

use http::StatusCode;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, api::ListParams};
use podvisor_cluster_types::{
    instancetype::{INSTANCETYPES, PREFERENCES},
    vm::{Matcher, VmSpec},
    vmi::{AccessCredential, VmiSpec, Volume},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Target,
    objects::{api, part},
    subresources::VM,
};
use crate::{
    https::{self, Answer},
    status::Failure,
};

/// Label of a node: what it is good for.
const LABEL: &str = "kubevirt.io/dependency-type";

/// Label of a pod: the unique id of its instance.
const CREATED_BY: &str = "kubevirt.io/created-by";

/// What is asked for; everything, if nothing is said.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Options {
    include_optional_nodes: Option<bool>,
    label_selector: Option<Selector>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Selector {
    match_labels: BTreeMap<String, String>,
    match_expressions: Vec<Expression>,
}

#[derive(Debug, Deserialize)]
struct Expression {
    key: String,
    operator: Operator,
    #[serde(default)]
    values: Vec<String>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
enum Operator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

impl Selector {
    /// Whether a node with this one label is selected.
    fn selects(&self, dependency: &str) -> bool {
        let value = |key: &str| (key == LABEL).then_some(dependency);
        let mut labels = self.match_labels.iter();
        labels.all(|(key, wanted)| value(key) == Some(wanted))
            && self.match_expressions.iter().all(|expression| {
                let value = value(&expression.key);
                let is_one =
                    value.is_some_and(|value| expression.values.iter().any(|v| v == value));
                match expression.operator {
                    Operator::In => is_one,
                    Operator::NotIn => !is_one,
                    Operator::Exists => value.is_some(),
                    Operator::DoesNotExist => value.is_none(),
                }
            })
    }
}

/// An object of the tree.
#[derive(Debug, Clone, PartialEq)]
struct Node {
    group: &'static str,
    kind: String,
    namespace: String,
    name: String,
    dependency: &'static str,
    is_optional: bool,
    children: Vec<Self>,
}

impl Node {
    fn new(
        namespace: &str,
        (group, kind, dependency): (&'static str, &str, &'static str),
        name: &str,
    ) -> Self {
        Self {
            group,
            kind: kind.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            dependency,
            is_optional: false,
            children: Vec::new(),
        }
    }

    fn retain(&mut self, options: &Options) {
        let selector = options.label_selector.as_ref();
        self.children.retain(|node| {
            let is_wanted = !node.is_optional || options.include_optional_nodes != Some(false);
            is_wanted && selector.is_none_or(|selector| selector.selects(node.dependency))
        });
        for node in &mut self.children {
            node.retain(options);
        }
    }

    fn to_json(&self) -> Value {
        let children: Vec<Value> = self.children.iter().map(Self::to_json).collect();
        let mut node = json!({
            "objectReference": {
                "apiGroup": self.group,
                "kind": self.kind,
                "name": self.name,
                "namespace": self.namespace,
            },
            "labels": { LABEL: self.dependency },
        });
        if self.is_optional {
            node["optional"] = json!(true);
        }
        if !children.is_empty() {
            node["children"] = children.into();
        }
        node
    }
}

const MACHINE: (&str, &str, &str) = ("kubevirt.io", "VirtualMachine", "compute");
const INSTANCE: (&str, &str, &str) = ("kubevirt.io", "VirtualMachineInstance", "compute");
const POD: (&str, &str, &str) = ("", "Pod", "compute");
const VOLUME: (&str, &str, &str) = ("cdi.kubevirt.io", "DataVolume", "storage");
const CLAIM: (&str, &str, &str) = ("", "PersistentVolumeClaim", "storage");
const CONFIG_MAP: (&str, &str, &str) = ("", "ConfigMap", "config");
const SECRET: (&str, &str, &str) = ("", "Secret", "config");
const ACCOUNT: (&str, &str, &str) = ("", "ServiceAccount", "config");
const NETWORK: (&str, &str, &str) = ("k8s.cni.cncf.io", "NetworkAttachmentDefinition", "network");

/// Answers with the tree of a VM or an instance.
pub(super) async fn answer(
    client: &Client,
    target: &Target<'_>,
    body: &[u8],
) -> Result<Answer, Failure> {
    let options: Options = match body.iter().all(u8::is_ascii_whitespace) {
        true => Options::default(),
        false => serde_json::from_slice(body)
            .map_err(|error| Failure::bad_request(format!("the options are invalid: {error}")))?,
    };
    let failed = |error: kube::Error| Failure::of_api_server(&error);
    let is_machine = target.resource == VM;
    let vmi = api(client, target.namespace, "VirtualMachineInstance");
    let vmi = vmi.get_opt(target.name).await.map_err(failed)?;
    let pod = match vmi.as_ref().and_then(|vmi| vmi.metadata.uid.as_deref()) {
        Some(uid) => pod_of(client, target.namespace, uid)
            .await
            .map_err(failed)?,
        None => None,
    };
    let pod = pod.map(|name| Node::new(target.namespace, POD, &name));
    let mut root = if is_machine {
        let vms = api(client, target.namespace, "VirtualMachine");
        let vm = vms.get_opt(target.name).await.map_err(failed)?;
        let unknown = || Failure::not_found("virtualmachine.kubevirt.io", target.name);
        let spec: VmSpec = part(&vm.ok_or_else(unknown)?, "spec");
        let instance = vmi.map(|_| {
            let mut node = Node::new(target.namespace, INSTANCE, target.name);
            node.children.extend(pod);
            node
        });
        of_machine(target.namespace, target.name, &spec, instance)
    } else {
        let unknown = || Failure::not_found("virtualmachineinstance.kubevirt.io", target.name);
        let spec: VmiSpec = part(&vmi.ok_or_else(unknown)?, "spec");
        let mut node = Node::new(target.namespace, INSTANCE, target.name);
        node.children.extend(pod);
        node.children.extend(of_spec(target.namespace, &spec));
        node
    };
    root.retain(&options);
    Ok(https::json(StatusCode::OK, &root.to_json()))
}

/// The pod of an instance that has not ended; of several, while it moves, one.
async fn pod_of(
    client: &Client,
    namespace: &str,
    uid: &str,
) -> Result<Option<String>, kube::Error> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let list = ListParams::default().labels(&format!("{CREATED_BY}={uid}"));
    let mut pods = pods.list(&list).await?.items;
    let has_ended = |pod: &Pod| {
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        matches!(phase, Some("Succeeded" | "Failed"))
    };
    pods.sort_by_key(has_ended);
    Ok(pods.into_iter().next().and_then(|pod| pod.metadata.name))
}

fn of_machine(namespace: &str, name: &str, spec: &VmSpec, instance: Option<Node>) -> Node {
    let mut root = Node::new(namespace, MACHINE, name);
    root.children.extend(instance);
    for (matcher, kinds) in [
        (&spec.instancetype, INSTANCETYPES),
        (&spec.preference, PREFERENCES),
    ] {
        root.children.extend(
            matcher
                .as_ref()
                .and_then(|of| matched(namespace, of, kinds)),
        );
    }
    if let Some(template) = &spec.template {
        root.children.extend(of_spec(namespace, &template.spec));
    }
    root
}

/// An instance type or a preference, of the namespace or of the cluster.
fn matched(namespace: &str, matcher: &Matcher, [own, cluster]: [&str; 2]) -> Option<Node> {
    let name = matcher.name.as_deref().filter(|name| !name.is_empty())?;
    let given = matcher.kind.as_deref().unwrap_or_default();
    let singular = given.strip_suffix('s').unwrap_or(given);
    let group = podvisor_cluster_types::instancetype::GROUP;
    let mut node = match singular.eq_ignore_ascii_case(own) {
        true => Node::new(namespace, (group, own, "config"), name),
        false => Node::new("", (group, cluster, "config"), name),
    };
    node.is_optional = true;
    Some(node)
}

fn of_spec(namespace: &str, spec: &VmiSpec) -> Vec<Node> {
    let credentials = spec.access_credentials.iter().filter_map(secret_of);
    let credentials = credentials.map(|name| Node::new(namespace, SECRET, name));
    let volumes = spec.volumes.iter();
    let volumes = volumes.flat_map(|volume| of_volume(namespace, volume));
    let networks = spec
        .networks
        .iter()
        .filter_map(|network| network.multus.as_ref());
    let networks = networks.filter(|multus| !multus.network_name.is_empty());
    let networks = networks.map(|multus| {
        let name = multus.network_name.as_str();
        let (namespace, name) = name.split_once('/').unwrap_or((namespace, name));
        let mut node = Node::new(namespace, NETWORK, name);
        node.is_optional = true;
        node
    });
    credentials.chain(volumes).chain(networks).collect()
}

fn secret_of(credential: &AccessCredential) -> Option<&str> {
    let keys = credential.ssh_public_key.as_ref().map(|keys| &keys.source);
    let words = credential.user_password.as_ref().map(|words| &words.source);
    let secret = keys.or(words)?.secret.as_ref()?;
    Some(&secret.secret_name)
}

/// What a volume is made of.
fn of_volume(namespace: &str, volume: &Volume) -> Vec<Node> {
    let claim = volume.persistent_volume_claim.as_ref();
    let overlaid = volume.ephemeral.as_ref();
    let overlaid = overlaid.and_then(|ephemeral| ephemeral.persistent_volume_claim.as_ref());
    let map = volume
        .config_map
        .as_ref()
        .and_then(|map| map.name.as_deref());
    let secret = volume
        .secret
        .as_ref()
        .and_then(|secret| secret.secret_name.as_deref());
    let account = volume.service_account.as_ref();
    let account = account.and_then(|account| account.service_account_name.as_deref());
    let data = volume
        .cloud_init_no_cloud
        .iter()
        .chain(&volume.cloud_init_config_drive);
    let data = data.flat_map(|data| [&data.secret_ref, &data.network_data_secret_ref]);
    let data = data
        .flatten()
        .map(|secret| (SECRET, Some(secret.name.as_str())));
    let named = [
        (
            CLAIM,
            claim.or(overlaid).map(|claim| claim.claim_name.as_str()),
        ),
        (
            VOLUME,
            volume
                .data_volume
                .as_ref()
                .map(|volume| volume.name.as_str()),
        ),
        (CONFIG_MAP, map),
        (SECRET, secret),
        (ACCOUNT, account),
    ];
    let nodes = named.into_iter().chain(data).filter_map(|(kind, name)| {
        let name = name.filter(|name| !name.is_empty())?;
        let mut node = Node::new(namespace, kind, name);
        if kind == VOLUME {
            node.children.push(Node::new(namespace, CLAIM, name));
        }
        Some(node)
    });
    nodes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Node {
        let spec = json!({
            "instancetype": { "name": "small" },
            "preference": { "name": "linux", "kind": "virtualmachinepreference" },
            "template": { "spec": {
                "accessCredentials": [{ "sshPublicKey": {
                    "source": { "secret": { "secretName": "keys" } },
                } }],
                "networks": [{ "name": "a", "multus": { "networkName": "other/net" } }],
                "volumes": [
                    { "name": "root", "dataVolume": { "name": "root" } },
                    { "name": "data", "persistentVolumeClaim": { "claimName": "data" } },
                    { "name": "map", "configMap": { "name": "map" } },
                    { "name": "account", "serviceAccount": { "serviceAccountName": "ann" } },
                    { "name": "init", "cloudInitNoCloud": {
                        "secretRef": { "name": "user" }, "networkDataSecretRef": { "name": "net" },
                    } },
                    { "name": "empty", "emptyDisk": { "capacity": "1Gi" } },
                ],
            } },
        });
        let spec: VmSpec = serde_json::from_value(spec).unwrap();
        let mut instance = Node::new("n", INSTANCE, "v");
        instance
            .children
            .push(Node::new("n", POD, "virt-launcher-v"));
        of_machine("n", "v", &spec, Some(instance))
    }

    fn names(node: &Node) -> Vec<String> {
        let own = |node: &Node| format!("{} {}/{}", node.kind, node.namespace, node.name);
        let children = node.children.iter();
        let children = children.flat_map(|child| [vec![own(child)], names(child)].concat());
        children.collect()
    }

    fn names_with(options: Value) -> Vec<String> {
        let mut root = machine();
        root.retain(&serde_json::from_value(options).unwrap());
        names(&root)
    }

    #[test]
    fn a_machine_has_all_that_it_is_made_of() {
        let all = [
            "VirtualMachineInstance n/v",
            "Pod n/virt-launcher-v",
            "VirtualMachineClusterInstancetype /small",
            "VirtualMachinePreference n/linux",
            "Secret n/keys",
            "DataVolume n/root",
            "PersistentVolumeClaim n/root",
            "PersistentVolumeClaim n/data",
            "ConfigMap n/map",
            "ServiceAccount n/ann",
            "Secret n/user",
            "Secret n/net",
            "NetworkAttachmentDefinition other/net",
        ];
        assert_eq!(names_with(json!({})), all);
        let json = machine().to_json();
        assert_eq!(json["children"][1]["optional"], true);
        let pod = &json["children"][0]["children"][0];
        assert_eq!(pod["objectReference"]["apiGroup"], "");
        assert_eq!(pod["labels"][LABEL], "compute");
    }

    #[test]
    fn a_selector_and_the_wish_for_nothing_optional_are_heeded() {
        let storage = json!({ "labelSelector": { "matchLabels": { LABEL: "storage" } } });
        let disks = ["DataVolume n/root", "PersistentVolumeClaim n/root"];
        let disks = [disks[0], disks[1], "PersistentVolumeClaim n/data"];
        assert_eq!(names_with(storage), disks);
        let expression =
            json!({ "key": LABEL, "operator": "NotIn", "values": ["config", "compute"] });
        let expressions = json!({ "labelSelector": { "matchExpressions": [expression] } });
        let found = names_with(expressions);
        assert_eq!(found[..3], disks);
        assert_eq!(found[3..], ["NetworkAttachmentDefinition other/net"]);
        let found = names_with(json!({ "includeOptionalNodes": false }));
        assert!(
            !found
                .iter()
                .any(|name| name.contains("Preference") || name.contains("Network"))
        );
        let other = json!({ "labelSelector": { "matchLabels": { "other": "storage" } } });
        assert!(names_with(other).is_empty());
    }
}
