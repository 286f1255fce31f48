//! The command line. A command's output goes to stdout, everything else (progress, logs, errors) to
//! stderr, and the exit code reports the result.
//!
//! `command` lists all commands. Those for containers are in `container`, the other ones have one
//! file each, with their flags and output; `globals`, `output`, `table`, `format`, `progress`,
//! `interrupt` and `terminal` are shared. The commands' work is done elsewhere: images by
//! `podvisor-images`, virtual machines by `sandbox`.

mod advice;
mod booleans;
mod check;
mod command;
mod completions;
mod config;
mod container;
mod deferred;
mod destination;
mod disks;
mod env_file;
mod format;
mod globals;
mod guest;
mod image;
mod images;
mod import;
mod input;
mod inspect;
mod interrupt;
mod io_limits;
mod kept;
mod keys;
mod load;
mod log;
mod manual;
mod message;
mod notify;
mod output;
mod pod;
mod progress;
mod prune;
mod pull;
mod registries;
mod replacements;
mod rmi;
mod run;
mod sandbox;
mod save;
mod serve;
mod settings;
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
mod vm;
mod whole_file;

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory as _, FromArgMatches as _, Parser};
use command::Command;
use globals::{FAILURE, Globals, RUN_FAILURE, USAGE, runtime};
use log::{LogFormat, LogLevel};
use message::message;
use output::{
    FormatArgs, JsonArgs, notice, notice_kernel_log, print, print_json, print_on, report, to_json,
};

/// Programs from OCI images, each in a virtual machine of its own, and virtual machines
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

/// Parses this process's arguments, runs the command, and returns the exit code.
#[must_use]
pub fn main() -> ExitCode {
    terminal::restore_on_panic();
    let arguments: Vec<OsString> = env::args_os().collect();
    if sandbox::is_plain(&arguments) {
        log::to_stderr(LogLevel::Info, LogFormat::Text);
        return exit_code(sandbox::run(), FAILURE);
    }
    let cli = match parse(&arguments) {
        Ok(cli) => cli,
        Err(error) => return usage(&error, &arguments),
    };
    log::to_stderr(cli.command.log_level(&cli.globals), cli.globals.log_format);
    let failure = match gives_exit_codes(&arguments) {
        true => RUN_FAILURE,
        false => FAILURE,
    };
    let done = cli.command.run(&cli.globals, Cli::command);
    exit_code(done, failure)
}

fn parse(arguments: &[OsString]) -> Result<Cli, clap::Error> {
    match Cli::try_parse_from(arguments) {
        Err(_) if booleans::are_among(arguments) => {
            let command = booleans::accepted(Cli::command());
            Cli::from_arg_matches_mut(&mut command.try_get_matches_from(arguments)?)
        }
        parsed => parsed,
    }
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

/// Prints help and version to stdout, errors to stderr with clap's suggestion.
fn usage(error: &clap::Error, arguments: &[OsString]) -> ExitCode {
    if error.kind() == ErrorKind::InvalidSubcommand
        && let Some(name) = subcommand(arguments).and_then(OsStr::to_str)
        && let Some(instead) = replacements::instead_of(name)
    {
        notice(&format!("there is no command `{name}`: {instead}"));
        return ExitCode::from(USAGE);
    }
    if let Some((flag, instead)) = refused_flag(error, arguments) {
        notice(&format!("there is no flag `{flag}`: {instead}"));
        return ExitCode::from(match gives_exit_codes(arguments) {
            true => RUN_FAILURE,
            false => USAGE,
        });
    }
    if !error.use_stderr() {
        return match error.print() {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                report(&anyhow::Error::from(error).context("cannot write to stdout"));
                ExitCode::from(FAILURE)
            }
            _ => ExitCode::SUCCESS,
        };
    }
    let text = error.render().to_string();
    match text.strip_prefix("error: ") {
        // Like all other errors.
        Some(what) => notice(what.trim_end()),
        // The help, of a command without what it needs. There is nowhere left to report that it
        // cannot be written.
        None => drop(error.print()),
    }
    ExitCode::from(match gives_exit_codes(arguments) {
        true => RUN_FAILURE,
        false => USAGE,
    })
}

/// Returns a flag that other engines have, and what to use instead of it.
fn refused_flag(error: &clap::Error, arguments: &[OsString]) -> Option<(String, &'static str)> {
    let command = subcommand(arguments).and_then(OsStr::to_str)?;
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let flag = flag.split(['=', ' ']).next().unwrap_or(flag);
    Some((
        flag.to_owned(),
        replacements::instead_of_flag(command, flag)?,
    ))
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

#[cfg(test)]
mod tests {
    use super::deferred::Deferred;
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
    fn a_daemon_logs_more_than_a_command_unless_it_is_told_how_much() {
        let level = |line: &str| {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            cli.command.log_level(&cli.globals)
        };
        assert_eq!(level("podvisor serve"), LogLevel::Info);
        assert_eq!(level("podvisor serve --log-level warn"), LogLevel::Warn);
        assert_eq!(level("podvisor --log-level debug serve"), LogLevel::Debug);
        assert_eq!(level("podvisor version"), LogLevel::Warn);
        assert_eq!(level("podvisor version --log-level info"), LogLevel::Info);
        assert_eq!(level("podvisor sandbox 1 --log-level off"), LogLevel::Info);
    }

    #[test]
    fn only_the_command_line_that_podvisor_makes_for_a_sandbox_needs_no_parser() {
        let is_plain = |line: &str| {
            let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            sandbox::is_plain(&arguments)
        };
        assert!(is_plain("podvisor sandbox 1f"));
        for line in [
            "podvisor sandbox",
            "podvisor sandbox --help",
            "podvisor run 1f",
            "podvisor sandbox 1f x",
        ] {
            assert!(!is_plain(line), "{line}");
        }
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
}
