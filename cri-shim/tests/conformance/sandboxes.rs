//! Pod sandboxes: their life cycle, their lists, and repeated calls.

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use podvisor_cri_messages::*;
use tonic::Code;

use crate::client::ask;
use crate::fixture::RUNTIME;
use crate::pod::{Pod, labels};
use crate::support::until;

fn listed(filter: PodSandboxFilter) -> Vec<PodSandbox> {
    ask!(list_pod_sandbox(ListPodSandboxRequest {
        filter: Some(filter),
    }))
    .unwrap()
    .items
}

#[test]
fn guest_runtime_names_itself_and_is_ready() {
    let version = ask!(version(VersionRequest {
        version: String::new(),
    }))
    .unwrap();
    assert_eq!(version.runtime_api_version, "v1");
    assert!(!version.runtime_name.is_empty() && !version.runtime_version.is_empty());

    let status = ask!(status(StatusRequest { verbose: false })).unwrap();
    let conditions: HashMap<_, _> = status
        .status
        .unwrap()
        .conditions
        .into_iter()
        .map(|condition| (condition.r#type, condition.status))
        .collect();
    assert_eq!(conditions.get("RuntimeReady"), Some(&true));
    assert_eq!(
        conditions.get("NetworkReady"),
        Some(&true),
        "{conditions:?}"
    );
}

#[test]
fn guest_a_sandbox_lives_and_every_end_may_be_asked_for_twice() {
    let pod = Pod::run("life", |config| {
        config.labels = labels(&[("app", "life"), ("tier", "a")]);
        config.annotations = labels(&[("note", "kept as it is")]);
    });
    let status = pod.status().unwrap();
    assert_eq!(status.state(), PodSandboxState::SandboxReady);
    assert_eq!(status.id, pod.id);
    assert_eq!(status.metadata, pod.config.metadata);
    assert_eq!(status.labels, pod.config.labels);
    assert_eq!(status.annotations, pod.config.annotations);
    assert!(status.created_at > 1_600_000_000_000_000_000);

    let by_label = |pairs| {
        listed(PodSandboxFilter {
            label_selector: labels(pairs),
            ..Default::default()
        })
    };
    assert_eq!(by_label(&[("app", "life")]).len(), 1);
    assert!(by_label(&[("app", "life"), ("tier", "b")]).is_empty());
    let with_state = |state: PodSandboxState| {
        listed(PodSandboxFilter {
            id: pod.id.clone(),
            state: Some(PodSandboxStateValue {
                state: state as i32,
            }),
            ..Default::default()
        })
    };
    assert_eq!(with_state(PodSandboxState::SandboxReady).len(), 1);
    assert!(with_state(PodSandboxState::SandboxNotready).is_empty());

    let container = pod.start("main", |_| {});
    let unstarted = pod.create("unstarted", |_| {});
    pod.stop();
    pod.stop();
    assert_eq!(
        pod.status().unwrap().state(),
        PodSandboxState::SandboxNotready
    );
    assert_eq!(container.state(), ContainerState::ContainerExited);
    // It never ran, so it has not failed.
    assert_eq!(unstarted.state(), ContainerState::ContainerCreated);
    assert_eq!(with_state(PodSandboxState::SandboxNotready).len(), 1);

    pod.remove();
    pod.remove();
    assert_eq!(pod.status().unwrap_err().code(), Code::NotFound);
    assert_eq!(container.try_status().unwrap_err().code(), Code::NotFound);
    assert!(with_state(PodSandboxState::SandboxNotready).is_empty());
}

#[test]
fn guest_a_sandbox_that_runs_can_be_removed_with_its_containers() {
    let pod = Pod::run("forced", |_| {});
    let container = pod.start("main", |_| {});
    pod.stop();
    pod.remove();
    assert_eq!(container.try_status().unwrap_err().code(), Code::NotFound);
}

#[test]
fn guest_unknown_sandboxes_are_not_found_and_no_hindrance() {
    let unknown = "0123456789abcdef";
    let status = ask!(pod_sandbox_status(PodSandboxStatusRequest {
        pod_sandbox_id: unknown.to_owned(),
        verbose: false,
    }));
    assert_eq!(status.unwrap_err().code(), Code::NotFound);
    let stopped = ask!(stop_pod_sandbox(StopPodSandboxRequest {
        pod_sandbox_id: unknown.to_owned(),
    }));
    match stopped {
        Err(status) if !RUNTIME.is_vm && status.code() == Code::NotFound => {}
        stopped => drop(stopped.unwrap()),
    }
    ask!(remove_pod_sandbox(RemovePodSandboxRequest {
        pod_sandbox_id: unknown.to_owned(),
    }))
    .unwrap();
    assert!(
        listed(PodSandboxFilter {
            id: unknown.to_owned(),
            ..Default::default()
        })
        .is_empty()
    );
}

#[test]
fn guest_a_sandbox_without_metadata_is_refused() {
    let refused = ask!(run_pod_sandbox(RunPodSandboxRequest {
        config: Some(PodSandboxConfig::default()),
        ..Default::default()
    }));
    refused.unwrap_err();
}

#[test]
fn guest_statistics_of_a_sandbox_name_its_containers() {
    let pod = Pod::shared();
    let container = pod.start("counted", |_| {});
    let stats = ask!(container_stats(ContainerStatsRequest {
        container_id: container.id.clone(),
    }))
    .unwrap()
    .stats
    .unwrap();
    assert_eq!(stats.attributes.unwrap().id, container.id);
    assert!(stats.cpu.unwrap().usage_core_nano_seconds.unwrap().value > 0);
    assert!(stats.memory.unwrap().working_set_bytes.unwrap().value > 0);
    // Other runtimes check disks only periodically.
    if RUNTIME.is_vm {
        let written = || {
            let stats = ask!(container_stats(ContainerStatsRequest {
                container_id: container.id.clone(),
            }));
            let layer = stats.unwrap().stats.unwrap().writable_layer.unwrap();
            assert!(layer.timestamp > 0 && layer.fs_id.unwrap().mountpoint.starts_with('/'));
            (
                layer.used_bytes.unwrap().value,
                layer.inodes_used.unwrap().value,
            )
        };
        let before = written();
        container.sh("head -c 1048576 /dev/zero > /one; : > /two");
        let after = written();
        assert!(after.0 >= before.0 + (1 << 20), "{before:?} {after:?}");
        assert!(after.0 < before.0 + (2 << 20), "{before:?} {after:?}");
        assert!(after.1 >= before.1 + 2, "{before:?} {after:?}");
    }
    let all = ask!(list_container_stats(ListContainerStatsRequest {
        filter: Some(ContainerStatsFilter {
            pod_sandbox_id: pod.id.clone(),
            ..Default::default()
        }),
    }))
    .unwrap();
    let ids: Vec<_> = all
        .stats
        .into_iter()
        .filter_map(|stats| stats.attributes.map(|attributes| attributes.id))
        .collect();
    assert!(ids.contains(&container.id), "{ids:?}");
    container.stop(0);
    container.remove();
}

#[test]
fn guest_statistics_of_a_sandbox_have_its_network() {
    let pod = Pod::shared();
    let stats = ask!(pod_sandbox_stats(PodSandboxStatsRequest {
        pod_sandbox_id: pod.id.clone(),
    }))
    .unwrap()
    .stats
    .unwrap();
    assert_eq!(stats.attributes.unwrap().id, pod.id);
    let linux = stats.linux.unwrap();
    assert!(linux.cpu.unwrap().timestamp > 0 && linux.memory.unwrap().timestamp > 0);
    let network = linux.network.unwrap().default_interface.unwrap();
    assert_eq!(network.name, "eth0");
    assert!(network.rx_bytes.is_some() && network.tx_bytes.is_some());
    let all = ask!(list_pod_sandbox_stats(ListPodSandboxStatsRequest {
        filter: Some(PodSandboxStatsFilter {
            id: pod.id.clone(),
            ..Default::default()
        }),
    }))
    .unwrap();
    assert_eq!(all.stats.len(), 1);
}

#[test]
fn guest_what_a_sandbox_has_used_does_not_shrink_when_a_container_ends() {
    let pod = Pod::run("used", |_| {});
    let used = || {
        let stats = ask!(pod_sandbox_stats(PodSandboxStatsRequest {
            pod_sandbox_id: pod.id.clone(),
        }));
        let linux = stats.unwrap().stats.unwrap().linux.unwrap();
        let (cpu, memory) = (linux.cpu.unwrap(), linux.memory.unwrap());
        [
            cpu.usage_core_nano_seconds.unwrap().value,
            memory.page_faults.unwrap().value,
        ]
    };
    let other = pod.start("other", |_| {});
    let busy = pod.start("busy", |_| {});
    busy.sh("i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done");
    let mut before = used();
    assert!(before[0] > 10_000_000, "{before:?}");
    let steps: [&dyn Fn(); 4] = [
        &|| busy.stop(0),
        &|| busy.remove(),
        &|| other.stop(0),
        &|| other.remove(),
    ];
    for (number, step) in steps.into_iter().enumerate() {
        step();
        let now = used();
        let has_grown = before.iter().zip(&now).all(|(before, now)| now >= before);
        assert!(has_grown, "step {number}: {before:?} {now:?}");
        before = now;
    }
}

/// The metrics that critest's versions require of each container, combined.
const METRICS: &[&str] = &[
    "container_blkio_device_usage_total",
    "container_cpu_cfs_periods_total",
    "container_cpu_cfs_throttled_periods_total",
    "container_cpu_cfs_throttled_seconds_total",
    "container_cpu_load_average_10s",
    "container_cpu_system_seconds_total",
    "container_cpu_usage_seconds_total",
    "container_cpu_user_seconds_total",
    "container_file_descriptors",
    "container_fs_inodes_free",
    "container_fs_inodes_total",
    "container_fs_limit_bytes",
    "container_fs_reads_bytes_total",
    "container_fs_reads_total",
    "container_fs_usage_bytes",
    "container_fs_writes_bytes_total",
    "container_fs_writes_total",
    "container_last_seen",
    "container_memory_cache",
    "container_memory_failcnt",
    "container_memory_failures_total",
    "container_memory_kernel_usage",
    "container_memory_mapped_file",
    "container_memory_max_usage_bytes",
    "container_memory_rss",
    "container_memory_swap",
    "container_memory_usage_bytes",
    "container_memory_working_set_bytes",
    "container_network_receive_bytes_total",
    "container_network_receive_errors_total",
    "container_network_receive_packets_dropped_total",
    "container_network_receive_packets_total",
    "container_network_transmit_bytes_total",
    "container_network_transmit_errors_total",
    "container_network_transmit_packets_dropped_total",
    "container_network_transmit_packets_total",
    "container_oom_events_total",
    "container_pressure_cpu_stalled_seconds_total",
    "container_pressure_cpu_waiting_seconds_total",
    "container_pressure_io_stalled_seconds_total",
    "container_pressure_io_waiting_seconds_total",
    "container_pressure_memory_stalled_seconds_total",
    "container_pressure_memory_waiting_seconds_total",
    "container_processes",
    "container_sockets",
    "container_spec_cpu_period",
    "container_spec_cpu_quota",
    "container_spec_cpu_shares",
    "container_spec_memory_limit_bytes",
    "container_spec_memory_reservation_limit_bytes",
    "container_spec_memory_swap_limit_bytes",
    "container_start_time_seconds",
    "container_tasks_state",
    "container_threads",
    "container_threads_max",
    "container_ulimits_soft",
];

#[test]
fn guest_metrics_fit_their_descriptors() {
    let pod = Pod::shared();
    let container = pod.start("measured", |config| {
        let resources = LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: 20_000,
            cpu_shares: 512,
            memory_limit_in_bytes: 64 << 20,
            memory_swap_limit_in_bytes: 64 << 20,
            ..Default::default()
        };
        config.linux.get_or_insert_default().resources = Some(resources);
    });
    container.sh("mkdir -p /var/lib/kept && echo hi > /var/lib/kept/one; sync");
    if RUNTIME.is_vm {
        // Its first CPU period is over.
        container.sh("while grep -qx 'nr_periods 0' /sys/fs/cgroup/cpu.stat; do :; done");
    }
    let descriptors = match ask!(list_metric_descriptors(ListMetricDescriptorsRequest {})) {
        // Older runtimes have none.
        Err(status) if !RUNTIME.is_vm && status.code() == Code::Unimplemented => return,
        answer => answer.unwrap().descriptors,
    };
    let pods = ask!(list_pod_sandbox_metrics(ListPodSandboxMetricsRequest {}))
        .unwrap()
        .pod_metrics;
    let found = pods.iter().find(|found| found.pod_sandbox_id == pod.id);
    let found = found.expect("the pod's metrics");
    let of_container = found.container_metrics.iter();
    let mut of_container = of_container.filter(|metrics| metrics.container_id == container.id);
    let metrics = &of_container
        .next()
        .expect("the container's metrics")
        .metrics;
    for metric in metrics.iter().chain(&found.metrics) {
        let descriptor = descriptors.iter().find(|d| d.name == metric.name);
        let keys = &descriptor.expect(&metric.name).label_keys;
        assert_eq!(keys.len(), metric.label_values.len(), "{}", metric.name);
        if RUNTIME.is_vm {
            // These labels distinguish a kubelet's metrics.
            for key in ["namespace", "pod", "container"] {
                let index = keys.iter().position(|found| found == key);
                assert!(!metric.label_values[index.expect(key)].is_empty());
            }
        }
    }
    // For others, critest reports what is missing.
    if RUNTIME.is_vm {
        let is_missing = |name: &&&str| {
            let mut all = metrics.iter().chain(&found.metrics);
            !all.any(|metric| metric.name == **name)
        };
        let missing: Vec<_> = METRICS.iter().filter(is_missing).collect();
        assert!(missing.is_empty(), "{missing:?}");
        let value = |name: &str| {
            let metric = metrics.iter().find(|metric| metric.name == name);
            metric.unwrap().value.unwrap().value
        };
        assert_eq!(value("container_spec_cpu_shares"), 512);
        assert_eq!(value("container_spec_cpu_quota"), 20_000);
        assert_eq!(value("container_spec_memory_limit_bytes"), 64 << 20);
        for name in [
            "container_cpu_cfs_periods_total",
            "container_file_descriptors",
            "container_fs_inodes_free",
            "container_fs_limit_bytes",
            "container_fs_usage_bytes",
            "container_memory_kernel_usage",
            "container_memory_max_usage_bytes",
            "container_processes",
            "container_threads",
            "container_ulimits_soft",
        ] {
            assert!(value(name) > 0, "{name}");
        }
        assert!(value("container_threads") >= value("container_processes"));
        assert!(value("container_fs_usage_bytes") < value("container_fs_limit_bytes"));
    }
    container.stop(0);
    container.remove();
}

/// Creates a control group like a kubelet's for a pod, without limits yet.
fn pods_group(name: &str) -> PathBuf {
    let root = Path::new("/sys/fs/cgroup");
    let above = root.join("conformance-pods");
    fs::create_dir_all(&above).unwrap();
    for group in [root, &above] {
        fs::write(group.join("cgroup.subtree_control"), "+cpu +memory +pids").unwrap();
    }
    let group = above.join(name);
    fs::create_dir(&group).unwrap();
    group
}

/// Does to a pod's group what systemd does to a slice whenever it reloads its units: it removes the
/// controllers that none of its units needs.
fn machine_keeps_its_limits(group: &Path, pod: &Pod) {
    let machine = group.join(&pod.id);
    let limits = ["memory.max", "cpu.max", "pids.max"].map(|name| machine.join(name));
    let read = || {
        limits
            .each_ref()
            .map(|limit| fs::read_to_string(limit).unwrap())
    };
    let before = read();
    assert!(
        before.iter().all(|limit| !limit.starts_with("max")),
        "{before:?}"
    );
    for name in ["cpu", "memory", "pids"] {
        let taken = fs::write(group.join("cgroup.subtree_control"), format!("-{name}"));
        let refused = taken.map_err(|error| error.kind());
        assert_eq!(refused, Err(ErrorKind::ResourceBusy), "{name}");
    }
    assert_eq!(read(), before);
}

#[test]
fn guest_a_machine_that_is_killed_for_its_pods_limit_is_told_as_out_of_memory() {
    // A container's own limit is tested elsewhere.
    if !RUNTIME.is_vm {
        return;
    }
    let group = pods_group("full");
    let pod = Pod::run("full", |config| {
        config.linux.as_mut().unwrap().cgroup_parent = "/conformance-pods/full".to_owned();
    });
    let [runs, created] = [pod.start("runs", |_| {}), pod.create("created", |_| {})];
    machine_keeps_its_limits(&group, &pod);
    // Its guest has more than that.
    fs::write(group.join("memory.max"), "16M").unwrap();
    let status = runs.ended();
    assert_eq!((status.exit_code, &*status.reason), (137, "OOMKilled"));
    for words in [
        &*group.display().to_string(),
        "memory limit",
        "RuntimeClass",
    ] {
        assert!(status.message.contains(words), "{}", status.message);
    }
    until("the pod's end", || {
        pod.status().unwrap().state() == PodSandboxState::SandboxNotready
    });
    assert_eq!(created.state(), ContainerState::ContainerCreated);
    pod.stop();
    pod.remove();
    // Nothing of it is left below the kubelet's group.
    fs::remove_dir(group).unwrap();
}

#[test]
fn guest_what_a_virtual_machine_cannot_share_is_refused_by_its_name() {
    if !RUNTIME.is_vm {
        return;
    }
    let refused = |options: NamespaceOption| {
        let config = Pod::config("refused", |config| {
            let linux = config.linux.as_mut().unwrap();
            linux.security_context = Some(LinuxSandboxSecurityContext {
                namespace_options: Some(options),
                ..Default::default()
            });
        });
        let status = ask!(run_pod_sandbox(RunPodSandboxRequest {
            config: Some(config),
            ..Default::default()
        }))
        .unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        status.message().to_owned()
    };
    let node = NamespaceMode::Node as i32;
    let network = NamespaceOption {
        network: node,
        ..Default::default()
    };
    assert!(refused(network).contains("hostNetwork"));
    let ipc = NamespaceOption {
        ipc: node,
        ..Default::default()
    };
    assert!(refused(ipc).contains("hostIPC"));
    let users = NamespaceOption {
        userns_options: Some(UserNamespace::default()),
        ..Default::default()
    };
    assert!(refused(users).contains("hostUsers"));
    let unknown = ask!(run_pod_sandbox(RunPodSandboxRequest {
        config: Some(Pod::config("refused", |_| {})),
        runtime_handler: "unknown".to_owned(),
    }));
    assert_eq!(unknown.unwrap_err().code(), Code::InvalidArgument);
    let checkpoint = ask!(checkpoint_container(CheckpointContainerRequest {
        container_id: "unknown".to_owned(),
        ..Default::default()
    }));
    let refused = checkpoint.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    // By this text, tests of nodes recognize a call that they have to skip.
    let said = refused.message();
    assert!(
        said.starts_with("unknown method CheckpointContainer"),
        "{said}"
    );
}
