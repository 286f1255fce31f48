//! `podvisor events`: shows container events as they happen.

use std::collections::BTreeMap;
use std::future::pending;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use clap::Args;
use serde_json::json;
use tokio::io::unix::AsyncFd;

use super::events::{self, Events, Reader};
use super::logs::{drain, parse_time, watch};
use super::record::{self, Record};
use super::{Containers, filter, sweep};
use crate::cli::signals::{Signals, exit_code_of};
use crate::cli::{FormatArgs, Globals};
use crate::sandbox::{Event, EventAction};

/// The type of all events, in docker's and podman's words.
const CONTAINER: &str = "container";

#[derive(Debug, Args)]
pub(in crate::cli) struct EventsArgs {
    /// Begin with what happened since then: 10m, 2026-01-31T12:00:00Z (or +02:00; UTC without a
    /// zone), or seconds since 1970
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    since: Option<SystemTime>,

    /// Stop at this time
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    until: Option<SystemTime>,

    /// Filter by container=NAME, event=WORD, image=NAME, label=KEY[=VALUE], type=container
    #[arg(short, long, value_name = "FILTER", value_parser = parse_filter)]
    filter: Vec<Filter>,

    #[command(flatten)]
    shown: FormatArgs,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Filter {
    Container(String),
    Event(String),
    Image(String),
    Label(filter::Label),
    /// Of containers, as all events are.
    Type,
}

fn parse_filter(text: &str) -> Result<Filter, String> {
    let usage = "write container=NAME, event=WORD, image=NAME, label=KEY[=VALUE] or type=container";
    let (key, value) = text.split_once('=').ok_or(usage)?;
    let value = value.to_owned();
    match key {
        "container" => Ok(Filter::Container(value)),
        "event" => Ok(Filter::Event(value)),
        "image" => Ok(Filter::Image(value)),
        "label" => Ok(Filter::Label(filter::parse_label(&value))),
        "type" if value == CONTAINER => Ok(Filter::Type),
        _ => Err(usage.to_owned()),
    }
}

impl Filter {
    fn takes(&self, event: &Event) -> bool {
        let is = |name: &str, value: &str| event.attributes.get(name).is_some_and(|v| v == value);
        match self {
            Self::Container(name) => {
                is("name", name) || (!name.is_empty() && event.id.starts_with(name.as_str()))
            }
            Self::Event(word) => event.action.to_string() == *word,
            Self::Image(name) => is("image", name),
            Self::Label((key, Some(value))) => is(key, value),
            Self::Label((key, None)) => event.attributes.contains_key(key),
            Self::Type => true,
        }
    }
}

fn takes(filters: &[Filter], event: &Event) -> bool {
    let is_label = |one: &Filter| matches!(one, Filter::Label(_));
    filter::takes(filters, is_label, |one| one.takes(event))
}

pub(in crate::cli) fn run(globals: &Globals, args: &EventsArgs) -> anyhow::Result<u8> {
    let root =
        std::path::absolute(globals.root()?).context("cannot find the root's absolute path")?;
    let containers = Containers::open(&root)?;
    let runtime = crate::cli::runtime()?;
    runtime.block_on(async {
        let mut signals = Signals::new()?;
        // The directory to watch has to exist.
        containers.make_dir()?;
        let events = Events::of_root(&root);
        let mut printer = Printer::new(args, &root);
        let mut reader = Reader::new(&events).context("cannot open the log of events")?;
        // Watched before it is read, so that nothing is missed in between.
        let watched = watch(&events.log())?;
        if printer.since == Since::Now {
            printer.skip(reader.next().context("cannot read the log of events")?);
        }
        let shown = async {
            sweep(&containers).await?;
            show(args, &watched, &mut reader, &mut printer).await
        };
        tokio::select! {
            biased;
            signal = signals.ending() => Ok(exit_code_of(signal)),
            shown = shown => shown.map(|()| 0),
        }
    })
}

async fn show(
    args: &EventsArgs,
    watched: &AsyncFd<OwnedFd>,
    reader: &mut Reader,
    printer: &mut Printer<'_>,
) -> anyhow::Result<()> {
    let until = async {
        match args.until {
            Some(until) => {
                let left = until.duration_since(SystemTime::now());
                tokio::time::sleep(left.unwrap_or_default()).await;
            }
            None => pending().await,
        }
    };
    tokio::pin!(until);
    loop {
        let events = reader.next().context("cannot read the log of events")?;
        if printer.print(events)?.is_break() {
            return Ok(());
        }
        tokio::select! {
            changed = watched.readable() => {
                let mut changed = changed?;
                drain(watched.get_ref())?;
                changed.clear_ready();
            }
            () = &mut until => {
                let events = reader.next().context("cannot read the log of events")?;
                return printer.print(events).map(drop);
            }
        }
    }
}

/// From when on events are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Since {
    Time(SystemTime),
    /// Those that come, by whatever clock: it may be set back meanwhile.
    Now,
}

/// Prints what is asked for, with what is known of the containers.
struct Printer<'a> {
    args: &'a EventsArgs,
    root: PathBuf,
    since: Since,
    /// What earlier events say of containers: those of a sandbox say nothing.
    known: BTreeMap<String, BTreeMap<String, String>>,
}

impl<'a> Printer<'a> {
    fn new(args: &'a EventsArgs, root: &Path) -> Self {
        let since = match (args.since, args.until) {
            (Some(since), _) => Since::Time(since),
            // Only what was can be before the present.
            (None, Some(until)) if until <= SystemTime::now() => Since::Time(UNIX_EPOCH),
            (None, _) => Since::Now,
        };
        Self {
            args,
            root: root.to_owned(),
            since,
            known: BTreeMap::new(),
        }
    }

    /// Takes note of events that are not shown.
    fn skip(&mut self, events: Vec<Event>) {
        for event in events {
            self.completed(event);
        }
    }

    fn print(&mut self, events: Vec<Event>) -> anyhow::Result<ControlFlow<()>> {
        let text = self.shown(events);
        match text.is_empty() {
            true => Ok(ControlFlow::Continue(())),
            false => crate::cli::print_on(&text),
        }
    }

    /// What is printed of events.
    fn shown(&mut self, events: Vec<Event>) -> String {
        let mut text = String::new();
        for event in events {
            let event = self.completed(event);
            let at = UNIX_EPOCH + Duration::from_nanos(event.time_ns);
            let is_asked_for = match self.since {
                Since::Time(since) => at >= since,
                Since::Now => true,
            };
            let is_asked_for = is_asked_for && self.args.until.is_none_or(|until| at < until);
            if is_asked_for && takes(&self.args.filter, &event) {
                text.push_str(&match self.args.shown.is_json() {
                    false => line(&event, at),
                    true => view(&event, at),
                });
                text.push('\n');
            }
        }
        text
    }

    /// Adds the name, image and labels of its container to an event.
    fn completed(&mut self, mut event: Event) -> Event {
        let known = self.known.entry(event.id.clone()).or_default();
        if event.action == EventAction::Create {
            known.clone_from(&event.attributes);
        } else if known.is_empty()
            && let Some(record) = record_of(&self.root, &event.id)
        {
            *known = events::event(&record, EventAction::Create).attributes;
        }
        for (name, value) in known.iter() {
            let attribute = event.attributes.entry(name.clone());
            attribute.or_insert_with(|| value.clone());
        }
        if event.action == EventAction::Destroy {
            self.known.remove(&event.id);
        }
        event
    }
}

fn line(event: &Event, at: SystemTime) -> String {
    let attributes: Vec<String> = event
        .attributes
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let line = format!(
        "{} {CONTAINER} {} {} ({})",
        humantime::format_rfc3339_nanos(at),
        event.action,
        event.id,
        attributes.join(", ")
    );
    line.replace(char::is_control, " ")
}

fn view(event: &Event, at: SystemTime) -> String {
    let seconds = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    json!({
        "Type": CONTAINER,
        "Action": event.action,
        "Actor": {"ID": event.id, "Attributes": event.attributes},
        "scope": "local",
        "status": event.action,
        "id": event.id,
        "from": event.attributes.get("image"),
        "time": seconds,
        "timeNano": event.time_ns,
    })
    .to_string()
}

/// Returns the record of the container of this id, if it exists.
fn record_of(root: &Path, id: &str) -> Option<Record> {
    let short = id.get(..crate::cli::format::SHORT_ID)?;
    record::read(&root.join(record::CONTAINERS).join(short)).ok()?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_of_a_kind_are_alternatives_and_kinds_hold_together() {
        let died = Event::now("abc", EventAction::Die).with("name", "web");
        let filters = |texts: &[&str]| -> Vec<Filter> {
            texts
                .iter()
                .map(|text| parse_filter(text).unwrap())
                .collect()
        };
        let is_taken = |texts: &[&str]| takes(&filters(texts), &died);
        assert!(is_taken(&[]));
        assert!(is_taken(&["event=start", "event=die"]));
        assert!(is_taken(&["event=die", "container=web"]));
        assert!(is_taken(&["container=ab"]) && is_taken(&["label=name=web"]));
        assert!(!is_taken(&["event=die", "container=other"]));
        assert!(!is_taken(&["label=name=other"]) && !is_taken(&["image=box"]));
        assert!(!is_taken(&["label=name=web", "label=tier"]));
        assert!(is_taken(&["type=container"]));
        for bad in ["", "die", "colour=red", "type=image"] {
            assert!(parse_filter(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_happens_after_the_clock_was_set_back_is_shown() {
        let mut args = EventsArgs {
            since: None,
            until: None,
            filter: Vec::new(),
            shown: FormatArgs::table(),
        };
        let hour = 3_600_000_000_000;
        let at = |id: &str, by: u64| {
            let mut event = Event::now(id, EventAction::Die);
            event.time_ns -= by;
            event
        };
        let root = Path::new("/none");
        let mut printer = Printer::new(&args, root);
        assert_eq!(printer.since, Since::Now);
        let created = Event::now("abc", EventAction::Create).with("name", "web");
        printer.skip(vec![created]);
        let shown = printer.shown(vec![at("abc", hour)]);
        assert!(shown.ends_with("container die abc (name=web)\n"), "{shown}");
        args.since = Some(SystemTime::now() - Duration::from_secs(60));
        let mut printer = Printer::new(&args, root);
        let shown = printer.shown(vec![at("old", hour), at("new", 0)]);
        assert!(
            shown.contains("die new") && !shown.contains("die old"),
            "{shown}"
        );
    }

    #[test]
    fn an_event_is_one_line_whatever_is_in_it() {
        let event = Event::now("abc", EventAction::Die).with("name", "a\nb");
        let at = UNIX_EPOCH;
        assert_eq!(
            line(&event, at),
            "1970-01-01T00:00:00.000000000Z container die abc (name=a b)"
        );
        assert_eq!(view(&event, at).lines().count(), 1);
    }
}
