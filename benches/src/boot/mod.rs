//! The cost of a boot: from starting a virtual machine monitor to the line that the guest's init
//! writes.
//!
//! [`peers`] defines how each monitor is started, [`stage`] copies everything that is measured to
//! memory, [`run`] boots once and samples the process at init's line, by the data that [`sample`]
//! reads from /proc, and [`report`] creates medians, the table and the JSON.
//!
//! Every monitor gets the same kernel, initramfs, memory, vCPU and command line, and a serial
//! console on its stdout, because that is where all of them can show that init runs.

mod peers;
mod report;
mod run;
mod sample;
mod stage;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

pub(crate) use peers::Kind;
pub(crate) use run::{Running, ahead_of_others};
pub(crate) use sample::{Memory, Sample, process_cpu, take};
pub(crate) use stage::Stage;

use crate::output;
use peers::{Guest, Peer};
use report::Report;

/// The default command line: every message of level "error" and worse would show.
const COMMAND_LINE: &str =
    "console=ttyS0 quiet panic=-1 reboot=k pci=off noreplace-smp rcupdate.rcu_expedited=1";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The guest's kernel, an uncompressed ELF file
    #[arg(long, value_name = "FILE")]
    kernel: PathBuf,
    /// The guest's initramfs, whose init writes the line `init` and sleeps
    #[arg(long, value_name = "FILE")]
    initramfs: PathBuf,
    /// The program that boots by podvisor's library
    #[arg(long, value_name = "FILE")]
    podvisor: PathBuf,
    /// A QEMU to compare with
    #[arg(long, value_name = "FILE")]
    qemu: Option<PathBuf>,
    /// A Firecracker to compare with
    #[arg(long, value_name = "FILE")]
    firecracker: Option<PathBuf>,
    /// A Cloud Hypervisor to compare with
    #[arg(long, value_name = "FILE")]
    cloud_hypervisor: Option<PathBuf>,
    /// The guest's memory in MiB
    #[arg(long, value_name = "MIB", default_value_t = 128)]
    memory: u64,
    /// The kernel's command line, before what a monitor adds to it
    #[arg(long, value_name = "TEXT", default_value = COMMAND_LINE)]
    cmdline: String,
    /// Boots of each monitor, after one that warms the caches
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// Time is counted in instructions here: one nanosecond each
    #[arg(long)]
    icount: bool,
    /// Write the results as JSON to this file, or to stdout (`-`)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(crate) fn command(args: &Args) -> Result<()> {
    if args.runs == 0 {
        bail!("--runs 0 measures nothing: give 1 or more");
    }
    let stage = Stage::new()?;
    let guest = Guest {
        kernel: stage.copy(&args.kernel)?,
        initramfs: stage.copy(&args.initramfs)?,
        memory_mib: args.memory,
        cmdline: args.cmdline.clone(),
    };
    let mut peers = Vec::new();
    for (kind, path) in [
        (Kind::Podvisor, Some(&args.podvisor)),
        (Kind::Qemu, args.qemu.as_ref()),
        (Kind::Firecracker, args.firecracker.as_ref()),
        (Kind::CloudHypervisor, args.cloud_hypervisor.as_ref()),
    ] {
        if let Some(path) = path {
            peers.push(Peer::stage(kind, path, &guest, &stage)?);
        }
    }

    let _first = run::ahead_of_others();
    let mut results = Vec::new();
    for peer in &peers {
        let boot = || run::boot(peer, &guest, stage.path());
        boot().with_context(|| format!("{} did not boot", peer.kind.name()))?;
        let samples = (0..args.runs)
            .map(|_| boot())
            .collect::<Result<Vec<_>>>()
            .with_context(|| format!("{} did not boot again", peer.kind.name()))?;
        results.push((peer, samples));
    }

    let report = Report::new(args, &results)?;
    output::print(&report, args.json.as_deref())
}
