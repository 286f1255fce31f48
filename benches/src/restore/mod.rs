//! What a clone costs: from starting the program to the first answer of the guest's agent over
//! vsock, against the cold boot of the same guest in the same run.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::boot::{Kind, Running, Sample, Stage, ahead_of_others, take};
use crate::output::{self, Criterion};

/// Of a clone's instructions to a cold boot's.
const RATIO_LIMIT: f64 = 0.15;
/// Own threads of a clone, in millions of instructions.
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
    /// The guest's memory in MiB
    #[arg(long, value_name = "MIB", default_value_t = 128)]
    memory: u64,
    /// The kernel's command line
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "quiet panic=-1 reboot=k pci=off 8250.nr_uarts=0 \
                         rcupdate.rcu_expedited=1 noreplace-smp"
    )]
    cmdline: String,
    /// Runs of each, after one that warms the caches
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// Time is counted in instructions here: one nanosecond each
    #[arg(long)]
    icount: bool,
    /// Write the results as JSON to this file, or to stdout (`-`)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report {
    unit: &'static str,
    runs: usize,
    memory_mib: u64,
    cold: Way,
    clone: Way,
    criteria: Vec<Criterion>,
}

/// Medians.
#[derive(Debug, Serialize)]
struct Way {
    total: f64,
    own: f64,
    vcpu: f64,
    ms: f64,
    /// Anonymous memory of the guest's: what the process does not share.
    private_mib: f64,
    /// Name and cost of each thread, of the last run.
    threads: Vec<(String, f64)>,
}

pub(crate) fn command(args: &Args) -> Result<()> {
    if args.runs == 0 {
        bail!("--runs 0 measures nothing: give 1 or more");
    }
    let stage = Stage::new()?;
    let program = stage.copy(&args.program)?;
    let snapshot = stage.path().join("snapshot");
    let boot: Vec<String> = vec![
        "boot".to_owned(),
        stage.copy(&args.kernel)?.display().to_string(),
        stage.copy(&args.initramfs)?.display().to_string(),
        format!("{}MiB", args.memory),
        args.cmdline.clone(),
    ];
    let restore = vec!["restore".to_owned(), snapshot.display().to_string()];
    let run = |arguments: &[String]| {
        let _first = ahead_of_others();
        let messages = stage.path().join("stderr");
        let began = Instant::now();
        let mut child = Running(
            Command::new(&program)
                .args(arguments)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(File::create(&messages)?)
                .spawn()?,
        );
        let stdout = child.0.stdout.take().context("stdout was not kept")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        if line.trim() != "answered" {
            let messages = std::fs::read_to_string(&messages)?;
            bail!("{} failed: {}", arguments[0], messages.trim());
        }
        take(child.0.id(), Kind::Podvisor, args.memory, began.elapsed())
    };
    let mut with_snapshot = boot.clone();
    with_snapshot.push(snapshot.display().to_string());
    run(&with_snapshot).context("the snapshot was not made")?;
    run(&restore)?;
    let many = |arguments: &[String]| {
        let samples: Result<Vec<Sample>> = (0..args.runs).map(|_| run(arguments)).collect();
        samples.map(|samples| Way::new(&samples))
    };
    let (cold, clone) = (many(&boot)?, many(&restore)?);
    let mut criteria = vec![Criterion::at_most(
        "a clone over a cold boot",
        RATIO_LIMIT,
        clone.total / cold.total,
    )];
    if args.icount {
        criteria.push(Criterion::at_most(
            "a clone's own threads, M instructions",
            OWN_LIMIT,
            clone.own,
        ));
    }
    criteria.push(Criterion::at_most(
        "memory private to a clone, MiB",
        PRIVATE_LIMIT,
        clone.private_mib,
    ));
    let unit = if args.icount {
        "M instructions"
    } else {
        "ms of CPU"
    };
    let report = Report {
        unit,
        runs: args.runs,
        memory_mib: args.memory,
        cold,
        clone,
        criteria,
    };
    output::print(&report, args.json.as_deref())
}

impl Way {
    fn new(samples: &[Sample]) -> Self {
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
        Self {
            total: median(&|s| (s.own() + s.vcpus()) as f64 / 1e6),
            own: median(&|s| s.own() as f64 / 1e6),
            vcpu: median(&|s| s.vcpus() as f64 / 1e6),
            ms: median(&|s| s.to_init.as_secs_f64() * 1e3),
            private_mib: median(&|s| s.memory.guest_anonymous as f64 / 1024.0),
            threads,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "To the agent's first answer: {} MiB, 1 vCPU, medians of {} runs; CPU in {}",
            self.memory_mib, self.runs, self.unit
        )?;
        writeln!(
            f,
            "{:10} {:>8} {:>8} {:>8} {:>8} {:>12}",
            "", "total", "own", "vCPU", "ms", "private MiB"
        )?;
        for (name, way) in [("cold boot", &self.cold), ("clone", &self.clone)] {
            writeln!(
                f,
                "{name:10} {:8.1} {:8.1} {:8.1} {:8.1} {:12.1}",
                way.total, way.own, way.vcpu, way.ms, way.private_mib
            )?;
            let threads = way.threads.iter();
            let costs: Vec<String> = threads
                .map(|(name, cost)| format!("{name} {cost:.2}"))
                .collect();
            writeln!(f, "           {}", costs.join(", "))?;
        }
        for criterion in &self.criteria {
            writeln!(f, "{criterion}")?;
        }
        Ok(())
    }
}
