//! Resource usage of containers and pods, as a kubelet polls it.

use std::sync::PoisonError;
use std::time::Duration;

use futures_util::future::join_all;
use podvisor_cri_messages::{
    ContainerAttributes, ContainerStats, ContainerStatsFilter, CpuUsage, FilesystemIdentifier,
    FilesystemUsage, IoUsage, LinuxPodSandboxStats, MemoryUsage, NetworkInterfaceUsage,
    NetworkUsage, PodSandboxAttributes, PodSandboxStats, PodSandboxStatsFilter, ProcessUsage,
    PsiData, PsiStats, UInt64Value,
};

use crate::cni::InterfaceCounters;
use crate::cri::error::Result;
use crate::cri::node::matches_labels;
use crate::cri::node::{Container, Node, Pod, now};
use crate::cri::state::PodPhase;
use crate::sandbox::{self, ContainerStats as Figures, GuestStats};
use crate::stall_timeout::timeout;

/// How long a call that lists statistics waits for each guest. A kubelet polls every 10 s.
const GUEST_TIMEOUT: Duration = Duration::from_secs(5);

impl Node {
    /// ContainerStats.
    pub(in crate::cri) async fn container_stats(&self, id: &str) -> Result<ContainerStats> {
        let container = self.settled_container(id).await?;
        self.brief_stats(&container).await
    }

    async fn brief_stats(&self, container: &Container) -> Result<ContainerStats> {
        container.running()?;
        let client = container.pod.client()?;
        let mut figures = client.stats_in_brief(&container.id).await?;
        self.add_disks(container, &mut figures);
        Ok(self.shown_stats(container, &figures))
    }

    /// ListContainerStats.
    pub(in crate::cri) async fn list_container_stats(
        &self,
        filter: Option<ContainerStatsFilter>,
    ) -> Vec<ContainerStats> {
        let filter = filter.unwrap_or_default();
        self.all_settled().await;
        let mut wanted = self.containers();
        wanted.retain(|container| {
            container.with_record(|record| {
                record.id.starts_with(&filter.id)
                    && record.pod.starts_with(&filter.pod_sandbox_id)
                    && matches_labels(&record.config.labels, &filter.label_selector)
            })
        });
        // Containers that end meanwhile are left out.
        let stats = wanted
            .iter()
            .map(async |container| self.brief_stats(container).await.ok());
        let stats = in_time(stats);
        stats.await.into_iter().flatten().collect()
    }

    /// PodSandboxStats.
    pub(in crate::cri) async fn pod_stats(&self, id: &str) -> Result<PodSandboxStats> {
        let pod = self.settled_pod(id).await?;
        pod.client()?;
        Ok(self.stats_of(&pod).await)
    }

    /// ListPodSandboxStats.
    pub(in crate::cri) async fn list_pod_stats(
        &self,
        filter: Option<PodSandboxStatsFilter>,
    ) -> Vec<PodSandboxStats> {
        let filter = filter.unwrap_or_default();
        self.all_settled().await;
        let mut wanted = self.pods();
        wanted.retain(|pod| {
            pod.with_record(|record| {
                record.phase == PodPhase::Ready
                    && record.id.starts_with(&filter.id)
                    && matches_labels(&record.config.labels, &filter.label_selector)
            })
        });
        in_time(wanted.iter().map(|pod| self.stats_of(pod))).await
    }

    async fn stats_of(&self, pod: &Pod) -> PodSandboxStats {
        let mut containers = Vec::new();
        // A pod without running containers has a current timestamp, too.
        let mut sum = Figures {
            timestamp_ns: u64::try_from(now()).unwrap_or(0),
            ..Figures::default()
        };
        // If one of them is unlimited, the sum is, too.
        let mut limit = Some(0_u64);
        for container in self.containers_of(&pod.id) {
            if let Ok(figures) = self.figures(&container).await {
                add(&mut sum, &figures);
                let of_it = memory_limit(&figures);
                limit = limit.and_then(|limit| limit.checked_add(of_it?));
                containers.push(self.shown_stats(&container, &figures));
            }
        }
        let nano_cores = containers.iter().filter_map(|stats| {
            let cpu = stats.cpu.as_ref()?;
            Some(cpu.usage_nano_cores.as_ref()?.value)
        });
        let nano_cores = nano_cores.fold(0, u64::saturating_add);
        sum.memory_limit_bytes = limit.unwrap_or(0);
        let used = pod.used.lock();
        take_guest(&mut sum, &mut used.unwrap_or_else(PoisonError::into_inner));
        let record = pod.record();
        PodSandboxStats {
            attributes: Some(PodSandboxAttributes {
                id: record.id,
                metadata: record.config.metadata,
                labels: record.config.labels,
                annotations: record.config.annotations,
            }),
            linux: Some(LinuxPodSandboxStats {
                cpu: Some(cpu(&sum, Some(nano_cores))),
                memory: Some(memory(&sum)),
                network: self.network_usage(&pod.id),
                process: Some(ProcessUsage {
                    timestamp: timestamp(&sum),
                    process_count: value(sum.processes),
                }),
                containers,
                io: io(&sum),
            }),
            windows: None,
        }
    }

    fn network_usage(&self, pod: &str) -> Option<NetworkUsage> {
        // A pod that ends meanwhile has no namespace any more.
        network(self.cni.counters(pod).ok()?)
    }

    fn shown_stats(&self, container: &Container, figures: &Figures) -> ContainerStats {
        let record = container.record();
        let nano_cores = nano_cores(container, figures);
        let root = self.store.root().to_string_lossy().into_owned();
        ContainerStats {
            attributes: Some(ContainerAttributes {
                id: record.id,
                metadata: record.config.metadata,
                labels: record.config.labels,
                annotations: record.config.annotations,
            }),
            cpu: Some(cpu(figures, nano_cores)),
            memory: Some(memory(figures)),
            writable_layer: writable_layer(figures, root),
            swap: None,
            io: io(figures),
        }
    }

    pub(in crate::cri) async fn figures(&self, container: &Container) -> Result<Figures> {
        container.running()?;
        let mut figures = container.pod.client()?.stats(&container.id).await?;
        self.add_disks(container, &mut figures);
        Ok(figures)
    }
}

#[allow(clippy::unnecessary_wraps, reason = "the API's messages have options")]
fn value(value: u64) -> Option<UInt64Value> {
    Some(UInt64Value { value })
}

/// Waits for all statistics concurrently, and omits those that time out: one guest must not keep a
/// kubelet from seeing the others.
pub(in crate::cri) async fn in_time<F: Future>(figures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let answers = join_all(figures.map(|figures| timeout(GUEST_TIMEOUT, figures))).await;
    answers.into_iter().filter_map(Result::ok).collect()
}

fn timestamp(figures: &Figures) -> i64 {
    i64::try_from(figures.timestamp_ns).unwrap_or(i64::MAX)
}

/// Adds a container's figures to its pod's. They come from the guest and may be arbitrarily large.
fn add(sum: &mut Figures, figures: &Figures) {
    sum.timestamp_ns = sum.timestamp_ns.max(figures.timestamp_ns);
    // Stall times of containers overlap, so a pod's pressure is not their sum. The last answer has
    // the newest values of the guest.
    sum.psi = figures.guest_psi;
    sum.guest = figures.guest;
    for (sum, value) in [
        (&mut sum.cpu_usage_us, figures.cpu_usage_us),
        (&mut sum.memory_usage_bytes, figures.memory_usage_bytes),
        (
            &mut sum.memory_working_set_bytes,
            figures.memory_working_set_bytes,
        ),
        (&mut sum.memory_anon_bytes, figures.memory_anon_bytes),
        (&mut sum.page_faults, figures.page_faults),
        (&mut sum.major_page_faults, figures.major_page_faults),
        (&mut sum.processes, figures.processes),
    ] {
        *sum = sum.saturating_add(value);
    }
}

/// Replaces a pod's statistics by those of its guest, where reported. Sums over containers lack the
/// CPU time and counts of exited containers, and the volume memory of removed ones. `used` keeps
/// the last values for times without a running container.
fn take_guest(sum: &mut Figures, used: &mut GuestStats) {
    if let Some(guest) = sum.guest {
        *used = guest;
        sum.memory_usage_bytes = guest.memory_usage_bytes;
        sum.memory_working_set_bytes = guest.memory_working_set_bytes;
        sum.memory_anon_bytes = guest.memory_anon_bytes;
    }
    for (sum, used) in [
        (&mut sum.cpu_usage_us, used.cpu_usage_us),
        (&mut sum.page_faults, used.page_faults),
        (&mut sum.major_page_faults, used.major_page_faults),
    ] {
        *sum = used.max(*sum);
    }
}

/// Returns the network usage; `None` for a pod without an interface: a kubelet assumes that there
/// is a first one.
///
/// The list has the default interface, too, which the API excludes from it: a kubelet copies both
/// fields to its summary as they are, and there the default interface is also in the list, as it is
/// if the figures are cAdvisor's.
fn network(counters: Vec<InterfaceCounters>) -> Option<NetworkUsage> {
    let usage = |counters: InterfaceCounters| NetworkInterfaceUsage {
        name: counters.name,
        rx_bytes: value(counters.received.bytes),
        rx_errors: value(counters.received.errors),
        tx_bytes: value(counters.sent.bytes),
        tx_errors: value(counters.sent.errors),
    };
    let interfaces: Vec<_> = counters.into_iter().map(usage).collect();
    Some(NetworkUsage {
        timestamp: now(),
        default_interface: Some(interfaces.first()?.clone()),
        interfaces,
    })
}

/// Returns the size of a container's writable layer: memory of its guest, or a machine's copies of
/// disks. A kubelet adds it to the usage of the file system at `root`, as the pod's ephemeral
/// storage. `None` from a sandbox of an earlier version.
fn writable_layer(figures: &Figures, root: String) -> Option<FilesystemUsage> {
    (figures.writable_bytes > 0).then(|| FilesystemUsage {
        timestamp: timestamp(figures),
        fs_id: Some(FilesystemIdentifier { mountpoint: root }),
        used_bytes: value(figures.writable_used_bytes),
        inodes_used: value(figures.writable_used_inodes),
    })
}

fn nano_cores(container: &Container, figures: &Figures) -> Option<u64> {
    let used_ns = figures.cpu_usage_us.saturating_mul(1000);
    let rate = container.cpu_rate.lock();
    let mut rate = rate.unwrap_or_else(PoisonError::into_inner);
    rate.at(figures.timestamp_ns, used_ns)
}

fn cpu(figures: &Figures, nano_cores: Option<u64>) -> CpuUsage {
    CpuUsage {
        timestamp: timestamp(figures),
        usage_core_nano_seconds: value(figures.cpu_usage_us.saturating_mul(1000)),
        usage_nano_cores: nano_cores.map(|value| UInt64Value { value }),
        psi: figures.psi.cpu.map(pressure),
    }
}

/// Converts pressure stall information, which the kernel counts in microseconds.
fn pressure(stats: sandbox::PsiStats) -> PsiStats {
    let data = |data: sandbox::PsiData| PsiData {
        total: data.total_us.saturating_mul(1000),
        avg10: data.avg10.percent(),
        avg60: data.avg60.percent(),
        avg300: data.avg300.percent(),
    };
    PsiStats {
        full: Some(data(stats.full)),
        some: Some(data(stats.some)),
    }
}

/// Returns I/O pressure only, if it is counted.
fn io(figures: &Figures) -> Option<IoUsage> {
    figures.psi.io.map(|psi| IoUsage {
        timestamp: timestamp(figures),
        psi: Some(pressure(psi)),
    })
}

/// Returns the memory limit; `None` if it is unlimited, which the guest reports as 0 or as the
/// maximum number.
fn memory_limit(figures: &Figures) -> Option<u64> {
    Some(figures.memory_limit_bytes).filter(|limit| (1..1 << 62).contains(limit))
}

fn memory(figures: &Figures) -> MemoryUsage {
    let available =
        memory_limit(figures).map(|limit| limit.saturating_sub(figures.memory_working_set_bytes));
    MemoryUsage {
        timestamp: timestamp(figures),
        working_set_bytes: value(figures.memory_working_set_bytes),
        available_bytes: available.and_then(value),
        usage_bytes: value(figures.memory_usage_bytes),
        rss_bytes: value(figures.memory_anon_bytes),
        page_faults: value(figures.page_faults),
        major_page_faults: value(figures.major_page_faults),
        psi: figures.psi.memory.map(pressure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Psi;

    #[test]
    fn the_interfaces_of_a_pod_are_listed_with_the_default_one() {
        let listed = |names: &[&str]| {
            let counters = names.iter().map(|name| InterfaceCounters {
                name: (*name).to_owned(),
                ..InterfaceCounters::default()
            });
            let usage = network(counters.collect()).unwrap();
            assert!(usage.timestamp > 0);
            assert_eq!(usage.default_interface.unwrap(), usage.interfaces[0]);
            let names = usage.interfaces.into_iter().map(|usage| usage.name);
            names.collect::<Vec<_>>()
        };
        assert_eq!(listed(&["eth0"]), ["eth0"]);
        assert_eq!(listed(&["eth0", "net1"]), ["eth0", "net1"]);
        assert_eq!(network(Vec::new()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_answer_in_time_is_left_out() {
        let figures = [Some(1), None, Some(3)].map(async |answer| match answer {
            Some(number) => number,
            None => std::future::pending().await,
        });
        assert_eq!(in_time(figures.into_iter()).await, [1, 3]);
    }

    #[test]
    fn figures_of_containers_are_summed_however_great_they_are() {
        let mut sum = Figures {
            timestamp_ns: 7,
            ..Figures::default()
        };
        let figures = Figures {
            timestamp_ns: 5,
            cpu_usage_us: u64::MAX,
            processes: 2,
            pids_current: 9,
            ..Figures::default()
        };
        add(&mut sum, &figures);
        add(&mut sum, &figures);
        assert_eq!((sum.timestamp_ns, sum.cpu_usage_us), (7, u64::MAX));
        assert_eq!(sum.processes, 4);
    }

    #[test]
    fn what_a_pod_has_used_does_not_shrink_with_the_containers_that_run() {
        let guest = |cpu_usage_us| GuestStats {
            cpu_usage_us,
            memory_usage_bytes: 100,
            memory_working_set_bytes: 90,
            page_faults: 5,
            ..GuestStats::default()
        };
        let container = |cpu_usage_us, of_all| Figures {
            cpu_usage_us,
            memory_usage_bytes: 30,
            processes: 2,
            guest: of_all,
            ..Figures::default()
        };
        let mut used = GuestStats::default();
        let mut pod = |containers: &[Figures]| {
            let mut sum = Figures::default();
            containers.iter().for_each(|figures| add(&mut sum, figures));
            take_guest(&mut sum, &mut used);
            sum
        };
        let two = pod(&[
            container(40, Some(guest(61))),
            container(20, Some(guest(62))),
        ]);
        assert_eq!(
            (two.cpu_usage_us, two.page_faults, two.processes),
            (62, 5, 4)
        );
        assert_eq!(
            (two.memory_usage_bytes, two.memory_working_set_bytes),
            (100, 90)
        );
        let one = pod(&[container(21, Some(guest(64)))]);
        assert_eq!((one.cpu_usage_us, one.processes), (64, 2));
        let none = pod(&[]);
        assert_eq!(
            (none.cpu_usage_us, none.page_faults, none.processes),
            (64, 5, 0)
        );
        assert_eq!(none.memory_usage_bytes, 0);
        // A sandbox of an older version reports only sums.
        used = GuestStats::default();
        let mut old = Figures::default();
        add(&mut old, &container(40, None));
        take_guest(&mut old, &mut used);
        assert_eq!((old.cpu_usage_us, old.memory_usage_bytes), (40, 30));
    }

    #[test]
    fn pressure_is_told_where_it_is_counted_and_a_pods_is_its_guests() {
        let none = Figures::default();
        assert_eq!((cpu(&none, None).psi, memory(&none).psi), (None, None));
        assert_eq!(io(&none), None);
        let waited = |total_us| {
            Some(sandbox::PsiStats {
                some: sandbox::PsiData {
                    total_us,
                    avg10: 1234.into(),
                    ..sandbox::PsiData::default()
                },
                ..sandbox::PsiStats::default()
            })
        };
        let figures = Figures {
            timestamp_ns: 5,
            psi: Psi {
                cpu: waited(1),
                memory: waited(2),
                io: waited(u64::MAX),
            },
            guest_psi: Psi {
                cpu: waited(7),
                ..Psi::default()
            },
            ..Figures::default()
        };
        let some = |psi: Option<PsiStats>| psi.unwrap().some.unwrap();
        let of_cpu = some(cpu(&figures, None).psi);
        assert_eq!(of_cpu.total, 1000);
        assert!((of_cpu.avg10 - 12.34).abs() < 1e-9);
        assert_eq!(some(memory(&figures).psi).total, 2000);
        let of_io = io(&figures).unwrap();
        assert_eq!((of_io.timestamp, some(of_io.psi).total), (5, u64::MAX));

        let mut sum = Figures::default();
        add(&mut sum, &figures);
        add(&mut sum, &figures);
        assert_eq!(sum.psi, figures.guest_psi);
    }

    #[test]
    fn the_writable_layer_is_counted_to_the_stores_file_system() {
        let figures = Figures {
            timestamp_ns: 3,
            writable_bytes: 100,
            writable_used_bytes: 40,
            writable_used_inodes: 2,
            ..Figures::default()
        };
        let root = || "/store".to_owned();
        assert_eq!(writable_layer(&Figures::default(), root()), None);
        let usage = writable_layer(&figures, root()).unwrap();
        assert_eq!(usage.fs_id.unwrap().mountpoint, "/store");
        assert_eq!((usage.timestamp, usage.used_bytes), (3, value(40)));
        assert_eq!(usage.inodes_used, value(2));
    }
}
