//! `podvisor pod`: machines for several containers, which share network, IPC and host name.
//!
//! A pod is kept as a container is, without a program: its directory has the machine, its record
//! says that it is one. The machine runs from `pod create` to `pod stop`.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use clap::{Args, Subcommand};
use oci_spec::runtime::Process;
use serde_json::{Value, json};

use super::lifecycle::unless_gone;
use super::ports::line;
use super::{
    Attached, Containers, Entry, NetworkArgs, Record, RestartArg, State, events, network, port,
    state, sweep, volumes,
};
use crate::cli::guest::{Guest, GuestArgs};
use crate::cli::run::{
    MachineOptions, keep_etc_files, launch_machine, now, parse_console, parse_hostname, parse_label,
};
use crate::cli::settings::BootMode;
use crate::cli::shown::{SHORT_ID, ago, rfc3339};
use crate::cli::signals::{Signals, exit_code_of};
use crate::cli::table::Table;
use crate::cli::{Format, Globals};
use crate::sandbox::{EventAction, SandboxClient, SandboxError, random_id};

const SIGKILL: u8 = 9;

/// Images that the containers of a pod may have at once, as of the daemon's pods.
const IMAGE_SLOTS: u8 = 10;

/// How long a pod's guest may take to power itself off when its containers have ended.
const POWER_OFF: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(in crate::cli) struct PodArgs {
    #[command(subcommand)]
    command: PodCommand,
}

#[derive(Debug, Subcommand)]
enum PodCommand {
    /// Start a machine for several containers, and print the pod's id
    Create(Box<CreateArgs>),
    /// List pods
    #[command(visible_alias = "ps", alias = "list")]
    Ls(ListArgs),
    /// Show pods in detail
    Inspect(InspectArgs),
    /// Stop the containers of pods, and their machines
    Stop(StopArgs),
    /// Remove pods with their containers
    Rm(RmArgs),
}

#[derive(Debug, Args)]
struct CreateArgs {
    /// Name of the pod [default: the beginning of its id]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Label of the pod
    #[arg(short, long, value_name = "KEY[=VALUE]", value_parser = parse_label)]
    label: Vec<(String, String)>,

    /// Host name of the guest [default: the pod's name]
    #[arg(long, value_name = "NAME", value_parser = parse_hostname)]
    hostname: Option<String>,

    #[command(flatten)]
    network: NetworkArgs,

    #[command(flatten)]
    guest: GuestArgs,

    /// How the guest begins: as a clone of one that has booted already, or by booting
    #[arg(
        long,
        value_name = "HOW",
        value_enum,
        env = "PODVISOR_BOOT",
        default_value_t = BootMode::Warm
    )]
    boot: BootMode,

    /// Give the guest a serial console: `pty` for `podvisor console` alone, or a file for what is
    /// written to it, too
    #[arg(long, value_name = "pty|FILE", value_parser = parse_console)]
    console: Option<PathBuf>,

    /// Do not jail the machine's process: for hosts that do not let podvisor do so
    #[arg(long)]
    no_jail: bool,
}

#[derive(Debug, Args)]
struct ListArgs {
    /// Print ids only
    #[arg(short, long)]
    quiet: bool,

    /// How to print: table or json
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Debug, Args)]
struct InspectArgs {
    /// Names or ids
    #[arg(value_name = "POD", required = true)]
    pods: Vec<String>,
}

#[derive(Debug, Args)]
struct StopArgs {
    /// Seconds until a program is killed that does not end
    #[arg(short = 't', long, value_name = "SECONDS", default_value = "10")]
    time: u32,

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

pub(in crate::cli) fn run(globals: &Globals, args: &PodArgs) -> anyhow::Result<u8> {
    match &args.command {
        PodCommand::Create(args) => create(globals, args),
        PodCommand::Ls(args) => list(globals, args),
        PodCommand::Inspect(args) => inspect(globals, args),
        PodCommand::Stop(args) => {
            let grace = Duration::from_secs(args.time.into());
            each(globals, &args.pods, async |containers, pod| {
                stop(containers, &pod, grace).await
            })
        }
        PodCommand::Rm(args) => each(globals, &args.pods, async |containers, pod| {
            remove(containers, &pod, args.force).await
        }),
    }
}

fn create(globals: &Globals, args: &CreateArgs) -> anyhow::Result<u8> {
    let root =
        std::path::absolute(globals.root()?).context("cannot find the root's absolute path")?;
    let guest = args.guest.guest(args.boot.templates(&root))?;
    let network = args.network.choose(None)?;
    let id = random_id().context("cannot make up an id for the pod")?;
    let short: String = id.chars().take(SHORT_ID).collect();
    let name = args.name.clone().unwrap_or(short);
    let hostname = args.hostname.clone();
    let record = Record {
        hostname: hostname.unwrap_or_else(|| match parse_hostname(&name) {
            Ok(name) => name,
            // Not every name is one of a host's.
            Err(_) => id.chars().take(SHORT_ID).collect(),
        }),
        name,
        image: String::new(),
        image_id: String::new(),
        created: now(),
        labels: args.label.iter().cloned().collect(),
        remove: false,
        restart: RestartArg::No,
        cpus: guest.cpus,
        memory: guest.memory,
        interactive: false,
        stop_signal: SIGKILL,
        volumes: Vec::new(),
        network,
        ports: args.network.ports(),
        jailed: !args.no_jail,
        user: String::new(),
        process: Process::default(),
        pod: None,
        is_pod: true,
        id: id.clone(),
    };
    let containers = Containers::open(&root)?;
    crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let mut signals = Signals::new()?;
        let (entry, claim) = containers.create(record)?;
        let launched = tokio::select! {
            launched = launch(args, &guest, &entry) => launched.map(|()| None),
            signal = signals.ending() => Ok(Some(exit_code_of(signal))),
        };
        drop(claim);
        if !matches!(launched, Ok(None)) {
            state::remove(&entry.dir).await?;
        }
        if let Some(code) = launched? {
            return Ok(code);
        }
        crate::cli::print(&format!("{id}\n"))?;
        Ok(0)
    })
}

async fn launch(args: &CreateArgs, guest: &Guest, entry: &Entry) -> anyhow::Result<()> {
    // Only root may mount what is to be shared.
    let shares = rustix::process::geteuid().is_root();
    if shares {
        volumes::make_shared(&entry.shared())?;
    }
    let mut attached: Attached = args.network.attach(entry).await?;
    keep_etc_files(entry, &attached)?;
    let options = MachineOptions::of_pod(IMAGE_SLOTS, shares, args.console.clone());
    launch_machine(entry, guest, &mut attached, options).await?;
    Ok(())
}

/// The way to a pod's machine; `None`: it has ended.
async fn machine(pod: &Entry) -> anyhow::Result<Option<SandboxClient>> {
    match SandboxClient::connect(&pod.dir).await {
        Ok(client) => Ok(Some(client)),
        Err(SandboxError::Gone { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn each(
    globals: &Globals,
    names: &[String],
    work: impl AsyncFn(&Containers, Entry) -> anyhow::Result<()>,
) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let mut code = 0;
        for name in names {
            let done = match containers.find_pod(name) {
                Ok(pod) => work(&containers, pod).await,
                Err(error) => Err(error),
            };
            match done {
                Ok(()) => crate::cli::print(&format!("{name}\n"))?,
                Err(error) => {
                    crate::cli::report(&error);
                    code = crate::cli::FAILURE;
                }
            }
        }
        Ok(code)
    })
}

/// Ends the containers at once, and then the machine.
async fn stop(containers: &Containers, pod: &Entry, grace: Duration) -> anyhow::Result<()> {
    let Some(machine) = machine(pod).await? else {
        return Ok(());
    };
    let mut ending = Vec::new();
    for entry in containers.of_pod(pod)? {
        let state = State::of(&entry).await?;
        if let Some(client) = state.client() {
            let signal = entry.record.stop_signal.into();
            // Answered at once: each has its deadline, which is the machine's to keep.
            unless_gone(client.stop_container(&entry.record.id, signal, grace).await)?;
            ending.push((entry, client.clone()));
        }
    }
    for (entry, client) in &ending {
        entry.ended(client).await;
        state::settle(entry).await;
        let stopped = events::event(&entry.record, EventAction::Stop);
        events::note(&entry.dir, &stopped);
    }
    machine.shutdown(POWER_OFF).await?;
    state::settle(pod).await;
    Ok(())
}

async fn remove(containers: &Containers, pod: &Entry, is_forced: bool) -> anyhow::Result<()> {
    let own = containers.of_pod(pod)?;
    if is_forced {
        // Whatever its guest does, and all containers with it.
        if let Some(machine) = machine(pod).await? {
            machine.shutdown(Duration::ZERO).await?;
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
        state::remove(&entry.dir).await?;
    }
    state::remove(&pod.dir).await
}

/// Removes pods that have ended, and whose containers have been removed; their names.
pub(in crate::cli) async fn prune(containers: &Containers) -> anyhow::Result<Vec<String>> {
    let mut removed = Vec::new();
    for pod in containers.pods()? {
        if machine(&pod).await?.is_none() && containers.of_pod(&pod)?.is_empty() {
            state::remove(&pod.dir).await?;
            removed.push(pod.record.name);
        }
    }
    Ok(removed)
}

fn list(globals: &Globals, args: &ListArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let pods = crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let mut pods = Vec::new();
        for pod in containers.pods()? {
            let count = containers.of_pod(&pod)?.len();
            let is_running = machine(&pod).await?.is_some();
            pods.push((pod, is_running, count));
        }
        anyhow::Ok(pods)
    })?;
    if args.quiet {
        let ids = pods
            .iter()
            .map(|(pod, ..)| format!("{}\n", pod.record.short_id()));
        return crate::cli::print(&ids.collect::<String>()).map(|()| 0);
    }
    if args.format == Format::Json {
        let views = pods.iter().map(|(pod, is_running, count)| {
            let mut view = view(pod, *is_running);
            view["NumContainers"] = json!(count);
            view
        });
        crate::cli::print_json(&views.collect::<Vec<_>>())?;
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
    for (pod, is_running, count) in &pods {
        let record = &pod.record;
        let created = UNIX_EPOCH + Duration::from_secs(record.created);
        let ports: &[_] = if *is_running { &record.ports } else { &[] };
        table.row([
            record.short_id().to_owned(),
            record.name.clone(),
            word(*is_running).to_owned(),
            ago(Some(created), SystemTime::now()),
            line(ports),
            count.to_string(),
        ]);
    }
    crate::cli::print(&table.render())?;
    Ok(0)
}

fn word(is_running: bool) -> &'static str {
    match is_running {
        true => "Running",
        false => "Exited",
    }
}

/// A pod with podman's names for things.
fn view(pod: &Entry, is_running: bool) -> Value {
    let record = &pod.record;
    let endpoint = match is_running {
        true => network::endpoint(pod).unwrap_or_default(),
        false => Default::default(),
    };
    let addresses: Vec<String> = endpoint.addresses.iter().map(ToString::to_string).collect();
    json!({
        "Id": record.id,
        "Name": record.name,
        "State": word(is_running),
        "Created": rfc3339(UNIX_EPOCH + Duration::from_secs(record.created)),
        "Hostname": record.hostname,
        "Labels": record.labels,
        "Cpus": record.cpus,
        "Memory": record.memory,
        "NetworkMode": record.network,
        "Addresses": addresses,
        "Ports": record.ports.iter().map(port::view).collect::<Vec<_>>(),
        "Directory": pod.dir,
    })
}

fn inspect(globals: &Globals, args: &InspectArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let views = crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let mut views = Vec::new();
        for name in &args.pods {
            let pod = containers.find_pod(name)?;
            let mut view = view(&pod, machine(&pod).await?.is_some());
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
    crate::cli::print_json(&views)?;
    Ok(0)
}
