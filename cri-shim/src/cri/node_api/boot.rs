//! How VMs were booted.

use std::time::Duration;

use podvisor_node_api::messages::{BootInfo, BootPhase, VmName};
use serde::Serialize;
use tonic::Status;

use super::control::status;
use crate::cri::node::Node;
use crate::sandbox::BootReport;

impl Node {
    /// Returns how the latest machine of a VM was booted.
    pub(super) async fn boot_info_of_vm(&self, vm: &VmName) -> Result<BootInfo, Status> {
        let (pod, container) = self.running_vm(vm).await?;
        let report = pod.client()?.boot_report(&container.id).await;
        Ok(shown(report.map_err(status)?))
    }
}

/// A report in the words of the calls.
fn shown(report: BootReport) -> BootInfo {
    let phases = report.times().map(|(phase, after)| BootPhase {
        name: word(&phase),
        after_ns: nanoseconds(after),
    });
    BootInfo {
        phases: phases.collect(),
        way: word(&report.way),
        description: report.way.description().to_owned(),
        entry: report.entry.unwrap_or_default(),
        config: report.config.unwrap_or_default(),
        kernel: report.kernel.unwrap_or_default(),
        initramfs: report.initramfs.unwrap_or_default(),
        cmdline: report.cmdline.unwrap_or_default(),
        boots: report.boots,
        started_at_ns: report.started_at_ns,
    }
}

/// The word that a value is stored as.
fn word(value: &impl Serialize) -> String {
    let json = serde_json::to_value(value).unwrap_or_default();
    json.as_str().unwrap_or_default().to_owned()
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use crate::sandbox::{BootEvent, BootPhase as Phase, BootWay};

    use super::*;

    #[test]
    fn a_report_is_told_in_words_and_times_from_its_beginning() {
        let event = |phase, at_ns| BootEvent { phase, at_ns };
        let info = shown(BootReport {
            way: BootWay::KeptKernel,
            entry: Some("Debian".to_owned()),
            events: vec![event(Phase::Begun, 5), event(Phase::Machine, 12)],
            ..BootReport::default()
        });
        assert_eq!(
            (info.way.as_str(), info.entry.as_str()),
            ("keptKernel", "Debian")
        );
        let phases: Vec<_> = info
            .phases
            .iter()
            .map(|p| (p.name.as_str(), p.after_ns))
            .collect();
        assert_eq!(phases, [("begun", 0), ("machine", 7)]);
        assert_eq!(info.cmdline, "");
    }
}
