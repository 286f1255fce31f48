//! `podvisor sandbox`: the process of one sandbox. It is not for users: podvisor starts itself with
//! it.

use clap::Args;

use crate::sandbox;

#[derive(Debug, Args)]
pub(super) struct SandboxArgs {
    /// The sandbox's id, for whoever looks at the list of processes
    #[arg(value_name = "ID")]
    _id: String,
}

#[allow(unsafe_code)] // Files that this process inherited are closed.
pub(super) fn run(_: &SandboxArgs) -> anyhow::Result<u8> {
    // SAFETY: the main thread comes here before any other is started, and has opened nothing: it
    // has read its arguments, and logs to stderr.
    unsafe { sandbox::run_process()? };
    Ok(0)
}
