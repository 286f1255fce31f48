//! Restrictions on a container's access to the guest's kernel: masked paths and system calls.

use oci_spec::runtime::{Capabilities, Capability, LinuxSeccomp};
use podvisor_cri_messages::{LinuxContainerSecurityContext, SecurityProfileType as ProfileType};

use super::fault::SpecFault;
use crate::sandbox::default_seccomp_profile;

/// Maximum size of a profile of the node, in bytes.
const PROFILE_BYTES: u64 = 1 << 20;

/// Returns the paths that Kubernetes wants masked; none for a privileged container.
pub(super) fn masked_paths(security: &LinuxContainerSecurityContext) -> Vec<String> {
    match security.privileged {
        true => Vec::new(),
        false => security.masked_paths.clone(),
    }
}

pub(super) fn readonly_paths(security: &LinuxContainerSecurityContext) -> Vec<String> {
    match security.privileged {
        true => Vec::new(),
        false => security.readonly_paths.clone(),
    }
}

/// Returns the filter of system calls; `None` if all are allowed.
pub(super) fn seccomp(
    security: &LinuxContainerSecurityContext,
    capabilities: &Capabilities,
) -> Result<Option<LinuxSeccomp>, SpecFault> {
    if security.privileged {
        return Ok(None);
    }
    let Some(profile) = &security.seccomp else {
        // By the API, a missing profile means unconfined.
        return Ok(None);
    };
    match ProfileType::try_from(profile.profile_type) {
        Ok(ProfileType::Unconfined) => Ok(None),
        Ok(ProfileType::RuntimeDefault) => {
            let held: Vec<Capability> = capabilities.iter().copied().collect();
            Ok(Some(default_seccomp_profile(&held)?))
        }
        Ok(ProfileType::Localhost) => localhost(&profile.localhost_ref).map(Some),
        Err(_) => Err(SpecFault::invalid(
            "security_context.seccomp.profile_type",
            format!("{} is not a profile type", profile.profile_type),
        )),
    }
}

/// Rejects AppArmor profiles of the node: there is no AppArmor in a guest, so a profile would
/// confine nothing.
pub(super) fn no_apparmor(security: &LinuxContainerSecurityContext) -> Result<(), SpecFault> {
    if security.privileged {
        return Ok(());
    }
    let profile = security.apparmor.as_ref();
    let is_localhost =
        profile.is_some_and(|profile| profile.profile_type == i32::from(ProfileType::Localhost));
    // The deprecated field, which newer kubelets set, too, and older ones alone.
    let is_named = security.apparmor_profile.starts_with("localhost/");
    if is_localhost || is_named {
        return Err(SpecFault::Refused {
            field: "security_context.apparmor",
            reason: "a guest has no AppArmor; take RuntimeDefault or Unconfined",
        });
    }
    Ok(())
}

/// Returns a profile of the node, by its absolute path.
fn localhost(path: &str) -> Result<LinuxSeccomp, SpecFault> {
    use std::io::Read as _;
    let field = "security_context.seccomp.localhost_ref";
    if !path.starts_with('/') {
        return Err(SpecFault::invalid(
            field,
            format!("{path:?} is not an absolute path"),
        ));
    }
    let failed = |reason: String| SpecFault::invalid(field, format!("{path}: {reason}"));
    let mut text = Vec::new();
    let file = std::fs::File::open(path).map_err(|error| failed(error.to_string()))?;
    if !file.metadata().is_ok_and(|meta| meta.is_file()) {
        return Err(failed("it is not a regular file".to_owned()));
    }
    file.take(PROFILE_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(|error| failed(error.to_string()))?;
    if text.len() as u64 > PROFILE_BYTES {
        return Err(failed(format!("it is longer than {PROFILE_BYTES} bytes")));
    }
    serde_json::from_slice(&text).map_err(|error| failed(error.to_string()))
}
