//! Flags of `run` and `exec` with an explicit boolean: `--rm=true`, `-t=false`.
//!
//! Help and completions show them without a value, so the parser is told of values only for a
//! command line that has them.

use std::ffi::OsString;

use clap::{Arg, ArgAction, Command};

use super::container::exec::ExecArgs;
use super::deferred::Deferred;
use super::run::RunArgs;

/// Returns whether an argument may be a flag with a boolean.
pub(super) fn are_among(arguments: &[OsString]) -> bool {
    arguments.iter().any(|argument| {
        let argument = argument.as_encoded_bytes();
        let value = argument.iter().position(|byte| *byte == b'=');
        let value = value.and_then(|equals| argument.get(equals..));
        argument.starts_with(b"-") && matches!(value, Some(b"=true" | b"=false"))
    })
}

/// Lets the flags of `run` and `exec` have booleans.
pub(super) fn accepted(command: Command) -> Command {
    command
        .mut_subcommand("run", |run| {
            run.defer(|run| with_values(Deferred::<RunArgs>::describe(run)))
        })
        .mut_subcommand("exec", |exec| {
            exec.defer(|exec| with_values(Deferred::<ExecArgs>::describe(exec)))
        })
}

fn with_values(command: Command) -> Command {
    command.mut_args(|flag: Arg| match flag.get_action() {
        ArgAction::SetTrue => flag.num_args(0..=1).require_equals(true).value_name("BOOL"),
        _ => flag,
    })
}
