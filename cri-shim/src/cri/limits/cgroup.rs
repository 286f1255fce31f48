//! The control group of a pod's machine. Its parent is the group that the kubelet created for the
//! pod, so that the pod's share of the node includes all of it, and the kubelet sees its usage.
//!
//! The kubelet's group has the limits of the pod's containers and the overhead of its RuntimeClass.
//! A guest that may become larger than that would be killed as a whole when it fills its memory
//! with cached files, so it is placed outside that group.

use std::fs;
use std::path::{Component, Path, PathBuf};

use podvisor_cri_messages::PodSandboxConfig;
use tracing::warn;

use crate::sandbox::{CGROUP_ROOT, DEFAULT_CGROUP_PARENT, MachineLimits, lacks_room};

/// Returns the parent of a machine's group, as a path from the hierarchy's root.
pub(in crate::cri) fn parent(config: &PodSandboxConfig, limits: MachineLimits) -> String {
    let linux = config.linux.as_ref();
    let named = linux.map_or("", |linux| linux.cgroup_parent.as_str());
    of_kubelet(Path::new(CGROUP_ROOT), named, limits)
        .unwrap_or_else(|| DEFAULT_CGROUP_PARENT.to_owned())
}

/// Returns the group that the kubelet names for a pod, as a path from the hierarchy's root.
pub(in crate::cri) fn of_pod(config: &PodSandboxConfig) -> Option<PathBuf> {
    path(&config.linux.as_ref()?.cgroup_parent)
}

/// Whether a pod's machine, a process, is outside of the group that the kubelet names for the pod.
pub(in crate::cri) fn is_outside(config: &PodSandboxConfig, pid: u32) -> bool {
    let (Some(named), Some(own)) = (of_pod(config), of_process(pid)) else {
        return false;
    };
    !own.starts_with(named)
}

/// Returns the group of a process, as a path from the hierarchy's root.
fn of_process(pid: u32) -> Option<PathBuf> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(PathBuf::from(own))
}

/// Returns the group that the kubelet names, if it exists and has room.
fn of_kubelet(root: &Path, named: &str, limits: MachineLimits) -> Option<String> {
    let path = path(named)?;
    match lacks_room(&root.join(path.strip_prefix("/").ok()?), limits) {
        None => Some(path.to_str()?.to_owned()),
        Some(why) => {
            warn!(
                group = named,
                why,
                "the machine is not below the pod's control group, which has no room for it (the \
                 overhead of a RuntimeClass makes room)"
            );
            None
        }
    }
}

/// Returns the path from the hierarchy's root of a group that is named by a path or by a systemd
/// slice: `a-b.slice` is `/a.slice/a-b.slice`.
fn path(named: &str) -> Option<PathBuf> {
    let last = Path::new(named).file_name()?.to_str()?;
    let path = match last.strip_suffix(".slice") {
        Some(slice) => {
            let ends = slice.match_indices('-').map(|(at, _)| at);
            let names = ends.chain([slice.len()]).map(|end| &slice[..end]);
            let slices = names.map(|name| format!("{name}.slice"));
            Path::new("/").join(slices.collect::<PathBuf>())
        }
        None => Path::new("/").join(named),
    };
    let is_below = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    path.components().all(is_below).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_named_by_paths_and_by_slices() {
        let path = |named| path(named).map(|path| path.to_str().unwrap().to_owned());
        let is = |path: &str| Some(path.to_owned());
        let cgroupfs = "/kubepods/burstable/pod1-2";
        assert_eq!(path(cgroupfs), is(cgroupfs));
        assert_eq!(path("kubepods/pod1"), is("/kubepods/pod1"));
        assert_eq!(
            path("kubepods-besteffort-pod1_2.slice"),
            is("/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1_2.slice")
        );
        // Some kubelets pass the whole path.
        assert_eq!(
            path("/kubepods.slice/kubepods-pod1.slice"),
            is("/kubepods.slice/kubepods-pod1.slice")
        );
        for none in ["", "/", "..", "/a/../../b"] {
            assert_eq!(path(none), None, "{none}");
        }
    }

    #[test]
    fn a_process_is_outside_of_a_group_that_is_not_above_it() {
        let config = |parent: &str| PodSandboxConfig {
            linux: Some(podvisor_cri_messages::LinuxPodSandboxConfig {
                cgroup_parent: parent.to_owned(),
                ..Default::default()
            }),
            ..PodSandboxConfig::default()
        };
        let this = std::process::id();
        if of_process(this).is_none() {
            // The host has no cgroup v2.
            return;
        }
        assert!(is_outside(&config("/kubepods/no-such-pod"), this));
        assert!(!is_outside(&config(""), this));
        let own = of_process(this).unwrap();
        if own != Path::new("/") {
            assert!(!is_outside(&config(own.to_str().unwrap()), this));
        }
        assert!(!is_outside(&config("/kubepods/no-such-pod"), u32::MAX));
    }

    #[test]
    fn the_kubelets_group_is_taken_when_it_is_there_and_has_room() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("kubepods/pod1");
        std::fs::create_dir_all(&group).unwrap();
        let limits = MachineLimits {
            vcpus: 1,
            memory: 256 << 20,
            growth: 0,
        };
        let found = || of_kubelet(root.path(), "/kubepods/pod1", limits);
        assert_eq!(found(), None);
        std::fs::write(group.join("cpu.max"), "max 100000").unwrap();
        std::fs::write(group.join("memory.max"), "max").unwrap();
        assert_eq!(found().as_deref(), Some("/kubepods/pod1"));
        std::fs::write(group.join("memory.max"), "67108864").unwrap();
        assert_eq!(found(), None);
    }
}
