use std::collections::BTreeSet;

use super::*;
use crate::cni::Direction;
use crate::sandbox::{Psi, PsiData, PsiStats};

fn metrics(figures: &Figures, resources: &LinuxContainerResources) -> Vec<Metric> {
    let source = Source {
        figures,
        resources,
        started_at_seconds: 7,
    };
    let counters = InterfaceCounters {
        name: "eth0".to_owned(),
        sent: Direction {
            bytes: 9,
            ..Direction::default()
        },
        ..InterfaceCounters::default()
    };
    let mut metrics = of_container(["c", "web", "img", "ns", "pod", "web"], &source);
    metrics.extend(of_interface(
        ["p", "pod", "", "ns", "pod", "POD"],
        &counters,
        1,
    ));
    metrics
}

fn value(metrics: &[Metric], name: &str, label: &str) -> u64 {
    let mut found = metrics.iter().filter(|metric| {
        let has_label = metric.label_values.iter().any(|value| value == label);
        metric.name == name && (label.is_empty() || has_label)
    });
    let metric = found.next().expect(name);
    metric.value.unwrap().value
}

#[test]
fn each_metric_has_one_descriptor_with_as_many_labels_and_each_descriptor_a_metric() {
    let descriptors = descriptors();
    let counted = Figures {
        psi: Psi {
            cpu: Some(PsiStats::default()),
            memory: Some(PsiStats::default()),
            io: Some(PsiStats::default()),
        },
        ..Figures::default()
    };
    let metrics = metrics(&counted, &LinuxContainerResources::default());
    for metric in &metrics {
        let mut found = descriptors.iter().filter(|d| d.name == metric.name);
        let descriptor = found.next().expect(&metric.name);
        assert!(found.next().is_none(), "{}", metric.name);
        assert_eq!(descriptor.label_keys.len(), metric.label_values.len());
        assert!(!descriptor.help.is_empty());
        let type_of = |other: &&Metric| other.name == metric.name;
        let mut types = metrics.iter().filter(type_of).map(|m| m.metric_type);
        assert!(types.all(|of| of == metric.metric_type), "{}", metric.name);
    }
    let described: BTreeSet<_> = descriptors.iter().map(|d| &d.name).collect();
    let measured: BTreeSet<_> = metrics.iter().map(|metric| &metric.name).collect();
    assert_eq!(described, measured);
    let series: BTreeSet<_> = metrics
        .iter()
        .map(|metric| (&metric.name, &metric.label_values))
        .collect();
    assert_eq!(series.len(), metrics.len());
}

#[test]
fn every_metric_has_the_labels_that_a_kubelet_does_not_add() {
    for descriptor in descriptors() {
        for label in ["namespace", "pod", "container"] {
            let keys = descriptor.label_keys.iter();
            let found = keys.filter(|key| *key == label).count();
            assert_eq!(found, 1, "{label} of {}", descriptor.name);
        }
    }
}

#[test]
fn pressure_is_in_seconds_and_left_out_where_nobody_counts_it() {
    let waited = |full, some| {
        let data = |seconds: u64| PsiData {
            total_us: seconds * SECOND_US + 999_999,
            ..PsiData::default()
        };
        Some(PsiStats {
            some: data(some),
            full: data(full),
        })
    };
    let figures = Figures {
        psi: Psi {
            cpu: waited(1, 2),
            memory: waited(3, 4),
            io: None,
        },
        ..Figures::default()
    };
    let metrics = metrics(&figures, &LinuxContainerResources::default());
    for (name, expected) in [
        ("container_pressure_cpu_stalled_seconds_total", 1),
        ("container_pressure_cpu_waiting_seconds_total", 2),
        ("container_pressure_memory_stalled_seconds_total", 3),
        ("container_pressure_memory_waiting_seconds_total", 4),
    ] {
        assert_eq!(value(&metrics, name, ""), expected, "{name}");
    }
    let mut names = metrics.iter().map(|metric| &metric.name);
    assert!(!names.any(|name| name.starts_with("container_pressure_io")));
}

#[test]
fn values_are_those_of_figures_and_limits() {
    let figures = Figures {
        cpu_usage_us: 2_500_000,
        processes: 3,
        pids_current: 8,
        tasks_stopped: 1,
        descriptors: 12,
        io_write_bytes: 5,
        memory_peak_bytes: 6,
        writable_bytes: 100,
        writable_used_bytes: 40,
        writable_inodes: 10,
        writable_used_inodes: 4,
        ..Figures::default()
    };
    let resources = LinuxContainerResources {
        cpu_quota: 20_000,
        memory_swap_limit_in_bytes: 64 << 20,
        unified: [("memory.min".to_owned(), "4096".to_owned())].into(),
        ..LinuxContainerResources::default()
    };
    let limited = metrics(&figures, &resources);
    for (name, label, expected) in [
        ("container_cpu_usage_seconds_total", "", 2),
        ("container_processes", "", 3),
        ("container_threads", "", 8),
        ("container_tasks_state", "stopped", 1),
        ("container_tasks_state", "running", 0),
        ("container_file_descriptors", "", 12),
        ("container_blkio_device_usage_total", "Read", 0),
        ("container_blkio_device_usage_total", "Write", 5),
        ("container_memory_max_usage_bytes", "", 6),
        ("container_fs_limit_bytes", "tmpfs", 100),
        ("container_fs_usage_bytes", "tmpfs", 40),
        ("container_fs_inodes_total", "tmpfs", 10),
        ("container_fs_inodes_free", "tmpfs", 6),
        ("container_spec_cpu_quota", "", 20_000),
        ("container_spec_cpu_period", "", 100_000),
        ("container_spec_cpu_shares", "", 1024),
        ("container_spec_memory_swap_limit_bytes", "", 64 << 20),
        ("container_spec_memory_reservation_limit_bytes", "", 4096),
        ("container_start_time_seconds", "", 7),
        ("container_network_transmit_bytes_total", "eth0", 9),
    ] {
        assert_eq!(value(&limited, name, label), expected, "{name} {label}");
    }
    let lifted = LinuxContainerResources {
        cpu_quota: -1,
        cpu_shares: 2,
        memory_swap_limit_in_bytes: -1,
        unified: [("memory.min".to_owned(), "max".to_owned())].into(),
        ..LinuxContainerResources::default()
    };
    let lifted = metrics(&figures, &lifted);
    for (name, expected) in [
        ("container_spec_cpu_quota", 0),
        ("container_spec_cpu_shares", 2),
        ("container_spec_memory_swap_limit_bytes", 0),
        ("container_spec_memory_reservation_limit_bytes", 0),
    ] {
        assert_eq!(value(&lifted, name, ""), expected, "{name}");
    }
}
