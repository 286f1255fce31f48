//! What a request to a disk costs: 4 KiB random reads, one at a time, over MMIO and over PCI, by
//! podvisor and by QEMU.
//!
//! [`subject`] knows how each monitor is started. The guest's init (`benches/guest/blk.c`) says
//! when it begins and when it ends, and the CPU time of the monitor's threads between these two
//! lines is what the requests cost.

mod subject;

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::boot::{Running, Sample, Stage, ahead_of_others, take};
use crate::output::{self, Criterion};
use subject::Subject;

/// Requests between the guest's two lines, as in `benches/guest/blk.c`.
const REQUESTS: f64 = 2000.0;
/// Bytes of the disk, which the page cache holds.
const DISK: usize = 64 << 20;
/// MiB of guest memory.
const MEMORY: u64 = 128;
/// Of a request over PCI to one over MMIO.
const RATIO_LIMIT: f64 = 0.9;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The guest's kernel, an uncompressed ELF file
    #[arg(long, value_name = "FILE")]
    kernel: PathBuf,
    /// The guest's initramfs, whose init reads the disk
    #[arg(long, value_name = "FILE")]
    initramfs: PathBuf,
    /// The program that runs a guest with a disk by podvisor's library
    #[arg(long, value_name = "FILE")]
    podvisor: PathBuf,
    /// A QEMU to compare with
    #[arg(long, value_name = "FILE")]
    qemu: Option<PathBuf>,
    /// Runs of each
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
    rows: Vec<Row>,
    criteria: Vec<Criterion>,
}

/// Medians, per request.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    /// CPU in thousands of instructions, or in µs.
    total: f64,
    own: f64,
    vcpu: f64,
    /// As the guest measures it, µs.
    latency: f64,
}

/// One run.
#[derive(Clone, Copy, Debug)]
struct Cost {
    own: f64,
    vcpu: f64,
    latency: f64,
}

pub(crate) fn command(args: &Args) -> Result<()> {
    if args.runs == 0 {
        bail!("--runs 0 measures nothing: give 1 or more");
    }
    let stage = Stage::new()?;
    let disk = stage.path().join("disk");
    std::fs::write(&disk, vec![0x5a; DISK])?;
    let guest = subject::Guest {
        kernel: stage.copy(&args.kernel)?,
        initramfs: stage.copy(&args.initramfs)?,
        disk,
        memory_mib: MEMORY,
    };
    let podvisor = stage.copy(&args.podvisor)?;
    let mut subjects = vec![
        Subject::podvisor(&podvisor, "mmio", &guest),
        Subject::podvisor(&podvisor, "pci", &guest),
    ];
    if let Some(qemu) = &args.qemu {
        subjects.push(Subject::microvm(qemu, &guest));
        subjects.push(Subject::q35(qemu, &guest));
    }
    let _first = ahead_of_others();
    let mut rows = Vec::new();
    for subject in &subjects {
        let costs = (0..args.runs)
            .map(|_| run(subject, stage.path()))
            .collect::<Result<Vec<_>>>()
            .with_context(|| format!("{} was not measured", subject.name))?;
        rows.push(Row::new(subject.name, &costs));
    }
    let (mmio, pci) = match rows.as_slice() {
        [mmio, pci, ..] => (mmio.total, pci.total),
        _ => bail!("podvisor was not measured"),
    };
    let criteria = vec![Criterion::at_most(
        "a request over PCI to one over MMIO",
        RATIO_LIMIT,
        pci / mmio,
    )];
    let unit = if args.icount {
        "thousands of instructions"
    } else {
        "µs of CPU"
    };
    let report = Report {
        unit,
        runs: args.runs,
        rows,
        criteria,
    };
    output::print(&report, args.json.as_deref())
}

/// Runs a guest from its start to its last line.
fn run(subject: &Subject, dir: &Path) -> Result<Cost> {
    let messages = dir.join("stderr");
    let began = Instant::now();
    let mut child = Running(
        Command::new(&subject.program)
            .args(&subject.arguments)
            // Open and silent: monitors that read their stdin wait.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&messages)?)
            .spawn()
            .with_context(|| format!("{} cannot be started", subject.program.display()))?,
    );
    let mut console = BufReader::new(child.0.stdout.take().context("stdout was not kept")?);
    let mut seen = String::new();
    let mut sample = |word: &str| -> Result<(Sample, String)> {
        loop {
            let mut line = String::new();
            if console.read_line(&mut line)? == 0 {
                let messages = std::fs::read_to_string(&messages).unwrap_or_default();
                bail!(
                    "it ended before {word:?}: {} {}",
                    seen.trim(),
                    messages.trim()
                );
            }
            if let Some(rest) = line.trim().strip_prefix(word) {
                let sample = take(child.0.id(), subject.kind, MEMORY, began.elapsed())?;
                return Ok((sample, rest.trim().to_owned()));
            }
            seen.push_str(&line);
        }
    };
    let (begin, _) = sample("begin")?;
    let (end, median) = sample("end")?;
    let latency = Duration::from_nanos(median.parse().context("the guest's median")?);
    let per_request = |before: u64, after: u64| (after - before) as f64 / REQUESTS / 1e3;
    Ok(Cost {
        own: per_request(begin.own(), end.own()),
        vcpu: per_request(begin.vcpus(), end.vcpus()),
        latency: latency.as_secs_f64() * 1e6,
    })
}

impl Row {
    fn new(name: &'static str, costs: &[Cost]) -> Self {
        let median = |of: &dyn Fn(&Cost) -> f64| {
            let mut values: Vec<f64> = costs.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values.get((values.len() - 1) / 2).copied().unwrap_or(0.0)
        };
        Self {
            name,
            total: median(&|cost| cost.own + cost.vcpu),
            own: median(&|cost| cost.own),
            vcpu: median(&|cost| cost.vcpu),
            latency: median(&|cost| cost.latency),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "4 KiB random reads, one at a time: per request, medians of {} runs; CPU in {}",
            self.runs, self.unit
        )?;
        writeln!(
            f,
            "{:24} {:>8} {:>8} {:>8} {:>10}",
            "", "total", "own", "vCPU", "µs"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:24} {:8.1} {:8.1} {:8.1} {:10.1}",
                row.name, row.total, row.own, row.vcpu, row.latency
            )?;
        }
        for criterion in &self.criteria {
            writeln!(f, "{criterion}")?;
        }
        Ok(())
    }
}
