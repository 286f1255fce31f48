//! Side-by-side measurements of podvisor and its peers, run by `cargo xtask bench`.
//!
//! One directory per subject, `output` for the common output, and `plot` for plots of it. The input
//! of a measurement is the paths of the programs to compare; the output is a table, JSON and SVG.
//! Product code is never here: podvisor is measured from outside, like every other program.

mod blk;
mod boot;
mod cri;
mod image;
mod interrupt;
mod migrate;
mod monitor;
mod net;
mod output;
mod plot;
mod pull;
mod qemu;
mod restore;
mod spread;
mod start;
mod vm;

use clap::{Parser, Subcommand};

/// Measures podvisor and its peers side by side.
#[derive(Debug, Parser)]
#[command(name = "podvisor-benches", disable_version_flag = true)]
struct Cli {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Debug, Subcommand)]
enum Subject {
    /// Reads of a disk in three ways, over MMIO and over PCI
    Blk(monitor::MonitorArgs),
    /// From starting the program to the guest's init
    Boot(boot::Args),
    /// A pod's life over the Container Runtime Interface
    Cri(cri::Args),
    /// An image as a disk and as memory
    Image(image::Args),
    /// A line's interrupt, by ioctl and by irqfd
    Interrupt(interrupt::Args),
    /// A running guest that moves from one process to another
    Migrate(migrate::Args),
    /// TCP both ways, and a byte there and back, over MMIO and over PCI
    Net(monitor::MonitorArgs),
    /// From a registry to a root file system
    Pull(pull::Args),
    /// From starting the program to the first answer of a clone's agent
    Restore(restore::Args),
    /// From a command to the end of its container's program
    Start(start::Args),
    /// From starting the program to the answer of a whole system's shell
    Vm(vm::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().subject {
        Subject::Blk(args) => blk::command(&args),
        Subject::Boot(args) => boot::command(&args),
        Subject::Cri(args) => cri::command(&args),
        Subject::Image(args) => image::command(&args),
        Subject::Interrupt(args) => interrupt::command(&args),
        Subject::Migrate(args) => migrate::command(&args),
        Subject::Net(args) => net::command(&args),
        Subject::Pull(args) => pull::command(&args),
        Subject::Restore(args) => restore::command(&args),
        Subject::Start(args) => start::command(&args),
        Subject::Vm(args) => vm::command(&args),
    }
}
