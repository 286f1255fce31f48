//! Health and metrics over HTTP, for monitoring: `/healthz` and `/metrics`.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tracing::{debug, info, warn};

use super::call_layer::{BOUNDS_MS, Calls};
use super::node::Node;
use super::state::{ContainerPhase, PodPhase};
use crate::connection_limiter::ConnectionLimiter;

/// Maximum number of concurrent clients; another one replaces the oldest.
const MAX_CONNECTIONS: usize = 32;

/// How long a client may take to send a request's header.
const REQUEST_HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Delay after a failed accept.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Listens on `address` and serves until the process exits.
pub(super) async fn serve(
    address: SocketAddr,
    node: Arc<Node>,
    calls: Arc<Calls>,
) -> io::Result<()> {
    let listener = TcpListener::bind(address).await?;
    info!(%address, "serving health and metrics");
    tokio::spawn(async move {
        let strangers = ConnectionLimiter::new(MAX_CONNECTIONS);
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let (node, calls) = (Arc::clone(&node), Arc::clone(&calls));
                    strangers.spawn(|stranger| async move {
                        converse(stream, node, calls).await;
                        drop(stranger);
                    });
                }
                Err(error) => {
                    // Usually no descriptors are left: open connections must end first.
                    warn!(%error, "failed to accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    });
    Ok(())
}

async fn converse(stream: TcpStream, node: Arc<Node>, calls: Arc<Calls>) {
    let service = service_fn(move |request| {
        let (node, calls) = (Arc::clone(&node), Arc::clone(&calls));
        async move { Ok::<_, Infallible>(answer(&node, &calls, &request).await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        debug!(%error, "a client of metrics");
    }
}

async fn answer(node: &Node, calls: &Calls, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/healthz") => match node.runtime_fault() {
            None => (StatusCode::OK, "ok\n".to_owned()),
            Some(fault) => (StatusCode::SERVICE_UNAVAILABLE, format!("{fault}\n")),
        },
        (&Method::GET | &Method::HEAD, "/metrics") => (StatusCode::OK, metrics(node, calls).await),
        (&Method::GET | &Method::HEAD, _) => (
            StatusCode::NOT_FOUND,
            "there are /healthz and /metrics\n".to_owned(),
        ),
        _ => (StatusCode::METHOD_NOT_ALLOWED, "GET\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    let kind = header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// Returns the metrics in Prometheus' text format.
async fn metrics(node: &Node, calls: &Calls) -> String {
    let mut text = String::new();
    let pods = node.pods().into_iter().map(|pod| match pod.phase() {
        PodPhase::Creating => "creating",
        PodPhase::Ready => "ready",
        PodPhase::Stopped { .. } => "stopped",
        PodPhase::Removing => "removing",
    });
    by_state(&mut text, "podvisor_pods", "Pod sandboxes by state", pods);
    let containers = node.containers().into_iter().map(|c| match c.phase() {
        ContainerPhase::Creating => "creating",
        ContainerPhase::Created => "created",
        ContainerPhase::Running { .. } => "running",
        ContainerPhase::Exited(_) => "exited",
        ContainerPhase::Removing => "removing",
    });
    let help = "Containers by state";
    by_state(&mut text, "podvisor_containers", help, containers);
    for (name, help, fault) in [
        (
            "podvisor_runtime_ready",
            "Whether pods can be run",
            node.runtime_fault(),
        ),
        (
            "podvisor_network_ready",
            "Whether pods can have a network",
            node.network_fault().await,
        ),
    ] {
        head(&mut text, name, help, "gauge");
        let _ = writeln!(text, "{name} {}", u8::from(fault.is_none()));
    }
    let name = "podvisor_pods_outside_cgroup";
    let help = "Pods whose machine is not in the control group of the kubelet's for the pod";
    head(&mut text, name, help, "gauge");
    let pods = node.pods().into_iter();
    let count = pods.filter(|pod| node.is_outside_cgroup(pod)).count();
    let _ = writeln!(text, "{name} {count}");
    let name = "podvisor_pods_missing_jail_layer";
    let help = "Pods whose process lacks a layer of its jail, by layer";
    head(&mut text, name, help, "gauge");
    for (layer, count) in node.missing_layers() {
        let _ = writeln!(text, "{name}{{layer=\"{layer}\"}} {count}");
    }
    of_calls(&mut text, calls);
    text
}

fn head(text: &mut String, name: &str, help: &str, kind: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn by_state(text: &mut String, name: &str, help: &str, states: impl Iterator<Item = &'static str>) {
    let mut counts = std::collections::BTreeMap::<_, u64>::new();
    for state in states {
        *counts.entry(state).or_default() += 1;
    }
    head(text, name, help, "gauge");
    for (state, count) in counts {
        let _ = writeln!(text, "{name}{{state=\"{state}\"}} {count}");
    }
}

fn of_calls(text: &mut String, calls: &Calls) {
    let name = "podvisor_call_duration_seconds";
    let help = "Calls of the Container Runtime Interface by method and gRPC code";
    head(text, name, help, "histogram");
    let counts = calls.counts();
    let counts = counts.iter().flat_map(|(method, of_method)| {
        // The method's name comes from a client.
        let method = method.replace(|c: char| !c.is_ascii_alphanumeric(), "");
        of_method
            .iter()
            .map(move |(code, count)| (method.clone(), code, count))
    });
    for (method, code, count) in counts {
        let labels = format!("method=\"{method}\",code=\"{code}\"");
        for (within, bound) in count.within.iter().zip(BOUNDS_MS) {
            let seconds = Duration::from_millis(bound).as_secs_f64();
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{seconds}\"}} {within}");
        }
        let (calls, sum) = (count.calls, count.time.as_secs_f64());
        let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {calls}");
        let _ = writeln!(text, "{name}_sum{{{labels}}} {sum}");
        let _ = writeln!(text, "{name}_count{{{labels}}} {calls}");
    }
}
