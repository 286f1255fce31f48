//! The limits of a pod as a whole, from the control group that the kubelet created for it.
//!
//! The request for a sandbox has the sum of the limits of the pod's containers, without saying that
//! some of them have none. And a limit of the pod itself is in the requests of all its containers
//! that have none of their own. Only the kubelet's group has the limits of the pod.

pub(in crate::cri) mod cgroup;
mod quantity;

use std::fs;
use std::path::Path;

use podvisor_cri_messages::{LinuxContainerResources, PodSandboxConfig};

use crate::sandbox::{CGROUP_ROOT, parse_cpu_max};

pub(in crate::cri) use quantity::parse as parse_quantity;

/// A bound on everything that belongs to a pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::cri) enum Bound {
    /// There is no control group to read it from.
    #[default]
    Unknown,
    /// Limited only by the node.
    Unlimited,
    /// For the containers, without the pod's overhead.
    At(u64),
}

/// The bounds of a pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::cri) struct PodBounds {
    /// In bytes.
    pub(in crate::cri) memory: Bound,
    pub(in crate::cri) milli_cpus: Bound,
}

impl PodBounds {
    pub(in crate::cri) fn of(pod: &PodSandboxConfig) -> Self {
        Self::read(Path::new(CGROUP_ROOT), pod)
    }

    fn read(root: &Path, pod: &PodSandboxConfig) -> Self {
        let Some(group) = cgroup::of_pod(pod) else {
            return Self::default();
        };
        let Ok(group) = group.strip_prefix("/") else {
            return Self::default();
        };
        let overhead = pod.linux.as_ref().and_then(|linux| linux.overhead.as_ref());
        let bound = |name: &str, parse: fn(&str) -> Option<u64>, overhead: u64| {
            let text = fs::read_to_string(root.join(group).join(name));
            match text.as_deref().map(str::trim) {
                Ok(text) if text.starts_with("max") => Bound::Unlimited,
                Ok(text) => parse(text).map_or(Bound::Unknown, |most| {
                    Bound::At(most.saturating_sub(overhead))
                }),
                Err(_) => Bound::Unknown,
            }
        };
        Self {
            memory: bound(
                "memory.max",
                |text| text.parse().ok(),
                overhead.map_or(0, memory_limit),
            ),
            milli_cpus: bound(
                "cpu.max",
                parse_cpu_max,
                overhead.map_or(0, |overhead| {
                    milli_cpus(overhead.cpu_quota, overhead.cpu_period).unwrap_or(0)
                }),
            ),
        }
    }
}

impl PodBounds {
    /// The bounds of a pod whose group is about to allow what `limits` say, where that is more: a
    /// kubelet (since 1.36) sets the limits of its group after the sandbox has taken them.
    pub(in crate::cri) fn raised_to(self, limits: &LinuxContainerResources) -> Self {
        let no_limit = -1;
        let raised = |bound: Bound, is_unlimited: bool, most: u64| match bound {
            Bound::At(_) if is_unlimited => Bound::Unlimited,
            Bound::At(now) => Bound::At(now.max(most)),
            Bound::Unknown | Bound::Unlimited => bound,
        };
        let cpus = milli_cpus(limits.cpu_quota, limits.cpu_period).unwrap_or(0);
        Self {
            memory: raised(
                self.memory,
                limits.memory_limit_in_bytes == no_limit,
                memory_limit(limits),
            ),
            milli_cpus: raised(self.milli_cpus, limits.cpu_quota == no_limit, cpus),
        }
    }
}

/// Limits that are about to be others, all of them.
#[derive(Debug, Clone, Copy)]
pub(in crate::cri) enum NewLimits<'a> {
    Container {
        id: &'a str,
        resources: &'a LinuxContainerResources,
    },
    /// Of the pod, whose record has them: its control group follows.
    Pod(&'a LinuxContainerResources),
}

impl NewLimits<'_> {
    /// The bounds of a pod with such limits.
    pub(in crate::cri) fn bounds(new: Option<Self>, pod: &PodSandboxConfig) -> PodBounds {
        match new {
            Some(Self::Pod(limits)) => PodBounds::of(pod).raised_to(limits),
            Some(Self::Container { .. }) | None => PodBounds::of(pod),
        }
    }
}

impl Bound {
    /// Returns `wanted`, or the bound if that is less.
    pub(in crate::cri) fn limit(self, wanted: u64) -> u64 {
        match self {
            Self::Unknown | Self::Unlimited => wanted,
            Self::At(most) => wanted.min(most),
        }
    }
}

/// Returns the memory limit in bytes; 0 without a limit.
pub(in crate::cri) fn memory_limit(resources: &LinuxContainerResources) -> u64 {
    u64::try_from(resources.memory_limit_in_bytes).unwrap_or(0)
}

/// Returns `quota` per `period` in thousandths of a CPU, rounded up; `None` if these are not a
/// limit.
pub(in crate::cri) fn milli_cpus(quota: i64, period: i64) -> Option<u64> {
    let positive = |number: i64| u64::try_from(number).ok().filter(|number| *number > 0);
    let (quota, period) = positive(quota).zip(positive(period))?;
    Some(quota.saturating_mul(1000).div_ceil(period))
}

#[cfg(test)]
mod tests {
    use podvisor_cri_messages::LinuxPodSandboxConfig;

    use super::*;

    #[test]
    fn the_kubelets_group_says_what_a_pod_may_use_beside_its_overhead() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("kubepods/pod1");
        let mut pod = PodSandboxConfig {
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: "/kubepods/pod1".to_owned(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let read = |pod: &PodSandboxConfig| {
            let bounds = PodBounds::read(root.path(), pod);
            (bounds.memory, bounds.milli_cpus)
        };
        let unknown = (Bound::Unknown, Bound::Unknown);
        assert_eq!(read(&pod), unknown);
        assert_eq!(read(&PodSandboxConfig::default()), unknown);
        fs::create_dir_all(&group).unwrap();
        let says = |memory: &str, cpu: &str| {
            fs::write(group.join("memory.max"), format!("{memory}\n")).unwrap();
            fs::write(group.join("cpu.max"), format!("{cpu}\n")).unwrap();
        };
        says("max", "max 100000");
        assert_eq!(read(&pod), (Bound::Unlimited, Bound::Unlimited));
        says("209715200", "150000 100000");
        assert_eq!(read(&pod), (Bound::At(200 << 20), Bound::At(1500)));
        pod.linux.as_mut().unwrap().overhead = Some(LinuxContainerResources {
            memory_limit_in_bytes: 50 << 20,
            cpu_quota: 50_000,
            cpu_period: 100_000,
            ..Default::default()
        });
        assert_eq!(read(&pod), (Bound::At(150 << 20), Bound::At(1000)));
        says("1", "1 0");
        assert_eq!(read(&pod), (Bound::At(0), Bound::Unknown));
        says("", "x y");
        assert_eq!(read(&pod), unknown);
    }

    #[test]
    fn what_the_kubelet_is_about_to_allow_counts() {
        let limits = |memory, quota| LinuxContainerResources {
            memory_limit_in_bytes: memory,
            cpu_quota: quota,
            cpu_period: 100_000,
            ..Default::default()
        };
        let at = |memory, milli_cpus| PodBounds {
            memory: Bound::At(memory),
            milli_cpus: Bound::At(milli_cpus),
        };
        let now = at(100, 1000);
        assert_eq!(now.raised_to(&limits(200, 200_000)), at(200, 2000));
        // The group is lowered last.
        assert_eq!(now.raised_to(&limits(50, 50_000)), now);
        assert_eq!(now.raised_to(&limits(0, 0)), now);
        let unlimited = PodBounds {
            memory: Bound::Unlimited,
            milli_cpus: Bound::Unlimited,
        };
        assert_eq!(now.raised_to(&limits(-1, -1)), unlimited);
        for same in [unlimited, PodBounds::default()] {
            assert_eq!(same.raised_to(&limits(200, 200_000)), same);
        }
    }

    #[test]
    fn what_is_wanted_stays_within_a_bound() {
        assert_eq!(Bound::At(5).limit(7), 5);
        assert_eq!(Bound::At(9).limit(7), 7);
        assert_eq!(Bound::Unlimited.limit(u64::MAX), u64::MAX);
        assert_eq!(Bound::Unknown.limit(7), 7);
    }
}
