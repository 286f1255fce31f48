//! `vm ps` and `vm inspect`.

use std::time::{Duration, SystemTime};

use clap::Args;
use serde_json::{Value, json};
use tokio::time::timeout;
use tracing::debug;

use super::saved::SavedFiles;
use super::{attached, volumes};
use crate::boot;
use crate::cli::container::ports::line;
use crate::cli::container::state::states;
use crate::cli::container::{AttachedDisk, Entry, Record, State, network, port, ps, sweep};
use crate::cli::format::{ago, rfc3339};
use crate::cli::table::Table;
use crate::cli::{FormatArgs, Globals, JsonArgs};

/// How long the guest's agent is waited for.
const GUEST_ANSWERS: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(super) struct ListArgs {
    /// Those that run alone
    #[arg(long)]
    running: bool,

    /// Accepted and ignored: those that are off are listed, too
    #[arg(short, long)]
    all: bool,

    /// Print ids only
    #[arg(short, long, conflicts_with_all = ["json", "format"])]
    quiet: bool,

    #[command(flatten)]
    shown: FormatArgs,
}

#[derive(Debug, Args)]
pub(super) struct InspectArgs {
    #[command(flatten)]
    shown: JsonArgs,

    /// Names or ids
    #[arg(value_name = "VM", required = true)]
    vms: Vec<String>,
}

/// Returns all VMs with their states; one that cannot be queried is reported and has none.
async fn all(
    globals: &Globals,
    names: Option<&[String]>,
) -> anyhow::Result<Vec<(Entry, Option<State>)>> {
    let containers = globals.containers()?;
    sweep(&containers).await?;
    let entries = match names {
        None => containers.list()?,
        Some(names) => {
            let found = names.iter().map(|name| containers.find(name));
            found.collect::<Result<_, _>>()?
        }
    };
    let states = states(entries).await.into_iter();
    let shown = states.map(|(entry, state)| {
        let state = state
            .map_err(|error| {
                crate::cli::report(&error.context(format!("VM {}", entry.record.name)));
            })
            .ok();
        (entry, state)
    });
    Ok(shown.collect())
}

pub(super) fn list(globals: &Globals, args: &ListArgs) -> anyhow::Result<u8> {
    let mut shown = crate::cli::runtime()?.block_on(all(globals, None))?;
    if args.running {
        shown.retain(|(_, state)| !state.as_ref().is_some_and(State::has_ended));
    }
    if args.quiet {
        let ids = shown
            .iter()
            .map(|(entry, _)| format!("{}\n", entry.record.short_id()));
        crate::cli::print(&ids.collect::<String>())?;
        return Ok(0);
    }
    if args.shown.is_json() {
        let views = shown
            .iter()
            .map(|(entry, state)| view(entry, state.as_ref()));
        crate::cli::print_json(&views.collect::<Vec<_>>())?;
        return Ok(0);
    }
    let mut table = Table::new([
        "VM ID", "NAME", "IMAGE", "CREATED", "STATUS", "ADDRESS", "PORTS",
    ]);
    let now = SystemTime::now();
    for (entry, state) in &shown {
        let record = &entry.record;
        table.row([
            record.short_id().to_owned(),
            record.name.clone(),
            record.image.clone(),
            ago(Some(record.created_at()), now),
            status(entry, state.as_ref(), now),
            addresses(entry, state.as_ref()).join(","),
            line(&entry.ports(state.as_ref())),
        ]);
    }
    crate::cli::print(&table.render())?;
    Ok(0)
}

/// Whether the VM is off with its memory stored.
fn hibernates(entry: &Entry, state: Option<&State>) -> bool {
    let files = SavedFiles::hibernated(&entry.dir);
    state.is_some_and(State::has_ended) && files.are_finished().unwrap_or(false)
}

fn status(entry: &Entry, state: Option<&State>, now: SystemTime) -> String {
    match (hibernates(entry, state), state.and_then(State::ended_at)) {
        (false, _) => ps::status(state, now),
        (true, None) => "Hibernated".to_owned(),
        (true, at) => format!("Hibernated {}", ago(at, now)),
    }
}

/// Returns the addresses of a VM that is not off.
fn addresses(entry: &Entry, state: Option<&State>) -> Vec<String> {
    if state.is_some_and(State::has_ended) {
        return Vec::new();
    }
    let endpoint = network::endpoint(entry).unwrap_or_default();
    let addresses = endpoint.addresses.iter();
    addresses
        .map(|prefix| prefix.address().to_string())
        .collect()
}

pub(super) fn inspect(globals: &Globals, args: &InspectArgs) -> anyhow::Result<u8> {
    let views = crate::cli::runtime()?.block_on(async {
        let mut views = Vec::new();
        for (entry, state) in all(globals, Some(&args.vms)).await? {
            let mut view = view(&entry, state.as_ref());
            view["Guest"] = guest(&entry, state.as_ref()).await;
            view["Boot"] = booted(&entry, state.as_ref()).await;
            views.push(view);
        }
        anyhow::Ok(views)
    })?;
    crate::cli::print_json(&views)?;
    Ok(0)
}

/// Returns how a VM that is not off was booted.
async fn booted(entry: &Entry, state: Option<&State>) -> Value {
    let Some(client) = state.and_then(State::client) else {
        return Value::Null;
    };
    let report = boot::ask(client, &entry.record.id).await;
    report.map_or(Value::Null, |report| boot::view(&report))
}

/// Returns what the guest says of itself by its agent, if there is one that answers.
async fn guest(entry: &Entry, state: Option<&State>) -> Value {
    let Some(client) = state.and_then(State::client) else {
        return Value::Null;
    };
    match timeout(GUEST_ANSWERS, client.guest_info(&entry.record.id)).await {
        Ok(Ok(info)) => json!(info),
        Ok(Err(error)) => {
            debug!(%error, "the guest's agent says nothing");
            Value::Null
        }
        Err(_) => Value::Null,
    }
}

fn view(entry: &Entry, state: Option<&State>) -> Value {
    let record = &entry.record;
    let vm = record.vm.as_ref();
    let pid = state.and_then(State::client).map(|client| client.pid());
    json!({
        "Id": record.id,
        "Name": record.name,
        "Image": record.image,
        "ImageID": record.image_id,
        "Created": rfc3339(record.created_at()),
        "Labels": record.labels,
        "State": match hibernates(entry, state) {
            true => "hibernated",
            false => state.map_or("unknown", State::word),
        },
        "ExitCode": state.and_then(State::exit_code),
        "Pid": pid,
        "Hostname": record.hostname,
        "Cpus": record.cpus,
        "Memory": record.memory,
        "DiskSize": vm.map(|vm| vm.disk_size),
        "AttachedDisks": attached_to(entry),
        "Volumes": volumes_of(record),
        "NetworkMode": record.network,
        "Addresses": addresses(entry, state),
        "Ports": entry.ports(state).iter().map(port::view).collect::<Vec<_>>(),
        "SshPort": vm.and_then(|vm| vm.ssh_port),
        "AutoRemove": record.remove,
        "Directory": entry.dir,
        "LogPath": entry.log(),
    })
}

/// Returns the disks of a VM besides its own.
fn attached_to(entry: &Entry) -> Vec<Value> {
    let view = |one: &AttachedDisk| {
        json!({
            "Serial": one.serial,
            "Path": one.path(&entry.dir),
            "ReadOnly": one.is_read_only,
        })
    };
    attached::of(&entry.record).iter().map(view).collect()
}

/// Returns the directories that a VM shares with this host.
fn volumes_of(record: &Record) -> Vec<Value> {
    let all = record.volumes.iter().enumerate();
    let views = all.map(|(number, volume)| {
        json!({
            "Source": volume.source,
            "Tag": volumes::tag(number, volume),
            "Destination": volumes::path(volume),
            "ReadOnly": volume.read_only,
        })
    });
    views.collect()
}
