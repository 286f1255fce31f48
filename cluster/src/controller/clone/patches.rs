//! What differs in a copy, as JSON patches of what it is a copy of.

use std::collections::BTreeMap;

use podvisor_cluster_types::clone::{CloneSpec, passes};
use serde_json::{Value, json};

use crate::objects::SourceMachine;

/// Returns the patches of a copy: those of the user come last.
pub(super) fn of(spec: &CloneSpec, source: &SourceMachine) -> Vec<String> {
    let mut patches = Vec::new();
    let filters = spec.template.clone().unwrap_or_default();
    let template = source.spec.template.as_ref();
    let of_template = template.and_then(|template| template.metadata.as_ref());
    for (keys, filters, root) in [
        (
            source.metadata.labels.as_ref(),
            &spec.label_filters,
            "/metadata/labels",
        ),
        (
            source.metadata.annotations.as_ref(),
            &spec.annotation_filters,
            "/metadata/annotations",
        ),
        (
            of_template.and_then(|metadata| metadata.labels.as_ref()),
            &filters.label_filters,
            "/spec/template/metadata/labels",
        ),
        (
            of_template.and_then(|metadata| metadata.annotations.as_ref()),
            &filters.annotation_filters,
            "/spec/template/metadata/annotations",
        ),
    ] {
        patches.extend(removed(keys, filters, root));
    }
    if let Some(domain) = template.and_then(|template| template.spec.get("domain")) {
        patches.extend(addresses(domain, &spec.new_mac_addresses));
        patches.extend(firmware(domain, spec.new_sm_bios_serial.as_deref()));
    }
    let own = patches.into_iter().map(|patch| patch.to_string());
    own.chain(spec.patches.iter().cloned()).collect()
}

fn remove(path: String) -> Value {
    json!({"op": "remove", "path": path})
}

/// Removes the keys that do not pass.
fn removed<'a>(
    keys: Option<&'a BTreeMap<String, String>>,
    filters: &'a [String],
    root: &'a str,
) -> impl Iterator<Item = Value> + 'a {
    let keys = keys.into_iter().flat_map(BTreeMap::keys);
    let keys = keys.filter(|key| !passes(filters, key));
    keys.map(move |key| {
        let key = key.replace('~', "~0").replace('/', "~1");
        remove(format!("{root}/{key}"))
    })
}

/// Two machines must not have one address.
fn addresses(domain: &Value, new: &BTreeMap<String, String>) -> Vec<Value> {
    let interfaces = domain.pointer("/devices/interfaces");
    let interfaces = interfaces.and_then(Value::as_array).into_iter().flatten();
    let patch = |(index, interface): (usize, &Value)| {
        let path = format!("/spec/template/spec/domain/devices/interfaces/{index}/macAddress");
        let name = interface.get("name").and_then(Value::as_str)?;
        match (new.get(name), interface.get("macAddress")) {
            (Some(address), _) => Some(json!({"op": "add", "path": path, "value": address})),
            (None, Some(_)) => Some(remove(path)),
            (None, None) => None,
        }
    };
    interfaces.enumerate().filter_map(patch).collect()
}

/// Nor one identity.
fn firmware(domain: &Value, serial: Option<&str>) -> Vec<Value> {
    let root = "/spec/template/spec/domain/firmware";
    let Some(firmware) = domain.get("firmware") else {
        let value = serial.map(|serial| json!({"serial": serial}));
        let patch = value.map(|value| json!({"op": "add", "path": root, "value": value}));
        return patch.into_iter().collect();
    };
    let mut patches = Vec::new();
    if firmware.get("uuid").is_some() {
        patches.push(remove(format!("{root}/uuid")));
    }
    let path = format!("{root}/serial");
    match (serial, firmware.get("serial")) {
        (Some(serial), _) => {
            patches.push(json!({"op": "add", "path": path, "value": serial}));
        }
        (None, Some(_)) => patches.push(remove(path)),
        (None, None) => {}
    }
    patches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_another_identity_and_only_the_labels_that_pass() {
        let source: SourceMachine = serde_json::from_value(json!({
            "metadata": {"labels": {"keep": "1", "a/b~c": "2"}, "annotations": {"x": "1"}},
            "spec": {"template": {
                "metadata": {"labels": {"app": "db"}},
                "spec": {"domain": {
                    "firmware": {"uuid": "u", "serial": "s"},
                    "devices": {"interfaces": [
                        {"name": "one", "macAddress": "00:00:00:00:00:01"},
                        {"name": "two"},
                        {"name": "three", "macAddress": "00:00:00:00:00:03"},
                    ]},
                }},
            }},
        }))
        .unwrap();
        let spec: CloneSpec = serde_json::from_value(json!({
            "labelFilters": ["*", "!a/*"],
            "template": {"labelFilters": ["none"]},
            "newMacAddresses": {"one": "00:00:00:00:00:11"},
            "patches": ["{\"last\": true}"],
        }))
        .unwrap();
        let found: Vec<Value> = of(&spec, &source)
            .iter()
            .map(|patch| serde_json::from_str(patch).unwrap())
            .collect();
        let root = "/spec/template/spec/domain";
        let interface = |index| format!("{root}/devices/interfaces/{index}/macAddress");
        let expected = [
            remove("/metadata/labels/a~1b~0c".into()),
            remove("/spec/template/metadata/labels/app".into()),
            json!({"op": "add", "path": interface(0), "value": "00:00:00:00:00:11"}),
            remove(interface(2)),
            remove(format!("{root}/firmware/uuid")),
            remove(format!("{root}/firmware/serial")),
            json!({"last": true}),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_serial_number_is_added_where_there_is_no_firmware() {
        let found = firmware(&json!({}), Some("n"));
        assert_eq!(found[0]["value"]["serial"], "n");
        assert_eq!(firmware(&json!({}), None), Vec::<Value>::new());
    }
}
