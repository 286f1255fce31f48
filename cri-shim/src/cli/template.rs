//! `podvisor template`: creates the template of a machine. It is not for users: podvisor starts
//! itself with it if a sandbox did not find a template.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;

use crate::machine::{NicKind, Transport};
use crate::sandbox::{self, Shape};

/// The nice value: it is less urgent than starting pods.
const NICENESS: i32 = 10;

#[derive(Debug, Args)]
pub(super) struct TemplateArgs {
    /// Kernel
    #[arg(long, value_name = "FILE")]
    kernel: PathBuf,
    /// Initramfs with the agent
    #[arg(long, value_name = "FILE")]
    initramfs: PathBuf,
    /// Virtual CPUs
    #[arg(long, value_name = "N")]
    cpus: u8,
    /// Virtual CPUs that there may be later
    #[arg(long, value_name = "N")]
    max_cpus: u8,
    /// Memory
    #[arg(long, value_name = "BYTES")]
    memory: u64,
    /// Memory that may be added later
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    growth: u64,
    /// Disks without a medium
    #[arg(long, value_name = "N")]
    disks: u8,
    /// Network cards
    #[arg(long, value_name = "N")]
    cards: u8,
    /// The network cards are stream sockets, not taps
    #[arg(long)]
    streams: bool,
    /// Share a directory
    #[arg(long)]
    share: bool,
    /// Devices are on PCI
    #[arg(long)]
    pci: bool,
    /// The guest's kernel counts pressure
    #[arg(long)]
    psi: bool,
    /// Where templates are kept
    #[arg(value_name = "DIR")]
    templates: PathBuf,
}

pub(super) fn run(args: &TemplateArgs) -> anyhow::Result<u8> {
    // If it fails, this runs with the priority of the parent.
    let _ = rustix::process::nice(NICENESS);
    let shape = Shape {
        kernel: args.kernel.clone(),
        initramfs: args.initramfs.clone(),
        vcpus: args.cpus,
        max_vcpus: args.max_cpus,
        memory: args.memory,
        growth: args.growth,
        image_slots: args.disks,
        nics: args.cards,
        nic_kind: match args.streams {
            true => NicKind::Stream,
            false => NicKind::Tap,
        },
        shares: args.share,
        transport: match args.pci {
            true => Transport::Pci,
            false => Transport::Mmio,
        },
        psi: args.psi,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the event loop")?;
    let made = runtime.block_on(sandbox::make_template(&shape, &args.templates));
    runtime.shutdown_background();
    made?;
    Ok(0)
}
