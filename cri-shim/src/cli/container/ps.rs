//! `podvisor ps`: lists containers.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use podvisor_images::parse_reference;
use serde_json::{Value, json};

use super::host_memory::{self, HostMemory};
use super::state::states;
use super::{Containers, Entry, Record, State, filter, port, ports, sweep};
use crate::cli::format::{ago, rfc3339};
use crate::cli::table::Table;
use crate::cli::{FormatArgs, Globals};
use crate::sandbox::{ContainerInfo, HealthStatus};

/// The state of a container that cannot be determined.
const UNKNOWN: &str = "unknown";

/// The names of all states.
const WORDS: [&str; 8] = [
    "created",
    "running",
    "paused",
    "restarting",
    "exited",
    "dead",
    "unresponsive",
    UNKNOWN,
];

/// Maximum number of characters of a command that are shown, as in docker.
const MAX_COMMAND_CHARS: usize = 20;

#[derive(Debug, Args)]
pub(in crate::cli) struct PsArgs {
    /// Show containers that have ended, too
    #[arg(short, long)]
    all: bool,

    /// Show the container that was created last, though it has ended
    #[arg(short, long, conflicts_with = "last")]
    latest: bool,

    /// Show the N containers that were created last, those that have ended, too
    #[arg(short = 'n', long, value_name = "N")]
    last: Option<usize>,

    /// Print ids only
    #[arg(short, long, conflicts_with_all = ["json", "format"])]
    quiet: bool,

    /// Show ids and commands in full
    #[arg(long)]
    no_trunc: bool,

    /// Show the machines' host memory; containers of a pod share a machine
    #[arg(long)]
    host_memory: bool,

    /// Show which pod each is in
    #[arg(long)]
    pod: bool,

    /// Filter by name=TEXT, id=BEGINNING, pod=NAME, label=KEY[=VALUE], status=WORD, exited=CODE,
    /// ancestor=IMAGE
    #[arg(short, long, value_name = "FILTER", value_parser = parse_filter)]
    filter: Vec<Filter>,

    #[command(flatten)]
    shown: FormatArgs,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Filter {
    Name(filter::Name),
    Id(String),
    Label(filter::Label),
    Status(String),
    Pod(String),
    /// Ended with this exit code.
    Exited(i32),
    /// Of the image with this name, or of which the id begins so.
    Ancestor(String),
    /// Of this health, or `none`.
    Health(String),
}

fn parse_filter(text: &str) -> Result<Filter, String> {
    let usage = "write name=TEXT, id=BEGINNING, pod=NAME, label=KEY[=VALUE], status=WORD, \
                 health=WORD, exited=CODE or ancestor=IMAGE";
    let (key, value) = text.split_once('=').ok_or(usage)?;
    let value = value.to_owned();
    match key {
        "name" => filter::parse_name(&value).map(Filter::Name),
        "id" => Ok(Filter::Id(value)),
        "status" if WORDS.contains(&value.as_str()) => Ok(Filter::Status(value)),
        "status" => Err(format!("a status is one of {}", WORDS.join(", "))),
        "pod" => Ok(Filter::Pod(value)),
        "label" => Ok(Filter::Label(filter::parse_label(&value))),
        "exited" => match value.parse() {
            Ok(code) => Ok(Filter::Exited(code)),
            Err(_) => Err("exited=CODE takes an exit code, such as 0 or 137".to_owned()),
        },
        "health" if HEALTH.contains(&value.as_str()) => Ok(Filter::Health(value)),
        "health" => Err(format!("health is one of {}", HEALTH.join(", "))),
        "ancestor" if !value.is_empty() => Ok(Filter::Ancestor(value)),
        _ => Err(usage.to_owned()),
    }
}

impl Filter {
    fn takes(&self, entry: &Entry, state: Option<&State>) -> bool {
        let record = &entry.record;
        match self {
            Self::Name(name) => name.takes(&record.name),
            Self::Id(begin) => record.id.starts_with(begin.as_str()),
            Self::Label((key, value)) => record
                .labels
                .get(key)
                .is_some_and(|is| value.as_ref().is_none_or(|wanted| wanted == is)),
            Self::Status(wanted) => word(state) == wanted,
            Self::Pod(name) => entry.pod().is_some_and(|pod| {
                pod.record.name == *name
                    || (!name.is_empty() && pod.record.id.starts_with(name.as_str()))
            }),
            Self::Exited(code) => state.and_then(State::exit_code) == Some(*code),
            Self::Ancestor(image) => is_of(record, image),
            Self::Health(wanted) => health_word(state) == wanted,
        }
    }
}

/// The words of `--filter health=`, as docker has them.
const HEALTH: [&str; 4] = ["starting", "healthy", "unhealthy", "none"];

fn health_word(state: Option<&State>) -> &'static str {
    let health = state.and_then(State::health);
    health.map_or("none", |health| health.status.word())
}

/// Returns whether a container is of the image with this name, or of which the id begins so.
fn is_of(record: &Record, image: &str) -> bool {
    let is_named = || {
        let name = parse_reference(image).ok();
        name.is_some() && name == parse_reference(&record.image).ok()
    };
    let id = record.image_id.as_str();
    let hex = id.split_once(':').map_or(id, |(_, hex)| hex);
    hex.starts_with(image) || id.starts_with(image) || is_named()
}

impl PsArgs {
    /// How many are shown at most, as `-n` and `-l` say.
    fn most(&self) -> Option<usize> {
        self.last.or(self.latest.then_some(1))
    }

    fn shows_ended(&self) -> bool {
        let is_status = |one: &Filter| matches!(one, Filter::Status(_) | Filter::Exited(_));
        self.all || self.most().is_some() || self.filter.iter().any(is_status)
    }
}

pub(in crate::cli) fn run(globals: &Globals, args: &PsArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let runtime = crate::cli::runtime()?;
    let is_label = |one: &Filter| matches!(one, Filter::Label(_));
    let shows_ended = args.shows_ended();
    let shown = runtime.block_on(async {
        sweep(&containers).await?;
        let mut shown = Vec::new();
        for (entry, state) in states(containers.list()?).await {
            let (state, error) = match state {
                Ok(state) => (Some(state), None),
                Err(error) => (None, Some(error)),
            };
            let takes = |one: &Filter| one.takes(&entry, state.as_ref());
            let has_ended = state.as_ref().is_some_and(State::has_ended);
            if (shows_ended || !has_ended) && filter::takes(&args.filter, is_label, takes) {
                if let Some(error) = error {
                    let what = format!("container {}", entry.record.name);
                    crate::cli::report(&error.context(what));
                }
                shown.push((entry, state));
            }
        }
        // The newest are first.
        shown.truncate(args.most().unwrap_or(usize::MAX));
        anyhow::Ok(shown)
    })?;
    if args.quiet {
        let ids = shown.iter().map(|(entry, _)| match args.no_trunc {
            true => format!("{}\n", entry.record.id),
            false => format!("{}\n", entry.record.short_id()),
        });
        crate::cli::print(&ids.collect::<String>())?;
    } else if args.shown.is_json() {
        let views = shown.iter().map(|(entry, state)| {
            let mut view = view(entry, state.as_ref());
            if args.host_memory {
                let memory = host_memory(state.as_ref());
                view["HostMemory"] = json!(memory.map(HostMemory::view));
            }
            view
        });
        crate::cli::print_json(&views.collect::<Vec<_>>())?;
    } else {
        crate::cli::print(&table(&shown, args))?;
    }
    Ok(0)
}

fn table(shown: &[(Entry, Option<State>)], args: &PsArgs) -> String {
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
        let state = state.as_ref();
        let record = &entry.record;
        let command = record.command();
        let command = match args.no_trunc || command.chars().count() <= MAX_COMMAND_CHARS {
            true => command,
            false => command
                .chars()
                .take(MAX_COMMAND_CHARS - 1)
                .chain(['…'])
                .collect(),
        };
        let id = |record: &Record| match args.no_trunc {
            true => record.id.clone(),
            false => record.short_id().to_owned(),
        };
        let mut row = vec![
            id(record),
            record.image.clone(),
            command,
            ago(Some(record.created_at()), now),
            status(state, now),
            ports::line(&entry.ports(state)),
            record.name.clone(),
        ];
        if args.pod {
            let pod = entry.pod().map(|pod| pod.record);
            row.push(pod.as_ref().map(id).unwrap_or_default());
            row.push(pod.map(|pod| pod.name).unwrap_or_default());
        }
        if args.host_memory {
            row.push(host_memory::shown(host_memory(state)));
        }
        table.row(row);
    }
    table.render()
}

fn host_memory(state: Option<&State>) -> Option<HostMemory> {
    HostMemory::of(state?.client()?.pid())
}

fn at(nanoseconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(nanoseconds)
}

pub(in crate::cli) fn status(state: Option<&State>, now: SystemTime) -> String {
    let Some(state) = state else {
        return "Unknown".to_owned();
    };
    match state {
        State::Starting => "Created".to_owned(),
        State::Running {
            info, is_paused, ..
        } => {
            let up = ago(Some(at(info.started_at_ns)), now);
            let up = up.trim_end_matches(" ago");
            let paused = if *is_paused { " (Paused)" } else { "" };
            format!("Up {up}{paused}{}", health_of(info))
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
        State::Dead { .. } => "Dead".to_owned(),
        State::Unresponsive { pid: Some(pid) } => format!("Unresponsive (process {pid})"),
        State::Unresponsive { pid: None } => "Unresponsive".to_owned(),
    }
}

/// Returns a container's health as docker shows it after its age.
fn health_of(info: &ContainerInfo) -> String {
    match info.health.as_ref().map(|health| health.status) {
        None => String::new(),
        Some(HealthStatus::Starting) => " (health: starting)".to_owned(),
        Some(status) => format!(" ({})", status.word()),
    }
}

/// Returns the name of a state.
fn word(state: Option<&State>) -> &'static str {
    state.map_or(UNKNOWN, State::word)
}

/// Returns a container's description with podman's field names; `None` as the state means that it
/// is unknown.
pub(super) fn view(entry: &Entry, state: Option<&State>) -> Value {
    let record = &entry.record;
    let pid = match state {
        Some(State::Running { client, .. }) => client.pid(),
        Some(State::Unresponsive { pid }) => pid.unwrap_or(0),
        _ => 0,
    };
    let started = state.and_then(State::started_at);
    let finished = match state {
        Some(State::Exited { exit, .. }) => Some(at(exit.exited_at_ns)),
        _ => None,
    };
    let ports = entry.ports(state);
    json!({
        "Id": record.id,
        "Names": [record.name],
        "Image": record.image,
        "ImageID": record.image_id,
        "Command": record.process.args(),
        "Created": rfc3339(record.created_at()),
        "Labels": record.labels,
        "State": word(state),
        "Status": status(state, SystemTime::now()),
        "Pid": pid,
        "StartedAt": started.map(rfc3339),
        "FinishedAt": finished.map(rfc3339),
        "ExitCode": state.map(State::shown_exit_code),
        "Ports": ports.iter().map(port::view).collect::<Vec<_>>(),
        "Networks": [record.network],
        "AutoRemove": record.remove,
        "Restarts": state.map_or(0, State::restarts),
        "Pod": record.pod,
        "PodName": entry.pod().map(|pod| pod.record.name),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_have_a_kind_and_a_value() {
        let name = filter::parse_name("x").map(Filter::Name);
        assert_eq!(parse_filter("name=x"), name);
        let label = Filter::Label(("a".into(), Some("b=c".into())));
        assert_eq!(parse_filter("label=a=b=c"), Ok(label));
        let label = Filter::Label(("a".into(), None));
        assert_eq!(parse_filter("label=a"), Ok(label));
        assert_eq!(parse_filter("exited=-1"), Ok(Filter::Exited(-1)));
        let image = Filter::Ancestor("a:5000/b".into());
        assert_eq!(parse_filter("ancestor=a:5000/b"), Ok(image));
        for bad in ["", "name", "colour=red", "exited=", "exited=x", "ancestor="] {
            assert!(parse_filter(bad).is_err(), "{bad}");
        }
        assert!(parse_filter("status=dead").is_ok());
        assert!(parse_filter("health=unhealthy").is_ok());
        assert!(parse_filter("health=ill").is_err());
        let error = parse_filter("status=runing").unwrap_err();
        assert!(error.contains("running, paused"), "{error}");
    }

    #[test]
    fn an_image_is_meant_by_name_or_by_the_beginning_of_its_id() {
        let record = Record {
            image: "busybox".to_owned(),
            image_id: "sha256:0123abcd".to_owned(),
            ..super::super::record::sample("a", "web")
        };
        for image in [
            "busybox",
            "busybox:latest",
            "docker.io/library/busybox:latest",
            "0123",
            "sha256:0123abcd",
        ] {
            assert!(is_of(&record, image), "{image}");
        }
        for image in ["busybo", "busybox:1", "quay.io/busybox", "123abcd", "x y"] {
            assert!(!is_of(&record, image), "{image}");
        }
    }
}
