//! How a machine's first card is connected.

use std::collections::HashMap;

use podvisor_network::cni::{CardForm, ForwardedPorts, PortProtocol};
use serde_json::Value;

use crate::cri::error::{CriError, Result};
use crate::cri::vm_spec::VMI;

/// Most ports and ranges that lead to a masqueraded guest.
const MAX_PORTS: usize = 1024;

/// Returns how the first card of a pod with these annotations is connected: as KubeVirt's object
/// says, else so that the guest has the pod's address.
///
/// # Errors
/// The object is not one, or has ports that do not exist.
pub(in crate::cri) fn card_form(annotations: &HashMap<String, String>) -> Result<CardForm> {
    let Some(text) = annotations.get(VMI) else {
        return Ok(CardForm::Joined);
    };
    let invalid = |reason: String| CriError::invalid("config.annotations", reason);
    let object: Value = serde_json::from_str(text)
        .map_err(|error| invalid(format!("{VMI} is not JSON: {error}")))?;
    let interfaces = object.pointer("/spec/domain/devices/interfaces");
    let mut interfaces = interfaces.and_then(Value::as_array).into_iter().flatten();
    let Some(interface) = interfaces.find(|one| one["masquerade"].is_object()) else {
        return Ok(CardForm::Joined);
    };
    let list = |name: &str| interface[name].as_array().cloned().unwrap_or_default();
    let ports = list("ports").into_iter().map(|one| {
        (
            one["protocol"].clone(),
            one["port"].clone(),
            one["port"].clone(),
        )
    });
    let ranges = list("portRanges").into_iter().map(|one| {
        (
            one["protocol"].clone(),
            one["start"].clone(),
            one["end"].clone(),
        )
    });
    let mut forwarded = Vec::new();
    for (protocol, first, last) in ports.chain(ranges) {
        let number = |value: &Value| {
            let port = value.as_u64().and_then(|port| u16::try_from(port).ok());
            port.filter(|port| *port > 0)
                .ok_or_else(|| invalid(format!("{VMI} forwards the port {value}")))
        };
        forwarded.push(ForwardedPorts {
            protocol: protocol_of(&protocol)
                .ok_or_else(|| invalid(format!("{VMI} forwards ports of {protocol}")))?,
            first: number(&first)?,
            last: number(&last)?,
        });
    }
    match forwarded.len() > MAX_PORTS {
        true => Err(invalid(format!(
            "{VMI} forwards more than {MAX_PORTS} ports"
        ))),
        false => Ok(CardForm::Masqueraded(forwarded)),
    }
}

fn protocol_of(value: &Value) -> Option<PortProtocol> {
    match value.as_str() {
        Some("TCP") => Some(PortProtocol::Tcp),
        None if value.is_null() => Some(PortProtocol::Tcp),
        Some("UDP") => Some(PortProtocol::Udp),
        Some("SCTP") => Some(PortProtocol::Sctp),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn form(interface: Value) -> Result<CardForm> {
        let object = json!({"spec": {"domain": {"devices": {"interfaces": [interface]}}}});
        card_form(&[(VMI.to_owned(), object.to_string())].into())
    }

    #[test]
    fn a_card_has_the_pods_address_unless_kubevirts_object_says_otherwise() {
        assert_eq!(card_form(&HashMap::new()).unwrap(), CardForm::Joined);
        assert_eq!(
            form(json!({"name": "a", "bridge": {}})).unwrap(),
            CardForm::Joined
        );
        let all = form(json!({"name": "a", "masquerade": {}})).unwrap();
        assert_eq!(all, CardForm::Masqueraded(Vec::new()));
        let some = json!({
            "name": "a", "masquerade": {},
            "ports": [{"port": 80}, {"port": 53, "protocol": "UDP"}],
            "portRanges": [{"protocol": "TCP", "start": 8000, "end": 8999}],
        });
        let CardForm::Masqueraded(ports) = form(some).unwrap() else {
            panic!("not masqueraded");
        };
        let ports: Vec<_> = ports
            .iter()
            .map(|one| (one.protocol, one.first, one.last))
            .collect();
        assert_eq!(
            ports,
            [
                (PortProtocol::Tcp, 80, 80),
                (PortProtocol::Udp, 53, 53),
                (PortProtocol::Tcp, 8000, 8999),
            ]
        );
    }

    #[test]
    fn ports_that_do_not_exist_are_refused() {
        for port in [
            json!({"port": 0}),
            json!({"port": 65536}),
            json!({}),
            json!({"port": "80"}),
        ] {
            assert!(
                form(json!({"masquerade": {}, "ports": [port]})).is_err(),
                "{port}"
            );
        }
        let icmp = json!({"port": 1, "protocol": "ICMP"});
        assert!(form(json!({"masquerade": {}, "ports": [icmp]})).is_err());
        let broken = [(VMI.to_owned(), "{".to_owned())].into();
        assert!(card_form(&broken).is_err());
    }
}
