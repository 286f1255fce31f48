//! `podvisor ps`: the containers that are here.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::{Value, json};

use super::memory::{self, HostMemory};
use super::{Containers, Entry, Record, State, port, ports, sweep};
use crate::cli::shown::{ago, rfc3339};
use crate::cli::table::Table;
use crate::cli::{Format, Globals};

/// Characters of a command that are shown, as in docker.
const COMMAND: usize = 20;

#[derive(Debug, Args)]
pub(in crate::cli) struct PsArgs {
    /// Show containers that have ended, too
    #[arg(short, long)]
    all: bool,

    /// Print ids only
    #[arg(short, long)]
    quiet: bool,

    /// Show ids and commands in full
    #[arg(long)]
    no_trunc: bool,

    /// Show what the machines take of the host's memory; those of a pod share one
    #[arg(long)]
    host_memory: bool,

    /// Show which pod each is in
    #[arg(long)]
    pod: bool,

    /// Show only what fits: name=TEXT, id=BEGINNING, pod=NAME, label=KEY[=VALUE],
    /// status=WORD
    #[arg(short, long, value_name = "FILTER", value_parser = parse_filter)]
    filter: Vec<Filter>,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// How to print: table or json
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Filter {
    Name(String),
    Id(String),
    Label(String, Option<String>),
    Status(String),
    Pod(String),
}

fn parse_filter(text: &str) -> Result<Filter, String> {
    let usage = "write name=TEXT, id=BEGINNING, pod=NAME, label=KEY[=VALUE] or status=WORD";
    let (key, value) = text.split_once('=').ok_or(usage)?;
    let value = value.to_owned();
    match key {
        "name" => Ok(Filter::Name(value)),
        "id" => Ok(Filter::Id(value)),
        "status" => Ok(Filter::Status(value)),
        "pod" => Ok(Filter::Pod(value)),
        "label" => Ok(match value.split_once('=') {
            Some((key, value)) => Filter::Label(key.to_owned(), Some(value.to_owned())),
            None => Filter::Label(value, None),
        }),
        _ => Err(usage.to_owned()),
    }
}

impl Filter {
    fn takes(&self, entry: &Entry, state: &State) -> bool {
        let record = &entry.record;
        match self {
            Self::Name(text) => record.name.contains(text.as_str()),
            Self::Id(begin) => record.id.starts_with(begin.as_str()),
            Self::Label(key, value) => record
                .labels
                .get(key)
                .is_some_and(|is| value.as_ref().is_none_or(|wanted| wanted == is)),
            Self::Status(word) => state.word() == word,
            Self::Pod(name) => entry.pod().is_some_and(|pod| {
                pod.record.name == *name
                    || (!name.is_empty() && pod.record.id.starts_with(name.as_str()))
            }),
        }
    }
}

pub(in crate::cli) fn run(globals: &Globals, args: &PsArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let runtime = crate::cli::runtime()?;
    let shown = runtime.block_on(async {
        sweep(&containers).await?;
        let mut shown = Vec::new();
        for entry in containers.list()? {
            let state = State::of(&entry).await?;
            let is_asked_for = args
                .filter
                .iter()
                .any(|one| matches!(one, Filter::Status(_)));
            let is_shown = args.all || is_asked_for || !state.has_ended();
            if is_shown
                && args
                    .filter
                    .iter()
                    .all(|filter| filter.takes(&entry, &state))
            {
                shown.push((entry, state));
            }
        }
        anyhow::Ok(shown)
    })?;
    if args.quiet {
        let ids = shown.iter().map(|(entry, _)| match args.no_trunc {
            true => format!("{}\n", entry.record.id),
            false => format!("{}\n", entry.record.short_id()),
        });
        crate::cli::print(&ids.collect::<String>())?;
    } else if args.json || args.format == Format::Json {
        let views = shown.iter().map(|(entry, state)| {
            let mut view = view(entry, state);
            if args.host_memory {
                view["HostMemory"] = json!(host_memory(state).map(HostMemory::view));
            }
            view
        });
        crate::cli::print_json(&views.collect::<Vec<_>>())?;
    } else {
        crate::cli::print(&table(&shown, args))?;
    }
    Ok(0)
}

fn table(shown: &[(Entry, State)], args: &PsArgs) -> String {
    let mut heading = vec![
        "CONTAINER ID",
        "IMAGE",
        "COMMAND",
        "CREATED",
        "STATUS",
        "PORTS",
        "NAMES",
    ];
    if args.pod {
        heading.extend(["POD ID", "PODNAME"]);
    }
    if args.host_memory {
        heading.push("HOST MEMORY");
    }
    let mut table = Table::new(heading);
    let now = SystemTime::now();
    for (entry, state) in shown {
        let record = &entry.record;
        let command = record.command();
        let command = match args.no_trunc || command.chars().count() <= COMMAND {
            true => command,
            false => command.chars().take(COMMAND - 1).chain(['…']).collect(),
        };
        let id = |record: &Record| match args.no_trunc {
            true => record.id.clone(),
            false => record.short_id().to_owned(),
        };
        let mut row = vec![
            id(record),
            record.image.clone(),
            command,
            ago(Some(UNIX_EPOCH + Duration::from_secs(record.created)), now),
            status(state, now),
            ports::line(entry.ports(state)),
            record.name.clone(),
        ];
        if args.pod {
            let pod = entry.pod().map(|pod| pod.record);
            row.push(pod.as_ref().map(id).unwrap_or_default());
            row.push(pod.map(|pod| pod.name).unwrap_or_default());
        }
        if args.host_memory {
            row.push(memory::shown(host_memory(state)));
        }
        table.row(row);
    }
    table.render()
}

fn host_memory(state: &State) -> Option<HostMemory> {
    HostMemory::of(state.client()?.pid())
}

fn at(nanoseconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(nanoseconds)
}

fn status(state: &State, now: SystemTime) -> String {
    match state {
        State::Starting => "Created".to_owned(),
        State::Running {
            info, is_paused, ..
        } => {
            let up = ago(Some(at(info.started_at_ns)), now);
            let up = up.trim_end_matches(" ago");
            let paused = if *is_paused { " (Paused)" } else { "" };
            format!("Up {up}{paused}")
        }
        State::Restarting { exit, .. } => format!(
            "Restarting ({}) {}",
            exit.code,
            ago(Some(at(exit.exited_at_ns)), now)
        ),
        State::Exited { exit, .. } => {
            format!(
                "Exited ({}) {}",
                exit.code,
                ago(Some(at(exit.exited_at_ns)), now)
            )
        }
        State::Dead(_) => "Dead".to_owned(),
    }
}

/// A container with podman's names for things.
pub(super) fn view(entry: &Entry, state: &State) -> Value {
    let record = &entry.record;
    let (pid, started) = match state {
        State::Running { client, info, .. } => (client.pid(), Some(at(info.started_at_ns))),
        _ => (0, None),
    };
    let finished = match state {
        State::Exited { exit, .. } => Some(at(exit.exited_at_ns)),
        _ => None,
    };
    json!({
        "Id": record.id,
        "Names": [record.name],
        "Image": record.image,
        "ImageID": record.image_id,
        "Command": record.process.args(),
        "Created": rfc3339(UNIX_EPOCH + Duration::from_secs(record.created)),
        "Labels": record.labels,
        "State": state.word(),
        "Status": status(state, SystemTime::now()),
        "Pid": pid,
        "StartedAt": started.map(rfc3339),
        "FinishedAt": finished.map(rfc3339),
        "ExitCode": state.exit_code(),
        "Ports": entry.ports(state).iter().map(port::view).collect::<Vec<_>>(),
        "Networks": [record.network],
        "AutoRemove": record.remove,
        "Restarts": state.restarts(),
        "Pod": record.pod,
        "PodName": entry.pod().map(|pod| pod.record.name),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_have_a_kind_and_a_value() {
        assert_eq!(parse_filter("name=x"), Ok(Filter::Name("x".into())));
        let label = Filter::Label("a".into(), Some("b=c".into()));
        assert_eq!(parse_filter("label=a=b=c"), Ok(label));
        assert_eq!(parse_filter("label=a"), Ok(Filter::Label("a".into(), None)));
        for bad in ["", "name", "colour=red"] {
            assert!(parse_filter(bad).is_err(), "{bad}");
        }
    }
}
