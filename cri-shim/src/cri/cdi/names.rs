//! Names of devices, as requests have them.

use std::collections::BTreeMap;

use podvisor_cri_messages::ContainerConfig;

use super::error::{CdiError, MAX_DEVICES};

/// Prefix of the keys of annotations that name devices.
const ANNOTATION: &str = "cdi.k8s.io/";

/// Returns whether a container asks for CDI devices.
pub(in crate::cri) fn is_asked_for(config: &ContainerConfig) -> bool {
    let mut keys = config.annotations.keys();
    !config.cdi_devices.is_empty() || keys.any(|key| key.starts_with(ANNOTATION))
}

/// Returns the devices that a container names, each once: those of the field, then those of
/// annotations in the order of their keys.
pub(super) fn of(config: &ContainerConfig) -> Result<Vec<String>, CdiError> {
    let mut names: Vec<String> = Vec::new();
    let mut add = |name: &str| {
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
        match names.len() {
            count if count > MAX_DEVICES => Err(CdiError::TooManyDevices { count }),
            _ => Ok(()),
        }
    };
    for device in &config.cdi_devices {
        add(&device.name)?;
    }
    let annotations: BTreeMap<_, _> = config.annotations.iter().collect();
    for (key, value) in annotations {
        if !key.starts_with(ANNOTATION) {
            continue;
        }
        for name in value.split(',') {
            if !is_qualified(name) {
                return Err(CdiError::InvalidName {
                    key: key.chars().take(256).collect(),
                    name: name.chars().take(256).collect(),
                });
            }
            add(name)?;
        }
    }
    Ok(names)
}

/// Returns whether a name is fully qualified: VENDOR/CLASS=NAME.
pub(super) fn is_qualified(name: &str) -> bool {
    let parts = name.split_once('=');
    parts.is_some_and(|(kind, device)| is_kind(kind) && is_device(device))
}

/// Returns whether this is the kind of a device: VENDOR/CLASS.
pub(super) fn is_kind(kind: &str) -> bool {
    let parts = kind.split_once('/');
    parts.is_some_and(|(vendor, class)| [vendor, class].into_iter().all(is_vendor_or_class))
}

fn is_vendor_or_class(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphabetic();
    is_word(name, "_-.") && name.bytes().next().is_some_and(is_letter)
}

/// Returns whether this is the name of a device among those of its kind.
pub(super) fn is_device(name: &str) -> bool {
    is_word(name, "_-.:")
}

/// Returns whether a name has letters and digits, and `others` between them.
fn is_word(name: &str, others: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric();
    name.starts_with(is_plain)
        && name.ends_with(is_plain)
        && name.chars().all(|c| is_plain(c) || others.contains(c))
}
