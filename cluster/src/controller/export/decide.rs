//! How an export goes on: a pure function of what was observed.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use podvisor_cluster_types::export::ExportSource;

use super::object::{owns, pod_name, service_name, token_name};
use super::source::{Content, Obstacle, Source, Volume};
use crate::export::Format;
use crate::objects::{
    Condition, ExportFormat, ExportLink, ExportLinks, ExportPhase, ExportStatus, ExportVolume,
    VirtualMachineExport, set_condition,
};

/// When to look again while nothing happens that leads to a look.
const PATIENCE: Duration = Duration::from_secs(10);

/// When to look again for what is not watched.
const LOOK: Duration = Duration::from_secs(2);

/// So long at most a pod lives: its certificate lives longer.
const POD_LIFE: SignedDuration = SignedDuration::from_hours(30 * 24);

/// What was observed.
#[derive(Debug, Clone)]
pub struct Observed<'a> {
    /// The export.
    pub export: &'a VirtualMachineExport,
    /// What it is of.
    pub source: &'a Source,
    /// The virtual machine that this is of, if it is of one.
    pub machine: Option<&'a str>,
    /// The pod of its name.
    pub pod: Option<&'a Pod>,
    /// The Service of its name.
    pub service: Option<&'a Service>,
    /// The authorities by which its pod is known; asked for when the pod is ready.
    pub authorities: Option<&'a str>,
    /// The time.
    pub now: Time,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Delete the export: its time is over.
    Delete,
    /// Make the Service.
    CreateService,
    /// Make a token, if there is none.
    CreateToken,
    /// Make the pod, which serves these volumes until this time.
    CreatePod {
        /// The volumes.
        volumes: Vec<Volume>,
        /// Seconds since 1970.
        until: i64,
    },
    /// Make the pod's certificate, if there is none.
    CreateCredentials,
    /// Delete the pod with this unique id.
    DeletePod {
        /// The unique id.
        uid: Option<String>,
        /// The reason of an event.
        reason: &'static str,
        /// The same for people.
        message: String,
    },
}

/// What is done and written, in this order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// What is done.
    pub actions: Vec<Action>,
    /// The status to write, if it differs.
    pub status: ExportStatus,
    /// When to look again, if nothing happens before.
    pub again: Option<Duration>,
}

/// Returns when an export is deleted.
fn end(export: &VirtualMachineExport) -> Option<Timestamp> {
    let created = export.metadata.creation_timestamp.as_ref()?.0;
    let ttl = SignedDuration::try_from(export.spec.ttl()).ok()?;
    Some(created.checked_add(ttl).unwrap_or(Timestamp::MAX))
}

/// How far the pod of an export is.
enum Stage {
    /// There is none, or it goes.
    None,
    /// It does not run yet.
    Pending,
    /// It runs, and is not ready.
    Starting,
    Ready,
    /// It has ended, by itself or not.
    Ended(ExportPhase),
}

fn stage(pod: &Pod) -> Stage {
    if pod.metadata.deletion_timestamp.is_some() {
        return Stage::None;
    }
    let status = pod.status.as_ref();
    match status.and_then(|status| status.phase.as_deref()) {
        None | Some("Pending") => Stage::Pending,
        Some("Succeeded") => Stage::Ended(ExportPhase::Terminated),
        Some("Failed") => Stage::Ended(ExportPhase::Pending),
        Some("Running") if is_ready(pod) => Stage::Ready,
        Some(_) => Stage::Starting,
    }
}

/// Whether a pod can be reached.
pub(super) fn is_ready(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|of| of.type_ == "Ready" && of.status == "True")
}

/// Decides.
#[must_use]
pub fn decide(observed: &Observed<'_>) -> Decision {
    let export = observed.export;
    let mut decision = Decision {
        status: export.status.clone(),
        ..Decision::default()
    };
    // What was made for it goes with it.
    if export.metadata.deletion_timestamp.is_some() {
        return decision;
    }
    let now = observed.now.0;
    let end = end(export).unwrap_or(Timestamp::MAX);
    if now >= end {
        decision.actions.push(Action::Delete);
        return decision;
    }
    let left = Duration::try_from(end.duration_since(now)).unwrap_or_default();
    // No timer is so long.
    decision.again = Some(left.min(Duration::from_secs(24 * 3600)));
    let status = &mut decision.status;
    status.ttl_expiration_time = Some(Time(end));
    status.virtual_machine_name = observed.machine.map(str::to_owned);
    status.token_secret_ref = Some(token_name(export));
    status.links = None;
    match observed.service {
        None => decision.actions.push(Action::CreateService),
        Some(service) if !owns(export, &service.metadata) => {
            // It goes with the export that it is of, if that is gone.
            let message = format!("the Service {} is another export's", service_name(export));
            waits(&mut decision, observed, "Initializing", &message);
            decision.look_within(LOOK);
            return decision;
        }
        Some(_) => {}
    }
    decision.status.service_name = service_name(export);
    let pod = observed.pod.filter(|pod| owns(export, &pod.metadata));
    match observed.source {
        Source::Available(volumes) => serve(&mut decision, observed, pod, volumes, end),
        Source::Waits(obstacle) => {
            stop(&mut decision, pod, obstacle.message());
            waits(
                &mut decision,
                observed,
                obstacle.reason(),
                obstacle.message(),
            );
            decision.look_within(PATIENCE);
        }
        Source::Nothing { reason, message } => {
            stop(&mut decision, pod, message);
            decision.status.phase = ExportPhase::Skipped;
            ready(&mut decision, observed, false, reason, message);
        }
    }
    of_source(&mut decision, observed);
    decision
}

impl Decision {
    fn look_within(&mut self, wait: Duration) {
        self.again = Some(self.again.map_or(wait, |again| again.min(wait)));
    }
}

fn serve(
    decision: &mut Decision,
    observed: &Observed<'_>,
    pod: Option<&Pod>,
    volumes: &[Volume],
    end: Timestamp,
) {
    let export = observed.export;
    match (observed.pod, pod) {
        (None, _) => {
            if export.spec.token_secret_ref.is_none() {
                decision.actions.push(Action::CreateToken);
            }
            let last = observed.now.0.checked_add(POD_LIFE).unwrap_or(end);
            decision.actions.push(Action::CreatePod {
                volumes: volumes.to_vec(),
                until: end.min(last).as_second(),
            });
            waits(decision, observed, "PodPending", "");
        }
        (Some(_), None) => {
            let message = format!("the pod {} is not this export's", pod_name(export));
            waits(decision, observed, "Initializing", &message);
            decision.look_within(LOOK);
        }
        (_, Some(pod)) => match (stage(pod), observed.authorities) {
            (Stage::None, _) => waits(decision, observed, "PodPending", ""),
            (Stage::Pending, _) => {
                decision.actions.push(Action::CreateCredentials);
                waits(decision, observed, "PodPending", "");
            }
            (Stage::Ready, Some(authorities)) => {
                decision.status.phase = ExportPhase::Ready;
                decision.status.links = Some(links(export, volumes, authorities));
                ready(decision, observed, true, "PodReady", "");
            }
            (Stage::Starting | Stage::Ready, _) => waits(decision, observed, "Unknown", ""),
            (Stage::Ended(phase), _) => {
                decision.actions.push(Action::DeletePod {
                    uid: pod.metadata.uid.clone(),
                    reason: "ExporterPodFailedOrCompleted",
                    message: format!("The exporter pod {} has ended", pod_name(export)),
                });
                decision.status.phase = phase;
                ready(decision, observed, false, "PodCompleted", "");
            }
        },
    }
}

/// Ends the pod, if there is one: nobody reads what is written to.
fn stop(decision: &mut Decision, pod: Option<&Pod>, why: &str) {
    if let Some(pod) = pod.filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
        decision.actions.push(Action::DeletePod {
            uid: pod.metadata.uid.clone(),
            reason: "ExportPaused",
            message: why.to_owned(),
        });
    }
}

fn waits(decision: &mut Decision, observed: &Observed<'_>, reason: &str, message: &str) {
    decision.status.phase = ExportPhase::Pending;
    ready(decision, observed, false, reason, message);
}

fn ready(decision: &mut Decision, observed: &Observed<'_>, is: bool, reason: &str, message: &str) {
    let condition = Condition {
        status: if is { "True" } else { "False" }.to_owned(),
        ..Condition::no("Ready", reason, message)
    };
    set_condition(&mut decision.status.conditions, condition, &observed.now);
}

/// Says of the source itself how far it is.
fn of_source(decision: &mut Decision, observed: &Observed<'_>) {
    let export = observed.export;
    let (kind, words) = match export.spec.source() {
        Some(ExportSource::Snapshot(_)) => {
            ("VolumesCreated", ["AllPVCsReady", "NotAllPVCsCreated"])
        }
        _ => ("PVCReady", ["PVCBound", "PVCPending"]),
    };
    let condition = match observed.source {
        Source::Available(_) | Source::Waits(Obstacle::InUse(_)) => Condition {
            status: "True".to_owned(),
            ..Condition::no(kind, words[0], "")
        },
        Source::Waits(Obstacle::Missing(message)) if kind == "PVCReady" => {
            Condition::no(kind, "PVCNotFound", message.as_str())
        }
        Source::Waits(obstacle) => Condition::no(kind, words[1], obstacle.message()),
        Source::Nothing { reason, message } => Condition::no(kind, reason, message.as_str()),
    };
    set_condition(&mut decision.status.conditions, condition, &observed.now);
}

/// The forms in which a volume is served.
fn formats(volume: &Volume) -> &'static [Format] {
    match volume.content {
        Content::Disk | Content::Device => &Format::OF_DISK,
        Content::Files => &Format::OF_FILES,
    }
}

/// Returns where volumes are downloaded.
fn links(export: &VirtualMachineExport, volumes: &[Volume], authorities: &str) -> ExportLinks {
    let namespace = export.metadata.namespace.as_deref().unwrap_or_default();
    let host = format!("{}.{namespace}.svc", service_name(export));
    let of = |volume: &Volume| ExportVolume {
        name: volume.name.clone(),
        formats: formats(volume)
            .iter()
            .map(|format| ExportFormat {
                format: format.name().to_owned(),
                url: format!("https://{host}{}", format.path(&volume.name)),
            })
            .collect(),
    };
    ExportLinks {
        internal: Some(ExportLink {
            cert: authorities.trim().to_owned(),
            volumes: volumes.iter().map(of).collect(),
        }),
    }
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
