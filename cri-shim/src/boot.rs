//! How VMs were booted, as commands and calls show it.

use std::time::{Duration, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::time::timeout;
use tracing::debug;

use crate::sandbox::{BootReport, SandboxClient};

/// How long a sandbox may take to tell: one that hangs must not keep the rest from being shown.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

/// Asks how the latest machine of a container was booted; `None` if its process does not tell, as
/// those of older versions do not.
pub(crate) async fn ask(client: &SandboxClient, container: &str) -> Option<BootReport> {
    match timeout(ASK_TIMEOUT, client.boot_report(container)).await {
        Ok(Ok(report)) => Some(report),
        Ok(Err(error)) => {
            debug!(container, %error, "how the machine was booted is not known");
            None
        }
        Err(_) => None,
    }
}

/// Returns a report as JSON, with the times from its beginning in seconds.
pub(crate) fn view(report: &BootReport) -> Value {
    let phases = report.times().map(|(phase, after)| {
        json!({
            "phase": phase,
            "seconds": after.as_secs_f64(),
        })
    });
    let started = UNIX_EPOCH.checked_add(Duration::from_nanos(report.started_at_ns));
    json!({
        "way": report.way,
        "description": report.way.description(),
        "entry": report.entry,
        "config": report.config,
        "kernel": report.kernel,
        "initramfs": report.initramfs,
        "cmdline": report.cmdline,
        "boots": report.boots,
        "startedAt": started.map(|time| humantime::format_rfc3339_millis(time).to_string()),
        "phases": phases.collect::<Vec<_>>(),
    })
}
