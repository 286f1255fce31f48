//! Linux capabilities of a container.

use k8s_cri::v1::LinuxContainerSecurityContext;
use oci_spec::runtime::{Capabilities, Capability};

use super::SpecFault;
use crate::sandbox::{ALL_CAPABILITIES, DEFAULT_CAPABILITIES};

/// What a container's root may do: the default, less what is dropped, with what is added.
/// `ALL` is every one, and goes before those that are named; dropped wins over added.
pub(super) fn capabilities(
    security: &LinuxContainerSecurityContext,
) -> Result<Capabilities, SpecFault> {
    if security.privileged {
        return Ok(ALL_CAPABILITIES.iter().copied().collect());
    }
    let mut set: Capabilities = DEFAULT_CAPABILITIES.iter().copied().collect();
    let Some(wanted) = &security.capabilities else {
        return Ok(set);
    };
    let parsed = |names: &[String], field| -> Result<Vec<Option<Capability>>, SpecFault> {
        names.iter().map(|name| parse(name, field)).collect()
    };
    let added = parsed(&wanted.add_capabilities, "capabilities.add_capabilities")?;
    let dropped = parsed(&wanted.drop_capabilities, "capabilities.drop_capabilities")?;
    if added.contains(&None) {
        set.extend(ALL_CAPABILITIES);
    }
    if dropped.contains(&None) {
        set.clear();
    }
    set.extend(added.into_iter().flatten());
    for capability in dropped.into_iter().flatten() {
        set.remove(&capability);
    }
    for capability in ambient(security)? {
        set.insert(capability);
    }
    Ok(set)
}

/// Capabilities that the process keeps though it is not root.
pub(super) fn ambient(security: &LinuxContainerSecurityContext) -> Result<Capabilities, SpecFault> {
    let names = security.capabilities.as_ref();
    let names = names.map_or(&[][..], |wanted| &wanted.add_ambient_capabilities);
    let mut set = Capabilities::new();
    for name in names {
        match parse(name, "capabilities.add_ambient_capabilities")? {
            None => set.extend(ALL_CAPABILITIES),
            Some(capability) => drop(set.insert(capability)),
        }
    }
    Ok(set)
}

/// `None` for `ALL`.
fn parse(name: &str, field: &'static str) -> Result<Option<Capability>, SpecFault> {
    let upper = name.to_ascii_uppercase();
    if upper == "ALL" {
        return Ok(None);
    }
    let short = upper.strip_prefix("CAP_").unwrap_or(&upper);
    match ALL_CAPABILITIES
        .iter()
        .find(|capability| capability.to_string() == short)
    {
        Some(capability) => Ok(Some(*capability)),
        None => Err(SpecFault::invalid(
            field,
            format!("{name:?} is not a capability; write it as in capabilities(7)"),
        )),
    }
}
