//! What podvisor promises to kubelets and another runtime may ignore.
//!
//! A kubelet asks for these features of all pods if Status says that the runtime has them. A
//! runtime that does not know their fields would create the pod without, and so allow it more than
//! it may have.

use podvisor_cri_messages::{
    ContainerConfig, PodSandboxConfig, StatusResponse, SupplementalGroupsPolicy as Policy,
};
use tonic::Status;

use super::client::HostRuntime;
use super::message::Call;

const GROUPS: &str = "security_context.supplemental_groups_policy (Strict)";
const READ_ONLY: &str = "mounts.recursive_read_only";
const MOUNT_OPTIONS: &str = "mounts.mount_options";

/// Refuses a pod that asks for what the other runtime does not promise.
pub(super) async fn check_pod(
    host: &HostRuntime,
    call: &Call,
    pod: &PodSandboxConfig,
) -> Result<(), Status> {
    check(host, call, |status| pod_lacks(pod, status)).await
}

/// Refuses a container that asks for what the other runtime does not promise.
pub(super) async fn check_container(
    host: &HostRuntime,
    call: &Call,
    container: &ContainerConfig,
) -> Result<(), Status> {
    check(host, call, |status| container_lacks(container, status)).await
}

async fn check(
    host: &HostRuntime,
    call: &Call,
    lacks: impl Fn(&StatusResponse) -> Option<&'static str>,
) -> Result<(), Status> {
    // Most ask for nothing that a runtime without features lacks.
    if lacks(&StatusResponse::default()).is_none() {
        return Ok(());
    }
    match lacks(&host.status(call).await?) {
        None => Ok(()),
        Some(field) => Err(Status::invalid_argument(format!(
            "{field} is not supported by the host's runtime, which this pod is for: it would be \
             ignored"
        ))),
    }
}

fn pod_lacks(pod: &PodSandboxConfig, status: &StatusResponse) -> Option<&'static str> {
    let linux = pod.linux.as_ref();
    let security = linux.and_then(|linux| linux.security_context.as_ref())?;
    let is_strict = security.supplemental_groups_policy() == Policy::Strict;
    (is_strict && !has_groups(status)).then_some(GROUPS)
}

fn container_lacks(container: &ContainerConfig, status: &StatusResponse) -> Option<&'static str> {
    let mut mounts = container.mounts.iter();
    if mounts.any(|mount| !mount.mount_options.is_empty()) && !has_options(status) {
        return Some(MOUNT_OPTIONS);
    }
    let linux = container.linux.as_ref();
    let security = linux.and_then(|linux| linux.security_context.as_ref());
    let is_strict =
        security.is_some_and(|security| security.supplemental_groups_policy() == Policy::Strict);
    if is_strict && !has_groups(status) {
        return Some(GROUPS);
    }
    let mut mounts = container.mounts.iter();
    let is_read_only = mounts.any(|mount| mount.recursive_read_only);
    (is_read_only && !has_read_only(status)).then_some(READ_ONLY)
}

fn has_groups(status: &StatusResponse) -> bool {
    let features = status.features.as_ref();
    features.is_some_and(|features| features.supplemental_groups_policy)
}

fn has_options(status: &StatusResponse) -> bool {
    let features = status.features.as_ref();
    features.is_some_and(|features| features.mount_options)
}

fn has_read_only(status: &StatusResponse) -> bool {
    let mut handlers = status.runtime_handlers.iter();
    let default = handlers.find(|handler| handler.name.is_empty());
    let features = default.and_then(|handler| handler.features.as_ref());
    features.is_some_and(|features| features.recursive_read_only_mounts)
}

#[cfg(test)]
mod tests {
    use podvisor_cri_messages::{
        LinuxContainerConfig, LinuxContainerSecurityContext, LinuxPodSandboxConfig,
        LinuxSandboxSecurityContext, Mount, RuntimeFeatures, RuntimeHandler,
        RuntimeHandlerFeatures,
    };

    use super::*;

    #[test]
    fn what_a_runtime_does_not_promise_is_found_by_its_field() {
        let pod = |policy: Policy| PodSandboxConfig {
            linux: Some(LinuxPodSandboxConfig {
                security_context: Some(LinuxSandboxSecurityContext {
                    supplemental_groups_policy: policy.into(),
                    ..LinuxSandboxSecurityContext::default()
                }),
                ..LinuxPodSandboxConfig::default()
            }),
            ..PodSandboxConfig::default()
        };
        let container = |policy: Policy, recursive_read_only, option: Option<&str>| {
            let mount = Mount {
                recursive_read_only,
                mount_options: option.map(str::to_owned).into_iter().collect(),
                ..Mount::default()
            };
            ContainerConfig {
                linux: Some(LinuxContainerConfig {
                    security_context: Some(LinuxContainerSecurityContext {
                        supplemental_groups_policy: policy.into(),
                        ..LinuxContainerSecurityContext::default()
                    }),
                    ..LinuxContainerConfig::default()
                }),
                mounts: vec![mount],
                ..ContainerConfig::default()
            }
        };
        let old = StatusResponse::default();
        let new = StatusResponse {
            features: Some(RuntimeFeatures {
                supplemental_groups_policy: true,
                mount_options: true,
                ..RuntimeFeatures::default()
            }),
            runtime_handlers: vec![RuntimeHandler {
                name: String::new(),
                features: Some(RuntimeHandlerFeatures {
                    recursive_read_only_mounts: true,
                    ..RuntimeHandlerFeatures::default()
                }),
            }],
            ..StatusResponse::default()
        };
        assert_eq!(pod_lacks(&PodSandboxConfig::default(), &old), None);
        assert_eq!(pod_lacks(&pod(Policy::Merge), &old), None);
        assert_eq!(pod_lacks(&pod(Policy::Strict), &old), Some(GROUPS));
        assert_eq!(pod_lacks(&pod(Policy::Strict), &new), None);
        assert_eq!(
            container_lacks(&container(Policy::Merge, false, None), &old),
            None
        );
        for (policy, read_only, option, field) in [
            (Policy::Strict, false, None, GROUPS),
            (Policy::Merge, true, None, READ_ONLY),
            (Policy::Merge, false, Some("noexec"), MOUNT_OPTIONS),
        ] {
            let container = container(policy, read_only, option);
            assert_eq!(container_lacks(&container, &old), Some(field));
            assert_eq!(container_lacks(&container, &new), None);
        }
    }
}
