//! The cost of a clone: from starting the program to the first answer of the guest's agent over
//! vsock, compared with the cold boot of the same guest in the same run; and many parallel clones.
//!
//! [`podvisor`] and [`firecracker`] define how each monitor boots, snapshots and clones, [`agent`]
//! what the agent is asked.

mod agent;
mod firecracker;
mod podvisor;

use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::boot::{Sample, Stage, ahead_of_others};
use crate::output::{self, Criterion};
use firecracker::Firecracker;
use podvisor::Podvisor;

/// A clone's instructions relative to a cold boot's.
const RATIO_LIMIT: f64 = 0.15;
/// The clone's own threads, in millions of instructions.
const OWN_LIMIT: f64 = 4.0;
/// Memory private to an idle clone.
const PRIVATE_LIMIT: f64 = 3.0;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The guest's kernel
    #[arg(long, value_name = "FILE")]
    kernel: PathBuf,
    /// The initramfs with the agent
    #[arg(long, value_name = "FILE")]
    initramfs: PathBuf,
    /// The program that boots and clones
    #[arg(long, value_name = "FILE")]
    program: PathBuf,
    /// A Firecracker to compare with
    #[arg(long, value_name = "FILE")]
    firecracker: Option<PathBuf>,
    /// The guest's memory in MiB
    #[arg(long, value_name = "MIB", default_value_t = 128)]
    memory: u64,
    /// The kernel's command line
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "quiet panic=-1 reboot=k 8250.nr_uarts=0 \
                         rcupdate.rcu_expedited=1 noreplace-smp"
    )]
    cmdline: String,
    /// The bus of podvisor's devices
    #[arg(long, value_name = "BUS", value_enum, default_value_t = Bus::Pci)]
    transport: Bus,
    /// Runs of each, after one that warms the caches
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// Clones that run at once, for the memory that is each one's own
    #[arg(long, value_name = "N", default_value_t = 50)]
    clones: usize,
    /// Time is counted in instructions here: one nanosecond each
    #[arg(long)]
    icount: bool,
    /// Write the results as JSON to this file, or to stdout (`-`)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
enum Bus {
    Mmio,
    Pci,
}

impl Bus {
    /// Returns the argument of `agent-podvisor`.
    fn word(self) -> &'static str {
        match self {
            Self::Mmio => "mmio",
            Self::Pci => "pci",
        }
    }
}

impl Args {
    /// Returns podvisor's command line: a guest without PCI does not look for it.
    fn cmdline(&self) -> String {
        match self.transport {
            Bus::Mmio => format!("{} pci=off", self.cmdline),
            Bus::Pci => self.cmdline.clone(),
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    unit: &'static str,
    runs: usize,
    transport: Bus,
    memory_mib: u64,
    ways: Vec<(&'static str, Way)>,
    clones: Clones,
    criteria: Vec<Criterion>,
}

/// Parallel clones.
#[derive(Debug, Serialize)]
struct Clones {
    count: usize,
    /// Memory of the clone that has the most.
    most_private_mib: f64,
    /// Mean memory of a clone.
    private_mib: f64,
}

/// Medians.
#[derive(Debug, Serialize)]
struct Way {
    total: f64,
    own: f64,
    vcpu: f64,
    ms: f64,
    /// Anonymous memory of the guest: what the process does not share.
    private_mib: f64,
    /// Name and cost of each thread in the last run.
    threads: Vec<(String, f64)>,
}

pub(crate) fn command(args: &Args) -> Result<()> {
    if args.runs == 0 || args.clones == 0 {
        bail!("--runs 0 and --clones 0 measure nothing: give 1 or more");
    }
    let stage = Stage::new()?;
    let podvisor = Podvisor::stage(args, &stage)?;
    let _first = ahead_of_others();
    podvisor.snapshot().context("the snapshot was not made")?;
    podvisor.restore()?;
    let cold = Way::new(args.runs, || podvisor.boot())?;
    let clone = Way::new(args.runs, || podvisor.restore())?;
    let clones = Clones::new(&podvisor.at_once(args.clones)?);
    let mut criteria = Vec::new();
    // Time on an emulated host says nothing about a guest's.
    if args.icount {
        criteria.push(Criterion::at_most(
            "a clone over a cold boot",
            RATIO_LIMIT,
            clone.total / cold.total,
        ));
        criteria.push(Criterion::at_most(
            "a clone's own threads, M instructions",
            OWN_LIMIT,
            clone.own,
        ));
    }
    criteria.push(Criterion::at_most(
        "memory private to a clone, the most of all, MiB",
        PRIVATE_LIMIT,
        clones.most_private_mib,
    ));
    let mut ways = vec![("cold boot", cold), ("clone", clone)];
    if let Some(program) = &args.firecracker {
        let files = [stage.copy(&args.kernel)?, stage.copy(&args.initramfs)?];
        let firecracker = Firecracker::stage(
            program,
            &stage,
            files,
            args.memory,
            &format!("{} pci=off", args.cmdline),
        )?;
        firecracker.snapshot().context("Firecracker's snapshot")?;
        firecracker.restore().context("Firecracker's clone")?;
        let cold = Way::new(args.runs, || firecracker.boot())?;
        ways.push(("Firecracker's cold boot", cold));
        let clone = Way::new(args.runs, || firecracker.restore())?;
        ways.push(("Firecracker's clone", clone));
    }
    let unit = if args.icount {
        "M instructions"
    } else {
        "ms of CPU"
    };
    let report = Report {
        unit,
        runs: args.runs,
        transport: args.transport,
        memory_mib: args.memory,
        ways,
        clones,
        criteria,
    };
    output::print(&report, args.json.as_deref())
}

impl Way {
    fn new(runs: usize, run: impl Fn() -> Result<Sample>) -> Result<Self> {
        let samples = (0..runs).map(|_| run()).collect::<Result<Vec<_>>>()?;
        let median = |of: &dyn Fn(&Sample) -> f64| {
            let mut values: Vec<f64> = samples.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values.get((values.len() - 1) / 2).copied().unwrap_or(0.0)
        };
        let mut threads: Vec<(String, f64)> = Vec::new();
        if let Some(sample) = samples.last() {
            let alive = sample.threads.iter();
            threads.extend(alive.map(|thread| (thread.name.clone(), thread.cpu as f64 / 1e6)));
            threads.push(("(ended)".to_owned(), sample.ended_threads as f64 / 1e6));
        }
        Ok(Self {
            total: median(&|s| (s.own() + s.vcpus()) as f64 / 1e6),
            own: median(&|s| s.own() as f64 / 1e6),
            vcpu: median(&|s| s.vcpus() as f64 / 1e6),
            ms: median(&|s| s.to_init.as_secs_f64() * 1e3),
            private_mib: median(&|s| s.memory.guest_anonymous as f64 / 1024.0),
            threads,
        })
    }
}

impl Clones {
    fn new(samples: &[Sample]) -> Self {
        let private = samples.iter().map(|sample| sample.memory.guest_anonymous);
        let mib = |kib: u64| kib as f64 / 1024.0;
        Self {
            count: samples.len(),
            most_private_mib: mib(private.clone().max().unwrap_or(0)),
            private_mib: mib(private.sum::<u64>()) / samples.len() as f64,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "To the agent's first answer: {} MiB, 1 vCPU, devices on {}, medians of {} runs; CPU in {}",
            self.memory_mib,
            self.transport.word(),
            self.runs,
            self.unit
        )?;
        writeln!(
            f,
            "{:24} {:>8} {:>8} {:>8} {:>8} {:>12}",
            "", "total", "own", "vCPU", "ms", "private MiB"
        )?;
        for (name, way) in &self.ways {
            writeln!(
                f,
                "{name:24} {:8.1} {:8.1} {:8.1} {:8.1} {:12.1}",
                way.total, way.own, way.vcpu, way.ms, way.private_mib
            )?;
            let threads = way.threads.iter();
            let costs: Vec<String> = threads
                .map(|(name, cost)| format!("{name} {cost:.2}"))
                .collect();
            writeln!(f, "    {}", costs.join(", "))?;
        }
        let Clones {
            count, private_mib, ..
        } = self.clones;
        writeln!(
            f,
            "{count} clones at once: {private_mib:.2} MiB private to each in the mean"
        )?;
        for criterion in &self.criteria {
            writeln!(f, "{criterion}")?;
        }
        Ok(())
    }
}
