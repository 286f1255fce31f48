//! The cost of a whole system on a disk: a small Debian (`cargo xtask small`) from starting the
//! program until a shell on the serial console answers, and what it costs while nothing happens.
//!
//! podvisor boots the disk by its loader, by the kernel that is kept of an image, by the system's
//! kernel given directly with the command line of its menu alone, and as a clone of a machine that
//! has booted. QEMU's q35 with SeaBIOS, and Cloud Hypervisor if there is one, get
//! the kernel directly: the disk has no boot loader that a firmware would start.

mod report;
mod subject;

use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::boot::{Sample, Stage, ahead_of_others};
use crate::output;
use report::{Report, Way};
use subject::{Files, Subject};

/// Seconds for which a machine without work is watched.
const IDLE: Duration = Duration::from_secs(4);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The program that boots by podvisor's library
    #[arg(long, value_name = "FILE")]
    podvisor: PathBuf,
    /// The loader's kernel
    #[arg(long, value_name = "FILE")]
    loader_kernel: PathBuf,
    /// The loader's initial file system
    #[arg(long, value_name = "FILE")]
    loader_initramfs: PathBuf,
    /// The directory of the small system
    #[arg(long, value_name = "DIR")]
    system: PathBuf,
    /// A QEMU to compare with
    #[arg(long, value_name = "FILE")]
    qemu: Option<PathBuf>,
    /// A Cloud Hypervisor to compare with
    #[arg(long, value_name = "FILE")]
    cloud_hypervisor: Option<PathBuf>,
    /// The guest's memory in MiB
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    memory: u64,
    /// Runs of each, after one that warms the caches
    #[arg(long, value_name = "N", default_value_t = 1)]
    runs: usize,
    /// Time is counted in instructions here: one nanosecond each
    #[arg(long)]
    icount: bool,
    /// Write the results as JSON to this file, or to stdout (`-`)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A run: at the answer, and the CPU time in ns of a second without work.
#[derive(Debug)]
struct Run {
    sample: Sample,
    idle: f64,
}

pub(crate) fn command(args: &Args) -> Result<()> {
    if args.runs == 0 {
        bail!("--runs 0 measures nothing: give 1 or more");
    }
    let stage = Stage::new()?;
    let files = Files::stage(args, &stage)?;
    let _first = ahead_of_others();
    let booted = files.snapshot(args)?;
    let mut ways = Vec::new();
    for subject in files.subjects(args, &booted)? {
        let run = || run(&subject, &files, args.memory);
        run().with_context(|| format!("{} did not answer", subject.name))?;
        let runs = (0..args.runs).map(|_| run()).collect::<Result<Vec<_>>>()?;
        ways.push(Way::new(subject.name, &runs));
    }
    output::print(&Report::new(args, ways), args.json.as_deref())
}

/// Runs a subject once, with a disk of its own.
fn run(subject: &Subject, files: &Files, memory: u64) -> Result<Run> {
    fs::copy(&subject.disk, files.disk())?;
    let mut machine = subject.start(files.messages())?;
    machine.answers(subject.is_booted)?;
    let sample = machine.sample(subject.kind, memory)?;
    let before = cpu(&sample);
    sleep(IDLE);
    let after = cpu(&machine.sample(subject.kind, memory)?);
    Ok(Run {
        sample,
        idle: (after - before) as f64 / IDLE.as_secs_f64(),
    })
}

fn cpu(sample: &Sample) -> u64 {
    sample.own() + sample.vcpus()
}
