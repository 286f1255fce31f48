//! `podvisor pod`: machines for several containers, which share network, IPC namespace and host
//! name.
//!
//! A pod is stored like a container, without a program: its directory has the machine, and its
//! record marks it as a pod. The machine runs from `pod create` to `pod stop`.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, ensure};
use clap::{ArgAction, Args, Subcommand};
use futures_util::future::join_all;
use futures_util::{StreamExt as _, stream};
use oci_spec::runtime::Process;
use serde_json::{Value, json};
use tracing::debug;

use super::container::claim::Claim;
use super::container::lifecycle::{ask_to_end, each_name, grace};
use super::container::ports::line;
use super::container::state::{MAX_CONCURRENT_QUERIES, other_version, states, unresponsive};
use super::container::{
    Containers, Entry, NetworkArgs, Record, RestartArg, State, clear, events, network, port, sweep,
    volumes,
};
use super::deferred::Deferred;
use super::env_file::parse_label;
use super::format::{SHORT_ID, ago, rfc3339};
use super::guest::{Guest, GuestArgs};
use super::io_limits::{self, IoArgs};
use super::run::{
    MachineOptions, begin_machine, keep_etc_files, now, parse_console, parse_hostname, parse_sysctl,
};
use super::settings::BootArgs;
use super::signals::{Signals, exit_code_of};
use super::table::Table;
use super::{FormatArgs, Globals, JsonArgs};
use crate::cri::POD_IMAGE_SLOTS;
use crate::sandbox::{EventAction, SandboxClient, SandboxError, random_id};
use crate::signal::SIGKILL;

/// How long a pod's guest may take to power itself off after its containers have ended.
const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(super) struct PodArgs {
    #[command(subcommand)]
    command: PodCommand,
}

#[derive(Debug, Subcommand)]
enum PodCommand {
    /// Start a machine for several containers, and print the pod's id
    Create(Deferred<CreateArgs>),
    /// List pods
    #[command(visible_alias = "ps", alias = "list")]
    Ls(Deferred<ListArgs>),
    /// Show pods in detail
    Inspect(Deferred<InspectArgs>),
    /// Stop the containers of pods, and their machines
    Stop(Deferred<StopArgs>),
    /// Remove pods with their containers
    Rm(Deferred<RmArgs>),
}

#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
struct CreateArgs {
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,

    /// Name of the pod [default: the beginning of its id]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Label of the pod
    #[arg(short, long, value_name = "KEY[=VALUE]", value_parser = parse_label)]
    label: Vec<(String, String)>,

    /// Host name of the guest [default: the pod's name]
    #[arg(short = 'h', long, value_name = "NAME", value_parser = parse_hostname)]
    hostname: Option<String>,

    #[command(flatten)]
    network: NetworkArgs,

    #[command(flatten)]
    guest: GuestArgs,

    #[command(flatten)]
    io: IoArgs,

    /// Set a parameter of the guest's kernel by its dotted name
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_sysctl)]
    sysctl: Vec<(String, String)>,

    #[command(flatten)]
    boot: BootArgs,

    /// Give the guest a serial console: `pty` for `podvisor console` alone, or a file for what is
    /// written to it, too
    #[arg(long, value_name = "pty|FILE", value_parser = parse_console)]
    console: Option<PathBuf>,

    /// Let containers of the pod share directories of the host, by `run --pod -v`; takes root, and
    /// the machine's process stays root in its jail
    #[arg(long)]
    volumes: bool,

    /// Do not jail the machine's process: for hosts that do not let podvisor do so
    #[arg(long)]
    no_jail: bool,
}

#[derive(Debug, Args)]
struct ListArgs {
    /// Print ids only
    #[arg(short, long, conflicts_with_all = ["json", "format"])]
    quiet: bool,

    #[command(flatten)]
    shown: FormatArgs,
}

#[derive(Debug, Args)]
struct InspectArgs {
    #[command(flatten)]
    shown: JsonArgs,

    /// Names or ids
    #[arg(value_name = "POD", required = true)]
    pods: Vec<String>,
}

#[derive(Debug, Args)]
struct StopArgs {
    /// Seconds to wait before killing the program [default: of `run --stop-timeout`, or
    /// 10]
    #[arg(short = 't', long, visible_alias = "timeout", value_name = "SECONDS")]
    time: Option<u32>,

    /// Names or ids
    #[arg(value_name = "POD", required = true)]
    pods: Vec<String>,
}

#[derive(Debug, Args)]
struct RmArgs {
    /// Kill its containers first if some run
    #[arg(short, long)]
    force: bool,

    /// Names or ids
    #[arg(value_name = "POD", required = true)]
    pods: Vec<String>,
}

pub(super) fn run(globals: &Globals, args: &PodArgs) -> anyhow::Result<u8> {
    match &args.command {
        PodCommand::Create(args) => create(globals, args),
        PodCommand::Ls(args) => list(globals, args),
        PodCommand::Inspect(args) => inspect(globals, args),
        PodCommand::Stop(args) => each_name(globals, &args.pods, async |containers, name| {
            stop(containers, &containers.find_pod(name)?, args.time).await?;
            Ok(Some(name.to_owned()))
        }),
        PodCommand::Rm(args) => each_name(globals, &args.pods, async |containers, name| {
            let pod = match args.force {
                true => containers.find_pod_if_there(name)?,
                false => Some(containers.find_pod(name)?),
            };
            let Some(pod) = pod else {
                return Ok(None);
            };
            remove(containers, &pod, args.force).await?;
            Ok(Some(name.to_owned()))
        }),
    }
}

fn create(globals: &Globals, args: &CreateArgs) -> anyhow::Result<u8> {
    let root =
        std::path::absolute(globals.root()?).context("cannot find the root's absolute path")?;
    ensure!(
        !args.volumes || rustix::process::geteuid().is_root(),
        "--volumes takes root, who alone may mount what is to be shared"
    );
    let guest = args.guest.guest(args.boot.mode()?.templates(&root))?;
    guest.check_whole_cpus()?;
    let io_limits = args.io.limits()?;
    let network = args.network.choose(None)?;
    let id = random_id().context("cannot make up an id for the pod")?;
    let short: String = id.chars().take(SHORT_ID).collect();
    let name = args.name.clone().unwrap_or(short);
    let hostname = args.hostname.clone();
    let now = now();
    let record = Record {
        hostname: hostname.unwrap_or_else(|| match parse_hostname(&name) {
            Ok(name) => name,
            // Not every name is a valid host name.
            Err(_) => id.chars().take(SHORT_ID).collect(),
        }),
        name,
        image: String::new(),
        image_id: String::new(),
        created: now.as_secs(),
        created_nanos: now.subsec_nanos(),
        labels: args.label.iter().cloned().collect(),
        remove: false,
        restart: RestartArg::No,
        cpus: guest.cpus,
        cpu_limit: None,
        memory: guest.memory,
        io_limits,
        interactive: false,
        stop_signal: SIGKILL,
        stop_timeout: None,
        volumes: Vec::new(),
        network,
        ports: args.network.ports(),
        jailed: !args.no_jail,
        user: String::new(),
        process: Process::default(),
        pod: None,
        is_pod: true,
        health: None,
        vm: None,
        id: id.clone(),
    };
    let containers = Containers::open(&root)?;
    super::runtime()?.block_on(async {
        sweep(&containers).await?;
        let mut signals = Signals::new()?;
        let (entry, claim) = containers.create(record)?;
        let launched = tokio::select! {
            launched = launch(args, &guest, &entry) => launched.map(|()| None),
            signal = signals.ending() => Ok(Some(exit_code_of(signal))),
        };
        drop(claim);
        if !matches!(launched, Ok(None)) {
            clear::remove(&entry.dir).await?;
        }
        if let Some(code) = launched? {
            return Ok(code);
        }
        super::print(&format!("{id}\n"))?;
        Ok(0)
    })
}

async fn launch(args: &CreateArgs, guest: &Guest, entry: &Entry) -> anyhow::Result<()> {
    if args.volumes {
        volumes::make_shared(&entry.shared(), entry.record.jailed)?;
    }
    let options = MachineOptions::of_pod(
        POD_IMAGE_SLOTS,
        args.volumes,
        args.console.clone(),
        &args.sysctl,
    );
    let (launching, attached) = begin_machine(entry, guest, &args.network, options).await?;
    // Before the machine answers, which it does once it has received the network.
    keep_etc_files(entry, &attached)?;
    launching.finish(attached.network).await?;
    Ok(())
}

/// The state of a pod's machine.
enum Machine {
    Running(SandboxClient),
    /// Another process is starting it, or removing the pod.
    Claimed,
    /// Its process does not answer.
    Unresponsive(Option<u32>),
    /// It cannot be queried: [`Self::of`] returned an error.
    Unknown,
    Ended,
}

impl Machine {
    async fn of(pod: &Entry) -> anyhow::Result<Self> {
        let is_claimed = Claim::is_taken(&pod.dir);
        match SandboxClient::connect(&pod.dir).await {
            Ok(client) => Ok(Self::Running(client)),
            Err(SandboxError::Unresponsive { .. } | SandboxError::Gone { .. }) if is_claimed => {
                Ok(Self::Claimed)
            }
            Err(SandboxError::Unresponsive { pid, .. }) => Ok(Self::Unresponsive(pid)),
            Err(SandboxError::Gone { .. }) => Ok(Self::Ended),
            Err(error @ SandboxError::Version { .. }) => {
                Err(anyhow::Error::from(error).context(other_version(pod)))
            }
            Err(error) => {
                let what = format!("cannot ask for the pod {}", pod.record.name);
                Err(anyhow::Error::from(error).context(what))
            }
        }
    }

    fn word(&self) -> &'static str {
        match self {
            Self::Running(_) => "Running",
            Self::Claimed => "Created",
            Self::Unresponsive(_) => "Unresponsive",
            Self::Unknown => "Unknown",
            Self::Ended => "Exited",
        }
    }
}

/// Stops the containers concurrently, and then the machine.
async fn stop(containers: &Containers, pod: &Entry, time: Option<u32>) -> anyhow::Result<()> {
    let machine = loop {
        match Machine::of(pod).await? {
            Machine::Claimed => Claim::released(&pod.dir).await?,
            machine => break machine,
        }
    };
    let machine = match machine {
        Machine::Running(machine) => machine,
        Machine::Unresponsive(pid) => return Err(unresponsive(pod, pid)),
        Machine::Claimed | Machine::Ended | Machine::Unknown => return Ok(()),
    };
    let own = states(containers.of_pod(pod)?).await;
    // Containers that cannot be stopped end with the machine.
    let stops = own.iter().map(async |(entry, state)| {
        let client = state.as_ref().ok().and_then(State::client)?;
        let signal = entry.record.stop_signal;
        let has_ended = ask_to_end(client, entry, signal, grace(entry, time)).await;
        let has_ended = has_ended.unwrap_or_else(|error| {
            debug!(container = entry.record.id, %error, "the container is not stopped");
            true
        });
        Some((entry, has_ended))
    });
    let stopped: Vec<_> = join_all(stops).await.into_iter().flatten().collect();
    let power_off = match stopped.iter().all(|(_, has_ended)| *has_ended) {
        true => POWER_OFF_TIMEOUT,
        false => {
            super::notice("the pod's guest does not answer, so its machine is killed");
            Duration::ZERO
        }
    };
    machine.shutdown(power_off).await?;
    for (entry, _) in stopped {
        clear::release_resources(entry).await;
        let stopped = events::event(&entry.record, EventAction::Stop);
        events::note(&entry.dir, &stopped);
    }
    clear::release_resources(pod).await;
    Ok(())
}

async fn remove(containers: &Containers, pod: &Entry, is_forced: bool) -> anyhow::Result<()> {
    let own = containers.of_pod(pod)?;
    if is_forced {
        // Regardless of its guest and its containers.
        match Machine::of(pod).await {
            Ok(Machine::Running(machine)) => machine.shutdown(Duration::ZERO).await?,
            Ok(Machine::Ended) => {}
            // Without waiting for the process that starts it.
            Ok(Machine::Claimed | Machine::Unresponsive(_) | Machine::Unknown) | Err(_) => {
                SandboxClient::kill(&pod.dir).await?
            }
        }
    } else {
        for entry in &own {
            let state = State::of(entry).await?;
            ensure!(
                state.has_ended(),
                "container {} of the pod {} is {}; `podvisor pod stop` it first, or give --force",
                entry.record.name,
                pod.record.name,
                state.word()
            );
        }
    }
    for entry in &own {
        clear::remove(&entry.dir).await?;
    }
    clear::remove(&pod.dir).await
}

/// Removes a pod that has ended and whose containers have been removed. Returns true if it did so.
pub(super) async fn remove_unused(containers: &Containers, pod: &Entry) -> anyhow::Result<bool> {
    let is_unused =
        matches!(Machine::of(pod).await?, Machine::Ended) && containers.of_pod(pod)?.is_empty();
    if is_unused {
        clear::remove(&pod.dir).await?;
    }
    Ok(is_unused)
}

fn list(globals: &Globals, args: &ListArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let pods = super::runtime()?.block_on(async {
        sweep(&containers).await?;
        // Concurrently: each one that hangs takes the whole timeout.
        let asked = containers.pods()?.into_iter().map(async |pod| {
            let machine = Machine::of(&pod).await;
            (pod, machine)
        });
        let asked: Vec<_> = stream::iter(asked)
            .buffered(MAX_CONCURRENT_QUERIES)
            .collect()
            .await;
        let mut pods = Vec::new();
        for (pod, machine) in asked {
            let count = containers.of_pod(&pod)?.len();
            // One that cannot be queried must not hide itself or the others.
            let machine = machine.unwrap_or_else(|error| {
                super::report(&error);
                Machine::Unknown
            });
            pods.push((pod, machine, count));
        }
        anyhow::Ok(pods)
    })?;
    if args.quiet {
        let ids = pods
            .iter()
            .map(|(pod, ..)| format!("{}\n", pod.record.short_id()));
        return super::print(&ids.collect::<String>()).map(|()| 0);
    }
    if args.shown.is_json() {
        let views = pods.iter().map(|(pod, machine, count)| {
            let mut view = view(pod, machine);
            view["NumContainers"] = json!(count);
            view
        });
        super::print_json(&views.collect::<Vec<_>>())?;
        return Ok(0);
    }
    let mut table = Table::new([
        "POD ID",
        "NAME",
        "STATUS",
        "CREATED",
        "PORTS",
        "# OF CONTAINERS",
    ]);
    for (pod, machine, count) in &pods {
        let record = &pod.record;
        let created = record.created_at();
        let ports: &[_] = match machine {
            Machine::Ended => &[],
            _ => &record.ports,
        };
        table.row([
            record.short_id().to_owned(),
            record.name.clone(),
            machine.word().to_owned(),
            ago(Some(created), SystemTime::now()),
            line(ports),
            count.to_string(),
        ]);
    }
    super::print(&table.render())?;
    Ok(0)
}

/// Returns a pod's description with podman's field names.
fn view(pod: &Entry, machine: &Machine) -> Value {
    let record = &pod.record;
    let endpoint = match machine {
        Machine::Ended => Default::default(),
        _ => network::endpoint(pod).unwrap_or_default(),
    };
    let addresses: Vec<String> = endpoint.addresses.iter().map(ToString::to_string).collect();
    let mut view = json!({
        "Id": record.id,
        "Name": record.name,
        "State": machine.word(),
        "Created": rfc3339(record.created_at()),
        "Hostname": record.hostname,
        "Labels": record.labels,
        "Cpus": record.cpus,
        "Memory": record.memory,
        "NetworkMode": record.network,
        "Addresses": addresses,
        "Ports": record.ports.iter().map(port::view).collect::<Vec<_>>(),
        "Directory": pod.dir,
    });
    io_limits::add_to_view(&mut view, &record.io_limits);
    view
}

fn inspect(globals: &Globals, args: &InspectArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let views = super::runtime()?.block_on(async {
        sweep(&containers).await?;
        let mut views = Vec::new();
        for name in &args.pods {
            let pod = containers.find_pod(name)?;
            let mut view = view(&pod, &Machine::of(&pod).await?);
            let mut own = Vec::new();
            for entry in containers.of_pod(&pod)? {
                let state = State::of(&entry).await?;
                own.push(json!({
                    "Id": entry.record.id,
                    "Name": entry.record.name,
                    "State": state.word(),
                }));
            }
            view["Containers"] = json!(own);
            views.push(view);
        }
        anyhow::Ok(views)
    })?;
    ensure!(!views.is_empty(), "name a pod");
    super::print_json(&views)?;
    Ok(0)
}
