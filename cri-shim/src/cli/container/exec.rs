//! `podvisor exec`: starts another process in a running container. `podvisor top` runs `ps` in the
//! same way.

use clap::Args;
use oci_spec::runtime::Process;

use super::events::{self, event};
use super::foreground::{Abandoned, ForwardedStreams, Program, exit_code};
use super::record::Record;
use super::state::running;
use super::{Containers, sweep};
use crate::cli::env_file::{EnvFile, from_here, read_env};
use crate::cli::keys::{DetachArgs, DetachKeys};
use crate::cli::signals::{Signals, exit_code_of};
use crate::cli::{Globals, terminal};
use crate::sandbox::{
    ContainerOptions, EventAction, Exec, RefusalKind, SandboxError, StdioFds, SupplementalGroups,
    further_process, random_id, set_variable,
};

#[derive(Debug, Args)]
#[command(override_usage = "podvisor exec [OPTIONS] CONTAINER CMD...")]
pub(in crate::cli) struct ExecArgs {
    /// Let the program read podvisor's stdin
    #[arg(short, long)]
    interactive: bool,

    /// Give the program a terminal
    #[arg(short, long)]
    tty: bool,

    /// Run in the background
    #[arg(short, long, conflicts_with_all = ["interactive", "tty"])]
    detach: bool,

    /// Set an environment variable; NAME alone takes the value from here
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    env: Vec<String>,

    /// Set the variables of a file, a line each; --env overrides them
    #[arg(long, value_name = "FILE", value_parser = read_env)]
    env_file: Vec<EnvFile>,

    /// Start in this directory of the container
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,

    /// Run as this user of the image, or number
    #[arg(short, long, value_name = "USER[:GROUP]")]
    user: Option<String>,

    #[command(flatten)]
    leave: DetachArgs,

    /// The container, and the command with its arguments
    #[arg(value_names = ["CONTAINER", "CMD"], required = true, num_args = 2.., trailing_var_arg = true)]
    container_and_command: Vec<String>,
}

#[derive(Debug, Args)]
pub(in crate::cli) struct TopArgs {
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    container: String,

    /// Options of the container's `ps`
    #[arg(
        value_name = "OPTIONS",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    options: Vec<String>,
}

pub(in crate::cli) fn run(globals: &Globals, args: &ExecArgs) -> anyhow::Result<u8> {
    if args.tty && args.interactive && !terminal::is_terminal(std::io::stdin()) {
        anyhow::bail!(
            "the input device is not a terminal; leave out -t to read from a file or a pipe"
        );
    }
    let (container, command) = match args.container_and_command.split_first() {
        Some((container, command)) => (container, command.to_vec()),
        None => anyhow::bail!("name a container and a command"),
    };
    let asked = ContainerOptions {
        env: args.env.clone(),
        workdir: args.workdir.clone(),
        ..ContainerOptions::default()
    };
    asked.check()?;
    in_container(globals, container, |record| {
        let mut process = further_process(&record.process, command, args.tty);
        let mut env = process.env().clone().unwrap_or_default();
        for entry in args.env_file.iter().flat_map(|file| &file.0) {
            set_variable(&mut env, entry);
        }
        for entry in &args.env {
            set_variable(&mut env, &from_here(entry));
        }
        process.set_env(Some(env));
        if let Some(workdir) = &args.workdir {
            process.set_cwd(workdir.into());
        }
        ExecRequest {
            process,
            user: args.user.clone().unwrap_or_else(|| record.user.clone()),
            has_terminal: args.tty,
            has_input: args.interactive,
            is_detached: args.detach,
            is_noted: true,
            detach_keys: args.leave.detach_keys.clone(),
        }
    })
}

pub(in crate::cli) fn top(globals: &Globals, args: &TopArgs) -> anyhow::Result<u8> {
    in_container(globals, &args.container, |record| {
        let options = match args.options.is_empty() {
            // Options that busybox and procps have in common.
            true => vec!["-o".to_owned(), "user,pid,ppid,args".to_owned()],
            false => args.options.clone(),
        };
        let command = std::iter::once("ps".to_owned()).chain(options);
        ExecRequest {
            process: further_process(&record.process, command.collect(), false),
            user: "0".to_owned(),
            has_terminal: false,
            has_input: false,
            is_detached: false,
            is_noted: false,
            detach_keys: DetachKeys::default(),
        }
    })
}

/// A requested process.
pub(super) struct ExecRequest {
    pub(super) process: Process,
    pub(super) user: String,
    pub(super) has_terminal: bool,
    pub(super) has_input: bool,
    pub(super) is_detached: bool,
    /// Whether it is recorded as an event: not if podvisor itself starts it.
    pub(super) is_noted: bool,
    /// Keys that detach from it on a terminal.
    pub(super) detach_keys: DetachKeys,
}

fn in_container(
    globals: &Globals,
    name: &str,
    wanted: impl FnOnce(&Record) -> ExecRequest,
) -> anyhow::Result<u8> {
    let containers = globals.containers()?;
    let runtime = crate::cli::runtime()?;
    let code = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let begun = begin(&containers, name, wanted);
        let begun = tokio::select! {
            begun = begun => begun?,
            // No signal can be forwarded to a program that may not run yet.
            signal = signals.ending() => return Ok(exit_code_of(signal)),
        };
        let Some((program, served)) = begun else {
            return Ok(0);
        };
        let outcome = program.wait(served, &mut signals).await?;
        Ok(exit_code(&outcome))
    });
    // A thread may be blocked in a read of stdin forever.
    runtime.shutdown_background();
    code.or_else(not_started)
}

/// Starts a process in a container, and serves its streams unless it is detached.
async fn begin(
    containers: &Containers,
    name: &str,
    wanted: impl FnOnce(&Record) -> ExecRequest,
) -> anyhow::Result<Option<(Program, ForwardedStreams)>> {
    sweep(containers).await?;
    let entry = containers.find(name)?;
    let (client, _, is_paused) = running(&entry).await?;
    anyhow::ensure!(
        !is_paused,
        "{} {} is paused; `podvisor {}unpause` it first",
        entry.record.what(),
        entry.record.name,
        entry.record.command_prefix()
    );
    let wanted = wanted(&entry.record);
    let exec_id: String = random_id()?.chars().take(16).collect();
    if wanted.is_noted {
        let command = wanted
            .process
            .args()
            .as_deref()
            .unwrap_or_default()
            .join(" ");
        let event = event(&entry.record, EventAction::Exec).with("execID", &exec_id);
        events::note(&entry.dir, &event.with("execCommand", command));
    }
    let program = Program {
        client,
        id: entry.record.id.clone(),
        exec_id: Some(exec_id.clone()),
        has_terminal: wanted.has_terminal,
        has_input: wanted.has_input,
        // Nothing could attach to it again.
        abandoned: Abandoned::Ends,
    };
    let exec = |stdio: StdioFds| Exec {
        exec_id,
        process: wanted.process,
        user: wanted.user,
        supplemental_groups: SupplementalGroups::Default,
        tty: wanted.has_terminal.then(terminal::size_or_usual),
        stdio,
    };
    if wanted.is_detached {
        program
            .client
            .exec(&program.id, exec(StdioFds::default()))
            .await?;
        return Ok(None);
    }
    let (streams, theirs) = program.streams()?;
    program.client.exec(&program.id, exec(theirs)).await?;
    let served = program.serve(streams, &wanted.detach_keys)?;
    Ok(Some((program, served)))
}

/// Maps errors to the shell's exit codes for a command that is missing or not executable.
pub(in crate::cli) fn not_started(error: anyhow::Error) -> anyhow::Result<u8> {
    let code = match error.downcast_ref().and_then(SandboxError::kind) {
        Some(RefusalKind::CommandNotFound) => 127,
        Some(RefusalKind::CommandNotExecutable) => 126,
        _ => return Err(error),
    };
    crate::cli::report(&error);
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_executed_has_the_shells_codes() {
        let error = |kind| {
            let message = "x".to_owned();
            anyhow::Error::from(SandboxError::Refused { kind, message })
        };
        assert_eq!(
            not_started(error(RefusalKind::CommandNotFound)).unwrap(),
            127
        );
        let code = not_started(error(RefusalKind::CommandNotExecutable)).unwrap();
        assert_eq!(code, 126);
        assert!(not_started(error(RefusalKind::Internal)).is_err());
    }
}
