//! Liveness and readiness probes.

use serde_json::Value;

use super::{VmiSpec, count};
use crate::{Causes, FieldPath};

object! {
    /// A probe: exactly one handler.
    pub struct Probe {
        /// Runs a program in the guest by its agent.
        pub exec: Option<ExecProbe>,
        /// Asks whether the guest's agent answers.
        pub guest_agent_ping: Option<ProbeHandler>,
        /// Asks for a page.
        pub http_get: Option<HttpGetProbe>,
        /// Opens a connection.
        pub tcp_socket: Option<TcpSocketProbe>,
        /// Seconds before the first one.
        pub initial_delay_seconds: Option<i64>,
        /// Seconds for an answer.
        pub timeout_seconds: Option<i64>,
        /// Seconds between two.
        pub period_seconds: Option<i64>,
        /// So many successes in a row are a success.
        pub success_threshold: Option<i64>,
        /// So many failures in a row are a failure.
        pub failure_threshold: Option<i64>,
    }

    /// A handler without settings.
    pub struct ProbeHandler {
    }

    /// A program in the guest.
    pub struct ExecProbe {
        /// The program and its arguments.
        pub command: Vec<String>,
    }

    /// A request by HTTP.
    pub struct HttpGetProbe {
        /// Number of the port, or its name.
        pub port: Option<Value>,
        /// The path.
        pub path: Option<String>,
        /// The host; the VM's address where it is missing.
        pub host: Option<String>,
        /// `HTTP` or `HTTPS`.
        pub scheme: Option<String>,
        /// Headers.
        pub http_headers: Vec<HttpHeader>,
    }

    /// A header of a request.
    pub struct HttpHeader {
        /// Its name.
        pub name: String,
        /// Its value.
        pub value: String,
    }

    /// A connection.
    pub struct TcpSocketProbe {
        /// Number of the port, or its name.
        pub port: Option<Value>,
        /// The host; the VM's address where it is missing.
        pub host: Option<String>,
    }
}

pub(super) fn apply_defaults(probe: &mut Probe) {
    let defaults = [
        (&mut probe.timeout_seconds, 1),
        (&mut probe.period_seconds, 10),
        (&mut probe.success_threshold, 1),
        (&mut probe.failure_threshold, 3),
    ];
    for (value, default) in defaults {
        if value.unwrap_or(0) == 0 {
            *value = Some(default);
        }
    }
}

pub(super) fn validate(spec: &VmiSpec, path: &FieldPath, causes: &mut Causes) {
    let probes = [
        ("readinessProbe", &spec.readiness_probe),
        ("livenessProbe", &spec.liveness_probe),
    ];
    for (name, probe) in probes {
        let Some(probe) = probe else { continue };
        let path = path.child(name);
        let handlers = [
            probe.exec.is_some(),
            probe.guest_agent_ping.is_some(),
            probe.http_get.is_some(),
            probe.tcp_socket.is_some(),
        ];
        match count(&handlers) {
            1 => {}
            0 => causes.required(
                &path,
                "needs a handler: one of exec, guestAgentPing, httpGet and tcpSocket",
            ),
            _ => causes.invalid(&path, "must have one handler only"),
        }
        if probe
            .exec
            .as_ref()
            .is_some_and(|exec| exec.command.is_empty())
        {
            causes.required(&path.child("exec.command"), "is required");
        }
        let by_network = [
            ("httpGet", probe.http_get.is_some()),
            ("tcpSocket", probe.tcp_socket.is_some()),
        ];
        for (name, given) in by_network {
            if given && !spec.has_pod_network() {
                causes.invalid(&path.child(name), "is only possible with a pod network");
            }
        }
        let numbers = [
            ("initialDelaySeconds", probe.initial_delay_seconds),
            ("timeoutSeconds", probe.timeout_seconds),
            ("periodSeconds", probe.period_seconds),
            ("successThreshold", probe.success_threshold),
            ("failureThreshold", probe.failure_threshold),
        ];
        for (name, number) in numbers {
            if let Some(number) = number.filter(|n| !(0..=i64::from(i32::MAX)).contains(n)) {
                causes.invalid(&path.child(name), format_args!("is {number}, out of range"));
            }
        }
    }
}
