//! Medians, ratios and criteria of a measurement, as a table and as JSON.

use std::fmt;
use std::fs;

use anyhow::{Context, Result};
use serde::Serialize;

use super::Args;
use super::peers::{Kind, Peer};
use super::sample::Sample;
use crate::output::Criterion;

/// podvisor's whole boot relative to QEMU's.
const RATIO_LIMIT: f64 = 0.26;
/// podvisor's own threads, in millions of instructions.
const OWN_LIMIT: f64 = 6.0;

/// The result of a measurement. CPU costs are in millions: of instructions if time is counted in
/// them, otherwise of nanoseconds.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    unit: &'static str,
    runs: usize,
    memory_mib: u64,
    vcpus: u32,
    kernel: String,
    cmdline: String,
    monitors: Vec<Monitor>,
    /// podvisor's median total relative to each peer's.
    ratios: Vec<Ratio>,
    criteria: Vec<Criterion>,
}

/// One monitor: medians over its boots.
#[derive(Debug, Serialize)]
struct Monitor {
    name: &'static str,
    arguments: Vec<String>,
    total: f64,
    own: f64,
    vcpu: f64,
    /// The smallest and the largest total.
    spread: [f64; 2],
    /// Each thread of the boot with the median total.
    threads: Vec<ThreadCost>,
    ms_to_init: f64,
    pss_kib: u64,
    anonymous_kib: u64,
    guest_resident_kib: u64,
    binary_kib: u64,
    libraries: usize,
    libraries_kib: u64,
}

#[derive(Debug, Serialize)]
struct ThreadCost {
    name: String,
    cost: f64,
}

#[derive(Debug, Serialize)]
struct Ratio {
    to: &'static str,
    total: f64,
}

impl Report {
    pub(super) fn new(args: &Args, results: &[(&Peer, Vec<Sample>)]) -> Result<Self> {
        let monitors: Vec<Monitor> = results
            .iter()
            .map(|(peer, samples)| Monitor::new(peer, samples))
            .collect::<Result<_>>()?;
        let find = |kind: Kind| monitors.iter().find(|m| m.name == kind.name());
        let mut ratios = Vec::new();
        let mut criteria = Vec::new();
        if let Some(podvisor) = find(Kind::Podvisor) {
            for peer in &monitors {
                if peer.name != podvisor.name {
                    ratios.push(Ratio {
                        to: peer.name,
                        total: podvisor.total / peer.total,
                    });
                }
            }
            if let Some(qemu) = find(Kind::Qemu) {
                let ratio = podvisor.total / qemu.total;
                criteria.push(Criterion::at_most(
                    "podvisor's boot over QEMU's",
                    RATIO_LIMIT,
                    ratio,
                ));
            }
            if args.icount {
                criteria.push(Criterion::at_most(
                    "podvisor's own threads, M instructions",
                    OWN_LIMIT,
                    podvisor.own,
                ));
            }
        }
        Ok(Self {
            unit: if args.icount {
                "M instructions"
            } else {
                "ms of CPU"
            },
            runs: args.runs,
            memory_mib: args.memory,
            vcpus: 1,
            kernel: args.kernel.display().to_string(),
            cmdline: args.cmdline.clone(),
            monitors,
            ratios,
            criteria,
        })
    }
}

impl Monitor {
    fn new(peer: &Peer, samples: &[Sample]) -> Result<Self> {
        let totals = samples.iter().map(|s| s.own() + s.vcpus());
        let mut by_total: Vec<(u64, &Sample)> = totals.zip(samples).collect();
        by_total.sort_by_key(|(total, _)| *total);
        let (typical, last) = by_total
            .get((by_total.len().saturating_sub(1)) / 2)
            .zip(by_total.last())
            .context("nothing was measured")?;
        let first = by_total.first().unwrap_or(last);
        let size = |path: &str| fs::metadata(path).map_or(0, |meta| meta.len() / 1024);
        let libraries = &typical.1.memory.libraries;
        let mut threads: Vec<ThreadCost> = typical
            .1
            .threads
            .iter()
            .map(|thread| ThreadCost {
                name: thread.name.clone(),
                cost: millions(thread.cpu),
            })
            .collect();
        // Reading the clock and the threads costs some instructions of the sampler, none of the
        // process: a remainder is a thread that has ended.
        if typical.1.ended_threads > 0 {
            threads.push(ThreadCost {
                name: "(ended)".to_owned(),
                cost: millions(typical.1.ended_threads),
            });
        }
        Ok(Self {
            name: peer.kind.name(),
            arguments: peer.arguments().to_vec(),
            total: millions(typical.0),
            own: millions(median(samples, Sample::own)),
            vcpu: millions(median(samples, Sample::vcpus)),
            spread: [millions(first.0), millions(last.0)],
            threads,
            ms_to_init: millions(median(samples, |s| {
                u64::try_from(s.to_init.as_nanos()).unwrap_or(u64::MAX)
            })),
            pss_kib: median(samples, |s| s.memory.pss),
            anonymous_kib: median(samples, |s| s.memory.anonymous),
            guest_resident_kib: median(samples, |s| s.memory.guest),
            binary_kib: size(&peer.program.display().to_string()),
            libraries: libraries.len(),
            libraries_kib: libraries.iter().map(|path| size(path)).sum(),
        })
    }
}

/// Returns the median; of two, the lower.
fn median(samples: &[Sample], of: impl Fn(&Sample) -> u64) -> u64 {
    let mut values: Vec<u64> = samples.iter().map(of).collect();
    values.sort_unstable();
    values
        .get(values.len().saturating_sub(1) / 2)
        .copied()
        .unwrap_or(0)
}

/// Nanoseconds in milliseconds; instructions in millions.
fn millions(count: u64) -> f64 {
    // f64 holds every count of a boot exactly.
    count as f64 / 1e6
}

fn mib(kib: u64) -> f64 {
    kib as f64 / 1024.0
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "Boot to init: {}, {} MiB, {} vCPU, medians of {} boots; CPU in {}, memory in MiB",
            self.kernel, self.memory_mib, self.vcpus, self.runs, self.unit
        )?;
        writeln!(f, "command line: {}", self.cmdline)?;
        writeln!(
            f,
            "{:<17} {:>8} {:>8} {:>8} {:>8} {:>7} {:>7} {:>9} {:>7}  libraries",
            "", "total", "own", "vCPU", "ms", "PSS", "anon", "binary", "threads"
        )?;
        for m in &self.monitors {
            writeln!(
                f,
                "{:<17} {:>8.2} {:>8.2} {:>8.2} {:>8.1} {:>7.2} {:>7.2} {:>9.2} {:>7}  {} ({:.1})",
                m.name,
                m.total,
                m.own,
                m.vcpu,
                m.ms_to_init,
                mib(m.pss_kib),
                mib(m.anonymous_kib),
                mib(m.binary_kib),
                m.threads.iter().filter(|t| t.name != "(ended)").count(),
                m.libraries,
                mib(m.libraries_kib),
            )?;
        }
        for m in &self.monitors {
            write!(f, "  {}:", m.name)?;
            for thread in &m.threads {
                write!(f, " {} {:.2}", thread.name, thread.cost)?;
            }
            writeln!(f, " (totals {:.2} to {:.2})", m.spread[0], m.spread[1])?;
        }
        for ratio in &self.ratios {
            writeln!(f, "podvisor / {}: {:.3}", ratio.to, ratio.total)?;
        }
        for c in &self.criteria {
            let verdict = if c.holds { "holds" } else { "DOES NOT HOLD" };
            writeln!(
                f,
                "{}: {:.3}, at most {}: {verdict}",
                c.what, c.value, c.limit
            )?;
        }
        Ok(())
    }
}
