//! podvisor's commands to build, test and benchmark it: `cargo xtask COMMAND`.
//!
//! One file (or directory) per command. They share [`paths`] (the location of results), [`process`]
//! (children that never outlive this program), [`setup`] (Debian packages) and [`report`] (a step's
//! terminal output). No product code is here, and nothing in the product depends on this crate; it
//! is built first on a fresh machine, so its dependencies are few.

mod bench;
mod cargo;
mod cluster;
mod conformance;
mod critest;
mod deb;
mod demo;
mod docs;
mod firmware;
mod fuzz;
mod go;
mod guest;
mod host;
mod images;
mod kernel;
mod libtest;
mod mutants;
mod package;
mod paths;
mod process;
mod programs;
mod report;
#[cfg(test)]
mod rooms;
mod setup;
mod soak;
mod space;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Builds, tests and measures podvisor.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    disable_version_flag = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install the Debian packages that are missing (every other command does it for itself)
    Setup,
    /// Build the guest kernel into target/guest/vmlinux
    Kernel(kernel::Args),
    /// Build what a guest boots from: the kernel and the agent's initramfs, in target/guest
    Guest,
    /// Build the UEFI firmware that guests can boot by into target/firmware/CLOUDHV.fd: many
    /// minutes
    Firmware(firmware::Args),
    /// Make a small system with Debian's kernel in target/small, which virtual machines boot in
    /// tests
    Small,
    /// Make a Debian for clouds in target/cloud, and boot it as a virtual machine: many minutes
    Cloud(images::cloud::Args),
    /// Measure podvisor side by side with other monitors
    Bench(bench::Args),
    /// Show the main job: an image is pulled and a program of it runs in a guest
    Demo,
    /// Build the documentation as a book, in target/book
    Book,
    /// Make a Debian package, and an archive of the same tree, in target/package
    Package,
    /// Run checks and tests, with --long all of them; the last lines count the tests
    Test(test::Args),
    /// Build a real Kubernetes API server, etcd and virtctl (with --all, a whole cluster's
    /// programs) in target/cluster/bin
    Cluster(cluster::Args),
    /// Ask a runtime what a kubelet expects of any: podvisor, or another one to compare with
    Conformance(conformance::Args),
    /// Run Kubernetes' validation suite for runtimes, unmodified, and print a table
    Critest(critest::Args),
    /// Move VMs again and again, and kill what takes part: many minutes
    Soak(soak::Args),
    /// Give fuzz targets to libFuzzer; finds stay in target/fuzz
    Fuzz(fuzz::Args),
    /// Break functions one by one, and see whether a test notices
    Mutants(mutants::Args),
    /// Run a command where KVM is sound: here, or in an emulated test host
    Host(host::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    process::install_signal_handling();
    let result = match cli.command {
        Command::Setup => setup::ensure(setup::ALL).map(|()| ExitCode::SUCCESS),
        Command::Kernel(args) => kernel::command(&args).map(|()| ExitCode::SUCCESS),
        Command::Guest => guest::command().map(|()| ExitCode::SUCCESS),
        Command::Firmware(args) => firmware::command(&args),
        Command::Small => images::small::command().map(|()| ExitCode::SUCCESS),
        Command::Cloud(args) => images::cloud::command(&args),
        Command::Bench(args) => bench::command(&args),
        Command::Demo => demo::command(),
        Command::Book => docs::book().map(|()| ExitCode::SUCCESS),
        Command::Package => package::command(),
        Command::Test(args) => test::command(&args),
        Command::Cluster(args) => cluster::command(&args),
        Command::Conformance(args) => conformance::command(&args),
        Command::Critest(args) => critest::command(&args),
        Command::Soak(args) => soak::command(&args),
        Command::Fuzz(args) => fuzz::command(&args),
        Command::Mutants(args) => mutants::command(&args),
        Command::Host(args) => host::command(&args),
    };
    process::clean_up();
    result.unwrap_or_else(|error| {
        report::error(&error);
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Cli;

    #[test]
    fn the_arguments_of_each_command_are_sound() {
        Cli::command().debug_assert();
    }
}
