//! Tests of the translation of the kubelet's requests.

use oci_spec::image::{self, ConfigBuilder};
use oci_spec::runtime::{Capability, LinuxNamespaceType};
use podvisor_cri_messages::{
    Capability as CapabilityWishes, ContainerConfig, ContainerMetadata, HugepageLimit, Int64Value,
    KeyValue, LinuxContainerConfig, LinuxContainerResources, LinuxSandboxSecurityContext,
    Mount as CriMount, NamespaceMode, NamespaceOption, PodSandboxConfig, SecurityProfile,
    SecurityProfileType as ProfileType, SupplementalGroupsPolicy, UserNamespace,
};
use rustix::fs::StatVfsMountFlags;

use super::*;

mod volumes;

fn image() -> image::Config {
    ConfigBuilder::default()
        .entrypoint(vec!["/entry".to_owned()])
        .cmd(vec!["default".to_owned()])
        .env(vec![
            "PATH=/bin".to_owned(),
            "LANG=C".to_owned(),
            "broken".to_owned(),
        ])
        .working_dir("srv")
        .user("app:staff")
        .build()
        .unwrap()
}

fn container() -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata {
            name: "c".to_owned(),
            attempt: 0,
        }),
        ..ContainerConfig::default()
    }
}

fn with_security(security: LinuxContainerSecurityContext) -> ContainerConfig {
    ContainerConfig {
        linux: Some(LinuxContainerConfig {
            resources: None,
            security_context: Some(security),
        }),
        ..container()
    }
}

fn build_with(container: &ContainerConfig, volumes: &[Volume]) -> Result<ContainerSpec, SpecFault> {
    let image = image();
    container_spec(&SpecRequest {
        id: "c1",
        hostname: "web",
        container,
        image: Some(&image),
        volumes,
        users: None,
    })
}

fn build(container: &ContainerConfig) -> ContainerSpec {
    build_with(container, &[]).unwrap()
}

fn process(container: &ContainerConfig) -> Process {
    build(container).spec.process().clone().unwrap()
}

fn args(command: &[&str], args: &[&str]) -> Vec<String> {
    let strings = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
    let container = ContainerConfig {
        command: strings(command),
        args: strings(args),
        ..container()
    };
    process(&container).args().clone().unwrap()
}

#[test]
fn an_entrypoint_that_an_image_leaves_empty_is_none() {
    let image = ConfigBuilder::default()
        .entrypoint(vec![String::new()])
        .cmd(vec!["default".to_owned()])
        .build()
        .unwrap();
    let args = |container: &ContainerConfig| {
        let request = SpecRequest {
            id: "c1",
            hostname: "web",
            container,
            image: Some(&image),
            volumes: &[],
            users: None,
        };
        let spec = container_spec(&request).unwrap().spec;
        spec.process().clone().unwrap().args().clone().unwrap()
    };
    assert_eq!(args(&container()), ["default"]);
    let with_arguments = ContainerConfig {
        args: vec!["ls".to_owned(), "/".to_owned()],
        ..container()
    };
    assert_eq!(args(&with_arguments), ["ls", "/"]);
}

#[test]
fn command_and_arguments_follow_the_rules_of_kubernetes() {
    assert_eq!(args(&[], &[]), ["/entry", "default"]);
    assert_eq!(args(&[], &["a"]), ["/entry", "a"]);
    assert_eq!(args(&["/c"], &[]), ["/c"]);
    assert_eq!(args(&["/c"], &["a", "b"]), ["/c", "a", "b"]);
}

#[test]
fn variables_of_the_container_win_over_the_images() {
    let mut wanted = container();
    wanted.envs = vec![KeyValue::new("LANG", "de=1"), KeyValue::new("EMPTY", "")];
    let env = process(&wanted).env().clone().unwrap();
    assert_eq!(env, ["PATH=/bin", "HOSTNAME=web", "LANG=de=1", "EMPTY="]);
    for bad in ["", "A=B"] {
        wanted.envs = vec![KeyValue::new(bad, "x")];
        assert!(build_with(&wanted, &[]).is_err(), "{bad:?}");
    }
}

#[test]
fn the_working_directory_is_absolute() {
    assert_eq!(process(&container()).cwd().to_str(), Some("/srv"));
    let wanted = ContainerConfig {
        working_dir: "/tmp".to_owned(),
        ..container()
    };
    assert_eq!(process(&wanted).cwd().to_str(), Some("/tmp"));
}

#[test]
fn users_come_from_the_request_first() {
    let user = |user: Option<i64>, name: &str, group: Option<i64>| {
        let built = build_with(
            &with_security(LinuxContainerSecurityContext {
                run_as_user: user.map(|value| Int64Value { value }),
                run_as_username: name.to_owned(),
                run_as_group: group.map(|value| Int64Value { value }),
                ..LinuxContainerSecurityContext::default()
            }),
            &[],
        );
        built.map(|built| built.user)
    };
    assert_eq!(user(None, "", None).unwrap(), "app:staff");
    assert_eq!(user(Some(7), "", None).unwrap(), "7");
    assert_eq!(user(Some(7), "", Some(8)).unwrap(), "7:8");
    assert_eq!(user(None, "app", None).unwrap(), "app");
    assert_eq!(user(None, "app", Some(8)).unwrap(), "app:8");
    assert!(user(None, "", Some(8)).is_err());
    assert!(user(Some(-1), "", None).is_err());
    assert!(user(Some(1 << 32), "", None).is_err());
    assert!(user(None, "a:b", Some(8)).is_err());
}

#[test]
fn groups_are_merged_with_the_images_unless_the_policy_is_strict() {
    let security = |policy: SupplementalGroupsPolicy| LinuxContainerSecurityContext {
        run_as_user: Some(Int64Value { value: 7 }),
        supplemental_groups: vec![4, 5],
        supplemental_groups_policy: policy.into(),
        ..LinuxContainerSecurityContext::default()
    };
    let merged = build(&with_security(security(SupplementalGroupsPolicy::Merge)));
    assert_eq!(merged.groups, SupplementalGroups::Merge);
    let strict = build(&with_security(security(SupplementalGroupsPolicy::Strict)));
    assert_eq!(strict.groups, SupplementalGroups::Strict);
    let process = strict.spec.process().clone().unwrap();
    assert_eq!(
        process.user().additional_gids().as_deref(),
        Some(&[4, 5][..])
    );
}

fn capabilities_of(add: &[&str], drop: &[&str]) -> Vec<String> {
    let strings = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
    let security = LinuxContainerSecurityContext {
        capabilities: Some(CapabilityWishes {
            add_capabilities: strings(add),
            drop_capabilities: strings(drop),
            ..CapabilityWishes::default()
        }),
        ..LinuxContainerSecurityContext::default()
    };
    let set = capabilities::capabilities(&security).unwrap();
    let mut names: Vec<String> = set.iter().map(ToString::to_string).collect();
    names.sort();
    names
}

#[test]
fn capabilities_are_added_to_and_dropped_from_the_default() {
    let has = |names: &[String], name: &str| names.iter().any(|n| n == name);
    let default = capabilities_of(&[], &[]);
    assert!(has(&default, "CHOWN") && !has(&default, "NET_ADMIN"));
    let changed = capabilities_of(&["NET_ADMIN", "cap_sys_time"], &["CHOWN"]);
    assert!(has(&changed, "NET_ADMIN") && has(&changed, "SYS_TIME") && !has(&changed, "CHOWN"));
    assert_eq!(capabilities_of(&["KILL"], &["ALL"]), ["KILL"]);
    let all = capabilities_of(&["ALL"], &["SYS_ADMIN"]);
    assert!(has(&all, "SYS_MODULE") && !has(&all, "SYS_ADMIN"));
    assert_eq!(capabilities_of(&["ALL"], &["ALL"]), [""; 0]);
    assert_eq!(capabilities_of(&["KILL"], &["ALL", "KILL"]), [""; 0]);
    let bad = LinuxContainerSecurityContext {
        capabilities: Some(CapabilityWishes {
            add_capabilities: vec!["MAGIC".to_owned()],
            ..CapabilityWishes::default()
        }),
        ..LinuxContainerSecurityContext::default()
    };
    assert!(build_with(&with_security(bad), &[]).is_err());
}

#[test]
fn apparmor_profiles_of_the_node_are_refused_unless_the_container_is_privileged() {
    let with = |profile_type: ProfileType, privileged| {
        let security = LinuxContainerSecurityContext {
            apparmor: Some(SecurityProfile {
                profile_type: profile_type.into(),
                localhost_ref: "mine".to_owned(),
            }),
            privileged,
            ..LinuxContainerSecurityContext::default()
        };
        build_with(&with_security(security), &[]).err()
    };
    assert!(with(ProfileType::RuntimeDefault, false).is_none());
    assert!(with(ProfileType::Unconfined, false).is_none());
    assert!(with(ProfileType::Localhost, true).is_none());
    let refused = with(ProfileType::Localhost, false).unwrap();
    assert!(refused.to_string().contains("AppArmor"), "{refused}");
}

#[test]
fn privileged_sees_and_may_do_everything_in_its_guest() {
    let built = build(&with_security(LinuxContainerSecurityContext {
        privileged: true,
        masked_paths: vec!["/proc/kcore".to_owned()],
        seccomp: Some(SecurityProfile::default()),
        ..LinuxContainerSecurityContext::default()
    }));
    let linux = built.spec.linux().as_ref().unwrap();
    assert!(linux.masked_paths().as_ref().is_none_or(Vec::is_empty));
    assert!(linux.seccomp().is_none());
    let process = built.spec.process().as_ref().unwrap();
    let capabilities = process.capabilities().as_ref().unwrap();
    let effective = capabilities.effective().as_ref().unwrap();
    assert!(effective.contains(&Capability::SysAdmin));
    let sys = built.spec.mounts().as_ref().unwrap().iter();
    let mut sys = sys.filter(|mount| mount.destination().to_str() == Some("/sys"));
    let options = sys.next().unwrap().options().clone().unwrap();
    assert!(!options.contains(&"ro".to_owned()));
}

#[test]
fn seccomp_profiles_are_the_default_none_or_the_nodes() {
    let profile = |profile: Option<(ProfileType, &str)>| {
        build_with(
            &with_security(LinuxContainerSecurityContext {
                seccomp: profile.map(|(kind, path)| SecurityProfile {
                    profile_type: kind.into(),
                    localhost_ref: path.to_owned(),
                }),
                ..LinuxContainerSecurityContext::default()
            }),
            &[],
        )
    };
    let has = |built: Result<ContainerSpec, SpecFault>| {
        let spec = built.unwrap().spec;
        spec.linux().as_ref().unwrap().seccomp().clone()
    };
    assert!(has(profile(None)).is_none());
    assert!(has(profile(Some((ProfileType::Unconfined, "")))).is_none());
    assert!(has(profile(Some((ProfileType::RuntimeDefault, "")))).is_some());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.json");
    std::fs::write(
        &path,
        r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["chmod"],"action":"SCMP_ACT_ERRNO"}]}"#,
    )
    .unwrap();
    let local = has(profile(Some((
        ProfileType::Localhost,
        path.to_str().unwrap(),
    ))));
    let names = local.unwrap().syscalls().clone().unwrap()[0]
        .names()
        .clone();
    assert_eq!(names, ["chmod"]);
    for bad in [
        "",
        "relative.json",
        "/no/such",
        dir.path().to_str().unwrap(),
    ] {
        assert!(
            profile(Some((ProfileType::Localhost, bad))).is_err(),
            "{bad}"
        );
    }
}

#[test]
fn containers_share_the_guests_network_and_processes_as_the_pod_wants() {
    let pid = |mode: Option<NamespaceMode>| {
        let built = build(&with_security(LinuxContainerSecurityContext {
            namespace_options: mode.map(|mode| NamespaceOption {
                pid: mode.into(),
                ..NamespaceOption::default()
            }),
            ..LinuxContainerSecurityContext::default()
        }));
        let namespaces = built
            .spec
            .linux()
            .as_ref()
            .unwrap()
            .namespaces()
            .clone()
            .unwrap();
        let kinds = |wanted| namespaces.iter().any(|n| n.typ() == wanted);
        assert!(!kinds(LinuxNamespaceType::Network) && !kinds(LinuxNamespaceType::Ipc));
        assert!(kinds(LinuxNamespaceType::Mount));
        let pid = namespaces
            .iter()
            .find(|n| n.typ() == LinuxNamespaceType::Pid);
        pid.map(|pid| pid.path().clone())
    };
    assert_eq!(pid(None), Some(Some("sandbox".into())));
    assert_eq!(pid(Some(NamespaceMode::Container)), Some(None));
    assert_eq!(pid(Some(NamespaceMode::Pod)), Some(Some("sandbox".into())));
    assert_eq!(pid(Some(NamespaceMode::Node)), None);
    let target = LinuxContainerSecurityContext {
        namespace_options: Some(NamespaceOption {
            pid: NamespaceMode::Target.into(),
            target_id: "web".to_owned(),
            ..NamespaceOption::default()
        }),
        ..LinuxContainerSecurityContext::default()
    };
    let joined = namespaces::namespaces(&target, None).unwrap();
    let joined = joined.iter().find(|n| n.typ() == LinuxNamespaceType::Pid);
    let path = joined.and_then(|pid| pid.path().clone());
    assert_eq!(path, Some("container:web".into()));
}

#[test]
fn what_a_virtual_machine_cannot_share_is_refused_by_name() {
    let refused = |options: NamespaceOption| {
        let pod = PodSandboxConfig {
            linux: Some(podvisor_cri_messages::LinuxPodSandboxConfig {
                security_context: Some(LinuxSandboxSecurityContext {
                    namespace_options: Some(options),
                    ..LinuxSandboxSecurityContext::default()
                }),
                ..Default::default()
            }),
            ..PodSandboxConfig::default()
        };
        check_sandbox(&pod).unwrap_err().to_string()
    };
    let node = i32::from(NamespaceMode::Node);
    let none = NamespaceOption::default;
    let network = refused(NamespaceOption {
        network: node,
        ..none()
    });
    assert!(network.contains("hostNetwork"), "{network}");
    // A kubelet has one runtime: another class would be rejected, too.
    assert!(network.contains("--host-runtime"), "{network}");
    assert!(
        refused(NamespaceOption {
            ipc: node,
            ..none()
        })
        .contains("hostIPC")
    );
    let users = Some(UserNamespace::default());
    let refusal = refused(NamespaceOption {
        userns_options: users,
        ..none()
    });
    assert!(refusal.contains("hostUsers"), "{refusal}");
    assert!(refused(NamespaceOption { pid: 9, ..none() }).contains("pid"));
}

#[test]
fn limits_become_those_of_a_control_group() {
    let wanted = LinuxContainerResources {
        cpu_shares: 512,
        cpu_quota: 50_000,
        cpu_period: 100_000,
        memory_limit_in_bytes: 1 << 26,
        oom_score_adj: 999,
        unified: [("memory.high".to_owned(), "1".to_owned())].into(),
        ..LinuxContainerResources::default()
    };
    let limits = resources(&wanted).unwrap();
    let cpu = limits.cpu().clone().unwrap();
    assert_eq!(
        (cpu.shares(), cpu.quota(), cpu.period()),
        (Some(512), Some(50_000), Some(100_000))
    );
    assert_eq!(limits.memory().as_ref().unwrap().limit(), Some(1 << 26));
    assert_eq!(limits.unified().as_ref().unwrap()["memory.high"], "1");
    let unlimited = LinuxContainerResources {
        memory_limit_in_bytes: -1,
        cpu_quota: -1,
        ..LinuxContainerResources::default()
    };
    let unlimited = resources(&unlimited).unwrap();
    assert_eq!(unlimited.memory().unwrap().limit(), Some(-1));
    assert_eq!(unlimited.cpu().clone().unwrap().quota(), Some(-1));
    let mut container = container();
    container.linux = Some(LinuxContainerConfig {
        resources: Some(wanted),
        security_context: None,
    });
    assert_eq!(process(&container).oom_score_adj(), Some(999));

    let bad = |change: fn(&mut LinuxContainerResources)| {
        let mut wanted = LinuxContainerResources::default();
        change(&mut wanted);
        resources(&wanted).is_err()
    };
    assert!(bad(|wanted| wanted.cpu_shares = -1));
    assert!(bad(|wanted| wanted.cpu_quota = -2));
    assert!(bad(|wanted| wanted.memory_limit_in_bytes = -2));
    let huge = |limit| LinuxContainerResources {
        hugepage_limits: vec![HugepageLimit {
            page_size: "2MB".to_owned(),
            limit,
        }],
        ..LinuxContainerResources::default()
    };
    resources(&huge(0)).unwrap();
    let refusal = resources(&huge(1 << 21)).unwrap_err().to_string();
    assert!(refusal.contains("hugepage_limits"), "{refusal}");
    assert!(bad(|wanted| drop(
        wanted.unified.insert("../x".to_owned(), String::new())
    )));
}

#[test]
fn an_exec_is_the_containers_process_with_another_command() {
    let process = process(&container());
    let exec = exec_process(&process, &["ls".to_owned()], true).unwrap();
    assert_eq!(exec.args().as_deref(), Some(&["ls".to_owned()][..]));
    assert_eq!(exec.cwd(), process.cwd());
    assert!(
        exec.env()
            .as_ref()
            .unwrap()
            .contains(&"TERM=xterm".to_owned())
    );
    assert!(exec_process(&process, &[], false).is_err());
    assert!(exec_process(&process, &["a\0".to_owned()], false).is_err());
}
