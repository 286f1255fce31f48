//! What a request for a subresource of an instance does, or why it does not.
//!
//! Codes and reasons are those of the real project, where its clients look at them.

use bytes::Bytes;
use podvisor_cluster_types::vmi::{VmiSpec, VmiStatus};
use serde::Deserialize;
use serde_json::json;

use crate::{api::Target, node_client::Call, status::Failure};

/// How long guests stay frozen if nobody says how long, in seconds; and the most that may be asked
/// for.
const FROZEN: u64 = 300;
const FROZEN_MOST: u64 = 3600;

const NOT_RUNNING: &str = "VMI is not running";
const NO_AGENT: &str = "VMI does not have guest agent connected";

/// What decides, besides the request.
pub(super) struct Instance<'a> {
    pub(super) spec: &'a VmiSpec,
    pub(super) status: &'a VmiStatus,
    /// The snapshot that is taken of it.
    pub(super) snapshot: Option<&'a str>,
}

impl Instance<'_> {
    fn is_running(&self) -> bool {
        self.status.phase.as_deref() == Some("Running")
    }

    fn is(&self, condition: &str) -> bool {
        let conditions = &self.status.conditions;
        conditions
            .iter()
            .any(|found| found.kind == condition && found.status == "True")
    }

    /// Fails with a conflict unless the instance runs.
    fn running(&self) -> Result<(), Failure> {
        if self.is_running() {
            return Ok(());
        }
        Err(Failure::conflict(NOT_RUNNING))
    }

    /// Fails as connections do unless the instance runs.
    fn connectable(&self) -> Result<(), Failure> {
        if self.is_running() {
            return Ok(());
        }
        let phase = self.status.phase.as_deref().unwrap_or("unknown");
        let message = format!(
            "Unable to connect to VirtualMachineInstance because phase is {phase} instead of Running"
        );
        // One that has failed never runs again.
        Err(match phase {
            "Failed" => Failure::conflict(message),
            _ => Failure::bad_request(message),
        })
    }
}

/// Options in bodies.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Options {
    dry_run: Vec<String>,
    unfreeze_timeout: Option<serde_json::Value>,
}

impl Options {
    fn read(body: &[u8]) -> Result<Self, Failure> {
        if body.iter().all(u8::is_ascii_whitespace) {
            return Ok(Self::default());
        }
        let options: Self = serde_json::from_slice(body)
            .map_err(|error| Failure::bad_request(format!("the options are invalid: {error}")))?;
        if options.dry_run.iter().any(|word| word != "All") {
            return Err(Failure::bad_request("dryRun must be All or missing"));
        }
        Ok(options)
    }
}

/// What the node has to do; nothing in a dry run.
pub(super) fn decide(
    target: &Target<'_>,
    query: Option<&str>,
    body: &[u8],
    instance: &Instance<'_>,
) -> Result<Option<Call>, Failure> {
    let steps = target.rest.as_slice();
    let get = target.verb == "get";
    let call = match (target.subresource, steps, get) {
        ("console", [], true) => console(instance)?,
        ("portforward", [port], true) => port_forward(port, "tcp", instance)?,
        ("portforward", [port, protocol], true) => port_forward(port, protocol, instance)?,
        ("vsock", [], true) => vsock(query, instance)?,
        ("vnc", [] | ["screenshot"], true) => {
            return Err(Failure::bad_request("No graphics devices are present."));
        }
        ("usbredir", [], true) => {
            return Err(Failure::bad_request("Not configured with USB Redirection"));
        }
        ("sev", [_], _) => {
            return Err(Failure::bad_request("Not configured with launch security"));
        }
        ("guestosinfo" | "userlist" | "filesystemlist", [], true) => {
            instance.running()?;
            if !instance.is("AgentConnected") {
                return Err(Failure::conflict(NO_AGENT));
            }
            Call::Get(target.subresource.to_owned())
        }
        (_, [], false) => {
            let options = Options::read(body)?;
            let call = act(target, &options, instance)?;
            if !options.dry_run.is_empty() {
                return Ok(None);
            }
            call
        }
        _ => return Err(unknown(target)),
    };
    Ok(Some(call))
}

fn unknown(target: &Target<'_>) -> Failure {
    Failure::not_found("subresource", target.subresource)
}

fn act(target: &Target<'_>, options: &Options, instance: &Instance<'_>) -> Result<Call, Failure> {
    let mut body = Bytes::new();
    match target.subresource {
        "pause" => {
            instance.running()?;
            let probe = instance.spec.liveness_probe.as_ref();
            if probe.is_some_and(|probe| probe.guest_agent_ping.is_none()) {
                return Err(Failure::forbidden(
                    "Pausing VMIs with LivenessProbe is currently not supported",
                ));
            }
            if instance.is("Paused") {
                return Err(Failure::conflict("VMI is already paused"));
            }
        }
        "unpause" => {
            instance.running()?;
            if !instance.is("Paused") {
                return Err(Failure::conflict("VMI is not paused"));
            }
            if let Some(name) = instance.snapshot {
                let message = format!("VMI snapshot {name} is in progress: try again later");
                return Err(Failure::conflict(message));
            }
        }
        "freeze" => {
            instance.running()?;
            let seconds = timeout(options.unfreeze_timeout.as_ref())?;
            body = Bytes::from(json!({ "seconds": seconds }).to_string());
        }
        "unfreeze" => instance.running()?,
        "softreboot" => {
            instance.running()?;
            if instance.is("Paused") {
                return Err(Failure::conflict("VMI is paused"));
            }
        }
        "reset" if !instance.is_running() => return Err(Failure::internal(NOT_RUNNING)),
        "reset" => {}
        _ => return Err(unknown(target)),
    }
    Ok(Call::Put(target.subresource.to_owned(), body))
}

/// How long a guest stays frozen: Go's durations are numbers of nanoseconds, or text as `5m0s`.
fn timeout(value: Option<&serde_json::Value>) -> Result<u64, Failure> {
    let invalid = || {
        Failure::bad_request(format!(
            "unfreezeTimeout must be a duration of at most {FROZEN_MOST} s, such as 5m0s"
        ))
    };
    let seconds = match value {
        None | Some(serde_json::Value::Null) => FROZEN,
        Some(serde_json::Value::Number(number)) => {
            number.as_u64().ok_or_else(invalid)? / 1_000_000_000
        }
        Some(serde_json::Value::String(text)) => seconds(text).ok_or_else(invalid)?,
        Some(_) => return Err(invalid()),
    };
    match seconds {
        0 => Ok(FROZEN),
        1..=FROZEN_MOST => Ok(seconds),
        _ => Err(invalid()),
    }
}

/// Reads a duration in whole hours, minutes and seconds.
fn seconds(text: &str) -> Option<u64> {
    let mut total = 0_u64;
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit())?;
        let (number, tail) = rest.split_at_checked(end)?;
        let unit = match tail.bytes().next()? {
            b'h' => 3600,
            b'm' => 60,
            b's' => 1,
            _ => return None,
        };
        let part = number.parse::<u64>().ok()?.checked_mul(unit)?;
        total = total.checked_add(part)?;
        rest = tail.get(1..)?;
    }
    (!text.is_empty()).then_some(total)
}

fn console(instance: &Instance<'_>) -> Result<Call, Failure> {
    if instance.spec.domain.devices.autoattach_serial_console == Some(false) {
        return Err(Failure::bad_request("No serial consoles are present."));
    }
    instance.connectable()?;
    Ok(Call::Stream("console".to_owned()))
}

fn port_forward(port: &str, protocol: &str, instance: &Instance<'_>) -> Result<Call, Failure> {
    let number = port.parse::<u16>().ok().filter(|port| *port > 0);
    let number = number.ok_or_else(|| {
        let port = podvisor_cluster_types::cause::shown(port);
        Failure::bad_request(format!("{port} is not a port: 1 to 65535 are"))
    })?;
    if !matches!(protocol, "tcp" | "udp") {
        let protocol = podvisor_cluster_types::cause::shown(protocol);
        let message = format!("{protocol} is not a protocol: tcp and udp are");
        return Err(Failure::bad_request(message));
    }
    if instance.is("Paused") {
        return Err(Failure::conflict("VMI is paused"));
    }
    instance.connectable()?;
    Ok(Call::Stream(format!("portforward/{number}/{protocol}")))
}

fn vsock(query: Option<&str>, instance: &Instance<'_>) -> Result<Call, Failure> {
    let value = |name: &str| {
        query?
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .find_map(|(key, value)| (key == name).then_some(value))
    };
    if instance.spec.domain.devices.autoattach_vsock != Some(true) {
        return Err(Failure::bad_request("VSOCK is not attached."));
    }
    let port = value("port").and_then(|port| port.parse::<u32>().ok());
    let port = port.filter(|port| *port != u32::MAX);
    let port = port.ok_or_else(|| Failure::bad_request("port must be the number of a port"))?;
    if value("tls") != Some("false") {
        return Err(Failure::bad_request(
            "TLS is between you and the guest here: ask for tls=false",
        ));
    }
    instance.connectable()?;
    Ok(Call::Stream(format!("vsock/{port}")))
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
