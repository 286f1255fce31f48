//! The commands: their names, and what runs each of them.

use clap::Subcommand;

use super::deferred::Deferred;
use super::log::LogLevel;
use super::{
    Globals, check, completions, config, container, image, images, import, inspect, load, manual,
    pod, prune, pull, rmi, run, sandbox, save, serve, snapshot, system, tag, template, version, vm,
};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Run a program from an image in a virtual machine of its own
    Run(Deferred<run::RunArgs>),
    /// List containers
    Ps(Deferred<container::ps::PsArgs>),
    /// Run a command in a running container
    Exec(Deferred<container::exec::ExecArgs>),
    /// Show what containers wrote
    Logs(Deferred<container::logs::LogsArgs>),
    /// Attach to a running container's standard streams
    Attach(Deferred<container::attach::AttachArgs>),
    /// Stop running containers
    Stop(Deferred<container::lifecycle::StopArgs>),
    /// Send a signal to containers
    Kill(Deferred<container::lifecycle::KillArgs>),
    /// Pause containers
    Pause(Deferred<container::lifecycle::NamesArgs>),
    /// Resume paused containers
    Unpause(Deferred<container::lifecycle::NamesArgs>),
    /// Wait until containers have ended, and print their exit codes
    Wait(Deferred<container::lifecycle::NamesArgs>),
    /// Remove containers
    Rm(Deferred<container::lifecycle::RmArgs>),
    /// Show which ports of the host lead to a container's
    Port(Deferred<container::port::PortArgs>),
    /// Show containers in detail
    Inspect(Deferred<container::inspect::InspectArgs>),
    /// Show resource usage of containers
    Stats(Deferred<container::stats::StatsArgs>),
    /// Print what containers and their machines use, for Prometheus
    Metrics(Deferred<container::metrics::MetricsArgs>),
    /// Manage machines for several containers
    Pod(pod::PodArgs),
    /// Run and manage virtual machines with an operating system of their own
    Vm(Deferred<vm::VmArgs>),
    /// Run a debug shell in a machine, outside its containers
    Debug(Deferred<container::debug::DebugArgs>),
    /// Connect to the serial console of a machine
    Console(Deferred<container::console::ConsoleArgs>),
    /// Show container events
    Events(Deferred<container::show_events::EventsArgs>),
    /// Show the processes of a container
    Top(Deferred<container::exec::TopArgs>),
    /// Copy files from or to a container
    Cp(Deferred<container::copy::CopyArgs>),
    /// Boot a machine and snapshot it, for `run --from-snapshot`
    Snapshot(Deferred<snapshot::SnapshotArgs>),
    /// Fetch images from a registry
    Pull(Deferred<pull::PullArgs>),
    /// List the images that are here
    Images(Deferred<images::ImagesArgs>),
    /// Remove images
    Rmi(Deferred<rmi::RmiArgs>),
    /// Remove containers and pods that have ended, and images that nobody needs
    Prune(Deferred<prune::PruneArgs>),
    /// Give an image more names
    Tag(Deferred<tag::TagArgs>),
    /// Take images from an archive
    Load(Deferred<load::LoadArgs>),
    /// Write images to an archive
    Save(Deferred<save::SaveArgs>),
    /// Make an image of a root file system: a directory or a tar
    Import(Deferred<import::ImportArgs>),
    /// Show how an image was made
    History(Deferred<inspect::HistoryArgs>),
    /// Inspect, pin and manage images
    Image(image::ImageArgs),
    /// Serve the Container Runtime Interface to a kubelet
    Serve(Deferred<serve::ServeArgs>),
    /// Check or print the settings file of `serve`
    Config(config::ConfigArgs),
    /// Show podvisor's disk usage
    System(system::SystemArgs),
    /// Say whether this machine can run guests, and what to do if not
    Check(Deferred<check::CheckArgs>),
    /// Show versions
    Version(Deferred<version::VersionArgs>),
    /// Print a completion script for a shell
    Completions(Deferred<completions::CompletionsArgs>),
    /// Write the manual pages, for a package
    #[command(hide = true)]
    Manual(Deferred<manual::ManualArgs>),
    /// The process of one sandbox, started by podvisor itself
    #[command(hide = true)]
    Sandbox(Deferred<sandbox::SandboxArgs>),
    /// Make a template of machines, started by podvisor itself
    #[command(hide = true)]
    Template(Deferred<template::TemplateArgs>),
}

impl Command {
    /// Runs it, and returns the exit code. `whole` is the whole command line's description.
    pub(super) fn run(self, globals: &Globals, whole: fn() -> clap::Command) -> anyhow::Result<u8> {
        match self {
            Self::Run(args) => run::run(globals, &args),
            Self::Ps(args) => container::ps::run(globals, &args),
            Self::Exec(args) => container::exec::run(globals, &args),
            Self::Logs(args) => container::logs::run(globals, &args),
            Self::Attach(args) => container::attach::run(globals, &args),
            Self::Stop(args) => container::lifecycle::stop(globals, &args),
            Self::Kill(args) => container::lifecycle::kill(globals, &args),
            Self::Pause(args) => container::lifecycle::pause(globals, &args),
            Self::Unpause(args) => container::lifecycle::unpause(globals, &args),
            Self::Wait(args) => container::lifecycle::wait(globals, &args),
            Self::Rm(args) => container::lifecycle::rm(globals, &args),
            Self::Port(args) => container::port::run(globals, &args),
            Self::Inspect(args) => container::inspect::run(globals, &args),
            Self::Stats(args) => container::stats::run(globals, &args),
            Self::Metrics(args) => container::metrics::run(globals, &args),
            Self::Pod(args) => pod::run(globals, &args),
            Self::Vm(args) => vm::run(globals, &args),
            Self::Debug(args) => container::debug::run(globals, &args),
            Self::Console(args) => container::console::run(globals, &args),
            Self::Events(args) => container::show_events::run(globals, &args),
            Self::Top(args) => container::exec::top(globals, &args),
            Self::Cp(args) => container::copy::run(globals, &args),
            Self::Snapshot(args) => snapshot::run(&args),
            Self::Pull(args) => pull::run(globals, &args),
            Self::Images(args) => images::run(globals, &args),
            Self::Rmi(args) => rmi::run(globals, &args),
            Self::Prune(args) => prune::run(globals, &args),
            Self::Tag(args) => tag::run(globals, &args),
            Self::Load(args) => load::run(globals, &args),
            Self::Save(args) => save::run(globals, &args),
            Self::Import(args) => import::run(globals, &args),
            Self::History(args) => inspect::history(globals, &args),
            Self::Image(args) => image::run(globals, &args),
            Self::Serve(args) => serve::run(globals, &args),
            Self::Config(args) => config::run(globals, &args),
            Self::System(args) => system::run(globals, &args),
            Self::Check(args) => check::run(&args, &globals.root().unwrap_or_default()),
            Self::Version(args) => version::run(&args),
            Self::Completions(args) => completions::run(&args, whole()),
            Self::Manual(args) => manual::run(&args, whole()),
            Self::Sandbox(_) => sandbox::run(),
            Self::Template(args) => template::run(&args),
        }
    }

    /// Returns its log level. A daemon's log is the place to find out what happened to a pod.
    pub(super) fn log_level(&self, globals: &Globals) -> LogLevel {
        match (self, globals.log_level) {
            (Self::Sandbox(_), _) | (Self::Serve(_), None) => LogLevel::Info,
            (_, Some(level)) => level,
            (_, None) => LogLevel::Warn,
        }
    }
}
