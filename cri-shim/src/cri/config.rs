//! Settings of the daemon.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use podvisor_cri_messages::{LinuxContainerResources, PodSandboxConfig};

use super::image_names::ImageNames;
use super::limits::{Bound, PodBounds, memory_limit, milli_cpus};
use crate::cni::CniOptions;
use crate::registries::Registries;
use crate::sandbox::{JailLayer, JailMode, MEMORY_OVERHEAD, memory_overhead};

/// The runtime handler that the daemon serves in addition to the empty name.
pub(crate) const HANDLER: &str = "podvisor";

/// The runtime handler of pods that are virtual machines.
pub(crate) const VM_HANDLER: &str = "podvisor-vm";

/// The runtime handler of pods that are always created in the other runtime.
pub(crate) const HOST_HANDLER: &str = "host";

/// A guest's memory beyond what its containers may use, in bytes, unless set otherwise.
pub(crate) const DEFAULT_MEMORY: u64 = 256 << 20;

/// How much a guest may grow while it runs, in bytes, unless set otherwise. This only reserves
/// addresses, which cost nothing.
pub(crate) const DEFAULT_GROWTH: u64 = 16 << 30;

/// vCPUs by which a guest may grow. Its kernel keeps 180 KiB for each.
pub(crate) const DEFAULT_CPU_GROWTH: u8 = 7;

/// Images that the containers of one pod may have at the same time: a machine has room for 19
/// devices, of which up to nine are others (vsock, random numbers, the shared directory, balloon,
/// memory, cards).
pub(crate) const POD_IMAGE_SLOTS: u8 = 10;

/// Settings of the daemon.
#[derive(Debug, Clone)]
pub(crate) struct ServeConfig {
    /// The socket.
    pub(crate) listen: PathBuf,
    /// The socket for calls about virtual machines.
    pub(crate) node_api: PathBuf,
    /// State that survives a reboot of the host: images, database, records of networks.
    pub(crate) root: PathBuf,
    /// State that does not: sandboxes' directories, network namespaces.
    pub(crate) state: PathBuf,
    /// Guests of the default runtime handler, which has two names: [`HANDLER`] and the empty one.
    pub(crate) guest: GuestSettings,
    /// Guests of other runtime handlers, by name.
    pub(crate) handlers: BTreeMap<String, GuestSettings>,
    /// Pods that are virtual machines.
    pub(crate) vm: VmSettings,
    /// Initramfs of guests, with the agent.
    pub(crate) initramfs: PathBuf,
    /// Networks.
    pub(crate) cni: CniOptions,
    /// Directories of CDI specifications; later ones go before earlier ones.
    pub(crate) cdi_spec_dirs: Vec<PathBuf>,
    /// How registries are reached.
    pub(crate) registries: Registries,
    /// Which signatures images need (containers-policy.json(5)), read anew for each pull; `None`:
    /// none.
    pub(crate) signature_policy: Option<PathBuf>,
    /// Short names of disk images.
    pub(crate) image_names: ImageNames,
    /// Where health and metrics are served over HTTP.
    pub(crate) metrics: Option<SocketAddr>,
    /// Directory for the console output of guests' kernels, one file per pod; a console makes
    /// guests boot slower.
    pub(crate) consoles: Option<PathBuf>,
    /// Where templates of pods' machines are kept; `None`: each pod's boots.
    pub(crate) templates: Option<PathBuf>,
    /// Whether the pods' processes are jailed.
    pub(crate) jail: JailMode,
    /// Whether they may serve volumes as nobody on the node, where these can be mounted so.
    pub(crate) map_users: bool,
    /// Layers of their confinement without which they do not start.
    pub(crate) required_layers: Vec<JailLayer>,
    /// The runtime for pods that need the node's own namespaces; `None`: they are refused.
    pub(crate) host_runtime: Option<HostSettings>,
}

/// Settings of the other runtime of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostSettings {
    /// Its socket.
    pub(crate) socket: PathBuf,
    /// Whether pods without a runtime handler are its.
    pub(crate) is_default: bool,
}

/// What boots the disks of pods that are virtual machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VmSettings {
    /// The loader's kernel.
    pub(crate) kernel: PathBuf,
    /// Its initramfs, with the loader.
    pub(crate) initramfs: PathBuf,
    /// What the loader finds in an image is kept for the image's next machines.
    pub(crate) keeps_kernels: bool,
    /// The UEFI firmware of machines that boot by one; it need not be there.
    pub(crate) firmware: PathBuf,
    /// The guest agent that is installed where a pod asks for it; it need not be there.
    pub(crate) guest_agent: PathBuf,
}

/// Settings of the guests of a runtime handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GuestSettings {
    /// Their kernel.
    pub(crate) kernel: PathBuf,
    /// How large they are.
    pub(crate) sizes: Sizes,
}

impl ServeConfig {
    /// Returns the guest settings of a runtime handler; `None` if it is unknown.
    pub(super) fn guest(&self, handler: &str) -> Option<&GuestSettings> {
        match handler {
            // A virtual machine brings its own kernel, but has these sizes.
            "" | HANDLER | VM_HANDLER => Some(&self.guest),
            name => self.handlers.get(name),
        }
    }

    /// Returns the names of the runtime handlers whose kernel exists, after the default's two,
    /// which are always listed: without the default's kernel the node is not ready.
    pub(super) fn usable_handlers(&self) -> impl Iterator<Item = &str> {
        let named = self.handlers.iter();
        let usable = named.filter(|(_, guest)| guest.kernel.exists());
        let usable = usable.map(|(name, _)| name.as_str());
        let vm = self.vm.fault().is_none().then_some(VM_HANDLER);
        ["", HANDLER].into_iter().chain(usable).chain(vm)
    }

    /// Returns the names of all runtime handlers, the default's two first and that of virtual
    /// machines last.
    pub(super) fn handler_names(&self) -> impl Iterator<Item = &str> {
        let named = self.handlers.keys().map(String::as_str);
        let vm = std::iter::once(VM_HANDLER);
        ["", HANDLER].into_iter().chain(named).chain(vm)
    }

    /// Returns the path of a pod's console log; `None` if consoles are off.
    pub(super) fn console(&self, pod: &str) -> Option<PathBuf> {
        let dir = self.consoles.as_ref()?;
        Some(dir.join(format!("{pod}.log")))
    }
}

/// How large guests are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Virtual CPUs of a pod without a CPU limit.
    pub(crate) vcpus: u8,
    /// Maximum number of virtual CPUs of a pod.
    pub(crate) max_vcpus: u8,
    /// Bytes for kernel, agent and writable layers. The pod's memory limit is added, and the part
    /// of its overhead that exceeds this and the machine's process.
    pub(crate) memory: u64,
    /// Bytes by which a guest may grow while it runs.
    pub(crate) growth: u64,
    /// vCPUs by which a guest may grow while it runs, up to `max_vcpus`.
    pub(crate) cpu_growth: u8,
    /// Images that the containers of one pod may have at the same time.
    pub(crate) image_slots: u8,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            vcpus: 1,
            max_vcpus: 64,
            memory: DEFAULT_MEMORY,
            growth: DEFAULT_GROWTH,
            cpu_growth: DEFAULT_CPU_GROWTH,
            image_slots: POD_IMAGE_SLOTS,
        }
    }
}

impl Sizes {
    /// Returns the bytes of memory for a pod with these limits, overhead and bounds, whose
    /// containers have limits of `containers` bytes in all: rounded down to whole MiB, so that an
    /// overhead that has room for the machine has room with any limit.
    pub(super) fn memory(&self, pod: &PodSandboxConfig, bounds: PodBounds, containers: u64) -> u64 {
        let linux = pod.linux.as_ref();
        let limit = |resources: Option<&LinuxContainerResources>| resources.map_or(0, memory_limit);
        let own = limit(linux.and_then(|linux| linux.resources.as_ref()));
        let overhead = limit(linux.and_then(|linux| linux.overhead.as_ref()));
        let base = overhead.saturating_sub(MEMORY_OVERHEAD).max(self.memory);
        let mut memory = base.saturating_add(bounds.memory.limit(own.max(containers)));
        if overhead >= self.memory.saturating_add(MEMORY_OVERHEAD) {
            // The tables for pages of a large guest, for which no overhead has room.
            let tables = memory_overhead(memory, self.growth) - MEMORY_OVERHEAD;
            memory = memory.saturating_sub(tables).max(self.memory);
        }
        memory - memory % (1 << 20)
    }

    /// Returns the vCPUs for a pod with these limits and bounds, whose containers have limits of
    /// `containers` thousandths of a CPU in all.
    pub(super) fn vcpus(&self, pod: &PodSandboxConfig, bounds: PodBounds, containers: u64) -> u8 {
        let linux = pod.linux.as_ref();
        let own = linux.and_then(|linux| linux.resources.as_ref());
        let own = own.map_or(0, |own| self.milli_cpus(own)).max(containers);
        let usual = u64::from(self.vcpus);
        // The overhead is for the process around them.
        let cpus = match (bounds.milli_cpus.limit(own), bounds.milli_cpus) {
            (0, _) => usual,
            // The limits are those of only some of its containers.
            (own, Bound::Unlimited) => own.div_ceil(1000).max(usual),
            (own, _) => own.div_ceil(1000),
        };
        let cpus = u8::try_from(cpus).unwrap_or(u8::MAX);
        cpus.clamp(1, self.max_vcpus.max(1))
    }

    /// Returns a CPU limit in thousandths of a CPU; 0 without a limit. Without a limit, the CPU
    /// request counts if it is more than a guest has by default: pods with exclusive CPUs have no
    /// quota.
    pub(super) fn milli_cpus(&self, resources: &LinuxContainerResources) -> u64 {
        milli_cpus(resources.cpu_quota, resources.cpu_period).unwrap_or_else(|| {
            let shares = u64::try_from(resources.cpu_shares).unwrap_or(0);
            let asked = shares.saturating_mul(1000).div_ceil(1024);
            let usual = u64::from(self.vcpus) * 1000;
            if asked > usual { asked } else { 0 }
        })
    }

    /// Returns the maximum number of vCPUs of a guest that starts with `vcpus`.
    pub(super) fn most_vcpus(&self, vcpus: u8) -> u8 {
        let most = vcpus.saturating_add(self.cpu_growth);
        most.min(self.max_vcpus).max(vcpus)
    }

    /// Returns the virtual CPUs and bytes of memory for a pod with these limits, overhead and
    /// bounds.
    pub(super) fn of_pod(&self, pod: &PodSandboxConfig, bounds: PodBounds) -> (u8, u64) {
        (self.vcpus(pod, bounds, 0), self.memory(pod, bounds, 0))
    }
}

#[cfg(test)]
mod tests {
    use podvisor_cri_messages::LinuxPodSandboxConfig;

    use super::*;
    use crate::sandbox::MachineLimits;

    const UNKNOWN: PodBounds = PodBounds {
        memory: Bound::Unknown,
        milli_cpus: Bound::Unknown,
    };

    fn pod(quota: i64, memory: i64) -> PodSandboxConfig {
        let resources = LinuxContainerResources {
            cpu_quota: quota,
            cpu_period: 100_000,
            memory_limit_in_bytes: memory,
            ..Default::default()
        };
        PodSandboxConfig {
            linux: Some(LinuxPodSandboxConfig {
                resources: Some(resources),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    #[test]
    fn a_guest_is_as_large_as_its_pods_limits_and_what_it_needs_itself() {
        let sizes = Sizes::default();
        assert_eq!(
            sizes.of_pod(&PodSandboxConfig::default(), UNKNOWN),
            (1, 256 << 20)
        );
        assert_eq!(sizes.of_pod(&pod(0, 0), UNKNOWN), (1, 256 << 20));
        assert_eq!(sizes.of_pod(&pod(150_000, 1), UNKNOWN), (2, 256 << 20));
        assert_eq!(
            sizes.of_pod(&pod(50_000, 1 << 30), UNKNOWN),
            (1, 1280 << 20)
        );
        assert_eq!(sizes.of_pod(&pod(i64::MAX, -1), UNKNOWN), (64, 256 << 20));
    }

    #[test]
    fn a_guest_gets_whole_cpus_for_what_its_pod_or_its_containers_may_use() {
        let sizes = Sizes {
            max_vcpus: 6,
            ..Sizes::default()
        };
        assert_eq!(sizes.vcpus(&pod(0, 0), UNKNOWN, 0), 1);
        assert_eq!(sizes.vcpus(&pod(0, 0), UNKNOWN, 2500), 3);
        assert_eq!(sizes.vcpus(&pod(100_000, 0), UNKNOWN, 1001), 2);
        assert_eq!(sizes.vcpus(&pod(300_000, 0), UNKNOWN, 1001), 3);
        assert_eq!(sizes.vcpus(&pod(300_000, 0), UNKNOWN, u64::MAX), 6);
    }

    #[test]
    fn a_guest_gets_the_cpus_that_are_promised_where_none_are_a_limit() {
        let sizes = Sizes {
            vcpus: 2,
            ..Sizes::default()
        };
        let with_shares = |quota: i64, shares: i64| {
            let mut pod = pod(quota, 0);
            let linux = pod.linux.as_mut().unwrap();
            linux.resources.as_mut().unwrap().cpu_shares = shares;
            sizes.vcpus(&pod, UNKNOWN, 0)
        };
        assert_eq!(with_shares(-1, 8 * 1024), 8);
        assert_eq!(with_shares(0, 2 * 1024 + 1), 3);
        assert_eq!(with_shares(0, 2), 2);
        assert_eq!(with_shares(50_000, 8 * 1024), 1);
        assert_eq!(with_shares(0, i64::MAX), 64);
    }

    #[test]
    fn a_guest_grows_to_what_the_settings_say() {
        let sizes = Sizes {
            max_vcpus: 6,
            cpu_growth: 3,
            ..Sizes::default()
        };
        assert_eq!([1, 4, 8].map(|vcpus| sizes.most_vcpus(vcpus)), [4, 6, 8]);
    }

    #[test]
    fn limits_of_containers_count_where_they_are_more_than_their_pods() {
        let sizes = Sizes::default();
        let memory = |containers| sizes.memory(&pod(0, 64 << 20), UNKNOWN, containers);
        assert_eq!(memory(0), 320 << 20);
        assert_eq!(memory(64 << 20), 320 << 20);
        assert_eq!(memory(100 << 20), 356 << 20);
        assert_eq!(memory(u64::MAX), u64::MAX >> 20 << 20);
    }

    #[test]
    fn what_the_pod_may_use_bounds_its_containers_together() {
        let sizes = Sizes {
            vcpus: 4,
            ..Sizes::default()
        };
        let at = PodBounds {
            memory: Bound::At(200 << 20),
            milli_cpus: Bound::At(1500),
        };
        // The pod's limit applies to each of its two containers.
        let pod = pod(150_000, 200 << 20);
        assert_eq!(sizes.memory(&pod, at, 400 << 20), 456 << 20);
        assert_eq!(sizes.vcpus(&pod, at, 3000), 2);
        let unlimited = PodBounds {
            memory: Bound::Unlimited,
            milli_cpus: Bound::Unlimited,
        };
        // A container other than those with limits may use more.
        assert_eq!(sizes.vcpus(&pod, unlimited, 1500), 4);
        assert_eq!(sizes.vcpus(&pod, unlimited, 7000), 7);
        assert_eq!(sizes.vcpus(&pod, UNKNOWN, 1500), 2);
    }

    #[test]
    fn overhead_is_for_the_guests_kernel_and_the_process_around_it() {
        let mut pod = pod(100_000, 64 << 20);
        let linux = pod.linux.as_mut().unwrap();
        linux.overhead = linux.resources.clone();
        let sizes = Sizes::default();
        assert_eq!(sizes.of_pod(&pod, UNKNOWN), (1, 320 << 20));
        let overhead = pod.linux.as_mut().unwrap().overhead.as_mut().unwrap();
        overhead.memory_limit_in_bytes = 1 << 30;
        let memory = (64 << 20) + (1 << 30) - MEMORY_OVERHEAD;
        assert_eq!(sizes.of_pod(&pod, UNKNOWN), (1, memory));
    }

    #[test]
    fn the_recommended_overhead_has_room_for_machines_of_limits_that_are_no_whole_mib() {
        let overhead = 352 << 20;
        let large = [7 << 30, 64_000_000_000, 512 << 30];
        let small = [1, 100_000_000, 500_000_000, 1_000_000_000, 1 << 30];
        for limit in small.into_iter().chain(large) {
            let mut pod = pod(100_000, limit);
            pod.linux.as_mut().unwrap().overhead = Some(LinuxContainerResources {
                memory_limit_in_bytes: overhead,
                ..Default::default()
            });
            // The kernel rounds limits down to whole pages.
            let group = u64::try_from(limit + overhead).unwrap() >> 12 << 12;
            let within = Bound::At(group - u64::try_from(overhead).unwrap());
            for memory in [Bound::Unknown, within] {
                let bounds = PodBounds { memory, ..UNKNOWN };
                let sizes = Sizes::default();
                let (vcpus, memory) = sizes.of_pod(&pod, bounds);
                let growth = sizes.growth;
                let machine = MachineLimits {
                    vcpus,
                    memory,
                    growth,
                }
                .memory_max();
                assert!(machine <= group, "{limit}: {machine} in {group}");
            }
        }
    }
}
