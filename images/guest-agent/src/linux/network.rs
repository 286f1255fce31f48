//! The guest's network interfaces.

use serde_json::{Value, json};

use super::sys::{self, Seen};
use crate::protocol::Fault;

/// Most interfaces, and most addresses of all of them.
const MAX_SEEN: usize = 1024;

pub(super) fn interfaces() -> Result<Value, Fault> {
    let seen = sys::interfaces();
    let seen = seen.map_err(|error| Fault::io("list", "network interfaces", &error))?;
    Ok(listed(&seen))
}

fn listed(seen: &[(String, Seen)]) -> Value {
    let mut interfaces: Vec<Value> = Vec::new();
    for (name, seen) in seen.iter().take(MAX_SEEN) {
        let at = interfaces.iter().position(|it| it["name"] == *name);
        let at = at.unwrap_or_else(|| {
            interfaces.push(json!({ "name": name, "ip-addresses": [] }));
            interfaces.len() - 1
        });
        let Some(interface) = interfaces.get_mut(at) else {
            continue;
        };
        match seen {
            Seen::Nothing => {}
            Seen::Mac(mac) => {
                let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
                interface["hardware-address"] = json!(mac);
            }
            Seen::Address(address, prefix) => {
                let kind = if address.is_ipv4() { "ipv4" } else { "ipv6" };
                let address = json!({
                    "ip-address": address,
                    "ip-address-type": kind,
                    "prefix": prefix,
                });
                if let Some(addresses) = interface["ip-addresses"].as_array_mut() {
                    addresses.push(address);
                }
            }
        }
    }
    Value::Array(interfaces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_has_all_of_its_addresses() {
        let of = |name: &str, seen| (name.to_owned(), seen);
        let listed = listed(&[
            of("lo", Seen::Nothing),
            of("eth0", Seen::Mac([2, 0, 0, 0, 0, 0xab])),
            of("lo", Seen::Address("127.0.0.1".parse().unwrap(), 8)),
            of("eth0", Seen::Address("10.0.0.2".parse().unwrap(), 24)),
            of("eth0", Seen::Address("fe80::1".parse().unwrap(), 64)),
        ]);
        assert_eq!(listed[1]["hardware-address"], "02:00:00:00:00:ab");
        let addresses = listed[1]["ip-addresses"].as_array().unwrap();
        assert_eq!(addresses.len(), 2);
        assert_eq!(
            addresses[1],
            json!({ "ip-address": "fe80::1", "ip-address-type": "ipv6", "prefix": 64 })
        );
    }

    #[test]
    fn this_systems_loopback_is_found() {
        let found = interfaces().unwrap();
        let lo = found
            .as_array()
            .unwrap()
            .iter()
            .find(|it| it["name"] == "lo");
        assert!(lo.is_some(), "{found}");
    }
}
