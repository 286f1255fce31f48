//! Translates the kubelet's configuration and the image's to the OCI runtime specification of a
//! container in the guest.
//!
//! Input are values of requests, output is a specification; nothing on the host is read or created.
//! Features that a virtual machine cannot provide are rejected with the field's name, never ignored
//! if a pod's isolation depends on them. The agent resolves user names and paths in the image.

mod capabilities;
pub(super) mod mounts;
mod namespaces;
mod process;
mod resources;
mod security;
mod users;

#[cfg(test)]
mod tests;

use oci_spec::image;
use oci_spec::runtime::{LinuxBuilder, Process, RootBuilder, Spec, SpecBuilder};
use podvisor_cri_messages::{
    ContainerConfig, LinuxContainerSecurityContext, LinuxSandboxSecurityContext, PodSandboxConfig,
};
use rustix::fs::StatVfsMountFlags;

use crate::machine::UserRange;
use crate::sandbox::{SPEC_VERSION, SupplementalGroups};

pub(super) use namespaces::{check_sandbox, users_of};
pub(super) use process::exec_process;
pub(super) use resources::resources;

/// Error of a container's specification.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpecFault {
    /// A field of the request is invalid.
    #[error("invalid {field}: {reason}")]
    Invalid {
        /// Its path in the request.
        field: &'static str,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// A field asks for what a pod in a virtual machine does not have.
    #[error("{field} is not supported: {reason}")]
    Refused {
        /// Its path in the request.
        field: &'static str,
        /// Why, and what to do instead.
        reason: &'static str,
    },
    /// A part of the specification does not fit together.
    #[error("cannot build the container's runtime specification")]
    Build(#[from] oci_spec::OciSpecError),
}

impl SpecFault {
    fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self::Invalid { field, reason }
    }
}

/// A volume in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Volume {
    /// Its source in the guest.
    pub(super) source: VolumeSource,
    /// Its mount point in the container.
    pub(super) destination: String,
    /// Whether nothing in it may be written, not even in mounts below it.
    pub(super) readonly: bool,
    /// Whether later mounts of the host are propagated.
    pub(super) is_slave: bool,
    /// Those of the mount that the host has it in, as far as programs in it notice.
    pub(super) flags: StatVfsMountFlags,
    /// Those that the request asks for: some of NOEXEC, NOSUID and NODEV.
    pub(super) asked: StatVfsMountFlags,
}

/// The source of a volume in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum VolumeSource {
    /// A name in the pod's shared directory.
    Shared(String),
    /// Like [`Self::Shared`]; the agent copies the image's files into it.
    Filled(String),
    /// An image, or a part of one.
    Image {
        /// The image's digest.
        digest: String,
        /// A path in it; empty for all of it.
        below: String,
    },
    /// In the guest's memory.
    Memory(MemorySource),
    /// A device of the guest's own kernel, by its path there.
    Device(&'static str),
}

/// A volume in the guest's memory; the agent creates it if it is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MemorySource {
    /// Its index in the pod's volumes in memory.
    pub(super) key: usize,
    /// A path in it; `None` for all of it.
    pub(super) below: Option<String>,
    /// In bytes; `None` for a share of the guest's memory.
    pub(super) size: Option<u64>,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl Volume {
    /// Marks a volume to be filled with the image's files, if it is in the shared directory.
    pub(super) fn filled(mut self) -> Self {
        if let VolumeSource::Shared(name) = self.source {
            self.source = VolumeSource::Filled(name);
        }
        self
    }

    /// Returns its name in the pod's shared directory, if it is there.
    pub(super) fn name(&self) -> Option<&str> {
        match &self.source {
            VolumeSource::Shared(name) | VolumeSource::Filled(name) => Some(name),
            VolumeSource::Image { .. } | VolumeSource::Memory(_) | VolumeSource::Device(_) => None,
        }
    }
}

/// The input of a specification.
#[derive(Debug)]
pub(super) struct SpecRequest<'a> {
    /// The container's id.
    pub(super) id: &'a str,
    /// The guest's host name.
    pub(super) hostname: &'a str,
    /// The container.
    pub(super) container: &'a ContainerConfig,
    /// Its image.
    pub(super) image: Option<&'a image::Config>,
    /// Its volumes.
    pub(super) volumes: &'a [Volume],
    /// The ids of the pod's users, if it has a user namespace.
    pub(super) users: Option<UserRange>,
}

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

/// Returns the pod's security context.
fn sandbox_security(pod: &PodSandboxConfig) -> Option<&LinuxSandboxSecurityContext> {
    pod.linux.as_ref()?.security_context.as_ref()
}
