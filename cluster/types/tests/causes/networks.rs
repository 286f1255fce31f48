//! Cards, networks and name servers.

use podvisor_cluster_types::ClusterConfig;
use serde_json::{Value, json};

use super::{CARD, accepted, at, causes_of, refused, right, set};

#[test]
fn a_card_has_one_binding() {
    refused(
        &[(&at(CARD, "bridge"), json!({}))],
        &["domain.devices.interfaces[0]"],
    );
    refused(
        &[(&at(CARD, "masquerade"), Value::Null)],
        &["domain.devices.interfaces[0]"],
    );
    refused(
        &[(
            "/networks",
            json!([{ "name": "default", "multus": { "networkName": "n" } }]),
        )],
        &["domain.devices.interfaces[0].name"],
    );
    for binding in ["slirp", "passt", "macvtap", "sriov", "binding"] {
        let path = format!("domain.devices.interfaces[0].{binding}");
        refused(
            &[
                (&at(CARD, "masquerade"), Value::Null),
                (&at(CARD, binding), json!({})),
            ],
            &[&path],
        );
    }
}

#[test]
fn a_bridge_on_the_pod_network_takes_the_clusters_permission() {
    let mut spec = right();
    set(&mut spec, CARD, json!({ "name": "default", "bridge": {} }));
    assert_eq!(causes_of(spec.clone(), &ClusterConfig::default()), []);
    let mut config = ClusterConfig::default();
    config.permit_bridge_on_pod_network = false;
    let causes = causes_of(spec, &config);
    assert_eq!(causes[0].field, "spec.domain.devices.interfaces[0].name");
}

#[test]
fn cards_and_networks_belong_together() {
    let name = "domain.devices.interfaces[0].name";
    refused(
        &[(&at(CARD, "name"), json!("other"))],
        &[name, "networks[0].name"],
    );
    refused(
        &[
            (&at(CARD, "name"), json!("a b")),
            ("/networks/0/name", json!("a b")),
        ],
        &[name],
    );
    refused(
        &[(
            "/domain/devices/interfaces/1",
            json!({ "name": "default", "masquerade": {} }),
        )],
        &["domain.devices.interfaces[1].name"],
    );
    refused(
        &[("/networks/0/multus", json!({ "networkName": "n" }))],
        &["networks[0]"],
    );
    refused(
        &[("/networks/1", json!({ "name": "default", "pod": {} }))],
        &["networks[1].name", "networks"],
    );
    let second = json!({ "name": "b", "multus": { "networkName": "n", "default": true } });
    refused(
        &[
            ("/networks/1", second),
            (
                "/domain/devices/interfaces/1",
                json!({ "name": "b", "bridge": {} }),
            ),
        ],
        &["networks"],
    );
    refused(
        &[
            ("/networks/1", json!({ "name": "b", "multus": {} })),
            (
                "/domain/devices/interfaces/1",
                json!({ "name": "b", "bridge": {} }),
            ),
        ],
        &["networks[1].multus.networkName"],
    );
}

#[test]
fn addresses_models_and_states_of_cards_are_known() {
    accepted(&[(&at(CARD, "macAddress"), json!("de-ad-00-00-be-ef"))]);
    for mac in [
        "02:00:00:00:00:00",
        "de:ad:00:00:be",
        "de:ad:00:00:be:ef:00",
        "g",
        "+a:0:0:0:0:0",
    ] {
        let path = "domain.devices.interfaces[0].macAddress";
        refused(&[(&at(CARD, "macAddress"), json!(mac))], &[path]);
    }
    refused(
        &[(&at(CARD, "model"), json!("e1000"))],
        &["domain.devices.interfaces[0].model"],
    );
    let state = "domain.devices.interfaces[0].state";
    accepted(&[(&at(CARD, "state"), json!("down"))]);
    refused(&[(&at(CARD, "state"), json!("gone"))], &[state]);
    refused(&[(&at(CARD, "state"), json!("absent"))], &[state, state]);
}

#[test]
fn ports_are_numbers_with_unique_names() {
    let path = |rest: &str| format!("domain.devices.interfaces[0].ports[{rest}");
    refused(
        &[(
            &at(CARD, "ports"),
            json!([{ "port": 65536 }, {}, { "port": 1, "protocol": "SCTP" }]),
        )],
        &[&path("0].port"), &path("1].port"), &path("2].protocol")],
    );
    let twice = json!([{ "port": 1, "name": "a" }, { "port": 2, "name": "a" }]);
    refused(&[(&at(CARD, "ports"), twice)], &[&path("1].name")]);
}

#[test]
fn ranges_of_ports_do_not_overlap() {
    let path = "domain.devices.interfaces[0].portRanges";
    let range = |start: i64, end: i64| json!({ "protocol": "TCP", "start": start, "end": end });
    let ranges = at(CARD, "portRanges");
    accepted(&[(&ranges, json!([range(1, 2), range(3, 4)]))]);
    refused(
        &[(&ranges, json!([range(1, 3), range(3, 4)]))],
        &[&format!("{path}[1]")],
    );
    refused(&[(&ranges, json!([range(4, 3)]))], &[&format!("{path}[0]")]);
    refused(&[(&ranges, Value::from(vec![range(1, 1); 11]))], &[path]);
    refused(
        &[
            (&ranges, json!([range(1, 2)])),
            (&at(CARD, "ports"), json!([{ "port": 9 }])),
        ],
        &[path],
    );
}

#[test]
fn dhcp_options_are_private_ones() {
    let options = json!({
        "ntpServers": ["10.0.0.1", "fd00::1"],
        "privateOptions": [
            { "option": 240, "value": "a" },
            { "option": 240, "value": "b" },
            { "option": 3, "value": "c" },
        ],
    });
    let path = "domain.devices.interfaces[0].dhcpOptions";
    refused(
        &[(&at(CARD, "dhcpOptions"), options)],
        &[
            &format!("{path}.ntpServers[1]"),
            &format!("{path}.privateOptions[1].option"),
            &format!("{path}.privateOptions[2].option"),
        ],
    );
}

#[test]
fn name_servers_are_as_a_pods() {
    refused(&[("/dnsPolicy", json!("Cluster"))], &["dnsPolicy"]);
    refused(&[("/dnsPolicy", json!("None"))], &["dnsConfig"]);
    refused(
        &[("/dnsPolicy", json!("None")), ("/dnsConfig", json!({}))],
        &["dnsConfig.nameservers"],
    );
    refused(
        &[(
            "/dnsConfig",
            json!({
                "nameservers": ["dns.example", "::1", "1.1.1.1", "8.8.8.8"],
                "searches": ["a", "b", "c", "d", "e", "f", "g"],
                "options": [{ "value": "1" }],
            }),
        )],
        &[
            "dnsConfig.nameservers",
            "dnsConfig.nameservers[0]",
            "dnsConfig.searches",
            "dnsConfig.options[0].name",
        ],
    );
    refused(
        &[("/dnsConfig/searches", json!(vec!["x".repeat(60); 5]))],
        &["dnsConfig.searches"],
    );
}
