//! `podvisor stats`: resource usage of running containers.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::time::Duration;

use clap::Args;
use futures_util::{StreamExt as _, stream};
use serde_json::json;

use super::host_memory::{self, HostMemory};
use super::metrics::STATS_TIMEOUT;
use super::state::{MAX_CONCURRENT_QUERIES, states};
use super::{Containers, Entry, State, sweep};
use crate::cli::table::Table;
use crate::cli::{FormatArgs, Globals, size, terminal};
use crate::sandbox::{ContainerStats, SandboxClient};
use crate::stall_timeout::timeout;

/// Time between two samples.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(in crate::cli) struct StatsArgs {
    /// Show once
    #[arg(long)]
    no_stream: bool,

    #[command(flatten)]
    shown: FormatArgs,

    /// Names or ids [default: all that run]
    #[arg(value_name = "CONTAINER")]
    containers: Vec<String>,
}

/// One sample of a container.
#[derive(Debug)]
struct Sample {
    entry: Entry,
    pid: u32,
    stats: ContainerStats,
    /// Thousandths of a CPU since the previous sample.
    cpu: Option<u64>,
}

pub(in crate::cli) fn run(globals: &Globals, args: &StatsArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let (mut before, mut missing) = (BTreeMap::new(), BTreeSet::new());
        // CPU usage is measured between two samples.
        look(&containers, args, &mut before, &mut missing).await?;
        let mut times = tokio::time::interval(REFRESH_INTERVAL);
        times.tick().await;
        loop {
            times.tick().await;
            let samples = look(&containers, args, &mut before, &mut missing).await?;
            if show(&samples, args)?.is_break() || args.no_stream {
                return Ok(0);
            }
        }
    })
}

async fn look(
    containers: &Containers,
    args: &StatsArgs,
    before: &mut BTreeMap<String, ContainerStats>,
    missing: &mut BTreeSet<String>,
) -> anyhow::Result<Vec<Sample>> {
    let entries = match args.containers.is_empty() {
        true => containers.list()?,
        false => args
            .containers
            .iter()
            .map(|name| containers.find(name))
            .collect::<Result<_, _>>()?,
    };
    let asked = states(entries).await.into_iter().map(ask);
    let asked: Vec<_> = stream::iter(asked)
        .buffered(MAX_CONCURRENT_QUERIES)
        .collect()
        .await;
    let mut samples = Vec::new();
    for (entry, answer) in asked {
        let (client, stats) = match answer {
            Answer::Figures(client, stats) => (client, *stats),
            Answer::None => continue,
            Answer::Missing => {
                // Only once, not for every sample.
                if missing.insert(entry.record.id.clone()) {
                    crate::cli::notice(&format!(
                        "container {} does not say what it uses, and is left out",
                        entry.record.name
                    ));
                }
                continue;
            }
        };
        missing.remove(&entry.record.id);
        let old = before.insert(entry.record.id.clone(), stats);
        let cpu = old.and_then(|old| {
            let time = stats.timestamp_ns.checked_sub(old.timestamp_ns)?;
            let used = stats.cpu_usage_us.checked_sub(old.cpu_usage_us)?;
            used.checked_mul(1_000_000)?.checked_div(time)
        });
        samples.push(Sample {
            pid: client.pid(),
            entry,
            stats,
            cpu,
        });
    }
    Ok(samples)
}

/// The answer of a container.
enum Answer {
    Figures(SandboxClient, Box<ContainerStats>),
    /// It has no statistics: it does not run, or is just ending.
    None,
    /// It does not answer.
    Missing,
}

async fn ask((entry, state): (Entry, anyhow::Result<State>)) -> (Entry, Answer) {
    let answer = match state {
        Ok(State::Running {
            client,
            is_paused: false,
            ..
        }) => match timeout(STATS_TIMEOUT, client.stats(&entry.record.id)).await {
            Ok(Ok(stats)) => Answer::Figures(client, Box::new(stats)),
            Ok(Err(_)) => Answer::None,
            Err(_) => Answer::Missing,
        },
        Ok(State::Unresponsive { .. }) | Err(_) => Answer::Missing,
        Ok(_) => Answer::None,
    };
    (entry, answer)
}

fn show(samples: &[Sample], args: &StatsArgs) -> anyhow::Result<ControlFlow<()>> {
    if args.shown.is_json() {
        let views = samples.iter().map(|sample| {
            json!({
                "Id": sample.entry.record.id,
                "Name": sample.entry.record.name,
                "CpuMilli": sample.cpu,
                "MemoryUsage": sample.stats.memory_usage_bytes,
                "MemoryLimit": sample.entry.record.memory,
                "HostMemory": HostMemory::of(sample.pid).map(HostMemory::view),
                "BlockRead": sample.stats.io_read_bytes,
                "BlockWritten": sample.stats.io_write_bytes,
                "Pids": sample.stats.pids_current,
            })
        });
        return crate::cli::print_on(&crate::cli::to_json(&views.collect::<Vec<_>>())?);
    }
    let mut table = Table::new([
        "ID",
        "NAME",
        "CPU %",
        "MEM USAGE / LIMIT",
        "ON THE HOST",
        "BLOCK IO",
        "PIDS",
    ]);
    for sample in samples {
        let (record, stats) = (&sample.entry.record, &sample.stats);
        let cpu = sample.cpu.unwrap_or(0);
        table.row([
            record.short_id().to_owned(),
            record.name.clone(),
            format!("{}.{}%", cpu / 10, cpu % 10),
            format!(
                "{} / {}",
                size::human(stats.memory_usage_bytes),
                size::human(record.memory)
            ),
            host_memory::shown(HostMemory::of(sample.pid)),
            format!(
                "{} / {}",
                size::human(stats.io_read_bytes),
                size::human(stats.io_write_bytes)
            ),
            stats.pids_current.to_string(),
        ]);
    }
    let clear = match !args.no_stream && terminal::is_terminal(std::io::stdout()) {
        true => "\x1b[H\x1b[J",
        false => "",
    };
    crate::cli::print_on(&format!("{clear}{}", table.render()))
}
