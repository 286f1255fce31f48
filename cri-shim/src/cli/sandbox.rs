//! `podvisor sandbox`: the process of one sandbox. It is not for users: podvisor starts itself with
//! it.

use std::ffi::OsString;

use clap::Args;

use crate::sandbox;

#[derive(Debug, Args)]
pub(super) struct SandboxArgs {
    /// The sandbox's id, for whoever looks at the list of processes
    #[arg(value_name = "ID")]
    _id: String,
}

/// Whether these arguments are those that podvisor starts a sandbox's process with. They do not
/// need a parser, which takes longer than the rest of the command line.
pub(super) fn is_plain(arguments: &[OsString]) -> bool {
    matches!(arguments, [_, command, id]
        if command == "sandbox" && !id.as_encoded_bytes().starts_with(b"-"))
}

#[allow(unsafe_code)] // Files that this process inherited are closed.
pub(super) fn run() -> anyhow::Result<u8> {
    // SAFETY: the main thread comes here before any other is started, and has opened nothing: it
    // has read its arguments, and logs to stderr.
    unsafe { sandbox::run_process()? };
    Ok(0)
}
