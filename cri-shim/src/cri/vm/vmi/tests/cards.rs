//! Cards of machines, as their objects say.

use podvisor_network::guest::{GuestNetwork, Interface};

use super::super::super::pod::cards;
use super::super::super::{interfaces_of, set_cards};
use super::*;

/// A card as its network has it.
fn card(name: &str) -> Interface {
    Interface {
        name: name.to_owned(),
        mac: [2; 6],
        mtu: 1500,
        addresses: Vec::new(),
        no_arp: false,
        is_down: false,
    }
}

#[test]
fn cards_have_the_addresses_that_are_given() {
    let fixture = Fixture::new("container-disk");
    let mut network = GuestNetwork {
        interfaces: vec![card("eth0"), card("net1")],
        ..GuestNetwork::default()
    };
    set_cards(&fixture.sandbox.annotations, &mut network).unwrap();
    let macs: Vec<[u8; 6]> = network.interfaces.iter().map(|one| one.mac).collect();
    assert_eq!(macs, [[2, 0, 0, 0, 0, 0xaa], [2; 6]]);
}

/// A pod whose instance has these cards, each on a network of its name.
fn pod_with_cards(cards: &Value) -> HashMap<String, String> {
    let networks = cards.as_array().unwrap().iter().map(|card| {
        let name = &card["name"];
        match name == "default" {
            true => json!({"name": name, "pod": {}}),
            false => json!({"name": name, "multus": {"networkName": name}}),
        }
    });
    let object = json!({
        "metadata": {"name": "a", "namespace": "b", "uid": "c"},
        "spec": {
            "domain": {"memory": {"guest": "128Mi"}, "devices": {"interfaces": cards}},
            "networks": networks.collect::<Vec<_>>(),
            "volumes": [{"name": "root", "containerDisk": {"image": "a"}}],
        },
    });
    [(ANNOTATION.to_owned(), object.to_string())].into()
}

#[test]
fn absent_cards_take_no_interface_of_the_pod() {
    let annotations = pod_with_cards(&json!([
        {"name": "default", "masquerade": {}},
        {"name": "gone", "bridge": {}, "state": "absent"},
        {"name": "other", "bridge": {}, "state": "down", "dhcpOptions": {
            "ntpServers": ["10.0.0.9"], "bootFileName": "pxe",
            "privateOptions": [{"option": 240, "value": "site"}],
        }},
    ]));
    let of = |names: &[&str]| {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        interfaces_of(&annotations, names).unwrap()
    };
    assert_eq!(
        of(&["other", "default"]),
        Ok(vec!["net1".to_owned(), "eth0".to_owned()])
    );
    assert_eq!(of(&["other", "gone"]), Err("gone".to_owned()));
    let mut network = GuestNetwork {
        interfaces: vec![card("eth0"), card("net1")],
        ..GuestNetwork::default()
    };
    set_cards(&annotations, &mut network).unwrap();
    let down: Vec<bool> = network.interfaces.iter().map(|one| one.is_down).collect();
    assert_eq!(down, [false, true]);
    let cards = cards(&annotations).unwrap();
    let options: Vec<_> = cards["net1"]
        .dhcp
        .iter()
        .map(|one| (one.code, &one.value[..]))
        .collect();
    assert_eq!(
        options,
        [(42, &[10, 0, 0, 9][..]), (67, b"pxe"), (240, b"site")]
    );
    assert_eq!(cards["eth0"].dhcp, []);
}
