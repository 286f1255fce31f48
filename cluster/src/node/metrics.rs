//! What the node's VMs use, under the names that dashboards of KubeVirt read.
//!
//! `podvisor serve` is asked when somebody scrapes; nothing is kept here.

use podvisor_node_api::messages::{Traffic, VmUsage};

use super::machines::Machines;
use crate::prometheus::{Metric, Samples};

/// Names of all metrics, and what they say.
const METRICS: [Metric; 18] = [
    (
        "kubevirt_vmi_cpu_usage_seconds_total",
        "CPU time of the VM's process: of the vCPUs and of the devices.",
    ),
    (
        "kubevirt_vmi_vcpu_seconds_total",
        "The same, for dashboards that add vCPUs up.",
    ),
    ("kubevirt_vmi_memory_domain_bytes", "The guest's memory."),
    (
        "kubevirt_vmi_memory_available_bytes",
        "Memory that the guest may use.",
    ),
    (
        "kubevirt_vmi_memory_resident_bytes",
        "The host's memory that the VM's process has.",
    ),
    (
        "kubevirt_vmi_network_receive_bytes_total",
        "Bytes to the guest.",
    ),
    (
        "kubevirt_vmi_network_receive_packets_total",
        "Packets to the guest.",
    ),
    (
        "kubevirt_vmi_network_receive_errors_total",
        "Packets to the guest with errors.",
    ),
    (
        "kubevirt_vmi_network_receive_packets_dropped_total",
        "Packets to the guest that there was no room for.",
    ),
    (
        "kubevirt_vmi_network_transmit_bytes_total",
        "Bytes from the guest.",
    ),
    (
        "kubevirt_vmi_network_transmit_packets_total",
        "Packets from the guest.",
    ),
    (
        "kubevirt_vmi_network_transmit_errors_total",
        "Packets from the guest with errors.",
    ),
    (
        "kubevirt_vmi_network_transmit_packets_dropped_total",
        "Packets from the guest that there was no room for.",
    ),
    (
        "kubevirt_vmi_storage_read_traffic_bytes_total",
        "Bytes that were read from disks.",
    ),
    (
        "kubevirt_vmi_storage_write_traffic_bytes_total",
        "Bytes that were written to disks.",
    ),
    ("kubevirt_vmi_storage_iops_read_total", "Reads from disks."),
    ("kubevirt_vmi_storage_iops_write_total", "Writes to disks."),
    (
        "kubevirt_vmi_node_reachable",
        "Whether podvisor on the node says what its VMs use.",
    ),
];

/// Of all disks together: they are not counted one by one.
const ALL_DISKS: &str = "all";

/// Returns the metrics of a node's VMs.
pub(super) async fn render(machines: &Machines, node: &str) -> String {
    let usage = machines.usage().await;
    if let Err(error) = &usage {
        tracing::warn!(%error, "failed to ask what the node's VMs use");
    }
    text(node, usage.as_deref().ok())
}

fn text(node: &str, usage: Option<&[VmUsage]>) -> String {
    let mut samples = Samples::default();
    let reachable = usize::from(usage.is_some());
    samples.add("kubevirt_vmi_node_reachable", &[("node", node)], reachable);
    for vm in usage.unwrap_or_default() {
        add(&mut samples, node, vm);
    }
    samples.text(&METRICS)
}

fn add(samples: &mut Samples, node: &str, usage: &VmUsage) {
    let name = usage.vm.clone().unwrap_or_default();
    let whose = [
        ("node", node),
        ("namespace", name.namespace.as_str()),
        ("name", name.name.as_str()),
    ];
    #[allow(
        clippy::cast_precision_loss,
        reason = "nanoseconds of years are exact enough"
    )]
    let seconds = usage.cpu_ns as f64 / 1e9;
    samples.add("kubevirt_vmi_cpu_usage_seconds_total", &whose, seconds);
    samples.add("kubevirt_vmi_vcpu_seconds_total", &whose, seconds);
    for (metric, value) in [
        ("kubevirt_vmi_memory_domain_bytes", usage.memory_bytes),
        ("kubevirt_vmi_memory_available_bytes", usage.memory_bytes),
        ("kubevirt_vmi_memory_resident_bytes", usage.resident_bytes),
    ] {
        samples.add(metric, &whose, value);
    }
    let more = |label, value| {
        whose
            .into_iter()
            .chain([(label, value)])
            .collect::<Vec<_>>()
    };
    for card in &usage.cards {
        let labels = more("interface", card.name.as_str());
        for (metrics, traffic) in [(RECEIVED, &card.received), (SENT, &card.sent)] {
            let Traffic {
                bytes,
                packets,
                errors,
                dropped,
            } = traffic.unwrap_or_default();
            for (metric, value) in metrics.into_iter().zip([bytes, packets, errors, dropped]) {
                samples.add(metric, &labels, value);
            }
        }
    }
    let labels = more("drive", ALL_DISKS);
    for (metric, value) in [
        (
            "kubevirt_vmi_storage_read_traffic_bytes_total",
            usage.disk_read_bytes,
        ),
        (
            "kubevirt_vmi_storage_write_traffic_bytes_total",
            usage.disk_write_bytes,
        ),
        ("kubevirt_vmi_storage_iops_read_total", usage.disk_reads),
        ("kubevirt_vmi_storage_iops_write_total", usage.disk_writes),
    ] {
        samples.add(metric, &labels, value);
    }
}

/// Bytes, packets, errors, dropped packets.
const RECEIVED: [&str; 4] = [
    "kubevirt_vmi_network_receive_bytes_total",
    "kubevirt_vmi_network_receive_packets_total",
    "kubevirt_vmi_network_receive_errors_total",
    "kubevirt_vmi_network_receive_packets_dropped_total",
];
const SENT: [&str; 4] = [
    "kubevirt_vmi_network_transmit_bytes_total",
    "kubevirt_vmi_network_transmit_packets_total",
    "kubevirt_vmi_network_transmit_errors_total",
    "kubevirt_vmi_network_transmit_packets_dropped_total",
];

#[cfg(test)]
mod tests {
    use podvisor_node_api::messages::{CardUsage, VmName};

    use super::*;

    #[test]
    fn what_a_vm_uses_is_told_by_kubevirts_names() {
        let usage = VmUsage {
            vm: Some(VmName::new("n", "web", "1")),
            cpu_ns: 1_500_000_000,
            memory_bytes: 1 << 30,
            resident_bytes: 1 << 20,
            cards: vec![CardUsage {
                name: "eth0".to_owned(),
                received: Some(Traffic {
                    bytes: 7,
                    ..Traffic::default()
                }),
                sent: None,
            }],
            disk_reads: 3,
            ..VmUsage::default()
        };
        let text = text("k", Some(&[usage]));
        let whose = "node=\"k\",namespace=\"n\",name=\"web\"";
        for line in [
            format!("kubevirt_vmi_cpu_usage_seconds_total{{{whose}}} 1.5"),
            format!("kubevirt_vmi_memory_resident_bytes{{{whose}}} 1048576"),
            format!("kubevirt_vmi_network_receive_bytes_total{{{whose},interface=\"eth0\"}} 7"),
            format!("kubevirt_vmi_storage_iops_read_total{{{whose},drive=\"all\"}} 3"),
            "# TYPE kubevirt_vmi_network_transmit_bytes_total counter".to_owned(),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }

    #[test]
    fn every_metric_is_described() {
        let mut usage = VmUsage::default();
        usage.cards.push(CardUsage::default());
        let text = text("k", Some(&[usage]));
        assert_eq!(text.matches("# HELP").count(), METRICS.len(), "{text}");
    }

    #[test]
    fn a_node_that_does_not_answer_says_so() {
        let text = text("k", None);
        assert!(
            text.ends_with("kubevirt_vmi_node_reachable{node=\"k\"} 0\n"),
            "{text}"
        );
    }
}
