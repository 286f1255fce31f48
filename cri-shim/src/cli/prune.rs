//! `podvisor prune`: removes what is not needed any more: ended containers, remains of killed
//! processes, and images. `podvisor image prune`: images only.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use clap::Args;
use podvisor_images::Prune;
use serde::Serialize;

use super::container::logs::parse_at;
use super::container::state::states;
use super::container::{Containers, clear, sweep};
use super::input::Stdin;
use super::rmi::RemovedView;
use super::settings::TEMPLATES;
use super::{FormatArgs, Globals, pod, size, terminal};
use crate::sandbox::remove_abandoned_templates;

#[derive(Debug, Args)]
pub(super) struct PruneArgs {
    /// Remove all images that no guest uses, not only those without a tag
    #[arg(short, long)]
    all: bool,

    /// Remove only what fits: until=TIME, images not used since then (24h, 2026-01-31T12:00:00Z or
    /// +02:00, UTC without a zone, or seconds since 1970); `podvisor prune` does the same with what
    /// ended before then
    #[arg(long, value_name = "FILTER", value_parser = parse_filter)]
    filter: Vec<Duration>,

    /// Remove the longest unused images first, until they take no more than this; without a filter,
    /// containers and pods stay
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    keep_size: Option<u64>,

    /// Do not ask
    #[arg(short, long)]
    force: bool,

    #[command(flatten)]
    shown: FormatArgs,
}

/// Parses how long an image must have been unused.
fn parse_filter(text: &str) -> Result<Duration, String> {
    let usage = "write until=24h or until=2026-01-31T12:00:00Z";
    let until = text.strip_prefix("until=").ok_or(usage)?;
    let now = SystemTime::now();
    let time = parse_at(until, now).map_err(|error| format!("until={until}: {error}"))?;
    // A time in the future matches everything.
    Ok(now.duration_since(time).unwrap_or_default())
}

pub(super) fn run(globals: &Globals, args: &PruneArgs) -> anyhow::Result<u8> {
    // A size limit for images does not affect containers.
    let with_containers = args.keep_size.is_none() || !args.filter.is_empty();
    if !args.force && !confirmed(args, with_containers)? {
        return Ok(0);
    }
    let root = globals.root()?;
    let mut view = PruneView::default();
    let mut code = 0;
    let mut note = |done: anyhow::Result<()>| {
        if let Err(error) = done {
            super::report(&error);
            code = super::FAILURE;
        }
    };
    if with_containers {
        let containers = &mut view.containers;
        note(prune_containers(&root, args.unused_for(), containers));
    }
    note(prune_images(globals, args, &mut view.images));
    if view.containers.has_failed {
        code = super::FAILURE;
    }
    if args.shown.is_json() {
        super::print_json(&view)?;
    } else {
        super::print(&view.containers.to_text())?;
        super::print(&view.images.to_summary())?;
    }
    view.images.notice();
    Ok(code)
}

/// `podvisor image prune`: images only.
pub(super) fn images(globals: &Globals, args: &PruneArgs) -> anyhow::Result<u8> {
    if !args.force && !confirmed(args, false)? {
        return Ok(0);
    }
    let mut images = RemovedView::default();
    let mut code = 0;
    if let Err(error) = prune_images(globals, args, &mut images) {
        // First, since stdout may be closed.
        super::report(&error);
        code = super::FAILURE;
    }
    if args.shown.is_json() {
        super::print_json(&images)?;
    } else {
        super::print(&images.to_summary())?;
    }
    images.notice();
    Ok(code)
}

/// Removes images; `images` says what was removed, also if that fails in part.
fn prune_images(
    globals: &Globals,
    args: &PruneArgs,
    images: &mut RemovedView,
) -> anyhow::Result<()> {
    let mut prune = Prune::default();
    prune.tagged = args.all;
    prune.unused_for = args.unused_for();
    prune.keep_bytes = args.keep_size;
    let mut removed = Vec::new();
    let pruned = globals.store()?.prune_into(&prune, &mut removed);
    for done in removed {
        images.add(done);
    }
    Ok(pruned?)
}

impl PruneArgs {
    /// Returns the minimum time for which removed objects have been unused.
    fn unused_for(&self) -> Option<Duration> {
        self.filter.iter().max().copied()
    }
}

#[derive(Debug, Default, Serialize)]
struct PruneView {
    #[serde(flatten)]
    images: RemovedView,
    #[serde(flatten)]
    containers: RemovedContainers,
}

/// Names of the removed containers and pods.
#[derive(Debug, Default, Serialize)]
struct RemovedContainers {
    containers: Vec<String>,
    pods: Vec<String>,
    /// Some could not be removed, which was reported.
    #[serde(skip)]
    has_failed: bool,
}

impl RemovedContainers {
    fn to_text(&self) -> String {
        let count = |what: &str, names: &[String]| match names.len() {
            0 => String::new(),
            count => format!("Removed {what}: {count}\n"),
        };
        count("containers", &self.containers) + &count("pods", &self.pods)
    }

    fn add(&mut self, name: String, is_container: bool, removed: anyhow::Result<()>) {
        match removed {
            Ok(()) if is_container => self.containers.push(name),
            Ok(()) => self.pods.push(name),
            Err(error) => {
                self.has_failed = true;
                super::report(&error.context(format!("cannot remove {name}")));
            }
        }
    }
}

/// Removes containers and pods that ended at least that long ago, or all that have ended, and the
/// remains of others. `removed` says what was removed, also if that fails in part, and whether some
/// could not be removed, which was reported.
fn prune_containers(
    root: &Path,
    ended_for: Option<Duration>,
    removed: &mut RemovedContainers,
) -> anyhow::Result<()> {
    let containers = Containers::open(root)?;
    let is_due = |ended: Option<SystemTime>| match ended_for {
        None => true,
        Some(ended_for) => match (ended, SystemTime::now().checked_sub(ended_for)) {
            (Some(ended), Some(before)) => ended <= before,
            // The time of its end is unknown, or all are younger.
            _ => false,
        },
    };
    super::runtime()?.block_on(async {
        removed.containers = sweep(&containers).await?;
        for (entry, state) in states(containers.list()?).await {
            match state {
                Ok(state) if !state.has_ended() => {}
                Ok(state) => {
                    let ended = state.ended_at().or_else(|| entry.machine_ended_at());
                    if is_due(ended) {
                        let done = clear::remove(&entry.dir).await;
                        removed.add(entry.record.name, true, done);
                    }
                }
                Err(error) => removed.add(entry.record.name, true, Err(error)),
            }
        }
        remove_abandoned_templates(&root.join(TEMPLATES));
        for pod in containers.pods()? {
            if is_due(pod.machine_ended_at()) {
                match pod::remove_unused(&containers, &pod).await {
                    Ok(false) => {}
                    done => removed.add(pod.record.name, false, done.map(drop)),
                }
            }
        }
        Ok(())
    })
}

/// Asks the user at the terminal.
fn confirmed(args: &PruneArgs, with_containers: bool) -> anyhow::Result<bool> {
    anyhow::ensure!(
        terminal::is_terminal(io::stdin()),
        "prune asks before it removes anything; give --force where nobody can answer"
    );
    let containers = match (with_containers, args.filter.is_empty()) {
        (false, _) => "",
        (true, true) => "all containers and pods that have ended, and ",
        (true, false) => "all containers and pods that ended before then, and ",
    };
    let images = match (args.all, args.filter.is_empty() && args.keep_size.is_none()) {
        (true, true) => "all images that no guest uses",
        (false, true) => "all images without a tag",
        (true, false) => "images that no guest uses",
        (false, false) => "images without a tag",
    };
    let mut stderr = io::stderr();
    write!(
        stderr,
        "This removes {containers}{images}, but for pinned ones.\nGo on? [y/N] "
    )?;
    stderr.flush()?;
    let mut answer = String::new();
    BufReader::new(Stdin).read_line(&mut answer)?;
    Ok(is_yes(&answer))
}

fn is_yes(answer: &str) -> bool {
    matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_an_age_or_a_time() {
        assert_eq!(parse_filter("until=24h"), Ok(Duration::from_secs(86400)));
        assert_eq!(parse_filter("until=1h30m"), Ok(Duration::from_secs(5400)));
        assert!(parse_filter("until=2020-01-01T00:00:00Z").unwrap() > Duration::from_secs(1 << 27));
        assert_eq!(
            parse_filter("until=9000-01-01T00:00:00"),
            Ok(Duration::ZERO)
        );
        let age = |text: &str| parse_filter(text).unwrap().as_secs();
        let zones = ["2020-01-01T00:00:00.5-01:00", "2020-01-01T03:00:00.5+02:00"];
        let [before, after] = zones.map(|time| age(&format!("until={time}")));
        assert!(before.abs_diff(after) <= 1, "{before} {after}");
        assert!(age("until=1577836800.5") > 1 << 27);
        for (bad, words) in [
            ("", "until=24h"),
            ("until", "until=24h"),
            ("label=x", "until=24h"),
            ("24h", "until=24h"),
            ("until=", "write an age"),
            ("until=soon", "until=soon: write an age"),
        ] {
            let error = parse_filter(bad).unwrap_err();
            assert!(error.contains(words), "{bad}: {error}");
        }
    }

    #[test]
    fn only_yes_is_yes() {
        for yes in ["y\n", "Y", "yes\n", " YES "] {
            assert!(is_yes(yes), "{yes}");
        }
        for no in ["", "\n", "n\n", "yess", "ja"] {
            assert!(!is_yes(no), "{no}");
        }
    }
}
