//! Namespaces: the guest's network, IPC and host name are the pod's; each container has its
//! own mounts, control group and, unless the pod shares one, processes.

use oci_spec::runtime::{LinuxNamespace, LinuxNamespaceBuilder, LinuxNamespaceType};
use podvisor_agent_protocol::PidNamespace;
use podvisor_cri_messages::{
    LinuxContainerSecurityContext, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption,
    PodSandboxConfig,
};

use super::fault::SpecFault;
use super::users;
use crate::machine::UserRange;

/// Checks whether a virtual machine can be this pod's sandbox.
pub(in crate::cri) fn check_sandbox(pod: &PodSandboxConfig) -> Result<(), SpecFault> {
    sandbox_options(pod).map_or(Ok(()), check)?;
    users_of(pod).map(drop)
}

/// Returns the ids in the guest that the users of a pod's containers have, if they are in a user
/// namespace.
pub(in crate::cri) fn users_of(pod: &PodSandboxConfig) -> Result<Option<UserRange>, SpecFault> {
    users::users(sandbox_options(pod))
}

fn sandbox_options(pod: &PodSandboxConfig) -> Option<&NamespaceOption> {
    sandbox_security(pod)?.namespace_options.as_ref()
}

pub(super) fn check_container(
    security: &LinuxContainerSecurityContext,
    pod: Option<UserRange>,
) -> Result<(), SpecFault> {
    security.namespace_options.as_ref().map_or(Ok(()), check)?;
    users::check_container(security, pod)
}

fn check(options: &NamespaceOption) -> Result<(), SpecFault> {
    let is = |mode: i32, wanted: NamespaceMode| mode == i32::from(wanted);
    if is(options.network, NamespaceMode::Node) {
        return Err(SpecFault::Refused {
            field: "namespace_options.network (hostNetwork)",
            reason: "a virtual machine has a network of its own; such pods need another runtime: \
                     the daemon's --host-runtime, or that of another node",
        });
    }
    if is(options.ipc, NamespaceMode::Node) {
        return Err(SpecFault::Refused {
            field: "namespace_options.ipc (hostIPC)",
            reason: "a virtual machine shares no memory with the host's processes; such pods \
                     need another runtime: the daemon's --host-runtime, or that of another node",
        });
    }
    for (field, mode) in [
        ("namespace_options.network", options.network),
        ("namespace_options.ipc", options.ipc),
        ("namespace_options.pid", options.pid),
    ] {
        if NamespaceMode::try_from(mode).is_err() {
            return Err(SpecFault::invalid(
                field,
                format!("{mode} is not a namespace mode"),
            ));
        }
    }
    if is(options.pid, NamespaceMode::Target) && options.target_id.is_empty() {
        return Err(SpecFault::invalid(
            "namespace_options.target_id",
            "the mode TARGET names a container",
        ));
    }
    Ok(())
}

/// Returns the namespaces of a container; one that is not listed is the guest's.
pub(super) fn namespaces(
    security: &LinuxContainerSecurityContext,
    users: Option<UserRange>,
) -> Result<Vec<LinuxNamespace>, SpecFault> {
    let mut namespaces = Vec::new();
    let of_users = users.map(|_| LinuxNamespaceType::User);
    let kinds = [LinuxNamespaceType::Mount, LinuxNamespaceType::Cgroup];
    for kind in kinds.into_iter().chain(of_users) {
        namespaces.push(LinuxNamespaceBuilder::default().typ(kind).build()?);
    }
    let mode = security
        .namespace_options
        .as_ref()
        .map(|options| options.pid);
    let mode = mode.and_then(|mode| NamespaceMode::try_from(mode).ok());
    let pid = LinuxNamespaceBuilder::default().typ(LinuxNamespaceType::Pid);
    match mode {
        // The node of a pod in a virtual machine is that machine.
        Some(NamespaceMode::Node) => {}
        // The API's default, unlike Kubernetes': a kubelet always sets it.
        Some(NamespaceMode::Pod) | None => {
            namespaces.push(pid.path(PidNamespace::Shared.to_string()).build()?)
        }
        Some(NamespaceMode::Target) => {
            let target = security.namespace_options.as_ref();
            let target = target.map_or("", |options| options.target_id.as_str());
            let path = PidNamespace::OfContainer(target).to_string();
            namespaces.push(pid.path(path).build()?);
        }
        Some(NamespaceMode::Container) => namespaces.push(pid.build()?),
    }
    Ok(namespaces)
}

/// Returns the pod's security context.
fn sandbox_security(pod: &PodSandboxConfig) -> Option<&LinuxSandboxSecurityContext> {
    pod.linux.as_ref()?.security_context.as_ref()
}
