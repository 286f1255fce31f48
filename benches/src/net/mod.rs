//! The cost of a guest's network: TCP in both directions, and a byte there and back, over MMIO and
//! over PCI, by podvisor and by QEMU.
//!
//! [`subject`] defines how each monitor is started, [`tap`] creates the tap that all of them use,
//! one after the other, and [`run`] talks to a guest (`benches/guest/net.c`) and samples the CPU
//! time of the monitor's threads before and after.

mod report;
mod run;
mod subject;
mod tap;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::boot::Stage;
use crate::output;
use report::Report;
use run::Costs;
use subject::Subject;
use tap::Tap;

/// MiB of guest memory.
const MEMORY: u64 = 128;

/// The size of the measurement.
const SIZE: Size = Size {
    bytes: 64 << 20,
    round_trips: 2000,
};

/// The amount of work with a guest's network.
#[derive(Clone, Copy, Debug)]
struct Size {
    /// The number of bytes in each direction.
    bytes: usize,
    round_trips: u32,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The guest's kernel, an uncompressed ELF file
    #[arg(long, value_name = "FILE")]
    kernel: PathBuf,
    /// The guest's initramfs, whose init answers
    #[arg(long, value_name = "FILE")]
    initramfs: PathBuf,
    /// The program that runs a guest with a network card by podvisor's library
    #[arg(long, value_name = "FILE")]
    podvisor: PathBuf,
    /// A QEMU to compare with
    #[arg(long, value_name = "FILE")]
    qemu: Option<PathBuf>,
    /// Rounds, in which each runs once
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// Time is counted in instructions here: one nanosecond each
    #[arg(long)]
    icount: bool,
    /// Write the results as JSON to this file, or to stdout (`-`)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the medians as SVG in this file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

pub(crate) fn command(args: &Args) -> Result<()> {
    if args.runs == 0 {
        bail!("--runs 0 measures nothing: give 1 or more");
    }
    let tap = Tap::new()?;
    let stage = Stage::new()?;
    let guest = subject::Guest {
        kernel: stage.copy(&args.kernel)?,
        initramfs: stage.copy(&args.initramfs)?,
        tap: tap.number(),
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
    let mut costs: Vec<Vec<Costs>> = subjects.iter().map(|_| Vec::new()).collect();
    for round in 0..args.runs {
        // Each round starts with another one.
        for turn in 0..subjects.len() {
            let at = (round + turn) % subjects.len();
            let subject = &subjects[at];
            let cost = run::run(subject, SIZE, stage.path())
                .with_context(|| format!("{} was not measured", subject.name))?;
            costs[at].push(cost);
        }
    }
    let names = subjects.iter().map(|subject| subject.name);
    let report = Report::new(args.icount, names.zip(&costs));
    output::print(&report, args.json.as_deref())?;
    output::draw(&report.plot(), args.plot.as_deref())
}
