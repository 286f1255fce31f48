//! `cargo xtask host`: runs a command where KVM is sound.
//!
//! That is this machine if `podvisor check --host` says so, and otherwise an emulated test host:
//! QEMU emulating an AMD CPU with SVM, Debian's kernel, and this machine's own `/` read-only below
//! a tmpfs ([`build`] builds it, [`run`] runs it). A command is passed its arguments, environment
//! and stdin; stdout, stderr and the exit status are returned separately. docs/testing.md has the
//! user's view.

mod build;
mod disk;
mod qemu;
mod run;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::{paths, process, report, setup};
pub(crate) use build::distribution_kernel;
pub(crate) use run::quote;
use run::{HostExit, Job};

/// Selects the host if set: `native` or `emulated`. Within a host, it names the current one.
const ENVIRONMENT: &str = "PODVISOR_TEST_HOST";

/// The status of a command that exceeded the time limit, as `timeout` reports it.
pub(crate) const TIMED_OUT: u8 = 124;

/// The status if the host hung, not the command.
pub(crate) const HUNG: u8 = 123;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Give the command this terminal; without a command, an interactive shell
    #[arg(long)]
    shell: bool,
    /// Use the emulated test host, even where this machine's KVM is sound
    #[arg(long, conflicts_with = "native")]
    emulated: bool,
    /// Run right here, whatever this machine's KVM is like
    #[arg(long)]
    native: bool,
    /// Share a directory read-write; everything else the command writes is gone afterwards
    #[arg(long, value_name = "DIR")]
    rw: Vec<PathBuf>,
    /// Copy a file to memory before the command runs, at the same path
    #[arg(long, value_name = "FILE")]
    copy: Vec<PathBuf>,
    /// Make time deterministic: one instruction is one nanosecond
    #[arg(long)]
    icount: bool,
    /// Give the host a network card with the outside behind it
    #[arg(long)]
    net: bool,
    /// Set a variable for the command (PATH, TERM, PODVISOR_… and RUST_… are passed anyhow)
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// End the host after this many seconds, with status 124
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// The host's CPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    smp: u32,
    /// The host's memory, as QEMU reads it
    #[arg(long, short, value_name = "SIZE", default_value = "6G")]
    memory: String,
    /// Keep the host's kernel messages in this file
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// The command and its arguments
    #[arg(last = true, value_name = "CMD")]
    command: Vec<String>,
}

/// Returns whether a command without an explicit choice runs in an emulated host.
pub(crate) fn is_emulated() -> bool {
    !native(false)
}

/// A command of xtask for a host.
#[derive(Clone, Debug, Default)]
pub(crate) struct Request {
    pub(crate) command: Vec<String>,
    pub(crate) shares: Vec<PathBuf>,
    pub(crate) copies: Vec<PathBuf>,
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) icount: bool,
    pub(crate) limit: Option<Duration>,
    /// The host's CPUs; one without.
    pub(crate) cpus: Option<u32>,
}

/// Runs `request` in a host and returns the command's status.
pub(crate) fn run_request(request: Request) -> Result<u8> {
    let args = Args {
        shell: false,
        emulated: false,
        native: false,
        rw: request.shares,
        copy: request.copies,
        icount: request.icount,
        net: false,
        env: request
            .environment
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect(),
        timeout: request.limit.map_or(600, |limit| limit.as_secs()),
        smp: request.cpus.unwrap_or(1),
        memory: "6G".to_owned(),
        log: None,
        command: request.command,
    };
    execute(&args, false)
}

pub(crate) fn command(args: &Args) -> Result<ExitCode> {
    let stdin = !std::io::stdin().is_terminal();
    execute(args, stdin).map(ExitCode::from)
}

fn execute(args: &Args, stdin: bool) -> Result<u8> {
    let mut command = args.command.clone();
    if command.is_empty() {
        if !args.shell {
            bail!("no command given; `cargo xtask host -- CMD…`, or `--shell` for a shell");
        }
        command = vec!["bash".to_owned(), "-i".to_owned()];
    }
    let mut environment = environment();
    for setting in &args.env {
        let (name, value) = setting
            .split_once('=')
            .with_context(|| format!("`--env {setting}` is not NAME=VALUE"))?;
        check_variable(name)?;
        environment.push((name.to_owned(), value.to_owned()));
    }
    let native = args.native || !args.emulated && native(args.icount);
    environment.push((
        ENVIRONMENT.to_owned(),
        if native { "native" } else { "emulated" }.to_owned(),
    ));
    if native {
        return run_here(&command, &environment, stdin || args.shell, args.timeout);
    }

    setup::ensure(&[setup::HOST])?;
    let image = build::ensure()?;
    let job = Job {
        command,
        environment,
        directory: std::env::current_dir().context("the current directory cannot be found")?,
        shares: canonical(&args.rw)?,
        copies: canonical(&args.copy)?,
        terminal: args.shell,
        stdin,
        network: args.net,
        icount: args.icount,
        cpus: args.smp,
        memory: args.memory.clone(),
        limit: Duration::from_secs(args.timeout),
        log: Some(args.log.clone().unwrap_or_else(run::console_log)),
    };
    if job.terminal && stdin {
        bail!("--shell needs a terminal on stdin");
    }
    let mut ended = run::run(&image, &job)?;
    if let HostExit::BootHang = ended {
        report::note("the test host hung while it booted; trying once more");
        ended = run::run(&image, &job)?;
    }
    match ended {
        HostExit::Status(status) => Ok(status),
        HostExit::TimeLimit => {
            report::error(&anyhow::anyhow!(
                "the command was still running after {} s and was ended with its host (--timeout sets the limit)",
                args.timeout
            ));
            Ok(TIMED_OUT)
        }
        HostExit::Hang => {
            report::error(&anyhow::anyhow!(
                "the test host stood still and was ended; its last messages and its CPUs' state are in {}",
                job.log.as_deref().map(paths::display).unwrap_or_default()
            ));
            Ok(HUNG)
        }
        HostExit::BootHang => bail!(
            "the test host hung twice while it booted; its kernel's messages are in {}",
            job.log.as_deref().map(paths::display).unwrap_or_default()
        ),
    }
}

/// Returns the environment of a command in a host.
fn environment() -> Vec<(String, String)> {
    let passed = |name: &str| {
        ["PATH", "HOME", "TERM", "LANG", "USER", "CARGO_TARGET_DIR"].contains(&name)
            || name.starts_with("PODVISOR_")
            || name.starts_with("RUST_")
    };
    std::env::vars()
        .filter(|(name, _)| passed(name) && name != ENVIRONMENT && check_variable(name).is_ok())
        .collect()
}

fn check_variable(name: &str) -> Result<()> {
    let valid = !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if !valid {
        bail!("`{name}` is no name of an environment variable");
    }
    Ok(())
}

fn canonical(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    paths
        .iter()
        .map(|path| {
            path.canonicalize()
                .with_context(|| format!("{} cannot be given to the host", path.display()))
        })
        .collect()
}

/// Returns whether this machine is the host. `podvisor check --host` decides; if it has not
/// been built, or does not answer within its time limit, the answer is no. Deterministic time
/// exists only in the emulated host.
fn native(icount: bool) -> bool {
    if icount {
        return false;
    }
    match std::env::var(ENVIRONMENT).as_deref() {
        Ok("native") => return true,
        Ok("emulated") => return is_emulated_host(),
        _ => {}
    }
    if !Path::new("/dev/kvm").exists() {
        return false;
    }
    let directory = paths::cargo_target();
    let program = ["release", "debug"]
        .iter()
        .map(|profile| directory.join(profile).join("podvisor"))
        .find(|path| path.is_file());
    program.is_some_and(|program| {
        Command::new("timeout")
            .args(["-k", "5", "30"])
            .arg(program)
            // The guest's files may not be built yet.
            .args(["check", "--host"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    })
}

/// Returns whether this program itself runs in the emulated host.
fn is_emulated_host() -> bool {
    Path::new("/run/podvisor-host/stage2").exists()
}

fn run_here(
    command: &[String],
    environment: &[(String, String)],
    stdin: bool,
    limit: u64,
) -> Result<u8> {
    use std::os::unix::process::ExitStatusExt;

    let (program, arguments) = command.split_first().context("no command given")?;
    let status = process::Group::spawn(
        process::tied("timeout")
            .args(["--foreground", "-k", "5", &limit.to_string(), program])
            .args(arguments)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(if stdin {
                Stdio::inherit()
            } else {
                Stdio::null()
            }),
    )?
    .wait()?;
    Ok(match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, Some(signal)) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
        (None, None) => u8::MAX,
    })
}
