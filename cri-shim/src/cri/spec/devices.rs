//! The devices of a request.

use std::path::{Component, Path};

use podvisor_cri_messages::Device;

use super::fault::SpecFault;

/// Checks the fields of a device, but not what is there on the node.
pub(in crate::cri) fn check(device: &Device) -> Result<(), SpecFault> {
    for (field, path) in [
        ("config.devices.container_path", &device.container_path),
        ("config.devices.host_path", &device.host_path),
    ] {
        let mut parts = Path::new(path).components();
        let is_plain = parts.next() == Some(Component::RootDir)
            && parts.clone().next().is_some()
            && parts.all(|part| matches!(part, Component::Normal(_)));
        if !is_plain || path.contains('\0') {
            let shown: String = path.chars().take(256).collect();
            let reason = format!("{shown:?} is not an absolute path without `..`");
            return Err(SpecFault::invalid(field, reason));
        }
    }
    let permissions = &device.permissions;
    if permissions.is_empty() || !permissions.chars().all(|one| "rwm".contains(one)) {
        let shown: String = permissions.chars().take(16).collect();
        let reason = format!("{shown:?} is not made of `r`, `w` and `m`");
        return Err(SpecFault::invalid("config.devices.permissions", reason));
    }
    Ok(())
}
