//! Fields of a pod and its container that a virtual machine cannot honour: those that would change
//! what runs are refused by their names. What cannot apply to an operating system of its own, such
//! as capabilities and system-call filters that restrict a container's processes, is refused where
//! somebody asked for it and ignored where it is a kubelet's default.

use std::path::Path;

use podvisor_cri_messages::SecurityProfileType as ProfileType;
use podvisor_cri_messages::{
    ContainerConfig, LinuxContainerSecurityContext, LinuxSandboxSecurityContext, Mount,
    NamespaceMode, PodSandboxConfig, SecurityProfile,
};

use podvisor_sandbox::BootMachine;

use crate::cri::error::{CriError, Result};
use crate::cri::spec::mounts::image_of;

/// What the kubelet mounts into every container, which a guest has by itself or does not need.
const KUBELETS_FILES: &[&str] = &["/etc/hosts", "/dev/termination-log"];

/// What the names of directories with files for containers contain, below a kubelet's directory.
const FILE_VOLUMES: &[&str] = &[
    "/volumes/kubernetes.io~configmap/",
    "/volumes/kubernetes.io~secret/",
    "/volumes/kubernetes.io~projected/",
    "/volumes/kubernetes.io~downward-api/",
];

/// Checks a pod before anything is created.
pub(super) fn check_pod(config: &PodSandboxConfig) -> Result<()> {
    let linux = config.linux.as_ref();
    if linux.is_some_and(|linux| !linux.sysctls.is_empty()) {
        return Err(refused(
            "config.linux.sysctls",
            "the guest has its own system: set them in its cloud-init",
        ));
    }
    let security = linux.and_then(|linux| linux.security_context.as_ref());
    security.map_or(Ok(()), check_sandbox)
}

fn check_sandbox(security: &LinuxSandboxSecurityContext) -> Result<()> {
    if security.privileged {
        return Err(refused(
            "config.linux.security_context.privileged",
            "a virtual machine has all rights in itself and none on the node",
        ));
    }
    if let Some(options) = &security.namespace_options {
        let is_node = |mode: i32| mode == i32::from(NamespaceMode::Node);
        for (is_refused, field) in [
            (
                is_node(options.network),
                "config.linux.security_context.namespace_options.network (hostNetwork)",
            ),
            (
                is_node(options.pid),
                "config.linux.security_context.namespace_options.pid (hostPID)",
            ),
            (
                is_node(options.ipc),
                "config.linux.security_context.namespace_options.ipc (hostIPC)",
            ),
        ] {
            if is_refused {
                return Err(refused(
                    field,
                    "a virtual machine shares nothing of the node",
                ));
            }
        }
    }
    profile(
        "config.linux.security_context.seccomp",
        security.seccomp.as_ref(),
    )
}

/// Checks a container before anything is created.
///
/// The container of a VirtualMachineInstance has what the pod security standard `restricted` asks
/// for, a user among it: that says nothing of the guest, and is accepted.
pub(super) fn check_container(config: &ContainerConfig, is_vmi: bool) -> Result<()> {
    if !config.command.is_empty() {
        return Err(refused(
            "config.command",
            "the disk's own system starts its programs; use cloud-init's runcmd",
        ));
    }
    if !config.args.is_empty() {
        return Err(refused(
            "config.args",
            "the disk's own system starts its programs; use cloud-init's runcmd",
        ));
    }
    if !config.working_dir.is_empty() {
        return Err(refused(
            "config.working_dir",
            "a virtual machine's programs start in directories of its own",
        ));
    }
    if !config.cdi_devices.is_empty() {
        return Err(refused(
            "config.cdi_devices",
            "devices of a virtual machine are block devices of the node",
        ));
    }
    let security = config.linux.as_ref();
    let security = security.and_then(|linux| linux.security_context.as_ref());
    security.map_or(Ok(()), |security| check_security(security, is_vmi))
}

fn check_security(security: &LinuxContainerSecurityContext, is_vmi: bool) -> Result<()> {
    if security.privileged {
        return Err(refused(
            "config.linux.security_context.privileged",
            "a virtual machine has all rights in itself and none on the node",
        ));
    }
    if security.readonly_rootfs {
        return Err(refused(
            "config.linux.security_context.readonly_rootfs",
            "an operating system writes to its root; each pod has its own copy of the disk",
        ));
    }
    let has_user = security.run_as_user.is_some() || !security.run_as_username.is_empty();
    if has_user && !is_vmi {
        return Err(refused(
            "config.linux.security_context.run_as_user",
            "the disk's own system starts its programs; create users by cloud-init",
        ));
    }
    let capabilities = security.capabilities.as_ref();
    if capabilities.is_some_and(|asked| {
        !asked.add_capabilities.is_empty() || !asked.add_ambient_capabilities.is_empty()
    }) {
        return Err(refused(
            "config.linux.security_context.capabilities",
            "a virtual machine has all rights in itself and none on the node",
        ));
    }
    profile(
        "config.linux.security_context.seccomp",
        security.seccomp.as_ref(),
    )?;
    profile(
        "config.linux.security_context.apparmor",
        security.apparmor.as_ref(),
    )
}

/// A profile of the node would confine nothing; the default confines the machine's process anyway.
fn profile(field: &'static str, profile: Option<&SecurityProfile>) -> Result<()> {
    let is_own =
        profile.is_some_and(|profile| profile.profile_type == i32::from(ProfileType::Localhost));
    match is_own {
        true => Err(refused(
            field,
            "a profile of the node does not reach into a virtual machine; take RuntimeDefault",
        )),
        false => Ok(()),
    }
}

/// A directory or file of the node that the guest gets as copies of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileMount {
    /// On the node.
    pub(super) from: String,
    /// In the guest.
    pub(super) to: String,
}

/// Whether a kubelet mounts this into every container.
pub(super) fn is_of_kubelet(mount: &Mount) -> bool {
    KUBELETS_FILES.contains(&mount.container_path.as_str())
        || mount.host_path.contains("/containers/")
}

/// Whether this is a directory that a kubelet has filled with files for containers.
pub(super) fn is_file_volume(mount: &Mount) -> bool {
    let mut parts = FILE_VOLUMES.iter();
    parts.any(|part| mount.host_path.contains(part))
}

/// What a guest gets of its container's mounts.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct PassedMounts {
    /// Those whose files are copied.
    pub(super) files: Vec<FileMount>,
    /// Directories that are shared.
    pub(super) directories: Vec<Mount>,
}

/// Returns what is passed of a container's mounts. It blocks.
///
/// # Errors
/// A mount that cannot be passed to a guest.
pub(super) fn passed_mounts(config: &ContainerConfig) -> Result<PassedMounts> {
    let mut passed = PassedMounts::default();
    for mount in &config.mounts {
        if is_of_kubelet(mount) {
            continue;
        }
        // A subPath of one of them is a file, bound elsewhere.
        if is_file_volume(mount) || Path::new(&mount.host_path).is_file() {
            passed.files.push(FileMount {
                from: mount.host_path.clone(),
                to: mount.container_path.clone(),
            });
            continue;
        }
        if image_of(mount).is_none() && Path::new(&mount.host_path).is_dir() {
            passed.directories.push(mount.clone());
            continue;
        }
        let shown: String = mount.container_path.chars().take(256).collect();
        return Err(CriError::invalid(
            "config.mounts",
            format!(
                "{shown:?}: neither a directory nor a file of the node; a virtual machine has no \
                 other mounts"
            ),
        ));
    }
    let most = BootMachine::MAX_SHARES;
    match passed.directories.len() {
        count if count > most => Err(CriError::invalid(
            "config.mounts",
            format!("{count} directories, but a virtual machine shares at most {most}"),
        )),
        _ => Ok(passed),
    }
}

fn refused(field: &'static str, reason: &'static str) -> CriError {
    CriError::Refused { field, reason }
}

#[cfg(test)]
mod tests {
    use podvisor_cri_messages::{
        Capability, Int64Value, LinuxContainerConfig, LinuxPodSandboxConfig, NamespaceOption,
    };

    use super::*;

    fn pod(security: LinuxSandboxSecurityContext) -> PodSandboxConfig {
        PodSandboxConfig {
            linux: Some(LinuxPodSandboxConfig {
                security_context: Some(security),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    fn container(security: LinuxContainerSecurityContext) -> ContainerConfig {
        ContainerConfig {
            linux: Some(LinuxContainerConfig {
                security_context: Some(security),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    fn localhost() -> Option<SecurityProfile> {
        Some(SecurityProfile {
            profile_type: ProfileType::Localhost.into(),
            localhost_ref: "/x".to_owned(),
        })
    }

    #[test]
    fn what_a_pod_cannot_have_is_refused_by_its_field() {
        check_pod(&PodSandboxConfig::default()).unwrap();
        let namespaces = |network: NamespaceMode, pid: NamespaceMode, ipc: NamespaceMode| {
            pod(LinuxSandboxSecurityContext {
                namespace_options: Some(NamespaceOption {
                    network: network.into(),
                    pid: pid.into(),
                    ipc: ipc.into(),
                    ..Default::default()
                }),
                ..Default::default()
            })
        };
        let (node, own) = (NamespaceMode::Node, NamespaceMode::Pod);
        check_pod(&namespaces(own, NamespaceMode::Container, own)).unwrap();
        let mut sysctls = pod(Default::default());
        let linux = sysctls.linux.as_mut().unwrap();
        linux
            .sysctls
            .insert("net.core.somaxconn".to_owned(), "1".to_owned());
        for (pod, field) in [
            (namespaces(node, own, own), "hostNetwork"),
            (namespaces(own, node, own), "hostPID"),
            (namespaces(own, own, node), "hostIPC"),
            (
                pod(LinuxSandboxSecurityContext {
                    privileged: true,
                    ..Default::default()
                }),
                "privileged",
            ),
            (
                pod(LinuxSandboxSecurityContext {
                    seccomp: localhost(),
                    ..Default::default()
                }),
                "seccomp",
            ),
            (sysctls, "sysctls"),
        ] {
            let error = check_pod(&pod).unwrap_err();
            assert!(matches!(&error, CriError::Refused { .. }), "{error}");
            assert!(error.to_string().contains(field), "{error}");
        }
    }

    #[test]
    fn what_a_container_cannot_have_is_refused_by_its_field() {
        check_container(&ContainerConfig::default(), false).unwrap();
        check_container(
            &container(LinuxContainerSecurityContext {
                masked_paths: vec!["/proc/kcore".to_owned()],
                no_new_privs: true,
                ..Default::default()
            }),
            false,
        )
        .unwrap();
        let words = |word: &str| vec![word.to_owned()];
        for (config, field) in [
            (
                ContainerConfig {
                    command: words("sh"),
                    ..Default::default()
                },
                "config.command",
            ),
            (
                ContainerConfig {
                    args: words("-c"),
                    ..Default::default()
                },
                "config.args",
            ),
            (
                container(LinuxContainerSecurityContext {
                    privileged: true,
                    ..Default::default()
                }),
                "privileged",
            ),
            (
                container(LinuxContainerSecurityContext {
                    readonly_rootfs: true,
                    ..Default::default()
                }),
                "readonly_rootfs",
            ),
            (
                container(LinuxContainerSecurityContext {
                    capabilities: Some(Capability {
                        add_capabilities: words("NET_ADMIN"),
                        ..Default::default()
                    }),
                    ..Default::default()
                }),
                "capabilities",
            ),
            (
                container(LinuxContainerSecurityContext {
                    seccomp: localhost(),
                    ..Default::default()
                }),
                "seccomp",
            ),
            (
                container(LinuxContainerSecurityContext {
                    apparmor: localhost(),
                    ..Default::default()
                }),
                "apparmor",
            ),
        ] {
            let error = check_container(&config, false).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }

    #[test]
    fn the_user_that_restricted_asks_for_is_accepted_in_an_instances_pod_alone() {
        let restricted = container(LinuxContainerSecurityContext {
            run_as_user: Some(Int64Value { value: 107 }),
            no_new_privs: true,
            capabilities: Some(Capability {
                drop_capabilities: vec!["ALL".to_owned()],
                ..Default::default()
            }),
            seccomp: Some(SecurityProfile::default()),
            ..Default::default()
        });
        check_container(&restricted, true).unwrap();
        let error = check_container(&restricted, false).unwrap_err().to_string();
        assert!(error.contains("run_as_user"), "{error}");
    }

    #[test]
    fn files_for_containers_are_copied_and_directories_are_shared() {
        let mount = |host: &str, path: &str| Mount {
            host_path: host.to_owned(),
            container_path: path.to_owned(),
            ..Default::default()
        };
        let pods = "/var/lib/kubelet/pods/u";
        let mut config = ContainerConfig {
            mounts: vec![
                mount(&format!("{pods}/etc-hosts"), "/etc/hosts"),
                mount(&format!("{pods}/containers/c/1a2b"), "/dev/termination-log"),
                mount(&format!("{pods}/volumes/kubernetes.io~secret/s"), "/etc/s"),
                mount("/etc/passwd", "/etc/single"),
            ],
            ..Default::default()
        };
        let passed = passed_mounts(&config).unwrap();
        let paths: Vec<_> = passed.files.iter().map(|file| file.to.as_str()).collect();
        assert_eq!(paths, ["/etc/s", "/etc/single"]);
        assert_eq!(passed.directories, []);
        config.mounts.push(mount("/tmp", "/data"));
        let passed = passed_mounts(&config).unwrap();
        assert_eq!(passed.directories, [mount("/tmp", "/data")]);
        config.mounts.push(mount("/dev/null", "/null"));
        let error = passed_mounts(&config).unwrap_err().to_string();
        assert!(error.contains("\"/null\""), "{error}");
        config.mounts = (0..9).map(|_| mount("/tmp", "/data")).collect();
        let error = passed_mounts(&config).unwrap_err().to_string();
        assert!(error.contains("at most 8"), "{error}");
    }
}
