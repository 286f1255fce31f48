//! New limits for a container that lives.

use std::path::Path;

use libcgroups::common::{CgroupManager as _, ControllerOpt};
use libcgroups::v2::manager::{Manager, V2ManagerError};
use oci_spec::runtime::LinuxResources;
use podvisor_agent_protocol::limits::SPEC_BYTES;

use super::cgroup::Cgroup;
use super::spec::SpecError;
use crate::init::mounts::CGROUP_ROOT;

/// Reads the limits of a request.
///
/// # Errors
///
/// [`SpecError`] for what is no such object, and for rules for devices.
pub fn parse(json: &[u8]) -> Result<LinuxResources, SpecError> {
    const WHAT: &str = "resources_json";
    if json.len() > SPEC_BYTES {
        return Err(SpecError::TooLarge {
            what: WHAT,
            limit: SPEC_BYTES,
        });
    }
    let resources: LinuxResources = serde_json::from_slice(json)
        .map_err(|source| SpecError::Malformed { what: WHAT, source })?;
    if resources
        .devices()
        .as_ref()
        .is_some_and(|rules| !rules.is_empty())
    {
        return Err(SpecError::Refused(
            "rules for devices cannot be changed while a container lives",
        ));
    }
    Ok(resources)
}

/// Puts limits into force; what they leave out stays as it is.
///
/// # Errors
///
/// What the kernel refuses, such as a memory limit below what cannot be given up.
pub fn apply(resources: &LinuxResources, cgroup: &Cgroup) -> Result<(), V2ManagerError> {
    let manager = Manager::new(
        Path::new(CGROUP_ROOT).to_owned(),
        cgroup.spec_path().to_owned(),
    )?;
    manager.apply(&ControllerOpt {
        resources,
        disable_oom_killer: false,
        oom_score_adj: None,
        freezer_state: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_and_rules_for_devices_refused() {
        let limits = parse(br#"{"memory": {"limit": 67108864}, "cpu": {"shares": 512}}"#).unwrap();
        assert_eq!(limits.memory().unwrap().limit(), Some(64 << 20));
        assert!(parse(b"true").is_err());
        assert!(parse(br#"{"devices": [{"allow": true}]}"#).is_err());
        assert!(parse(&vec![b' '; SPEC_BYTES + 1]).is_err());
        parse(br#"{"devices": []}"#).unwrap();
    }
}
