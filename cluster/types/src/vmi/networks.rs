//! Networks (`spec.networks`).

use std::collections::BTreeSet;

use serde_json::Value;

use super::{VmiSpec, count};
use crate::{Causes, FieldPath, cause::shown};

object! {
    /// A network: exactly one source.
    pub struct Network {
        /// Its name, which an interface refers to.
        pub name: String,
        /// The pod's network.
        pub pod: Option<PodNetwork>,
        /// A network of Multus.
        pub multus: Option<MultusNetwork>,
        /// Refused.
        pub resource_claim: Option<Value>,
    }

    /// The pod's network.
    pub struct PodNetwork {
        /// The guest's network behind NAT.
        #[serde(rename = "vmNetworkCIDR")]
        pub vm_network_cidr: Option<String>,
        /// The guest's IPv6 network behind NAT.
        #[serde(rename = "vmIPv6NetworkCIDR")]
        pub vm_ipv6_network_cidr: Option<String>,
    }

    /// A network of Multus.
    pub struct MultusNetwork {
        /// `[namespace/]name` of the NetworkAttachmentDefinition.
        pub network_name: String,
        /// It replaces the pod's network.
        pub default: Option<bool>,
    }
}

pub(super) fn validate(spec: &VmiSpec, path: &FieldPath, causes: &mut Causes) {
    let interfaces: BTreeSet<&str> = spec
        .domain
        .devices
        .interfaces
        .iter()
        .map(|interface| interface.name.as_str())
        .collect();
    let mut names = BTreeSet::new();
    let (mut pods, mut defaults) = (0, 0);
    for (index, network) in spec.networks.iter().enumerate() {
        let path = path.index(index);
        let name = path.child("name");
        if !names.insert(network.name.as_str()) {
            causes.duplicate(&name, &network.name);
        }
        if !interfaces.contains(network.name.as_str()) {
            let message = format!(
                "is {}, but no interface has this name",
                shown(&network.name)
            );
            causes.invalid(&name, message);
        }
        let sources = [
            network.pod.is_some(),
            network.multus.is_some(),
            network.resource_claim.is_some(),
        ];
        if count(&sources) != 1 {
            causes.invalid(&path, "must have exactly one of pod and multus");
        }
        if let Some(pod) = &network.pod {
            pods += 1;
            validate_cidrs(pod, &path.child("pod"), causes);
        }
        if let Some(multus) = &network.multus {
            defaults += usize::from(multus.default == Some(true));
            if multus.network_name.is_empty() {
                causes.required(&path.child("multus.networkName"), "is required");
            }
        }
    }
    if pods > 1 {
        causes.invalid(path, "must not have more than one pod network");
    }
    if defaults > 1 {
        causes.invalid(
            path,
            "must not have more than one default network of Multus",
        );
    }
    if pods > 0 && defaults > 0 {
        causes.invalid(
            path,
            "must not have a pod network and a default network of Multus",
        );
    }
}

fn validate_cidrs(pod: &PodNetwork, path: &FieldPath, causes: &mut Causes) {
    let cidrs = [
        ("vmNetworkCIDR", &pod.vm_network_cidr, true, 30),
        ("vmIPv6NetworkCIDR", &pod.vm_ipv6_network_cidr, false, 126),
    ];
    for (name, cidr, is_ipv4, longest) in cidrs {
        let Some(cidr) = cidr.as_deref().filter(|cidr| !cidr.is_empty()) else {
            continue;
        };
        let valid = cidr.split_once('/').is_some_and(|(address, prefix)| {
            let address: Result<std::net::IpAddr, _> = address.parse();
            address.is_ok_and(|address| address.is_ipv4() == is_ipv4)
                && prefix
                    .parse::<u8>()
                    .is_ok_and(|prefix| (1..=longest).contains(&prefix))
        });
        if !valid {
            let family = if is_ipv4 { "IPv4" } else { "IPv6" };
            causes.invalid(
                &path.child(name),
                format_args!("is {}, but must be an {family} network", shown(cidr)),
            );
        }
    }
}
