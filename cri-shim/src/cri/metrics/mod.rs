//! Metrics of pods and containers under cAdvisor's names, for a kubelet that collects them from the
//! runtime.
//!
//! As critest requires, each described metric has a value for each running container: what a guest
//! does not have (swap) or does not count (load) is 0. Only those of [`pressure`] are omitted if
//! the guest's kernel does not count it.

mod pressure;

use podvisor_cri_messages::{
    ContainerMetrics, LinuxContainerResources, Metric, MetricDescriptor, MetricType,
    PodSandboxMetadata, PodSandboxMetrics, UInt64Value,
};

use super::containers::in_time;
use super::node::{Container, Node, Pod, now};
use super::state::{ContainerPhase, PodPhase};
use crate::cni::InterfaceCounters;
use crate::sandbox::ContainerStats as Figures;

/// Labels that every metric starts with. A kubelet adds none: it takes those of Kubernetes from the
/// runtime, too.
const BASE: [&str; 6] = ["id", "name", "image", "namespace", "pod", "container"];

/// The `container` label of a pod's own metrics.
const NO_CONTAINER: &str = "POD";

/// The values from which a container's metrics are read.
struct Source<'a> {
    figures: &'a Figures,
    resources: &'a LinuxContainerResources,
    started_at_seconds: u64,
}

/// A metric of each container: its additional labels with their values, and how it is read.
struct ContainerMetric {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    labels: &'static [(&'static str, &'static str)],
    read: fn(&Source<'_>) -> u64,
}

/// A metric of each interface of a pod; the interface's name is an additional label.
struct InterfaceMetric {
    name: &'static str,
    help: &'static str,
    read: fn(&InterfaceCounters) -> u64,
}

const SECOND_US: u64 = 1_000_000;

/// The kernel's defaults.
const CPU_PERIOD_US: u64 = 100_000;
const CPU_SHARES: u64 = 1024;

/// Disks belong to the guest; none is the node's.
const DISK: (&str, &str) = ("device", "");

/// The file system that contains containers' writable layers.
const WRITABLE: (&str, &str) = ("device", "tmpfs");

/// Returns a limit as requested; 0 if it is unset or unlimited.
fn limit(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// Returns a limit, or the kernel's default if it is unset.
fn limit_or(value: i64, default: u64) -> u64 {
    match limit(value) {
        0 => default,
        limit => limit,
    }
}

const fn counter(
    name: &'static str,
    help: &'static str,
    read: fn(&Source<'_>) -> u64,
) -> ContainerMetric {
    ContainerMetric {
        name,
        help,
        kind: MetricType::Counter,
        labels: &[],
        read,
    }
}

const fn gauge(
    name: &'static str,
    help: &'static str,
    read: fn(&Source<'_>) -> u64,
) -> ContainerMetric {
    ContainerMetric {
        kind: MetricType::Gauge,
        ..counter(name, help, read)
    }
}

const fn labelled(
    labels: &'static [(&'static str, &'static str)],
    metric: ContainerMetric,
) -> ContainerMetric {
    ContainerMetric { labels, ..metric }
}

const TASKS_HELP: &str = "Threads by what they do; waits for disks are among `uninterruptible`";
const BLKIO_HELP: &str = "Bytes that disks moved, by direction";

const OF_CONTAINERS: &[ContainerMetric] = &[
    labelled(
        &[("cpu", "total")],
        counter(
            "container_cpu_usage_seconds_total",
            "CPU time used, in seconds",
            |s| s.figures.cpu_usage_us / SECOND_US,
        ),
    ),
    counter(
        "container_cpu_user_seconds_total",
        "CPU time used by programs themselves, in seconds",
        |s| s.figures.cpu_user_us / SECOND_US,
    ),
    counter(
        "container_cpu_system_seconds_total",
        "CPU time used by the kernel for programs, in seconds",
        |s| s.figures.cpu_system_us / SECOND_US,
    ),
    gauge(
        "container_cpu_load_average_10s",
        "CPU load of the last 10 seconds; 0, nobody counts it",
        |_| 0,
    ),
    counter(
        "container_cpu_cfs_periods_total",
        "Periods of the CPU limit",
        |s| s.figures.cpu_periods,
    ),
    counter(
        "container_cpu_cfs_throttled_periods_total",
        "Periods in which the CPU limit held programs up",
        |s| s.figures.cpu_throttled_periods,
    ),
    counter(
        "container_cpu_cfs_throttled_seconds_total",
        "Time for which the CPU limit held programs up, in seconds",
        |s| s.figures.cpu_throttled_us / SECOND_US,
    ),
    gauge(
        "container_memory_usage_bytes",
        "Memory in use, caches included",
        |s| s.figures.memory_usage_bytes,
    ),
    gauge(
        "container_memory_working_set_bytes",
        "Memory in use that the kernel cannot simply give up",
        |s| s.figures.memory_working_set_bytes,
    ),
    gauge("container_memory_rss", "Anonymous memory in bytes", |s| {
        s.figures.memory_anon_bytes
    }),
    gauge("container_memory_cache", "Memory of files in bytes", |s| {
        s.figures.memory_file_bytes
    }),
    gauge(
        "container_memory_mapped_file",
        "Memory of files that programs have mapped, in bytes",
        |s| s.figures.memory_mapped_file_bytes,
    ),
    gauge(
        "container_memory_kernel_usage",
        "Memory of the kernel for the container in bytes",
        |s| s.figures.memory_kernel_bytes,
    ),
    gauge(
        "container_memory_max_usage_bytes",
        "Most memory that was in use at once",
        |s| s.figures.memory_peak_bytes,
    ),
    gauge(
        "container_memory_swap",
        "Swap in use in bytes; 0, guests have none",
        |_| 0,
    ),
    counter(
        "container_memory_failcnt",
        "Times that the use of memory came to its limit",
        |s| s.figures.memory_limit_hits,
    ),
    labelled(
        &[("failure_type", "pgfault"), ("scope", "container")],
        counter(
            "container_memory_failures_total",
            "Page faults by their type",
            |s| s.figures.page_faults,
        ),
    ),
    labelled(
        &[("failure_type", "pgmajfault"), ("scope", "container")],
        counter(
            "container_memory_failures_total",
            "Page faults by their type",
            |s| s.figures.major_page_faults,
        ),
    ),
    counter(
        "container_oom_events_total",
        "Programs that were killed for want of memory",
        |s| s.figures.oom_kills,
    ),
    gauge(
        "container_spec_memory_limit_bytes",
        "Memory limit; 0 is none",
        |s| s.figures.memory_limit_bytes,
    ),
    gauge(
        "container_spec_memory_swap_limit_bytes",
        "Limit of memory and swap together, as it was asked for; 0 is none",
        |s| limit(s.resources.memory_swap_limit_in_bytes),
    ),
    gauge(
        "container_spec_memory_reservation_limit_bytes",
        "Memory that the container keeps when there is little (memory.min); 0 is none",
        |s| {
            let reservation = s.resources.unified.get("memory.min");
            reservation.and_then(|text| text.parse().ok()).unwrap_or(0)
        },
    ),
    gauge(
        "container_spec_cpu_period",
        "Period of the CPU limit in microseconds",
        |s| limit_or(s.resources.cpu_period, CPU_PERIOD_US),
    ),
    gauge(
        "container_spec_cpu_quota",
        "CPU time in each period, in microseconds; 0 is no limit",
        |s| limit(s.resources.cpu_quota),
    ),
    gauge(
        "container_spec_cpu_shares",
        "Share of CPU time beside the pod's other containers",
        |s| limit_or(s.resources.cpu_shares, CPU_SHARES),
    ),
    gauge("container_processes", "Processes", |s| s.figures.processes),
    gauge("container_threads", "Threads", |s| s.figures.pids_current),
    gauge(
        "container_threads_max",
        "Most threads; 0 is no limit",
        |s| s.figures.pids_limit,
    ),
    labelled(
        &[("state", "sleeping")],
        gauge("container_tasks_state", TASKS_HELP, |s| {
            s.figures.tasks_sleeping
        }),
    ),
    labelled(
        &[("state", "running")],
        gauge("container_tasks_state", TASKS_HELP, |s| {
            s.figures.tasks_running
        }),
    ),
    labelled(
        &[("state", "stopped")],
        gauge("container_tasks_state", TASKS_HELP, |s| {
            s.figures.tasks_stopped
        }),
    ),
    labelled(
        &[("state", "uninterruptible")],
        gauge("container_tasks_state", TASKS_HELP, |s| {
            s.figures.tasks_uninterruptible
        }),
    ),
    labelled(
        &[("state", "iowaiting")],
        gauge("container_tasks_state", TASKS_HELP, |_| 0),
    ),
    gauge("container_file_descriptors", "Open descriptors", |s| {
        s.figures.descriptors
    }),
    gauge("container_sockets", "Open sockets", |s| s.figures.sockets),
    labelled(
        &[("ulimit", "max_open_files")],
        gauge(
            "container_ulimits_soft",
            "Soft limits of the container's own process",
            |s| s.figures.descriptor_limit,
        ),
    ),
    labelled(
        &[WRITABLE],
        gauge(
            "container_fs_limit_bytes",
            "Most that the container can write to its root, in bytes",
            |s| s.figures.writable_bytes,
        ),
    ),
    labelled(
        &[WRITABLE],
        gauge(
            "container_fs_usage_bytes",
            "What the container has written to its root, in bytes",
            |s| s.figures.writable_used_bytes,
        ),
    ),
    labelled(
        &[WRITABLE],
        gauge(
            "container_fs_inodes_total",
            "Most files that the container can make in its root",
            |s| s.figures.writable_inodes,
        ),
    ),
    labelled(
        &[WRITABLE],
        gauge(
            "container_fs_inodes_free",
            "Files that the container can still make in its root",
            |s| {
                let figures = s.figures;
                let free = figures.writable_inodes;
                free.saturating_sub(figures.writable_used_inodes)
            },
        ),
    ),
    labelled(
        &[DISK, ("major", ""), ("minor", ""), ("operation", "Read")],
        counter("container_blkio_device_usage_total", BLKIO_HELP, |s| {
            s.figures.io_read_bytes
        }),
    ),
    labelled(
        &[DISK, ("major", ""), ("minor", ""), ("operation", "Write")],
        counter("container_blkio_device_usage_total", BLKIO_HELP, |s| {
            s.figures.io_write_bytes
        }),
    ),
    labelled(
        &[DISK],
        counter(
            "container_fs_reads_bytes_total",
            "Bytes read from disks",
            |s| s.figures.io_read_bytes,
        ),
    ),
    labelled(
        &[DISK],
        counter(
            "container_fs_writes_bytes_total",
            "Bytes written to disks",
            |s| s.figures.io_write_bytes,
        ),
    ),
    labelled(
        &[DISK],
        counter("container_fs_reads_total", "Reads from disks", |s| {
            s.figures.io_read_operations
        }),
    ),
    labelled(
        &[DISK],
        counter("container_fs_writes_total", "Writes to disks", |s| {
            s.figures.io_write_operations
        }),
    ),
    gauge(
        "container_start_time_seconds",
        "When the container was started, in seconds since 1970",
        |s| s.started_at_seconds,
    ),
    gauge(
        "container_last_seen",
        "When the container was seen last, in seconds since 1970",
        |s| s.figures.timestamp_ns / 1_000_000_000,
    ),
];

const OF_INTERFACES: &[InterfaceMetric] = &[
    InterfaceMetric {
        name: "container_network_receive_bytes_total",
        help: "Bytes received",
        read: |i| i.received.bytes,
    },
    InterfaceMetric {
        name: "container_network_receive_packets_total",
        help: "Packets received",
        read: |i| i.received.packets,
    },
    InterfaceMetric {
        name: "container_network_receive_errors_total",
        help: "Errors while receiving",
        read: |i| i.received.errors,
    },
    InterfaceMetric {
        name: "container_network_receive_packets_dropped_total",
        help: "Packets dropped while receiving",
        read: |i| i.received.dropped,
    },
    InterfaceMetric {
        name: "container_network_transmit_bytes_total",
        help: "Bytes sent",
        read: |i| i.sent.bytes,
    },
    InterfaceMetric {
        name: "container_network_transmit_packets_total",
        help: "Packets sent",
        read: |i| i.sent.packets,
    },
    InterfaceMetric {
        name: "container_network_transmit_errors_total",
        help: "Errors while sending",
        read: |i| i.sent.errors,
    },
    InterfaceMetric {
        name: "container_network_transmit_packets_dropped_total",
        help: "Packets dropped while sending",
        read: |i| i.sent.dropped,
    },
];

/// Returns the descriptors of the metrics of [`Node::list_metrics`].
pub(super) fn descriptors() -> Vec<MetricDescriptor> {
    let mut descriptors: Vec<MetricDescriptor> = Vec::new();
    let keys = |further: &mut dyn Iterator<Item = &'static str>| -> Vec<String> {
        let base = BASE.into_iter();
        base.chain(further).map(str::to_owned).collect()
    };
    for metric in OF_CONTAINERS {
        if descriptors.iter().any(|other| other.name == metric.name) {
            continue;
        }
        descriptors.push(MetricDescriptor {
            name: metric.name.to_owned(),
            help: metric.help.to_owned(),
            label_keys: keys(&mut metric.labels.iter().map(|(key, _)| *key)),
        });
    }
    let of_interfaces = OF_INTERFACES.iter().map(|metric| MetricDescriptor {
        name: metric.name.to_owned(),
        help: metric.help.to_owned(),
        label_keys: keys(&mut std::iter::once("interface")),
    });
    descriptors.extend(of_interfaces);
    descriptors.extend(pressure::descriptors());
    descriptors
}

fn of_container(base: [&str; BASE.len()], source: &Source<'_>) -> Vec<Metric> {
    let timestamp = i64::try_from(source.figures.timestamp_ns).unwrap_or(i64::MAX);
    let metrics = OF_CONTAINERS.iter().map(|metric| {
        let further = metric.labels.iter().map(|(_, value)| *value);
        let labels = base.into_iter().chain(further).map(str::to_owned);
        Metric {
            name: metric.name.to_owned(),
            timestamp,
            metric_type: metric.kind.into(),
            label_values: labels.collect(),
            value: Some(UInt64Value {
                value: (metric.read)(source),
            }),
        }
    });
    let of_pressure = pressure::of_container(base, &source.figures.psi, timestamp);
    metrics.chain(of_pressure).collect()
}

fn of_interface(
    base: [&str; BASE.len()],
    counters: &InterfaceCounters,
    timestamp: i64,
) -> Vec<Metric> {
    let metrics = OF_INTERFACES.iter().map(|metric| {
        let labels = base.into_iter().chain([counters.name.as_str()]);
        Metric {
            name: metric.name.to_owned(),
            timestamp,
            metric_type: MetricType::Counter.into(),
            label_values: labels.map(str::to_owned).collect(),
            value: Some(UInt64Value {
                value: (metric.read)(counters),
            }),
        }
    });
    metrics.collect()
}

impl Node {
    /// ListPodSandboxMetrics, of running pods.
    pub(super) async fn list_metrics(&self) -> Vec<PodSandboxMetrics> {
        self.all_settled().await;
        let mut pods = self.pods();
        pods.retain(|pod| pod.phase() == PodPhase::Ready);
        in_time(pods.iter().map(|pod| self.metrics_of_pod(pod))).await
    }

    async fn metrics_of_pod(&self, pod: &Pod) -> PodSandboxMetrics {
        let PodSandboxMetadata {
            name, namespace, ..
        } = pod.record().config.metadata.unwrap_or_default();
        // A pod that ends meanwhile has no interfaces any more.
        let counters = self.cni.counters(&pod.id).unwrap_or_default();
        let base = [&*pod.id, &*name, "", &*namespace, &*name, NO_CONTAINER];
        let metrics = counters
            .iter()
            .flat_map(|counters| of_interface(base, counters, now()));
        let mut containers = Vec::new();
        for container in self.containers_of(&pod.id) {
            let metrics = self.metrics_of(&container, &namespace, &name).await;
            containers.extend(metrics);
        }
        PodSandboxMetrics {
            pod_sandbox_id: pod.id.clone(),
            metrics: metrics.collect(),
            container_metrics: containers,
        }
    }

    /// Returns `None` for a container that does not run, or ends meanwhile.
    async fn metrics_of(
        &self,
        container: &Container,
        namespace: &str,
        pod: &str,
    ) -> Option<ContainerMetrics> {
        let figures = self.figures(container).await.ok()?;
        let record = container.record();
        let ContainerPhase::Running { started_at } = record.phase else {
            return None;
        };
        let linux = record.config.linux.unwrap_or_default();
        let source = Source {
            figures: &figures,
            resources: &linux.resources.unwrap_or_default(),
            started_at_seconds: u64::try_from(started_at / 1_000_000_000).unwrap_or(0),
        };
        let name = record.config.metadata.unwrap_or_default().name;
        let image = record.image_ref.as_str();
        let base = [&*record.id, &*name, image, namespace, pod, &*name];
        Some(ContainerMetrics {
            container_id: record.id.clone(),
            metrics: of_container(base, &source),
        })
    }
}

#[cfg(test)]
mod tests;
