//! `podvisor stats`: what running containers use.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::Args;
use serde_json::json;

use super::memory::{self, HostMemory};
use super::{Containers, Entry, State, sweep};
use crate::cli::table::Table;
use crate::cli::{Format, Globals, size, terminal};
use crate::sandbox::ContainerStats;

/// Time between two looks.
const EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(in crate::cli) struct StatsArgs {
    /// Show once
    #[arg(long)]
    no_stream: bool,

    /// How to print: table or json
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Format::Table)]
    format: Format,

    /// Names or ids [default: all that run]
    #[arg(value_name = "CONTAINER")]
    containers: Vec<String>,
}

/// One look at a container.
#[derive(Debug)]
struct Sample {
    entry: Entry,
    pid: u32,
    stats: ContainerStats,
    /// Thousandths of a CPU since the look before.
    cpu: Option<u64>,
}

pub(in crate::cli) fn run(globals: &Globals, args: &StatsArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let mut before = BTreeMap::new();
        // What a CPU does is seen between two looks.
        look(&containers, args, &mut before).await?;
        let mut times = tokio::time::interval(EVERY);
        times.tick().await;
        loop {
            times.tick().await;
            let samples = look(&containers, args, &mut before).await?;
            show(&samples, args)?;
            if args.no_stream {
                return Ok(0);
            }
        }
    })
}

async fn look(
    containers: &Containers,
    args: &StatsArgs,
    before: &mut BTreeMap<String, ContainerStats>,
) -> anyhow::Result<Vec<Sample>> {
    let entries = match args.containers.is_empty() {
        true => containers.list()?,
        false => args
            .containers
            .iter()
            .map(|name| containers.find(name))
            .collect::<Result<_, _>>()?,
    };
    let mut samples = Vec::new();
    for entry in entries {
        let State::Running {
            client,
            is_paused: false,
            ..
        } = State::of(&entry).await?
        else {
            continue;
        };
        // One that ends in this moment has no figures.
        let Ok(stats) = client.stats(&entry.record.id).await else {
            continue;
        };
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

fn show(samples: &[Sample], args: &StatsArgs) -> anyhow::Result<()> {
    if args.format == Format::Json {
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
        return crate::cli::print_json(&views.collect::<Vec<_>>());
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
            memory::shown(HostMemory::of(sample.pid)),
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
    crate::cli::print(&format!("{clear}{}", table.render()))
}
