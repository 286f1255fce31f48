//! `podvisor manual`: writes the manual pages for a package.

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;

#[derive(Debug, Args)]
pub(super) struct ManualArgs {
    /// Directory for the pages, one for each command
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

pub(super) fn run(args: &ManualArgs, whole: clap::Command) -> anyhow::Result<u8> {
    let dir = &args.dir;
    let what = || format!("cannot write manual pages to {}", dir.display());
    fs::create_dir_all(dir).with_context(what)?;
    let command = whole.disable_help_subcommand(true);
    clap_mangen::generate_to(command, dir).with_context(what)?;
    Ok(0)
}
