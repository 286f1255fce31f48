//! `podvisor inspect`: containers in detail, as JSON.

use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

use clap::Args;
use serde_json::{Map, Value, json};

use super::ports::Port;
use super::{Containers, Entry, State, network, ps, sweep};
use crate::cli::{Globals, JsonArgs, io_limits};
use crate::cni::Endpoint;
use crate::sandbox::{Health, HealthCheck, SandboxClient, SandboxExit};
use crate::signal;

#[derive(Debug, Args)]
pub(in crate::cli) struct InspectArgs {
    #[command(flatten)]
    shown: JsonArgs,

    /// Names or ids
    #[arg(value_name = "CONTAINER", required = true)]
    containers: Vec<String>,
}

pub(in crate::cli) fn run(globals: &Globals, args: &InspectArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let (found, code) = crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let (mut found, mut code) = (Vec::new(), 0);
        for name in &args.containers {
            let shown = async {
                let entry = containers.find(name)?;
                let state = State::of(&entry).await?;
                anyhow::Ok(view(&entry, &state))
            };
            match shown.await {
                Ok(view) => found.push(view),
                Err(error) => {
                    crate::cli::report(&error);
                    code = crate::cli::FAILURE;
                }
            }
        }
        anyhow::Ok((found, code))
    })?;
    crate::cli::print_json(&found)?;
    Ok(code)
}

/// Returns a container's description with docker's field names, for existing scripts.
fn view(entry: &Entry, state: &State) -> Value {
    let machine_exit = match state {
        State::Dead { machine, .. } => machine.as_ref(),
        _ => None,
    };
    let (record, short) = (&entry.record, ps::view(entry, Some(state)));
    let part = |name: &str| short.get(name).cloned().unwrap_or_default();
    let mounts = record.volumes.iter().map(|volume| {
        json!({
            "Type": "bind",
            "Source": volume.source,
            "Destination": volume.destination,
            "RW": !volume.read_only,
        })
    });
    let mut view = json!({
        "Id": record.id,
        "Name": record.name,
        "Created": part("Created"),
        "Image": record.image_id,
        "ImageName": record.image,
        "State": {
            "Status": state.word(),
            "Running": matches!(state, State::Running { .. }),
            "Restarting": matches!(state, State::Restarting { .. }),
            "Paused": state.word() == "paused",
            "OOMKilled": match state {
                State::Exited { exit, .. } => exit.oom_killed,
                _ => matches!(machine_exit, Some(SandboxExit::OutOfMemory { .. })),
            },
            "Pid": part("Pid"),
            "ExitCode": part("ExitCode"),
            "Error": match (state, machine_exit) {
                (_, Some(exit)) => exit.to_string(),
                (State::Dead { .. }, None) => "the sandbox's process died".to_owned(),
                _ => String::new(),
            },
            "GuestLog": machine_exit.map_or(&[][..], SandboxExit::kernel_log),
            "StartedAt": part("StartedAt"),
            "FinishedAt": part("FinishedAt"),
            "Health": state.health().map(health),
        },
        "RestartCount": state.restarts(),
        "Pod": record.pod,
        "Config": {
            "Image": record.image,
            "Hostname": record.hostname,
            "Cmd": record.process.args(),
            "Env": record.process.env(),
            "WorkingDir": record.process.cwd(),
            "User": record.user,
            "Tty": record.has_terminal(),
            "OpenStdin": record.interactive,
            "Labels": record.labels,
            "StopSignal": signal::name(record.stop_signal),
            "StopTimeout": record.stop_timeout,
            "Healthcheck": record.health.as_ref().map(health_check),
        },
        "HostConfig": {
            "AutoRemove": record.remove,
            "RestartPolicy": {
                "Name": record.restart.name(),
                "MaximumRetryCount": record.restart.max_restarts(),
            },
            "Memory": record.memory,
            "NanoCpus": record.cpu_limit.map_or_else(
                || u64::from(record.cpus) * 1_000_000_000,
                |thousandths| u64::from(thousandths) * 1_000_000,
            ),
            "Jail": record.jailed,
            "JailMissing": state.client().map(SandboxClient::missing_layers),
            "NetworkMode": record.network,
            "PortBindings": bindings(&record.ports),
        },
        "NetworkSettings": network_settings(entry, state),
        "Mounts": mounts.collect::<Vec<_>>(),
        "LogPath": entry.log(),
        "Directory": entry.dir,
    });
    io_limits::add_to_view(&mut view["HostConfig"], &record.io_limits);
    view
}

/// Returns how a container's health is checked; durations are in nanoseconds.
fn health_check(check: &HealthCheck) -> Value {
    let ns = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    let command = check.process.args().iter().flatten();
    json!({
        "Test": std::iter::once("CMD").chain(command.map(String::as_str)).collect::<Vec<_>>(),
        "Interval": ns(check.interval),
        "Timeout": ns(check.timeout),
        "StartPeriod": ns(check.start_period),
        "StartInterval": ns(check.start_interval),
        "Retries": check.retries,
    })
}

fn health(health: &Health) -> Value {
    let at = |ns: u64| humantime::format_rfc3339_nanos(UNIX_EPOCH + Duration::from_nanos(ns));
    let log = health.log.iter().map(|result| {
        json!({
            "Start": at(result.started_at_ns).to_string(),
            "End": at(result.ended_at_ns).to_string(),
            "ExitCode": result.exit_code,
            "Output": result.output,
        })
    });
    json!({
        "Status": health.status.word(),
        "FailingStreak": health.failing_streak,
        "Log": log.collect::<Vec<_>>(),
    })
}

/// Returns the container's network configuration.
fn network_settings(entry: &Entry, state: &State) -> Value {
    let pod = entry.pod();
    let entry = pod.as_ref().unwrap_or(entry);
    let endpoint = match state.has_ended() {
        true => Endpoint::default(),
        false => network::endpoint(entry).unwrap_or_default(),
    };
    let address = endpoint.addresses.first();
    let mut settings = json!({
        "IPAddress": address.map(|address| address.address().to_string()).unwrap_or_default(),
        "IPPrefixLen": address.map_or(0, |address| address.length()),
        "Gateway": endpoint.gateway.map(|gateway| gateway.to_string()).unwrap_or_default(),
        "MacAddress": endpoint.mac,
    });
    let mut networks = Map::new();
    networks.insert(entry.record.network.to_string(), settings.clone());
    settings["Networks"] = Value::Object(networks);
    settings["Ports"] = bindings(&entry.ports(Some(state)));
    settings["SandboxKey"] = json!(network::netns(entry).unwrap_or_default());
    settings
}

/// Maps the container's ports to the host's.
fn bindings(ports: &[Port]) -> Value {
    let mut bindings: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for port in ports {
        let host = port.host();
        let binding = json!({"HostIp": host.ip(), "HostPort": host.port().to_string()});
        bindings.entry(port.guest()).or_default().push(binding);
    }
    json!(bindings)
}
