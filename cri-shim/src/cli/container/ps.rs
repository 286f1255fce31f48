//! `podvisor ps`: the containers that are here.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::{Value, json};

use super::{Containers, Entry, State, sweep};
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

    /// Show only what fits: name=TEXT, id=BEGINNING, label=KEY[=VALUE], status=WORD
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
}

fn parse_filter(text: &str) -> Result<Filter, String> {
    let usage = "write name=TEXT, id=BEGINNING, label=KEY[=VALUE] or status=WORD";
    let (key, value) = text.split_once('=').ok_or(usage)?;
    let value = value.to_owned();
    match key {
        "name" => Ok(Filter::Name(value)),
        "id" => Ok(Filter::Id(value)),
        "status" => Ok(Filter::Status(value)),
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
        let views = shown.iter().map(|(entry, state)| view(entry, state));
        crate::cli::print_json(&views.collect::<Vec<_>>())?;
    } else {
        crate::cli::print(&table(&shown, args.no_trunc))?;
    }
    Ok(0)
}

fn table(shown: &[(Entry, State)], in_full: bool) -> String {
    let mut table = Table::new([
        "CONTAINER ID",
        "IMAGE",
        "COMMAND",
        "CREATED",
        "STATUS",
        "NAMES",
    ]);
    let now = SystemTime::now();
    for (Entry { record, .. }, state) in shown {
        let command = record.command();
        let command = match in_full || command.chars().count() <= COMMAND {
            true => command,
            false => command.chars().take(COMMAND - 1).chain(['…']).collect(),
        };
        table.row([
            if in_full {
                record.id.clone()
            } else {
                record.short_id().to_owned()
            },
            record.image.clone(),
            command,
            ago(Some(UNIX_EPOCH + Duration::from_secs(record.created)), now),
            status(state, now),
            record.name.clone(),
        ]);
    }
    table.render()
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
        State::Exited(exit) => {
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
        State::Exited(exit) => Some(at(exit.exited_at_ns)),
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
        "AutoRemove": record.remove,
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
