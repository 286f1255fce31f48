//! `podvisor metrics`: resource usage of containers and their machines in Prometheus' text format,
//! without a daemon: for the textfile collector of the node exporter, or another scraper that runs
//! a command.
//!
//! Names of containers' metrics are cAdvisor's, as in `podvisor serve`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use futures_util::{StreamExt as _, stream};

use super::host_memory::HostMemory;
use super::state::{MAX_CONCURRENT_QUERIES, states};
use super::{Containers, Entry, State, sweep};
use crate::cli::Globals;
use crate::sandbox::ContainerStats;
use crate::stall_timeout::timeout;

/// How long a guest may take to report its container's usage.
pub(super) const STATS_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub(in crate::cli) struct MetricsArgs {}

/// A container and its statistics.
struct Sample {
    entry: Entry,
    word: &'static str,
    restarts: u32,
    started_at_ns: Option<u64>,
    stats: Option<ContainerStats>,
    host: Option<HostMemory>,
}

/// How a metric is read; `None` if the container does not have it.
type Read = fn(&Sample) -> Option<String>;

const METRICS: &[(&str, &str, &str, Read)] = &[
    (
        "container_start_time_seconds",
        "When the program was started, in seconds since 1970",
        "gauge",
        |s| Some(seconds(s.started_at_ns? / 1000)),
    ),
    (
        "podvisor_container_restarts_total",
        "How often the program was started again",
        "counter",
        |s| Some(s.restarts.to_string()),
    ),
    (
        "container_cpu_usage_seconds_total",
        "CPU time used, in seconds",
        "counter",
        |s| Some(seconds(s.stats?.cpu_usage_us)),
    ),
    (
        "container_memory_usage_bytes",
        "Memory in use",
        "gauge",
        |s| Some(s.stats?.memory_usage_bytes.to_string()),
    ),
    (
        "container_memory_working_set_bytes",
        "Memory in use, less the file cache that the kernel reclaims at need",
        "gauge",
        |s| Some(s.stats?.memory_working_set_bytes.to_string()),
    ),
    (
        "container_spec_memory_limit_bytes",
        "Memory of the machine",
        "gauge",
        |s| Some(s.entry.record.memory.to_string()),
    ),
    (
        "container_oom_events_total",
        "Times that the guest's kernel killed for want of memory",
        "counter",
        |s| Some(s.stats?.oom_kills.to_string()),
    ),
    (
        "container_fs_reads_bytes_total",
        "Bytes read from disks",
        "counter",
        |s| Some(s.stats?.io_read_bytes.to_string()),
    ),
    (
        "container_fs_writes_bytes_total",
        "Bytes written to disks",
        "counter",
        |s| Some(s.stats?.io_write_bytes.to_string()),
    ),
    ("container_threads", "Threads", "gauge", |s| {
        Some(s.stats?.pids_current.to_string())
    }),
    (
        "podvisor_machine_private_bytes",
        "Memory of the host that the machine has for itself; containers of a pod share a machine",
        "gauge",
        |s| Some(s.host?.private.to_string()),
    ),
    (
        "podvisor_machine_shared_bytes",
        "Memory of the host that the machine shares with others",
        "gauge",
        |s| Some(s.host?.shared.to_string()),
    ),
    (
        "podvisor_machine_proportional_bytes",
        "Memory of the host that the machine has, a shared page counted in part",
        "gauge",
        |s| Some(s.host?.proportional.to_string()),
    ),
];

fn seconds(microseconds: u64) -> String {
    let (whole, rest) = (microseconds / 1_000_000, microseconds % 1_000_000);
    format!("{whole}.{rest:06}")
}

pub(in crate::cli) fn run(globals: &Globals, _: &MetricsArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let samples = crate::cli::runtime()?.block_on(async {
        sweep(&containers).await?;
        let samples = states(containers.list()?).await.into_iter();
        let samples = samples.map(|(entry, state)| sample(entry, state));
        let samples: Vec<Sample> = stream::iter(samples)
            .buffered(MAX_CONCURRENT_QUERIES)
            .collect()
            .await;
        anyhow::Ok(samples)
    })?;
    crate::cli::print(&text(&samples))?;
    Ok(0)
}

async fn sample(entry: Entry, state: anyhow::Result<State>) -> Sample {
    let Ok(state) = state else {
        return Sample {
            entry,
            word: "unknown",
            restarts: 0,
            started_at_ns: None,
            stats: None,
            host: None,
        };
    };
    let mut sample = Sample {
        word: state.word(),
        restarts: state.restarts(),
        started_at_ns: None,
        stats: None,
        host: None,
        entry,
    };
    if let State::Running {
        client,
        info,
        is_paused,
    } = state
    {
        sample.started_at_ns = Some(info.started_at_ns);
        sample.host = HostMemory::of(client.pid());
        if !is_paused {
            let stats = timeout(STATS_TIMEOUT, client.stats(&sample.entry.record.id)).await;
            sample.stats = stats.ok().and_then(Result::ok);
        }
    }
    sample
}

fn text(samples: &[Sample]) -> String {
    let mut text = String::new();
    let mut by_state = BTreeMap::<_, u64>::new();
    for sample in samples {
        *by_state.entry(sample.word).or_default() += 1;
    }
    let name = "podvisor_containers";
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "# HELP {name} Containers by state\n# TYPE {name} gauge"
    );
    for (state, count) in by_state {
        let _ = writeln!(text, "{name}{{state=\"{state}\"}} {count}");
    }
    for (name, help, kind, read) in METRICS {
        let values = samples.iter().filter_map(|s| Some((s, read(s)?)));
        let values: Vec<_> = values.collect();
        if values.is_empty() {
            continue;
        }
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (sample, value) in values {
            let _ = writeln!(text, "{name}{{{}}} {value}", labels(&sample.entry));
        }
    }
    text
}

fn labels(entry: &Entry) -> String {
    let record = &entry.record;
    let pod = entry.pod().map(|pod| pod.record.name).unwrap_or_default();
    let labels = [
        ("id", &record.id),
        ("name", &record.name),
        ("image", &record.image),
        ("pod", &pod),
    ];
    let labels = labels.map(|(name, value)| format!("{name}=\"{}\"", escaped(value)));
    labels.join(",")
}

/// Escapes a label's value for the format.
fn escaped(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    for c in value.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            c => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::record::sample as record;
    use super::*;

    #[test]
    fn figures_are_in_the_format_of_prometheus() {
        let mut record = record("a", "one");
        record.image = "a\"b\\c\nd".to_owned();
        let entry = Entry {
            dir: "/nowhere".into(),
            record,
        };
        let stats = ContainerStats {
            cpu_usage_us: 1_500_000,
            ..ContainerStats::default()
        };
        let sample = Sample {
            entry,
            word: "running",
            restarts: 2,
            started_at_ns: None,
            stats: Some(stats),
            host: None,
        };
        let text = text(&[sample]);
        let id = "a".repeat(64);
        let line = format!(
            "container_cpu_usage_seconds_total{{id=\"{id}\",name=\"one\",\
             image=\"a\\\"b\\\\c\\nd\",pod=\"\"}} 1.500000\n"
        );
        assert!(text.contains(&line), "{text}");
        assert!(text.contains("podvisor_containers{state=\"running\"} 1\n"));
        assert!(text.contains("# TYPE container_cpu_usage_seconds_total counter\n"));
        // Unknown values have neither a sample nor a header.
        assert!(!text.contains("podvisor_machine"), "{text}");
    }
}
