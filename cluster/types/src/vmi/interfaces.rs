//! Network cards (`spec.domain.devices.interfaces`).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
};

use serde_json::Value;

use super::{VmiSpec, count};
use crate::{Causes, ClusterConfig, FieldPath, cause::shown, names::is_port_name};

/// The address that the pod's end of a masqueraded card has.
const RESERVED_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0];

/// States of a card.
const ABSENT: &str = "absent";
const DOWN: &str = "down";

const MAX_PORT_RANGES: usize = 10;

/// More ports than this in a list are a mistake, and slow to check.
const MAX_PORTS: usize = 1024;

const LAST_PORT: i64 = 65535;

object! {
    /// A network card: exactly one binding.
    pub struct Interface {
        /// Its name, which is that of its network.
        pub name: String,
        /// The guest has the pod's address.
        pub bridge: Option<Binding>,
        /// The guest has a private address behind NAT.
        pub masquerade: Option<Binding>,
        /// Refused.
        pub sriov: Option<Value>,
        /// Refused.
        pub slirp: Option<Value>,
        /// Refused.
        pub macvtap: Option<Value>,
        /// Refused.
        pub passt: Option<Value>,
        /// Refused.
        pub passt_binding: Option<Value>,
        /// Refused.
        pub binding: Option<Value>,
        /// `virtio`.
        pub model: Option<String>,
        /// The card's hardware address.
        pub mac_address: Option<String>,
        /// Ports that reach the guest; none means all.
        pub ports: Vec<InterfacePort>,
        /// Ranges of ports that reach the guest.
        pub port_ranges: Vec<PortRange>,
        /// What the guest is told by DHCP.
        pub dhcp_options: Option<DhcpOptions>,
        /// Where in the order of boot it stands.
        pub boot_order: Option<i64>,
        /// `up`, `down` or `absent`.
        pub state: Option<String>,
        /// A tag in cloud-init's data.
        pub tag: Option<String>,
        /// Refused.
        pub acpi_index: Option<Value>,
        /// Refused.
        pub pci_address: Option<Value>,
    }

    /// A binding: it has no settings.
    pub struct Binding {
    }

    /// A port that reaches the guest.
    pub struct InterfacePort {
        /// Its name.
        pub name: Option<String>,
        /// `TCP` or `UDP`.
        pub protocol: Option<String>,
        /// Its number.
        pub port: Option<i64>,
    }

    /// A range of ports that reach the guest.
    pub struct PortRange {
        /// `TCP` or `UDP`.
        pub protocol: Option<String>,
        /// First port.
        pub start: Option<i64>,
        /// Last port.
        pub end: Option<i64>,
    }

    /// What the guest is told by DHCP.
    pub struct DhcpOptions {
        /// Option 67.
        pub boot_file_name: Option<String>,
        /// Option 66.
        pub tftp_server_name: Option<String>,
        /// Option 42.
        pub ntp_servers: Vec<String>,
        /// Options from 224 to 254.
        pub private_options: Vec<PrivateDhcpOption>,
    }

    /// A private option of DHCP.
    pub struct PrivateDhcpOption {
        /// Its number.
        pub option: i64,
        /// Its value.
        pub value: String,
    }
}

pub(super) fn validate(
    spec: &VmiSpec,
    config: &ClusterConfig,
    path: &FieldPath,
    causes: &mut Causes,
) {
    let networks: BTreeMap<&str, _> = spec
        .networks
        .iter()
        .map(|network| (network.name.as_str(), network))
        .collect();
    let mut names = BTreeSet::new();
    for (index, interface) in spec.domain.devices.interfaces.iter().enumerate() {
        let path = path.index(index);
        let name = path.child("name");
        if interface.name.is_empty() {
            causes.required(&name, "is required");
        } else if !interface
            .name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b))
        {
            let given = shown(&interface.name);
            causes.invalid(
                &name,
                format_args!("is {given}, but must match [A-Za-z0-9_-]+"),
            );
        }
        if !names.insert(interface.name.as_str()) {
            causes.duplicate(&name, &interface.name);
        }
        let network = networks.get(interface.name.as_str());
        if network.is_none() {
            let given = shown(&interface.name);
            causes.invalid(
                &name,
                format_args!("is {given}, but no network has this name"),
            );
        }
        let on_pod = network.is_some_and(|network| network.pod.is_some());
        let is_default = on_pod
            || network.is_some_and(|network| {
                network
                    .multus
                    .as_ref()
                    .is_some_and(|multus| multus.default == Some(true))
            });
        validate_binding(interface, network.is_some(), on_pod, config, &path, causes);
        validate_card(interface, is_default, &path, causes);
        validate_ports(interface, &path, causes);
        if let Some(options) = &interface.dhcp_options {
            validate_dhcp(options, &path.child("dhcpOptions"), causes);
        }
    }
}

fn validate_binding(
    interface: &Interface,
    has_network: bool,
    on_pod: bool,
    config: &ClusterConfig,
    path: &FieldPath,
    causes: &mut Causes,
) {
    let bindings = [
        interface.bridge.is_some(),
        interface.masquerade.is_some(),
        interface.sriov.is_some(),
        interface.slirp.is_some(),
        interface.macvtap.is_some(),
        interface.passt.is_some(),
        interface.passt_binding.is_some(),
        interface.binding.is_some(),
    ];
    if count(&bindings) != 1 {
        causes.invalid(path, "must have exactly one of bridge and masquerade");
    }
    if interface.masquerade.is_some() && has_network && !on_pod {
        causes.invalid(
            &path.child("name"),
            "masquerade is only possible with the pod network",
        );
    }
    if interface.bridge.is_some() && on_pod && !config.permit_bridge_on_pod_network {
        causes.invalid(
            &path.child("name"),
            "bridge is not permitted on the pod network in this cluster: use masquerade",
        );
    }
}

impl Interface {
    /// The guest does not have it.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        self.state.as_deref() == Some(ABSENT)
    }

    /// The guest's driver is told that it has no link.
    #[must_use]
    pub fn is_down(&self) -> bool {
        self.state.as_deref() == Some(DOWN)
    }
}

fn validate_card(interface: &Interface, is_default: bool, path: &FieldPath, causes: &mut Causes) {
    if let Some(text) = interface
        .mac_address
        .as_deref()
        .filter(|text| !text.is_empty())
    {
        let path = path.child("macAddress");
        match parse_mac(text) {
            None => causes.invalid(
                &path,
                format_args!("is {}, but must be six hexadecimal bytes", shown(text)),
            ),
            Some(RESERVED_MAC) if interface.masquerade.is_some() => {
                causes.invalid(&path, format_args!("is {text}, which the gateway has"));
            }
            Some([first, ..]) if first & 1 != 0 => {
                causes.invalid(&path, format_args!("is {text}, a multicast address"));
            }
            Some(_) => {}
        }
    }
    if let Some(model) = interface.model.as_deref().filter(|model| !model.is_empty()) {
        causes.one_of(&path.child("model"), model, &["virtio"]);
    }
    if let Some(state) = interface.state.as_deref().filter(|state| !state.is_empty()) {
        let path = path.child("state");
        causes.one_of(&path, state, &["up", DOWN, ABSENT]);
        if interface.is_absent() && interface.bridge.is_none() {
            causes.invalid(&path, "can be absent only for a bridge");
        }
        if interface.is_absent() && is_default {
            causes.invalid(&path, "cannot be absent for the default network");
        }
    }
}

fn validate_ports(interface: &Interface, path: &FieldPath, causes: &mut Causes) {
    let ports = path.child("ports");
    if interface.ports.len() > MAX_PORTS {
        causes.invalid(
            &ports,
            format_args!("must not have more than {MAX_PORTS}: use portRanges"),
        );
        return;
    }
    let mut names = BTreeSet::new();
    for (index, port) in interface.ports.iter().enumerate() {
        let path = ports.index(index);
        match port.port {
            None | Some(0) => causes.required(&path.child("port"), "is required"),
            Some(number) if !(1..=LAST_PORT).contains(&number) => {
                let message = format!("is {number}, but must be between 1 and {LAST_PORT}");
                causes.invalid(&path.child("port"), message);
            }
            Some(_) => {}
        }
        validate_protocol(port.protocol.as_deref(), &path, causes);
        let Some(name) = port.name.as_deref().filter(|name| !name.is_empty()) else {
            continue;
        };
        if !is_port_name(name) {
            let message = format!("is {}, not the name of a port", shown(name));
            causes.invalid(&path.child("name"), message);
        }
        if !names.insert(name) {
            causes.duplicate(&path.child("name"), name);
        }
    }
    if !interface.port_ranges.is_empty() {
        validate_port_ranges(interface, &path.child("portRanges"), causes);
    }
}

fn validate_port_ranges(interface: &Interface, path: &FieldPath, causes: &mut Causes) {
    if interface.masquerade.is_none() {
        causes.invalid(path, "is only possible with masquerade");
    }
    if !interface.ports.is_empty() {
        causes.invalid(path, "must not be given with ports");
    }
    if interface.port_ranges.len() > MAX_PORT_RANGES {
        causes.invalid(
            path,
            format_args!("must not have more than {MAX_PORT_RANGES}"),
        );
        return;
    }
    let mut seen: Vec<(String, i64, i64)> = Vec::new();
    for (index, range) in interface.port_ranges.iter().enumerate() {
        let path = path.index(index);
        validate_protocol(range.protocol.as_deref(), &path, causes);
        let (start, end) = (range.start.unwrap_or(0), range.end.unwrap_or(0));
        if start < 1 || start > end || end > LAST_PORT {
            let message = format!("{start} to {end} is no range within 1 to {LAST_PORT}");
            causes.invalid(&path, message);
            continue;
        }
        let protocol = range
            .protocol
            .as_deref()
            .unwrap_or("TCP")
            .to_ascii_uppercase();
        if seen
            .iter()
            .any(|(other, from, to)| *other == protocol && start <= *to && *from <= end)
        {
            causes.invalid(
                &path,
                format_args!("{start} to {end} overlaps with another range"),
            );
        }
        seen.push((protocol, start, end));
    }
}

fn validate_protocol(protocol: Option<&str>, path: &FieldPath, causes: &mut Causes) {
    if let Some(protocol) = protocol.filter(|protocol| !protocol.is_empty()) {
        causes.one_of(
            &path.child("protocol"),
            protocol,
            &["TCP", "UDP", "tcp", "udp"],
        );
    }
}

fn validate_dhcp(options: &DhcpOptions, path: &FieldPath, causes: &mut Causes) {
    for (index, server) in options.ntp_servers.iter().enumerate() {
        if server.parse::<Ipv4Addr>().is_err() {
            let message = format!("is {}, but must be an IPv4 address", shown(server));
            causes.invalid(&path.child("ntpServers").index(index), message);
        }
    }
    let names = [
        ("bootFileName", &options.boot_file_name),
        ("tftpServerName", &options.tftp_server_name),
    ];
    for (name, text) in names {
        if text.as_ref().is_some_and(|text| text.len() > 255) {
            causes.invalid(&path.child(name), "must have at most 255 bytes");
        }
    }
    let mut seen = BTreeSet::new();
    for (index, option) in options.private_options.iter().enumerate() {
        let path = path.child("privateOptions").index(index);
        if !(224..=254).contains(&option.option) {
            let message = format!("is {}, but must be between 224 and 254", option.option);
            causes.invalid(&path.child("option"), message);
        } else if !seen.insert(option.option) {
            causes.duplicate(&path.child("option"), &option.option.to_string());
        }
        if option.value.len() > 255 {
            causes.invalid(&path.child("value"), "must have at most 255 bytes");
        }
    }
}

/// Six hexadecimal bytes with `:` or `-` between them.
fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut bytes = [0; 6];
    let mut parts = text.split([':', '-']);
    for byte in &mut bytes {
        let part = parts
            .next()
            .filter(|part| part.len() == 2 && !part.starts_with('+'))?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(bytes)
}
