//! The part of an instance's status that its node writes.

use std::collections::HashMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use podvisor_cluster_types::vmi::VmiSpec;
use podvisor_node_api::messages::{GuestInfo, GuestInterface};
use serde_json::{Map, Value, json};

use crate::node::guest::{cut, os_info};

/// Addresses beyond this are not reported.
const MAX_ADDRESSES: usize = 32;

/// The status, by the conditions that hold and since when.
pub(super) fn status(
    begun: &HashMap<&'static str, Time>,
    guest: Option<&GuestInfo>,
    spec: Option<&Value>,
) -> Value {
    let mut status = Map::new();
    let conditions: Vec<Value> = [
        (
            "AgentConnected",
            "AgentConnected",
            "the guest's agent answers",
        ),
        ("Paused", "PausedByUser", "the VM was paused by a user"),
    ]
    .into_iter()
    .filter_map(|(kind, reason, message)| {
        let time = begun.get(kind)?;
        Some(json!({
            "type": kind,
            "status": "True",
            "reason": reason,
            "message": message,
            "lastTransitionTime": time,
        }))
    })
    .collect();
    if !conditions.is_empty() {
        status.insert("conditions".to_owned(), Value::Array(conditions));
    }
    if let Some(guest) = guest {
        status.insert("guestOSInfo".to_owned(), json!(os_info(guest)));
        let freeze = cut(&guest.freeze_status);
        if freeze == "frozen" {
            status.insert("fsFreezeStatus".to_owned(), json!(freeze));
        }
        let spec = spec.and_then(|spec| serde_json::from_value(spec.clone()).ok());
        let interfaces = interfaces(&guest.interfaces, spec.as_ref());
        if !interfaces.is_empty() {
            status.insert("interfaces".to_owned(), Value::Array(interfaces));
        }
    }
    Value::Object(status)
}

/// The cards of the specification, as the guest sees them.
fn interfaces(seen: &[GuestInterface], spec: Option<&VmiSpec>) -> Vec<Value> {
    let Some(spec) = spec else {
        return Vec::new();
    };
    let cards = &spec.domain.devices.interfaces;
    // Whatever else a guest has, cards have hardware addresses.
    let is_card = |interface: &&GuestInterface| {
        !interface.mac.is_empty() && interface.mac != "00:00:00:00:00:00"
    };
    cards
        .iter()
        .filter_map(|card| {
            let found = match &card.mac_address {
                Some(mac) => seen.iter().find(|seen| seen.mac.eq_ignore_ascii_case(mac)),
                // Which is which is known where there is one.
                None if cards.len() == 1 => seen.iter().find(is_card),
                None => None,
            }?;
            let addresses: Vec<String> = found
                .addresses
                .iter()
                .take(MAX_ADDRESSES)
                // Without the length of their prefix.
                .map(|address| cut(address.split('/').next().unwrap_or_default()))
                .collect();
            let mut interface = json!({
                "name": card.name,
                "mac": cut(&found.mac),
                "interfaceName": cut(&found.name),
                "infoSource": "domain, guest-agent",
                "queueCount": 1,
            });
            // Behind a translation of addresses, the guest's own reaches nothing.
            if card.masquerade.is_none() && !addresses.is_empty() {
                interface["ipAddress"] = json!(addresses.first());
                interface["ipAddresses"] = json!(addresses);
            }
            Some(interface)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    fn guest() -> GuestInfo {
        let interface = |name: &str, mac: &str, address: &str| GuestInterface {
            name: name.to_owned(),
            mac: mac.to_owned(),
            addresses: vec![address.to_owned()],
        };
        GuestInfo {
            interfaces: vec![
                interface("lo", "00:00:00:00:00:00", "127.0.0.1/8"),
                interface("eth0", "0A:00:00:00:00:01", "10.1.0.7/24"),
                interface("eth1", "0a:00:00:00:00:02", "10.2.0.7/24"),
            ],
            ..Default::default()
        }
    }

    fn cards(interfaces: Value) -> Value {
        let spec = json!({ "domain": { "devices": { "interfaces": interfaces } } });
        let found = status(&HashMap::new(), Some(&guest()), Some(&spec));
        found.get("interfaces").cloned().unwrap_or_default()
    }

    #[test]
    fn nothing_is_written_of_a_vm_without_anything_to_say() {
        assert_eq!(status(&HashMap::new(), None, None), json!({}));
    }

    #[test]
    fn a_paused_vm_says_who_paused_it_and_since_when() {
        let begun = HashMap::from([("Paused", Time(Timestamp::UNIX_EPOCH))]);
        let found = status(&begun, None, None);
        assert_eq!(found["conditions"][0]["type"], "Paused");
        assert_eq!(found["conditions"][0]["reason"], "PausedByUser");
        assert_eq!(
            found["conditions"][0]["lastTransitionTime"],
            "1970-01-01T00:00:00Z"
        );
    }

    #[test]
    fn a_card_is_known_by_its_hardware_address_or_by_being_the_only_one() {
        let only = cards(json!([{ "name": "default", "bridge": {} }]));
        assert_eq!(only[0]["interfaceName"], "eth0");
        assert_eq!(only[0]["ipAddresses"], json!(["10.1.0.7"]));
        let second = json!([
            { "name": "a" },
            { "name": "b", "macAddress": "0A:00:00:00:00:02" },
        ]);
        let second = cards(second);
        assert_eq!(second.as_array().unwrap().len(), 1);
        assert_eq!(
            (&second[0]["name"], &second[0]["ipAddress"]),
            (&json!("b"), &json!("10.2.0.7"))
        );
    }

    #[test]
    fn addresses_behind_a_translation_are_not_reported() {
        let card = cards(json!([{ "name": "default", "masquerade": {} }]));
        assert_eq!(card[0]["mac"], "0A:00:00:00:00:01");
        assert_eq!(card[0].get("ipAddress"), None);
    }
}
