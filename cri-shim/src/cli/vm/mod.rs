//! `podvisor vm`: virtual machines with an operating system of their own, from the disk images that
//! distributions publish.
//!
//! A VM is stored like a container: its directory has the record, the disk with what the guest has
//! written, the log of its console and its sandbox. Its sandbox runs while the VM does, and has the
//! machine as its only container, so that the commands for containers wait for it, stop it and show
//! its log.
//!
//! | file | contents |
//! | --- | --- |
//! | `args` | the flags of `vm run` |
//! | `image` | the disk image that a VM begins with |
//! | `disk` | the VM's own disk |
//! | `keys` | the SSH keys that it knows its user by |
//! | `seed` | what cloud-init in the guest is told |
//! | `boot` | the network, the sandbox, the machine |
//! | `saved` | the files of a saved machine |
//! | `hibernate`, `snapshot`, `clone` | `vm hibernate`, snapshots and `vm restore`, `vm clone` |
//! | `commit` | `vm commit` |
//! | `migrate`, `receive` | `vm migrate`, and its other side |
//! | `transfer` | what the two say to each other first |
//! | `run` | `vm run` and `vm start` |
//! | `copy` | `vm cp` |
//! | `console` | `vm console`, and the console of `vm run` |
//! | `list` | `vm ps` and `vm inspect` |
//! | `timings` | `vm timings`, and `--timings`: the phases of a boot |
//! | `resize` | `vm resize` |
//! | `attach`, `attached` | `vm attach-disk` and `vm detach-disk`, and the disks |
//! | `reboot` | `vm reboot` |
//! | `ssh` | `vm ssh` |
//! | `volumes` | directories that it shares with this host |

mod args;
mod arrival;
mod attach;
mod attached;
mod boot;
mod clone;
mod commit;
mod console;
mod copy;
mod disk;
mod dump;
mod hibernate;
mod image;
mod keys;
mod list;
mod migrate;
mod reboot;
mod receive;
mod resize;
mod run;
mod saved;
mod seed;
mod snapshot;
mod ssh;
mod timings;
mod transfer;
mod volumes;

use clap::{Arg, Args, Subcommand};

use super::Globals;
use super::container::{exec, lifecycle, logs};
use super::kept::Kept;

#[derive(Debug, Args)]
pub(super) struct VmArgs {
    #[command(subcommand)]
    command: VmCommand,
}

#[derive(Debug, Subcommand)]
enum VmCommand {
    /// Make a virtual machine of a disk image, boot it, and connect to its console
    Run(Box<args::RunArgs>),
    /// Boot virtual machines that are off, and continue those that hibernate
    #[command(mut_arg("containers", of_vms))]
    Start(run::StartArgs),
    /// Store the memory of virtual machines on the disk, and end their processes
    #[command(mut_arg("containers", of_vms))]
    Hibernate(lifecycle::NamesArgs),
    /// Store the memory and the disk of a virtual machine, which goes on
    Snapshot(snapshot::SnapshotArgs),
    /// Write the memory of a virtual machine to a file for `crash` and `gdb`; the guest stands
    /// still meanwhile
    Dump(dump::DumpArgs),
    /// List snapshots of virtual machines
    Snapshots(snapshot::ListArgs),
    /// Continue a virtual machine from one of its snapshots
    Restore(snapshot::RestoreArgs),
    /// Make virtual machines that continue from the memory of another one
    Clone(clone::CloneArgs),
    /// Make an image of the disk of a virtual machine, which others begin with
    Commit(commit::CommitArgs),
    /// Move a running virtual machine to another host
    Migrate(migrate::MigrateArgs),
    /// Take a virtual machine that another host moves here
    Receive(receive::ReceiveArgs),
    /// Change CPUs and memory of virtual machines, while they run as far as they were made for
    /// that, and make their disks larger
    Resize(resize::ResizeArgs),
    /// Give a virtual machine another disk, also while it runs; prints its serial number
    AttachDisk(attach::AttachArgs),
    /// Take an attached disk from a virtual machine
    DetachDisk(attach::DetachArgs),
    /// Remove snapshots of a virtual machine
    RmSnapshot(snapshot::RmArgs),
    /// Connect to the console of a virtual machine
    Console(console::ConsoleArgs),
    /// List virtual machines
    #[command(visible_alias = "ls", alias = "list")]
    Ps(list::ListArgs),
    /// Show virtual machines in detail
    Inspect(list::InspectArgs),
    /// Show how long each phase of a virtual machine's boot took
    Timings(timings::TimingsArgs),
    /// Show what was written to the console
    #[command(mut_arg("containers", of_vms))]
    Logs(logs::LogsArgs),
    /// Log in by SSH, or run a command
    Ssh(ssh::SshArgs),
    /// Run a command by the guest's agent: qemu-guest-agent, or podvisor's (vm run --agent)
    #[command(override_usage = "podvisor vm exec [OPTIONS] VM CMD...")]
    #[command(mut_arg("container_and_command", |names| names.value_names(["VM", "CMD"])))]
    Exec(exec::ExecArgs),
    /// Copy a file to or from a virtual machine by the guest's agent
    Cp(copy::CopyArgs),
    /// Make the guest's agent reboot the guest, or reset the machine
    Reboot(reboot::RebootArgs),
    /// Press the power button, and kill a virtual machine that does not power itself off
    #[command(mut_arg("containers", of_vms), mut_arg("time", patient))]
    Stop(lifecycle::StopArgs),
    /// Pause virtual machines
    #[command(mut_arg("containers", of_vms))]
    Pause(lifecycle::NamesArgs),
    /// Resume paused virtual machines
    #[command(mut_arg("containers", of_vms))]
    Unpause(lifecycle::NamesArgs),
    /// Wait until virtual machines are off, and print their exit codes
    #[command(mut_arg("containers", of_vms))]
    Wait(lifecycle::NamesArgs),
    /// Remove virtual machines with their disks
    #[command(mut_arg("containers", of_vms))]
    Rm(lifecycle::RmArgs),
}

fn of_vms(names: Arg) -> Arg {
    names.value_name("VM")
}

fn patient(time: Arg) -> Arg {
    time.help("Seconds to wait before killing it [default: 60]")
}

pub(super) fn run(globals: &Globals, args: &VmArgs) -> anyhow::Result<u8> {
    let globals = &Globals {
        root: Some(globals.root()?),
        kept: Kept::Vms,
        ..*globals
    };
    match &args.command {
        VmCommand::Run(args) => run::run(globals, args),
        VmCommand::Start(args) => run::start(globals, args),
        VmCommand::Hibernate(args) => hibernate::run(globals, args),
        VmCommand::Snapshot(args) => snapshot::take(globals, args),
        VmCommand::Dump(args) => dump::run(globals, args),
        VmCommand::Snapshots(args) => snapshot::list(globals, args),
        VmCommand::Restore(args) => snapshot::restore(globals, args),
        VmCommand::Clone(args) => clone::run(globals, args),
        VmCommand::Commit(args) => commit::run(globals, args),
        VmCommand::Migrate(args) => migrate::run(globals, args),
        VmCommand::Receive(args) => receive::run(globals, args),
        VmCommand::Resize(args) => resize::run(globals, args),
        VmCommand::AttachDisk(args) => attach::attach(globals, args),
        VmCommand::DetachDisk(args) => attach::detach(globals, args),
        VmCommand::RmSnapshot(args) => snapshot::rm(globals, args),
        VmCommand::Console(args) => console::run(globals, args),
        VmCommand::Ps(args) => list::list(globals, args),
        VmCommand::Inspect(args) => list::inspect(globals, args),
        VmCommand::Timings(args) => timings::run(globals, args),
        VmCommand::Logs(args) => logs::run(globals, args),
        VmCommand::Ssh(args) => ssh::run(globals, args),
        VmCommand::Exec(args) => exec::run(globals, args),
        VmCommand::Cp(args) => copy::run(globals, args),
        VmCommand::Reboot(args) => reboot::run(globals, args),
        VmCommand::Stop(args) => lifecycle::stop(globals, args),
        VmCommand::Pause(args) => lifecycle::pause(globals, args),
        VmCommand::Unpause(args) => lifecycle::unpause(globals, args),
        VmCommand::Wait(args) => lifecycle::wait(globals, args),
        VmCommand::Rm(args) => lifecycle::rm(globals, args),
    }
}
