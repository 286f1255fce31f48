//! Pressure metrics, for containers whose guest counts pressure.

use podvisor_cri_messages::{Metric, MetricDescriptor, MetricType, UInt64Value};

use super::{BASE, SECOND_US};
use crate::sandbox::{Psi, PsiData};

/// A metric of each container.
struct PressureMetric {
    name: &'static str,
    help: &'static str,
    read: fn(&Psi) -> Option<PsiData>,
}

const OF_PRESSURE: [PressureMetric; 6] = [
    PressureMetric {
        name: "container_pressure_cpu_stalled_seconds_total",
        help: "Time in which no program could go on for want of CPU time, in seconds",
        read: |psi| Some(psi.cpu?.full),
    },
    PressureMetric {
        name: "container_pressure_cpu_waiting_seconds_total",
        help: "Time in which a program waited for CPU time, in seconds",
        read: |psi| Some(psi.cpu?.some),
    },
    PressureMetric {
        name: "container_pressure_memory_stalled_seconds_total",
        help: "Time in which no program could go on for want of memory, in seconds",
        read: |psi| Some(psi.memory?.full),
    },
    PressureMetric {
        name: "container_pressure_memory_waiting_seconds_total",
        help: "Time in which a program waited for memory, in seconds",
        read: |psi| Some(psi.memory?.some),
    },
    PressureMetric {
        name: "container_pressure_io_stalled_seconds_total",
        help: "Time in which no program could go on until a disk had answered, in seconds",
        read: |psi| Some(psi.io?.full),
    },
    PressureMetric {
        name: "container_pressure_io_waiting_seconds_total",
        help: "Time in which a program waited for a disk, in seconds",
        read: |psi| Some(psi.io?.some),
    },
];

pub(super) fn descriptors() -> impl Iterator<Item = MetricDescriptor> {
    OF_PRESSURE.iter().map(|metric| MetricDescriptor {
        name: metric.name.to_owned(),
        help: metric.help.to_owned(),
        label_keys: BASE.map(str::to_owned).to_vec(),
    })
}

pub(super) fn of_container(
    base: [&str; BASE.len()],
    psi: &Psi,
    timestamp: i64,
) -> impl Iterator<Item = Metric> {
    OF_PRESSURE.iter().filter_map(move |metric| {
        Some(Metric {
            name: metric.name.to_owned(),
            timestamp,
            metric_type: MetricType::Counter.into(),
            label_values: base.map(str::to_owned).to_vec(),
            value: Some(UInt64Value {
                value: (metric.read)(psi)?.total_us / SECOND_US,
            }),
        })
    })
}
