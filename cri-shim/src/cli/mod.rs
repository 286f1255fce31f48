//! The command line. A command's output goes to stdout, everything else (progress, logs, errors) to
//! stderr, and the exit code reports the result.
//!
//! Commands for containers are in `container`. The other commands have one file each, with their
//! flags and output; `table`, `shown`, `progress`, `interrupt` and `terminal` are shared. The
//! commands' work is done elsewhere: images by `podvisor-images`, virtual machines by `sandbox`.

mod absent;
mod advice;
mod check;
mod completions;
mod config;
mod container;
mod deferred;
mod destination;
mod disks;
mod guest;
mod image;
mod images;
mod import;
mod inspect;
mod interrupt;
mod keys;
mod load;
mod log;
mod manual;
mod notify;
mod progress;
mod prune;
mod pull;
mod registries;
mod rmi;
mod run;
mod sandbox;
mod save;
mod serve;
mod settings;
mod shown;
mod signals;
mod size;
mod snapshot;
mod system;
mod table;
mod tag;
mod template;
mod terminal;
mod verify;
mod version;

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};
use deferred::Deferred;
use log::{LogFormat, LogLevel};
use podvisor_images::Store;

use crate::sandbox::SandboxExit;

/// Exit code of a command that failed.
const FAILURE: u8 = 1;

/// Exit code for an invalid command line.
const USAGE: u8 = 2;

/// Exit code of `run` and `exec` if podvisor failed and not the program, as in docker.
const RUN_FAILURE: u8 = 125;

/// Maximum length of an error, in characters: parts of it may come from a registry or a guest.
const ERROR_MAX: usize = 2000;

/// Programs from OCI images, each in a virtual machine of its own
#[derive(Debug, Parser)]
#[command(name = "podvisor", version, max_term_width = 100)]
#[command(subcommand_required = true)]
#[command(arg_required_else_help = true)]
struct Cli {
    #[command(flatten)]
    globals: Globals,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
struct Globals {
    /// Directory of images and state [default: /var/lib/podvisor for root,
    /// $XDG_DATA_HOME/podvisor for others]
    #[arg(
        long,
        value_name = "DIR",
        env = "PODVISOR_ROOT",
        hide_env_values = true
    )]
    #[arg(global = true)]
    root: Option<PathBuf>,

    /// Log level on stderr [default: warn; info for `serve`]
    #[arg(long, value_name = "LEVEL", value_enum)]
    #[arg(global = true)]
    log_level: Option<LogLevel>,

    /// Format of log lines
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    #[arg(global = true)]
    log_format: LogFormat,
}

/// Output format of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// For people.
    Table,
    /// For scripts.
    Json,
}

fn parse_format(text: &str) -> Result<Format, String> {
    match text {
        "table" => Ok(Format::Table),
        "json" => Ok(Format::Json),
        _ => Err(
            "write table or json; there are no templates: give --json, and take parts of it by jq"
                .to_owned(),
        ),
    }
}

#[derive(Debug, Args)]
struct FormatArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,

    /// How to print: table or json
    #[arg(long, value_name = "FORMAT", default_value = "table", value_parser = parse_format)]
    format: Format,
}

impl FormatArgs {
    /// For tests.
    #[cfg(test)]
    fn table() -> Self {
        Self {
            json: false,
            format: Format::Table,
        }
    }

    fn is_json(&self) -> bool {
        self.json || self.format == Format::Json
    }
}

/// Of commands that print JSON in any case: what others take to do so is not refused.
#[derive(Debug, Args)]
struct JsonArgs {
    #[arg(long, hide = true)]
    json: bool,

    #[arg(short, long, hide = true, value_name = "FORMAT", value_parser = parse_json_format)]
    format: Option<Format>,
}

fn parse_json_format(text: &str) -> Result<Format, String> {
    match text {
        "json" => Ok(Format::Json),
        _ => Err("it prints JSON, of which jq takes parts; there are no templates".to_owned()),
    }
}

#[derive(Debug, Subcommand)]
enum Command {
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
    Pod(container::pod::PodArgs),
    /// Run a debug shell in a machine, outside its containers
    Debug(Deferred<container::debug::DebugArgs>),
    /// Connect to the serial console of a machine
    Console(Deferred<container::console::ConsoleArgs>),
    /// Show container events
    Events(Deferred<container::events::EventsArgs>),
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

/// Parses this process's arguments, runs the command, and returns the exit code.
#[must_use]
pub fn main() -> ExitCode {
    terminal::restore_on_panic();
    let arguments: Vec<OsString> = env::args_os().collect();
    if sandbox::is_plain(&arguments) {
        log::to_stderr(LogLevel::Info, LogFormat::Text);
        return exit_code(sandbox::run(), FAILURE);
    }
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) => return usage(&error, &arguments),
    };
    log::to_stderr(level(&cli), cli.globals.log_format);
    let failure = match &cli.command {
        Command::Run(_) | Command::Exec(_) | Command::Debug(_) | Command::Attach(_) => RUN_FAILURE,
        _ => FAILURE,
    };
    let done = match cli.command {
        Command::Run(args) => run::run(&cli.globals, &args),
        Command::Ps(args) => container::ps::run(&cli.globals, &args),
        Command::Exec(args) => container::exec::run(&cli.globals, &args),
        Command::Logs(args) => container::logs::run(&cli.globals, &args),
        Command::Attach(args) => container::attach::run(&cli.globals, &args),
        Command::Stop(args) => container::lifecycle::stop(&cli.globals, &args),
        Command::Kill(args) => container::lifecycle::kill(&cli.globals, &args),
        Command::Pause(args) => container::lifecycle::pause(&cli.globals, &args),
        Command::Unpause(args) => container::lifecycle::unpause(&cli.globals, &args),
        Command::Wait(args) => container::lifecycle::wait(&cli.globals, &args),
        Command::Rm(args) => container::lifecycle::rm(&cli.globals, &args),
        Command::Port(args) => container::port::run(&cli.globals, &args),
        Command::Inspect(args) => container::inspect::run(&cli.globals, &args),
        Command::Stats(args) => container::stats::run(&cli.globals, &args),
        Command::Metrics(args) => container::metrics::run(&cli.globals, &args),
        Command::Pod(args) => container::pod::run(&cli.globals, &args),
        Command::Debug(args) => container::debug::run(&cli.globals, &args),
        Command::Console(args) => container::console::run(&cli.globals, &args),
        Command::Events(args) => container::events::run(&cli.globals, &args),
        Command::Top(args) => container::exec::top(&cli.globals, &args),
        Command::Cp(args) => container::copy::run(&cli.globals, &args),
        Command::Snapshot(args) => snapshot::run(&args),
        Command::Pull(args) => pull::run(&cli.globals, &args),
        Command::Images(args) => images::run(&cli.globals, &args),
        Command::Rmi(args) => rmi::run(&cli.globals, &args),
        Command::Prune(args) => prune::run(&cli.globals, &args),
        Command::Tag(args) => tag::run(&cli.globals, &args),
        Command::Load(args) => load::run(&cli.globals, &args),
        Command::Save(args) => save::run(&cli.globals, &args),
        Command::Import(args) => import::run(&cli.globals, &args),
        Command::History(args) => inspect::history(&cli.globals, &args),
        Command::Image(args) => image::run(&cli.globals, &args),
        Command::Serve(args) => serve::run(&cli.globals, &args),
        Command::Config(args) => config::run(&cli.globals, &args),
        Command::System(args) => system::run(&cli.globals, &args),
        Command::Check(args) => check::run(&args),
        Command::Version(args) => version::run(&args),
        Command::Completions(args) => completions::run(&args),
        Command::Manual(args) => manual::run(&args),
        Command::Sandbox(_) => sandbox::run(),
        Command::Template(args) => template::run(&args),
    };
    exit_code(done, failure)
}

/// Returns a command's exit code, after reporting its error.
fn exit_code(done: anyhow::Result<u8>, failure: u8) -> ExitCode {
    match done {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            report(&error);
            ExitCode::from(failure)
        }
    }
}

/// Returns the log level. A daemon's log is the place to find out what happened to a pod.
fn level(cli: &Cli) -> LogLevel {
    match (&cli.command, cli.globals.log_level) {
        (Command::Sandbox(_), _) | (Command::Serve(_), None) => LogLevel::Info,
        (_, Some(level)) => level,
        (_, None) => LogLevel::Warn,
    }
}

/// Prints help and version to stdout, errors to stderr with clap's suggestion.
fn usage(error: &clap::Error, arguments: &[OsString]) -> ExitCode {
    if error.kind() == ErrorKind::InvalidSubcommand
        && let Some(name) = subcommand(arguments).and_then(OsStr::to_str)
        && let Some(instead) = absent::instead_of(name)
    {
        notice(&format!("there is no command `{name}`: {instead}"));
        return ExitCode::from(USAGE);
    }
    // There is nowhere left to report that an error cannot be written.
    let printed = error.print();
    if !error.use_stderr() {
        return match printed {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                report(&anyhow::Error::from(error).context("cannot write to stdout"));
                ExitCode::from(FAILURE)
            }
            _ => ExitCode::SUCCESS,
        };
    }
    ExitCode::from(match gives_exit_codes(arguments) {
        true => RUN_FAILURE,
        false => USAGE,
    })
}

/// Returns whether the command's exit code is that of a program.
fn gives_exit_codes(arguments: &[OsString]) -> bool {
    let command = subcommand(arguments).and_then(OsStr::to_str);
    matches!(command, Some("run" | "exec" | "debug" | "attach"))
}

/// Returns the first argument that is neither a global flag nor a global flag's value.
fn subcommand(arguments: &[OsString]) -> Option<&OsStr> {
    let mut rest = arguments.iter().skip(1);
    while let Some(argument) = rest.next() {
        if ["--root", "--log-level", "--log-format"]
            .iter()
            .any(|flag| argument == *flag)
        {
            rest.next();
        } else if !argument.as_encoded_bytes().starts_with(b"-") {
            return Some(argument);
        }
    }
    None
}

/// Prints an error with its causes to stderr.
fn report(error: &anyhow::Error) {
    notice(&message(error));
}

/// Prints a message for the user that is not the command's result.
fn notice(text: &str) {
    // There is nowhere left to report that stderr is closed.
    let _ = writeln!(io::stderr(), "podvisor: {text}");
}

/// Prints the last messages of a guest's kernel.
fn notice_kernel_log(exit: &SandboxExit) {
    let mut stderr = io::stderr().lock();
    for line in exit.kernel_log() {
        // There is nowhere left to report that stderr is closed.
        let _ = writeln!(stderr, "guest: {line}");
    }
}

/// Returns an error and its causes as one line, without control characters.
fn message(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        // Some libraries repeat their cause in their own text.
        if text.ends_with(cause.as_str()) {
            continue;
        }
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&cause);
    }
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(clean).take(ERROR_MAX).collect()
}

/// Writes a command's output. It is not an error if the reader has closed its end.
fn print(text: &str) -> anyhow::Result<()> {
    print_on(text).map(drop)
}

/// Like [`print`], for continuous output: breaks if the reader has closed its end.
fn print_on(text: &str) -> anyhow::Result<ControlFlow<()>> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        done => {
            done.context("cannot write to stdout")?;
            Ok(ControlFlow::Continue(()))
        }
    }
}

fn to_json(value: &impl serde::Serialize) -> anyhow::Result<String> {
    let mut text = serde_json::to_string_pretty(value).context("cannot write JSON")?;
    text.push('\n');
    Ok(text)
}

fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    print(&to_json(value)?)
}

/// Creates a single-threaded runtime: slow work runs in other processes and machines.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the asynchronous runtime")
}

impl Globals {
    /// Opens the store of images.
    fn store(&self) -> anyhow::Result<Store> {
        Store::open(self.root()?.join("images")).map_err(|error| unwritable(error.into()))
    }

    fn root(&self) -> anyhow::Result<PathBuf> {
        if let Some(root) = &self.root {
            return Ok(root.clone());
        }
        let is_root = rustix::process::geteuid().is_root();
        default_root(is_root, env::var_os("XDG_DATA_HOME"), env::var_os("HOME"))
            .context("no directory for images: set PODVISOR_ROOT or HOME, or give --root")
    }
}

/// Adds advice to an error if something below the root cannot be written.
fn unwritable(error: anyhow::Error) -> anyhow::Error {
    let is_refused = error.chain().any(|cause| {
        let kind = cause.downcast_ref().map(io::Error::kind);
        matches!(
            kind,
            Some(io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
        )
    });
    match is_refused {
        // The whole chain first: a context would be printed before it.
        true => anyhow::Error::msg(format!(
            "{}; choose a directory of your own by --root or PODVISOR_ROOT",
            message(&error)
        )),
        false => error,
    }
}

fn default_root(is_root: bool, data: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    if is_root {
        return Some(PathBuf::from("/var/lib/podvisor"));
    }
    // The XDG base directory specification requires ignoring relative directories.
    let absolute = |value: Option<OsString>| value.map(PathBuf::from).filter(|p| p.is_absolute());
    absolute(data)
        .or_else(|| absolute(home).map(|home| home.join(".local/share")))
        .map(|data| data.join("podvisor"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_command_is_described_as_it_is_listed() {
        let listed = Cli::command();
        let mut built = Cli::command();
        built.build();
        let about = |command: &clap::Command| command.get_about().map(ToString::to_string);
        for command in listed.get_subcommands() {
            let name = command.get_name();
            let built = built.find_subcommand(name).unwrap();
            assert_eq!(about(built), about(command), "{name}");
        }
        let run = built.find_subcommand("run").unwrap();
        assert!(
            run.get_arguments()
                .any(|argument| argument.get_id() == "network")
        );
    }

    fn run_args(arguments: &[&str]) -> Deferred<run::RunArgs> {
        let all = ["podvisor", "run"].iter().chain(arguments);
        match Cli::try_parse_from(all).unwrap().command {
            Command::Run(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn flags_after_the_image_are_the_programs() {
        let args = run_args(&["-i", "busybox", "ls", "-t", "--root", "/", "--", "-x"]);
        assert_eq!(args.image(), "busybox");
        assert_eq!(args.command(), ["ls", "-t", "--root", "/", "--", "-x"]);
        let args = run_args(&["busybox", "-c", "--help"]);
        assert_eq!(args.command(), ["-c", "--help"]);
    }

    #[test]
    fn the_host_name_has_a_short_flag_as_in_docker() {
        let args = run_args(&["-h", "web", "busybox"]);
        assert_eq!(args.image(), "busybox");
        for create in ["run", "pod create"] {
            let line = format!("podvisor {create} --help");
            let error = Cli::try_parse_from(line.split(' ')).unwrap_err();
            assert_eq!(
                error.kind(),
                clap::error::ErrorKind::DisplayHelp,
                "{create}"
            );
            let line = format!("podvisor {create} -h");
            let error = Cli::try_parse_from(line.split(' ')).unwrap_err();
            assert!(error.use_stderr(), "{create}");
        }
    }

    #[test]
    fn a_typo_in_a_flag_is_no_image() {
        for arguments in [
            ["podvisor", "run", "--memroy", "1G", "busybox"].as_slice(),
            &["podvisor", "run", "-x", "busybox"],
            &["podvisor", "run"],
        ] {
            assert!(Cli::try_parse_from(arguments).is_err(), "{arguments:?}");
        }
    }

    #[test]
    fn the_root_follows_the_user() {
        let dir = |s: &str| Some(OsString::from(s));
        let is = |root: Option<PathBuf>, path: &str| assert_eq!(root, Some(PathBuf::from(path)));
        is(
            default_root(true, dir("/d"), dir("/h")),
            "/var/lib/podvisor",
        );
        is(default_root(false, dir("/d"), dir("/h")), "/d/podvisor");
        is(
            default_root(false, dir("d"), dir("/h")),
            "/h/.local/share/podvisor",
        );
        is(
            default_root(false, None, dir("/h")),
            "/h/.local/share/podvisor",
        );
        assert_eq!(default_root(false, None, None), None);
    }

    #[test]
    fn a_daemon_logs_more_than_a_command_unless_it_is_told_how_much() {
        let level = |line: &str| level(&Cli::try_parse_from(line.split(' ')).unwrap());
        assert_eq!(level("podvisor serve"), LogLevel::Info);
        assert_eq!(level("podvisor serve --log-level warn"), LogLevel::Warn);
        assert_eq!(level("podvisor --log-level debug serve"), LogLevel::Debug);
        assert_eq!(level("podvisor version"), LogLevel::Warn);
        assert_eq!(level("podvisor version --log-level info"), LogLevel::Info);
        assert_eq!(level("podvisor sandbox 1 --log-level off"), LogLevel::Info);
    }

    #[test]
    fn the_command_is_found_behind_global_flags() {
        let gives = |line: &str| {
            let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            gives_exit_codes(&arguments)
        };
        for command in ["run", "exec", "debug", "attach"] {
            assert!(gives(&format!("podvisor {command} --bad")), "{command}");
        }
        assert!(gives("podvisor --root /r --log-level=debug run --bad"));
        assert!(!gives("podvisor pull run"));
        assert!(!gives("podvisor --root run pull"));
    }

    #[test]
    fn a_message_is_one_bounded_line_without_control_characters() {
        let inner = anyhow::anyhow!("evil \x1b[2J\nname {}", "x".repeat(5000));
        let text = message(&inner.context("cannot pull"));
        assert!(text.starts_with("cannot pull: evil  [2J name xxx"));
        assert_eq!(text.chars().count(), ERROR_MAX);
        assert!(!text.contains(char::is_control));
    }
}
