//! `podvisor prune`: removes what nobody needs: containers that have ended, what killed processes
//! left, and images.

use std::io::{self, BufRead as _, Write as _};
use std::time::{Duration, SystemTime};

use clap::Args;
use podvisor_images::Prune;

use super::container::{Containers, State, pod, state, sweep};
use super::rmi::RemovedView;
use super::settings::TEMPLATES;
use super::{Globals, size, terminal};
use crate::sandbox::remove_abandoned_templates;

#[derive(Debug, Args)]
pub(super) struct PruneArgs {
    /// Remove all images that no guest uses, not only those without a tag
    #[arg(short, long)]
    all: bool,

    /// Remove only what fits: until=TIME, not used since then (24h, or 2026-01-31T12:00:00Z)
    #[arg(long, value_name = "FILTER", value_parser = parse_filter)]
    filter: Vec<Duration>,

    /// Remove the longest unused first, until images take no more than this
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    keep_size: Option<u64>,

    /// Do not ask
    #[arg(short, long)]
    force: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// How long an image has to be unused.
fn parse_filter(text: &str) -> Result<Duration, String> {
    let usage = || "write until=24h or until=2026-01-31T12:00:00Z".to_owned();
    let until = text.strip_prefix("until=").ok_or_else(usage)?;
    if let Ok(age) = humantime::parse_duration(until) {
        return Ok(age);
    }
    let time = humantime::parse_rfc3339_weak(until).map_err(|_| usage())?;
    // A time to come is met by everything.
    Ok(SystemTime::now().duration_since(time).unwrap_or_default())
}

pub(super) fn run(globals: &Globals, args: &PruneArgs) -> anyhow::Result<u8> {
    if !args.force && !confirmed(args)? {
        return Ok(0);
    }
    let mut prune = Prune::default();
    prune.tagged = args.all;
    prune.unused_for = args.filter.iter().max().copied();
    prune.keep_bytes = args.keep_size;
    let containers = prune_containers(globals)?;
    let mut removed = RemovedView::default();
    for done in globals.store()?.prune(&prune)? {
        removed.add(done);
    }
    if args.json {
        super::print_json(&removed)?;
    } else {
        if containers > 0 {
            super::print(&format!("Removed containers: {containers}\n"))?;
        }
        super::print(&removed.to_summary())?;
    }
    removed.notice();
    Ok(0)
}

/// Removes containers that have ended and what else is left of any; how many there were.
fn prune_containers(globals: &Globals) -> anyhow::Result<usize> {
    let root = globals.root()?;
    let containers = Containers::open(&root)?;
    super::runtime()?.block_on(async {
        let mut count = sweep(&containers).await?.len();
        for entry in containers.list()? {
            if State::of(&entry).await?.has_ended() {
                state::remove(&entry.dir).await?;
                count += 1;
            }
        }
        remove_abandoned_templates(&root.join(TEMPLATES));
        count += pod::prune(&containers).await?.len();
        Ok(count)
    })
}

/// Asks whoever sits at the terminal.
fn confirmed(args: &PruneArgs) -> anyhow::Result<bool> {
    anyhow::ensure!(
        terminal::is_terminal(io::stdin()),
        "prune asks before it removes anything; give --force where nobody can answer"
    );
    let what = if args.all {
        "all containers that have ended, and all images that no guest uses"
    } else {
        "all containers that have ended, and all images without a tag"
    };
    let mut stderr = io::stderr();
    write!(
        stderr,
        "This removes {what}, but for pinned ones.\nGo on? [y/N] "
    )?;
    stderr.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
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
        for bad in ["", "until", "until=", "until=soon", "label=x", "24h"] {
            assert!(
                parse_filter(bad).unwrap_err().contains("until=24h"),
                "{bad}"
            );
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
