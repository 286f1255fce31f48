//! Linux capabilities of a container.

use oci_spec::runtime::Capabilities;
use podvisor_cri_messages::LinuxContainerSecurityContext;

use super::fault::SpecFault;
use crate::sandbox::{self, NamedCapability, all_capabilities};

/// Returns the capabilities of a container's root: the default, less the dropped ones, plus the
/// added ones.
pub(super) fn capabilities(
    security: &LinuxContainerSecurityContext,
) -> Result<Capabilities, SpecFault> {
    if security.privileged {
        return Ok(all_capabilities());
    }
    let Some(wanted) = &security.capabilities else {
        return Ok(sandbox::capabilities(&[], &[]));
    };
    let added = parse(&wanted.add_capabilities, "capabilities.add_capabilities")?;
    let dropped = parse(&wanted.drop_capabilities, "capabilities.drop_capabilities")?;
    let mut set = sandbox::capabilities(&added, &dropped);
    set.extend(ambient(security)?);
    Ok(set)
}

/// Returns the capabilities that the process keeps even if it is not root.
pub(super) fn ambient(security: &LinuxContainerSecurityContext) -> Result<Capabilities, SpecFault> {
    let names = security.capabilities.as_ref();
    let names = names.map_or(&[][..], |wanted| &wanted.add_ambient_capabilities);
    let mut set = Capabilities::new();
    for named in parse(names, "capabilities.add_ambient_capabilities")? {
        match named {
            NamedCapability::All => set.extend(all_capabilities()),
            NamedCapability::One(capability) => drop(set.insert(capability)),
        }
    }
    Ok(set)
}

fn parse(names: &[String], field: &'static str) -> Result<Vec<NamedCapability>, SpecFault> {
    let named = |name: &String| {
        let invalid = |error| SpecFault::invalid(field, format!("{name:?}: {error}"));
        name.parse().map_err(invalid)
    };
    names.iter().map(named).collect()
}
