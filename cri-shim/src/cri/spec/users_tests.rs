use podvisor_cri_messages::{
    ContainerConfig, LinuxPodSandboxConfig, LinuxSandboxSecurityContext, Mount, PodSandboxConfig,
    UserNamespace,
};

use oci_spec::runtime::{Linux, LinuxNamespaceType};

use super::super::{SpecRequest, check_sandbox, container_spec, mounts, namespaces, users_of};
use super::*;

const RANGE: UserRange = UserRange {
    first: 131_072,
    count: 65_536,
};

fn mapping(container_id: u32, host_id: u32, length: u32) -> IdMapping {
    IdMapping {
        host_id,
        container_id,
        length,
    }
}

fn options(mode: NamespaceMode, uids: Vec<IdMapping>, gids: Vec<IdMapping>) -> NamespaceOption {
    NamespaceOption {
        userns_options: Some(UserNamespace {
            mode: mode.into(),
            uids,
            gids,
        }),
        ..NamespaceOption::default()
    }
}

fn mapped(first: u32, count: u32) -> NamespaceOption {
    let ids = vec![mapping(0, first, count)];
    options(NamespaceMode::Pod, ids.clone(), ids)
}

fn pod(options: NamespaceOption) -> PodSandboxConfig {
    PodSandboxConfig {
        linux: Some(LinuxPodSandboxConfig {
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(options),
                ..LinuxSandboxSecurityContext::default()
            }),
            ..LinuxPodSandboxConfig::default()
        }),
        ..PodSandboxConfig::default()
    }
}

fn container(options: Option<NamespaceOption>) -> LinuxContainerSecurityContext {
    LinuxContainerSecurityContext {
        namespace_options: options,
        ..LinuxContainerSecurityContext::default()
    }
}

#[test]
fn a_pods_users_are_the_range_that_the_kubelet_gave_or_the_guests() {
    let given = pod(mapped(131_072, 65_536));
    check_sandbox(&given).unwrap();
    assert_eq!(users_of(&given).unwrap(), Some(RANGE));
    let node = options(NamespaceMode::Node, Vec::new(), Vec::new());
    assert_eq!(users_of(&pod(node)).unwrap(), None);
    let none = NamespaceOption::default();
    assert_eq!(users_of(&pod(none)).unwrap(), None);
}

#[test]
fn mappings_that_no_pod_can_have_are_refused() {
    let one = || vec![mapping(0, 65_536, 65_536)];
    let two = vec![mapping(0, 65_536, 10), mapping(10, 131_072, 10)];
    let pods = |uids, gids| options(NamespaceMode::Pod, uids, gids);
    for (wrong, why) in [
        (pods(Vec::new(), Vec::new()), "0 mappings of users"),
        (pods(one(), Vec::new()), "0 of groups"),
        (pods(two.clone(), two), "2 mappings of users"),
        (pods(one(), vec![mapping(0, 65_536, 10)]), "alike"),
        (pods(one(), vec![mapping(0, 131_072, 65_536)]), "alike"),
        (mapped(0, 65_536), "not to the host's 0"),
        (mapped(65_536, 0), "at least one id"),
        (mapped(u32::MAX - 10, 11), "none above"),
        (
            pods(vec![mapping(1, 65_536, 10)], vec![mapping(1, 65_536, 10)]),
            "the container's 0",
        ),
        (options(NamespaceMode::Node, one(), one()), "NODE"),
        (options(NamespaceMode::Container, one(), one()), "neither"),
        (options(NamespaceMode::Target, one(), one()), "neither"),
    ] {
        let refusal = check_sandbox(&pod(wrong)).unwrap_err().to_string();
        assert!(refusal.contains("hostUsers: false"), "{refusal}");
        assert!(refusal.contains(why), "{refusal}");
    }
    let processes = NamespaceOption {
        pid: NamespaceMode::Node.into(),
        ..mapped(65_536, 65_536)
    };
    let refusal = check_sandbox(&pod(processes)).unwrap_err().to_string();
    assert!(refusal.contains("hostPID"), "{refusal}");
}

#[test]
fn containers_and_volumes_have_the_users_of_their_pod() {
    let own = Some(mapped(131_072, 65_536));
    let other = Some(mapped(65_536, 65_536));
    let node = Some(options(NamespaceMode::Node, Vec::new(), Vec::new()));
    let check = |options: &Option<NamespaceOption>, pod| {
        namespaces::check_container(&container(options.clone()), pod).is_ok()
    };
    for (options, in_range, in_guests) in [
        (&own, true, false),
        (&other, false, false),
        (&node, false, true),
        (&None, true, true),
        (&Some(NamespaceOption::default()), true, true),
    ] {
        assert_eq!(check(options, Some(RANGE)), in_range, "{options:?}");
        assert_eq!(check(options, None), in_guests, "{options:?}");
    }
    let mount = |uids: &[IdMapping], gids: &[IdMapping], pod| {
        let mount = Mount {
            container_path: "/x".to_owned(),
            host_path: "/y".to_owned(),
            uid_mappings: uids.to_vec(),
            gid_mappings: gids.to_vec(),
            ..Mount::default()
        };
        mounts::check(&[mount], pod).is_ok()
    };
    let own = [mapping(0, 131_072, 65_536)];
    let other = [mapping(0, 65_536, 65_536)];
    assert!(mount(&own, &own, Some(RANGE)) && mount(&[], &[], Some(RANGE)));
    assert!(!mount(&other, &other, Some(RANGE)) && !mount(&own, &[], Some(RANGE)));
    assert!(!mount(&own, &own, None) && mount(&[], &[], None));
}

#[test]
fn a_container_of_a_pod_with_a_user_namespace_is_in_one_with_its_ids() {
    let container = ContainerConfig {
        command: vec!["true".to_owned()],
        ..ContainerConfig::default()
    };
    let linux = |users: Option<UserRange>| {
        let request = SpecRequest {
            id: "c1",
            hostname: "web",
            container: &container,
            image: None,
            volumes: &[],
            users,
        };
        let spec = container_spec(&request).unwrap().spec;
        spec.linux().clone().unwrap()
    };
    let is_in_one = |linux: &Linux| {
        let mut namespaces = linux.namespaces().iter().flatten();
        namespaces.any(|one| one.typ() == LinuxNamespaceType::User && one.path().is_none())
    };
    let with = linux(Some(RANGE));
    assert!(is_in_one(&with));
    for mappings in [with.uid_mappings(), with.gid_mappings()] {
        let [mapping] = mappings.as_deref().unwrap() else {
            panic!("{mappings:?}");
        };
        let ids = (mapping.container_id(), mapping.host_id(), mapping.size());
        assert_eq!(ids, (0, 131_072, 65_536));
    }
    let without = linux(None);
    assert!(!is_in_one(&without) && without.uid_mappings().is_none());
}
