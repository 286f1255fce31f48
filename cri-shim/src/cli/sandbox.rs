//! `podvisor sandbox`: the process of one sandbox. Nobody types this: podvisor starts itself so.

use clap::Args;

use crate::sandbox;

#[derive(Debug, Args)]
pub(super) struct SandboxArgs {
    /// The sandbox's id, for whoever looks at the list of processes
    #[arg(value_name = "ID")]
    _id: String,
}

pub(super) fn run(_: &SandboxArgs) -> anyhow::Result<u8> {
    sandbox::run_process()?;
    Ok(0)
}
