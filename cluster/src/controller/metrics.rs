//! What the cluster's VMs are, in Prometheus' text format, under the names that dashboards of
//! KubeVirt use.
//!
//! Only the replica that leads knows the VMs; the others say that they do not lead.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use super::leader::Leading;
use super::progress::Progress;
use super::world::World;
use crate::objects::{
    MigrationPhase, Phase, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceMigration,
    condition,
};
use crate::prometheus::{Metric, Samples};
use crate::scrape;

/// Names of all gauges, and what they say.
const GAUGES: [Metric; 19] = [
    (
        "kubevirt_virt_controller_leading_status",
        "Whether this replica leads.",
    ),
    (
        "kubevirt_virt_controller_ready_status",
        "Whether this replica is ready to lead.",
    ),
    ("kubevirt_number_of_vms", "VirtualMachines of a namespace."),
    ("kubevirt_vm_info", "A VirtualMachine and its state."),
    (
        "kubevirt_vmi_info",
        "A VirtualMachineInstance, where it is and what it runs.",
    ),
    (
        "kubevirt_vmi_phase_count",
        "VirtualMachineInstances of a node in a phase.",
    ),
    (
        "kubevirt_vmi_status_addresses",
        "An address of a VirtualMachineInstance.",
    ),
    (
        "kubevirt_vmi_non_evictable",
        "A VirtualMachineInstance that should be migrated when it is evicted, and cannot be.",
    ),
    (
        "kubevirt_vmi_migrations_in_unset_phase",
        "Migrations that nobody has looked at.",
    ),
    (
        "kubevirt_vmi_migrations_in_pending_phase",
        "Migrations that wait for their turn.",
    ),
    (
        "kubevirt_vmi_migrations_in_scheduling_phase",
        "Migrations whose target is being made.",
    ),
    (
        "kubevirt_vmi_migrations_in_running_phase",
        "Migrations that move memory.",
    ),
    (
        "kubevirt_vmi_migration_succeeded",
        "A migration that succeeded.",
    ),
    ("kubevirt_vmi_migration_failed", "A migration that failed."),
    (
        "kubevirt_vmi_migration_start_time_seconds",
        "When the latest migration of a VirtualMachineInstance began.",
    ),
    (
        "kubevirt_vmi_migration_end_time_seconds",
        "When the latest migration of a VirtualMachineInstance ended.",
    ),
    (
        "kubevirt_vmi_migration_data_total_bytes",
        "Memory and local disks of a guest that moves.",
    ),
    (
        "kubevirt_vmi_migration_data_processed_bytes",
        "What of them is at the target.",
    ),
    (
        "kubevirt_vmi_migration_data_remaining_bytes",
        "What of them is still to be sent.",
    ),
];

/// What is measured.
#[derive(Debug, Clone, Default)]
pub(super) struct Metrics {
    world: Arc<Mutex<Option<World>>>,
    leading: Leading,
    progress: Progress,
}

impl Metrics {
    /// Whether this replica leads.
    pub(super) const fn leading(&self) -> &Leading {
        &self.leading
    }

    /// What nodes say of migrations.
    pub(super) const fn progress(&self) -> &Progress {
        &self.progress
    }

    /// What this replica knows since it leads.
    pub(super) fn set(&self, world: World) {
        *self.world.lock().unwrap_or_else(PoisonError::into_inner) = Some(world);
    }

    fn render(&self) -> String {
        let leads = self.leading.is_leading();
        let world = self.world.lock().unwrap_or_else(PoisonError::into_inner);
        match world.as_ref().filter(|_| leads) {
            Some(world) => {
                let mut samples = render(leads, &world.vms.state(), &world.vmis.state());
                migrations(&mut samples, &world.migrations.state());
                for vmi in world.vmis.state() {
                    moved(&mut samples, &vmi, &self.progress);
                }
                samples.text(&GAUGES)
            }
            None => render(leads, &[], &[]).text(&GAUGES),
        }
    }

    /// Answers scrapers until it is dropped.
    pub(super) async fn serve(self, address: SocketAddr) -> anyhow::Result<()> {
        let listener = scrape::listen(address).await?;
        scrape::serve(listener, move || self.render()).await
    }
}

fn render(
    leads: bool,
    vms: &[Arc<VirtualMachine>],
    vmis: &[Arc<VirtualMachineInstance>],
) -> Samples {
    let mut samples = Samples::default();
    samples.add(
        "kubevirt_virt_controller_leading_status",
        &[],
        usize::from(leads),
    );
    samples.add("kubevirt_virt_controller_ready_status", &[], 1);
    let mut of_namespace: BTreeMap<&str, usize> = BTreeMap::new();
    for vm in vms {
        let (namespace, name) = (text(&vm.metadata.namespace), text(&vm.metadata.name));
        *of_namespace.entry(namespace).or_default() += 1;
        let of = |part: &str| -> &str {
            let matcher = vm.spec.rest.get(part);
            let name = matcher.and_then(|matcher| matcher.get("name"));
            name.and_then(Value::as_str).unwrap_or_default()
        };
        let status = vm.status.printable_status.as_str();
        let labels = [
            ("namespace", namespace),
            ("name", name),
            ("status", status),
            ("status_group", group(status)),
            ("instance_type", of("instancetype")),
            ("preference", of("preference")),
        ];
        samples.add("kubevirt_vm_info", &labels, 1);
    }
    for (namespace, count) in of_namespace {
        samples.add("kubevirt_number_of_vms", &[("namespace", namespace)], count);
    }
    let mut of_phase: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for vmi in vmis {
        let (namespace, name) = (text(&vmi.metadata.namespace), text(&vmi.metadata.name));
        let (node, phase) = (vmi.status.node_name.as_str(), word(vmi.status.phase));
        *of_phase.entry((node, phase)).or_default() += 1;
        instance(&mut samples, vmi, [namespace, name, node, phase]);
    }
    for ((node, phase), count) in of_phase {
        let labels = [("node", node), ("phase", phase)];
        samples.add("kubevirt_vmi_phase_count", &labels, count);
    }
    samples
}

/// How many migrations are how far, and how the others ended.
fn migrations(samples: &mut Samples, all: &[Arc<VirtualMachineInstanceMigration>]) {
    use MigrationPhase::{Failed, Pending, Running, Succeeded, Unset};
    let count =
        |is: &dyn Fn(MigrationPhase) -> bool| all.iter().filter(|one| is(one.status.phase)).count();
    let of = |samples: &mut Samples, name, count| samples.add(name, &[], count);
    of(
        samples,
        "kubevirt_vmi_migrations_in_unset_phase",
        count(&|phase| phase == Unset),
    );
    of(
        samples,
        "kubevirt_vmi_migrations_in_pending_phase",
        count(&|phase| phase == Pending),
    );
    of(
        samples,
        "kubevirt_vmi_migrations_in_scheduling_phase",
        count(&|phase| phase > Pending && phase < Running),
    );
    of(
        samples,
        "kubevirt_vmi_migrations_in_running_phase",
        count(&|phase| phase == Running),
    );
    for one in all {
        let name = match one.status.phase {
            Succeeded => "kubevirt_vmi_migration_succeeded",
            Failed => "kubevirt_vmi_migration_failed",
            _ => continue,
        };
        let labels = [
            ("vmi", one.spec.vmi_name.as_str()),
            ("vmim", text(&one.metadata.name)),
            ("namespace", text(&one.metadata.namespace)),
        ];
        samples.add(name, &labels, 1);
    }
}

/// The latest migration of an instance.
fn moved(samples: &mut Samples, vmi: &VirtualMachineInstance, progress: &Progress) {
    let Some(state) = &vmi.status.migration_state else {
        return;
    };
    let labels = [
        ("node", vmi.status.node_name.as_str()),
        ("namespace", text(&vmi.metadata.namespace)),
        ("name", text(&vmi.metadata.name)),
    ];
    for (name, time) in [
        (
            "kubevirt_vmi_migration_start_time_seconds",
            &state.start_timestamp,
        ),
        (
            "kubevirt_vmi_migration_end_time_seconds",
            &state.end_timestamp,
        ),
    ] {
        let seconds = time.as_ref().map(|time| time.0.as_second());
        if let Some(seconds) = seconds.and_then(|seconds| usize::try_from(seconds).ok()) {
            samples.add(name, &labels, seconds);
        }
    }
    if let Some(report) = progress.get(&state.migration_uid) {
        let processed = report.bytes_total.saturating_sub(report.bytes_left);
        for (name, bytes) in [
            (
                "kubevirt_vmi_migration_data_total_bytes",
                report.bytes_total,
            ),
            ("kubevirt_vmi_migration_data_processed_bytes", processed),
            (
                "kubevirt_vmi_migration_data_remaining_bytes",
                report.bytes_left,
            ),
        ] {
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            samples.add(name, &labels, bytes);
        }
    }
}

fn instance(
    samples: &mut Samples,
    vmi: &VirtualMachineInstance,
    [namespace, name, node, phase]: [&str; 4],
) {
    let guest = vmi.status.rest.get("guestOSInfo");
    let of_guest = |part: &str| -> &str {
        let value = guest.and_then(|guest| guest.get(part));
        value.and_then(Value::as_str).unwrap_or_default()
    };
    let migratable = condition(&vmi.status.conditions, "LiveMigratable");
    let migratable = migratable.is_some_and(|found| found.status == "True");
    let whose = [("node", node), ("namespace", namespace), ("name", name)];
    let more = [
        ("phase", phase),
        ("guest_os_name", of_guest("name")),
        ("guest_os_version_id", of_guest("versionId")),
        ("guest_os_kernel_release", of_guest("kernelRelease")),
        ("guest_os_arch", of_guest("machine")),
        ("evictable", if migratable { "true" } else { "false" }),
    ];
    let labels: Vec<_> = whose.into_iter().chain(more).collect();
    samples.add("kubevirt_vmi_info", &labels, 1);
    for interface in &vmi.status.interfaces {
        for address in &interface.ip_addresses {
            let more = [
                ("network_name", interface.name.as_str()),
                ("address", address),
                ("type", "InternalIP"),
            ];
            let labels: Vec<_> = whose.into_iter().chain(more).collect();
            samples.add("kubevirt_vmi_status_addresses", &labels, 1);
        }
    }
    let strategy = vmi.spec.get("evictionStrategy").and_then(Value::as_str);
    if strategy == Some("LiveMigrate") && !migratable && !vmi.status.phase.is_final() {
        samples.add("kubevirt_vmi_non_evictable", &whose, 1);
    }
}

fn text(of: &Option<String>) -> &str {
    of.as_deref().unwrap_or_default()
}

fn word(phase: Phase) -> &'static str {
    match phase {
        Phase::Unset => "unset",
        Phase::Pending => "pending",
        Phase::Scheduling => "scheduling",
        Phase::Scheduled => "scheduled",
        Phase::Running => "running",
        Phase::Succeeded => "succeeded",
        Phase::Failed => "failed",
        Phase::Unknown => "unknown",
    }
}

/// The group of a printable status.
fn group(status: &str) -> &'static str {
    match status {
        "Provisioning" | "Starting" | "WaitingForVolumeBinding" => "starting",
        "Running" => "running",
        "Migrating" => "migrating",
        "" | "Stopped" | "Stopping" | "Paused" | "Terminating" => "non_running",
        _ => "error",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::controller::nodes::MigrationReport;

    #[test]
    fn a_replica_that_does_not_lead_says_no_more() {
        let text = Metrics::default().render();
        assert!(text.contains("\nkubevirt_virt_controller_leading_status 0\n"));
        assert_eq!(
            text.lines().filter(|line| !line.starts_with('#')).count(),
            2
        );
    }

    #[test]
    fn migrations_are_counted_and_the_one_that_goes_on_is_measured() {
        let one = |name: &str, phase: &str| {
            Arc::new(
                serde_json::from_value(json!({
                    "metadata": { "namespace": "n", "name": name },
                    "spec": { "vmiName": "a" },
                    "status": { "phase": phase },
                }))
                .unwrap(),
            )
        };
        let mut samples = Samples::default();
        let all = [
            one("x", "TargetReady"),
            one("y", "Failed"),
            one("z", "Running"),
        ];
        migrations(&mut samples, &all);
        let vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "metadata": { "namespace": "n", "name": "a" },
            "status": {
                "nodeName": "k",
                "migrationState": {
                    "migrationUid": "u", "startTimestamp": "1970-01-01T00:00:05Z",
                },
            },
        }))
        .unwrap();
        let progress = Progress::default();
        let report = MigrationReport {
            bytes_total: 10,
            bytes_left: 4,
            ..MigrationReport::default()
        };
        progress.set("u", Some(report));
        moved(&mut samples, &vmi, &progress);
        let text = samples.text(&GAUGES);
        let of = "{node=\"k\",namespace=\"n\",name=\"a\"}";
        for line in [
            "kubevirt_vmi_migrations_in_pending_phase 0".to_owned(),
            "kubevirt_vmi_migrations_in_scheduling_phase 1".to_owned(),
            "kubevirt_vmi_migrations_in_running_phase 1".to_owned(),
            "kubevirt_vmi_migration_failed{vmi=\"a\",vmim=\"y\",namespace=\"n\"} 1".to_owned(),
            format!("kubevirt_vmi_migration_start_time_seconds{of} 5"),
            format!("kubevirt_vmi_migration_data_processed_bytes{of} 6"),
            format!("kubevirt_vmi_migration_data_remaining_bytes{of} 4"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }

    #[test]
    fn machines_and_instances_are_told_by_kubevirts_names() {
        let vm = |name: &str, status: &str| {
            let vm = json!({
                "metadata": { "namespace": "n", "name": name },
                "spec": { "instancetype": { "name": "small" } },
                "status": { "printableStatus": status },
            });
            Arc::new(serde_json::from_value(vm).unwrap())
        };
        let vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "metadata": { "namespace": "n", "name": "a" },
            "spec": { "evictionStrategy": "LiveMigrate" },
            "status": {
                "phase": "Running",
                "nodeName": "k",
                "guestOSInfo": { "name": "a \"b\"\n\\" },
                "interfaces": [{ "name": "default", "ipAddresses": ["10.1.0.7"] }],
            },
        }))
        .unwrap();
        let vms = [vm("a", "Running"), vm("b", "CrashLoopBackOff")];
        let text = render(true, &vms, &[Arc::new(vmi)]).text(&GAUGES);
        for line in [
            "kubevirt_number_of_vms{namespace=\"n\"} 2",
            "kubevirt_vmi_phase_count{node=\"k\",phase=\"running\"} 1",
            "kubevirt_vmi_non_evictable{node=\"k\",namespace=\"n\",name=\"a\"} 1",
            "# TYPE kubevirt_vm_info gauge",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        for part in [
            "name=\"b\",status=\"CrashLoopBackOff\",status_group=\"error\",instance_type=\"small\"",
            "guest_os_name=\"a \\\"b\\\"\\n\\\\\"",
            "network_name=\"default\",address=\"10.1.0.7\",type=\"InternalIP\"} 1",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }
}
