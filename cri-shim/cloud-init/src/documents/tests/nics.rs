//! The document about the network, in both versions and in OpenStack's form.

use super::*;
use crate::network::{Dhcp, NetworkNic, NetworkRoute};

fn route(to: &str, length: u8, gateway: Option<&str>) -> NetworkRoute {
    NetworkRoute {
        destination: (to.parse().unwrap(), length),
        gateway: gateway.map(|gateway| gateway.parse().unwrap()),
        metric: None,
    }
}

/// Two cards with addresses of both families, and one without any.
pub(super) fn network() -> Network {
    let nic = |number: u8, addresses: &[(&str, u8)], routes: Vec<NetworkRoute>| NetworkNic {
        name: format!("eth{number}"),
        mac: [2, 0, 0, 0, 0, number],
        mtu: (number == 0).then_some(1450),
        addresses: addresses
            .iter()
            .map(|(one, length)| (one.parse().unwrap(), *length))
            .collect(),
        routes,
        dhcp: Dhcp::No,
    };
    Network {
        nics: vec![
            nic(
                0,
                &[("10.1.0.2", 16), ("fd00::2", 64)],
                vec![
                    route("0.0.0.0", 0, Some("10.1.0.1")),
                    route("10.96.0.0", 12, Some("10.1.0.3")),
                    route("::", 0, Some("fd00::1")),
                ],
            ),
            nic(
                1,
                &[("192.168.7.2", 24)],
                vec![
                    route("0.0.0.0", 0, Some("192.168.7.1")),
                    route("172.16.0.0", 12, None),
                ],
            ),
            nic(2, &[], vec![]),
        ],
        name_servers: vec!["10.96.0.10".parse().unwrap(), "fd00::a".parse().unwrap()],
        search: vec!["svc.cluster.local".to_owned()],
    }
}

#[test]
fn version_1_names_every_card_and_one_default_route() {
    let seed = GuestSeed {
        network: NetworkConfig::Version1(network()),
        ..seed()
    };
    assert_eq!(
        document(&seed, "network-config"),
        json!({
            "version": 1,
            "config": [
                {
                    "type": "physical", "name": "eth0", "mac_address": "02:00:00:00:00:00",
                    "mtu": 1450,
                    "subnets": [
                        {
                            "type": "static", "address": "10.1.0.2/16", "gateway": "10.1.0.1",
                            "routes": [{
                                "network": "10.96.0.0", "netmask": "255.240.0.0",
                                "gateway": "10.1.0.3",
                            }],
                        },
                        {"type": "static6", "address": "fd00::2/64", "gateway": "fd00::1"},
                    ],
                },
                {
                    "type": "physical", "name": "eth1", "mac_address": "02:00:00:00:00:01",
                    "subnets": [{
                        "type": "static", "address": "192.168.7.2/24",
                        "routes": [{
                            "network": "172.16.0.0", "netmask": "255.240.0.0",
                            "gateway": "0.0.0.0",
                        }],
                    }],
                },
                {
                    "type": "physical", "name": "eth2", "mac_address": "02:00:00:00:00:02",
                    "subnets": [{"type": "dhcp4"}],
                },
                {
                    "type": "nameserver", "address": ["10.96.0.10", "fd00::a"],
                    "search": ["svc.cluster.local"],
                },
            ],
        })
    );
}

#[test]
fn version_2_finds_cards_by_their_addresses() {
    let seed = GuestSeed {
        network: NetworkConfig::Version2(network()),
        ..seed()
    };
    let servers = json!({
        "addresses": ["10.96.0.10", "fd00::a"], "search": ["svc.cluster.local"],
    });
    assert_eq!(
        document(&seed, "network-config"),
        json!({
            "version": 2,
            "ethernets": {
                "eth0": {
                    "match": {"macaddress": "02:00:00:00:00:00"},
                    "mtu": 1450, "dhcp4": false, "dhcp6": false,
                    "addresses": ["10.1.0.2/16", "fd00::2/64"],
                    "routes": [
                        {"to": "0.0.0.0/0", "via": "10.1.0.1"},
                        {"to": "10.96.0.0/12", "via": "10.1.0.3"},
                        {"to": "::/0", "via": "fd00::1"},
                    ],
                    "nameservers": servers,
                },
                "eth1": {
                    "match": {"macaddress": "02:00:00:00:00:01"},
                    "dhcp4": false, "dhcp6": false,
                    "addresses": ["192.168.7.2/24"],
                    "routes": [{"to": "172.16.0.0/12", "scope": "link"}],
                    "nameservers": servers,
                },
                "eth2": {
                    "match": {"macaddress": "02:00:00:00:00:02"},
                    "dhcp4": true, "dhcp6": false,
                    "nameservers": servers,
                },
            },
        })
    );
}

#[test]
fn a_gateway_outside_the_network_is_on_the_link() {
    let mut network = network();
    network.nics.truncate(1);
    network.nics[0].addresses = vec![
        ("10.244.7.3".parse().unwrap(), 32),
        ("fd00::2".parse().unwrap(), 128),
    ];
    network.nics[0].routes = vec![
        route("0.0.0.0", 0, Some("169.254.1.1")),
        route("::", 0, Some("fe80::1")),
    ];
    let seed = GuestSeed {
        network: NetworkConfig::Version2(network),
        ..seed()
    };
    assert_eq!(
        document(&seed, "network-config")["ethernets"]["eth0"]["routes"],
        json!([
            {"to": "0.0.0.0/0", "via": "169.254.1.1", "on-link": true},
            {"to": "::/0", "via": "fe80::1"},
        ])
    );
}

#[test]
fn openstacks_form_says_the_same() {
    let seed = GuestSeed {
        form: Form::ConfigDrive,
        network: NetworkConfig::Version1(network()),
        ..seed()
    };
    let data = document(&seed, "openstack/latest/network_data.json");
    assert_eq!(
        data["links"][0],
        json!({
            "id": "link-0", "type": "phy", "ethernet_mac_address": "02:00:00:00:00:00",
            "mtu": 1450,
        })
    );
    assert_eq!(
        data["networks"],
        json!([
            {
                "id": "net-0", "type": "ipv4", "link": "link-0", "ip_address": "10.1.0.2",
                "netmask": "255.255.0.0",
                "routes": [
                    {"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "10.1.0.1"},
                    {"network": "10.96.0.0", "netmask": "255.240.0.0", "gateway": "10.1.0.3"},
                ],
            },
            {
                "id": "net-1", "type": "ipv6", "link": "link-0", "ip_address": "fd00::2",
                "netmask": "ffff:ffff:ffff:ffff::",
                "routes": [{"network": "::", "netmask": "::", "gateway": "fd00::1"}],
            },
            {
                "id": "net-2", "type": "ipv4", "link": "link-1", "ip_address": "192.168.7.2",
                "netmask": "255.255.255.0",
                "routes": [
                    {"network": "172.16.0.0", "netmask": "255.240.0.0", "gateway": "0.0.0.0"},
                ],
            },
            {"id": "net-3", "type": "ipv4_dhcp", "link": "link-2"},
        ])
    );
    assert_eq!(
        data["services"],
        json!([
            {"type": "dns", "address": "10.96.0.10"},
            {"type": "dns", "address": "fd00::a"},
        ])
    );
}

#[test]
fn the_users_own_network_is_taken_as_it_is() {
    let mut seed = seed();
    let text = "version: 2 # mine\n";
    seed.network = NetworkConfig::Document(text.to_owned());
    assert_eq!(files(&seed)["network-config"], text);
    seed.form = Form::ConfigDrive;
    assert!(error(&seed).contains("not JSON"));
    seed.network = NetworkConfig::Document("{\"links\": []}".to_owned());
    assert_eq!(
        files(&seed)["openstack/latest/network_data.json"],
        "{\"links\": []}"
    );
}
