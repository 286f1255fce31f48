//! Translates the kubelet's configuration and the image's to the OCI runtime specification of a
//! container in the guest.
//!
//! Input are values of requests, output is a specification; nothing on the host is read or created.
//! Features that a virtual machine cannot provide are rejected with the field's name, never ignored
//! if a pod's isolation depends on them. The agent resolves user names and paths in the image.

mod capabilities;
pub(super) mod devices;
mod fault;
pub(super) mod mounts;
mod namespaces;
mod process;
mod request;
mod resources;
mod security;
mod users;
mod volume;

#[cfg(test)]
mod tests;

use oci_spec::runtime::{LinuxBuilder, Process, RootBuilder, Spec, SpecBuilder};
use podvisor_cri_messages::LinuxContainerSecurityContext;

use crate::sandbox::{SPEC_VERSION, SupplementalGroups};

pub(crate) use fault::SpecFault;
pub(super) use namespaces::{check_sandbox, users_of};
pub(super) use process::exec_process;
pub(super) use request::SpecRequest;
pub(super) use resources::resources;
pub(super) use volume::{MemorySource, Volume, VolumeSource};

/// A specification, and what the agent is passed with it.
#[derive(Debug)]
pub(super) struct ContainerSpec {
    pub(super) spec: Spec,
    /// `user[:group]` for the agent to look up.
    pub(super) user: String,
    /// Which groups of the image's /etc/group it gets.
    pub(super) groups: SupplementalGroups,
    pub(super) readonly_rootfs: bool,
}

/// Creates the specification of a container.
pub(super) fn container_spec(request: &SpecRequest<'_>) -> Result<ContainerSpec, SpecFault> {
    let empty = LinuxContainerSecurityContext::default();
    let linux = request.container.linux.as_ref();
    let security = linux.and_then(|linux| linux.security_context.as_ref());
    let security = security.unwrap_or(&empty);
    namespaces::check_container(security, request.users)?;
    security::no_apparmor(security)?;
    let user = process::user(security, request.image)?;
    let process: Process = process::process(request, security)?;
    let resources = linux.and_then(|linux| linux.resources.as_ref());
    let is_privileged = security.privileged;
    let allowed = capabilities::capabilities(security)?;

    let mut linux = LinuxBuilder::default()
        .cgroups_path(format!("/podvisor/{}", request.id))
        .namespaces(namespaces::namespaces(security, request.users)?)
        .masked_paths(security::masked_paths(security))
        .readonly_paths(security::readonly_paths(security))
        .resources(resources::with_devices(resources, is_privileged)?);
    if let Some(users) = request.users {
        let mappings = users::mappings(users)?;
        linux = linux.uid_mappings(mappings.clone()).gid_mappings(mappings);
    }
    if let Some(profile) = security::seccomp(security, &allowed)? {
        linux = linux.seccomp(profile);
    }
    let mut spec = SpecBuilder::default()
        .version(SPEC_VERSION)
        .process(process)
        .root(
            RootBuilder::default()
                .path("rootfs")
                .readonly(security.readonly_rootfs)
                .build()?,
        )
        .mounts(mounts::mounts(request, is_privileged)?)
        .annotations(request.container.annotations.clone())
        .linux(linux.build()?)
        .build()?;
    // The builder sets one; the host name is set for the guest as a whole.
    spec.set_hostname(None);
    Ok(ContainerSpec {
        spec,
        user,
        groups: process::groups(security, request.image),
        readonly_rootfs: security.readonly_rootfs,
    })
}
