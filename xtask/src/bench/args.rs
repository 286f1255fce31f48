//! Arguments of `cargo xtask bench`.

use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(super) subject: Subject,
}

#[derive(Debug, clap::Subcommand)]
pub(super) enum Subject {
    /// Reads of a disk, one at a time, eight in flight and in order: podvisor over MMIO and over
    /// PCI, and QEMU's microvm and q35
    Blk(BlkArgs),
    /// From starting the program to the guest's init: podvisor and QEMU's microvm side by side
    Boot(BootArgs),
    /// Each call of a pod's life over the Container Runtime Interface: podvisor, by booting and as
    /// clones, and containerd with runc beside it
    Cri(CriArgs),
    /// An image as a disk and as memory: what a guest pays until it reads, and the memory of many
    Image(ImageArgs),
    /// A line's interrupt, by ioctl and by irqfd
    Interrupt(InterruptArgs),
    /// A running guest that moves to another process: podvisor over MMIO and over PCI, and QEMU's
    /// microvm and q35
    Migrate(MigrateArgs),
    /// TCP both ways and a byte there and back over a tap: podvisor over MMIO and over PCI, and
    /// QEMU's microvm and q35
    Net(NetArgs),
    /// From a registry to a root file system: podvisor, containerd, and skopeo with umoci side by
    /// side (as root)
    Pull(PullArgs),
    /// From starting the program to the first answer of the guest's agent: a clone beside the cold
    /// boot
    Restore(RestoreArgs),
    /// From `podvisor run` to its program's end, by booting and as a clone, and runc beside it
    Start(StartArgs),
    /// A small Debian on a disk until its shell answers: podvisor by the loader and as a clone, and
    /// QEMU's q35 beside it
    Vm(VmArgs),
}

#[derive(Debug, clap::Args)]
pub(super) struct VmArgs {
    #[command(flatten)]
    pub(super) clock: Clock,
    /// Runs of each
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) runs: usize,
    /// Compare with this Cloud Hypervisor too
    #[arg(long, value_name = "FILE")]
    pub(super) cloud_hypervisor: Option<PathBuf>,
    #[command(flatten)]
    pub(super) json: Json,
}

#[derive(Debug, clap::Args)]
pub(super) struct BootArgs {
    #[command(flatten)]
    pub(super) clock: Clock,
    /// Boots of each monitor
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(super) runs: usize,
    /// Compare with this Firecracker too
    #[arg(long, value_name = "FILE")]
    pub(super) firecracker: Option<PathBuf>,
    /// Compare with this Cloud Hypervisor too
    #[arg(long, value_name = "FILE")]
    pub(super) cloud_hypervisor: Option<PathBuf>,
    /// Boot this kernel instead of target/guest/vmlinux
    #[arg(long, value_name = "FILE")]
    pub(super) kernel: Option<PathBuf>,
    /// The kernel's command line, with `console=ttyS0`
    #[arg(long, value_name = "TEXT")]
    pub(super) cmdline: Option<String>,
    /// The guest's memory in MiB
    #[arg(long, value_name = "MIB")]
    pub(super) memory: Option<u64>,
    #[command(flatten)]
    pub(super) json: Json,
}

#[derive(Debug, clap::Args)]
pub(super) struct BlkArgs {
    #[command(flatten)]
    pub(super) clock: Clock,
    /// Rounds, in which each runs once [default: 3, and 1 where instructions are counted]
    #[arg(long, value_name = "N")]
    pub(super) runs: Option<usize>,
    #[command(flatten)]
    pub(super) json: Json,
    #[command(flatten)]
    pub(super) plot: Plot,
}

#[derive(Debug, clap::Args)]
pub(super) struct ImageArgs {
    #[command(flatten)]
    pub(super) clock: Clock,
    /// Look at the memory of many machines with their image as this: blk or pmem
    #[arg(long, value_name = "WAY")]
    pub(super) memory_of: Option<String>,
    /// How many machines
    #[arg(long, value_name = "N", default_value_t = 20, requires = "memory_of")]
    pub(super) machines: u32,
    #[command(flatten)]
    pub(super) json: Json,
}

#[derive(Debug, clap::Args)]
pub(super) struct MigrateArgs {
    #[command(flatten)]
    pub(super) clock: Clock,
    /// Migrations of each
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(super) runs: usize,
    /// MiB of the guest's 128 that have data
    #[arg(long, value_name = "MIB", default_value_t = 64)]
    pub(super) fill: u32,
    /// MiB of them that the guest writes to again and again
    #[arg(long, value_name = "MIB", default_value_t = 16)]
    pub(super) region: u32,
    /// Pages that it writes to per millisecond
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub(super) pages: u32,
    /// For how many milliseconds the guest may stand still
    #[arg(long, value_name = "MS", default_value_t = 300)]
    pub(super) downtime: u32,
    #[command(flatten)]
    pub(super) json: Json,
    #[command(flatten)]
    pub(super) plot: Plot,
}

#[derive(Debug, clap::Args)]
pub(super) struct NetArgs {
    #[command(flatten)]
    pub(super) clock: Clock,
    /// Rounds, in which each runs once [default: 3, and 1 where instructions are counted]
    #[arg(long, value_name = "N")]
    pub(super) runs: Option<usize>,
    #[command(flatten)]
    pub(super) json: Json,
    #[command(flatten)]
    pub(super) plot: Plot,
}

#[derive(Debug, clap::Args)]
pub(super) struct RestoreArgs {
    #[command(flatten)]
    pub(super) clock: Clock,
    /// Runs of each [default: 20, and 3 where instructions are counted]
    #[arg(long, value_name = "N")]
    pub(super) runs: Option<usize>,
    /// The bus of podvisor's devices: mmio or pci
    #[arg(long, value_name = "BUS", default_value = "pci")]
    pub(super) transport: String,
    /// Clones that run at once, for the memory that is each one's own
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub(super) clones: usize,
    /// Compare with this Firecracker too
    #[arg(long, value_name = "FILE")]
    pub(super) firecracker: Option<PathBuf>,
    /// The guest's memory in MiB
    #[arg(long, value_name = "MIB", default_value_t = 128)]
    pub(super) memory: u64,
}

#[derive(Debug, clap::Args)]
pub(super) struct StartArgs {
    #[command(flatten)]
    pub(super) clock: Clock,
    /// Runs of each [default: 20, and 5 where instructions are counted]
    #[arg(long, value_name = "N")]
    pub(super) runs: Option<usize>,
    /// Containers that are started at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(super) at_once: usize,
    /// Idle containers whose memory is looked at
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(super) idle: usize,
}

#[derive(Debug, clap::Args)]
pub(super) struct CriArgs {
    #[command(flatten)]
    pub(super) clock: Clock,
    /// Pods of each [default: 20, and 5 where instructions are counted]
    #[arg(long, value_name = "N")]
    pub(super) runs: Option<usize>,
    /// Pods for throughput and memory
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(super) pods: usize,
}

#[derive(Debug, clap::Args)]
pub(super) struct InterruptArgs {
    #[command(flatten)]
    pub(super) clock: Clock,
}

#[derive(Debug, clap::Args)]
pub(super) struct PullArgs {
    /// Pulls of each image by each program
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(super) runs: usize,
    #[command(flatten)]
    pub(super) json: Json,
}

/// By what costs are told.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Clock {
    /// Count instructions instead of time: in the emulated test host, the same on every machine
    #[arg(long)]
    pub(super) icount: bool,
}

/// Where results go besides the table.
#[derive(Debug, Default, clap::Args)]
pub(super) struct Json {
    /// Write the results as JSON to this file, or to stdout (`-`)
    #[arg(id = "json", long, value_name = "FILE")]
    pub(super) path: Option<PathBuf>,
}

/// Where the picture goes.
#[derive(Debug, Default, clap::Args)]
pub(super) struct Plot {
    /// Draw the medians as SVG in this file
    #[arg(id = "plot", long, value_name = "FILE")]
    pub(super) path: Option<PathBuf>,
}
