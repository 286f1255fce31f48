//! `podvisor system df`: what podvisor takes of its disk.

use clap::{Args, Subcommand};
use serde::Serialize;

use super::table::Table;
use super::{Globals, size};

#[derive(Debug, Args)]
pub(super) struct SystemArgs {
    #[command(subcommand)]
    command: SystemCommand,
}

#[derive(Debug, Subcommand)]
enum SystemCommand {
    /// Show the disk space that images take
    Df(DfArgs),
}

#[derive(Debug, Args)]
struct DfArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct UsageView {
    images: ImagesUsage,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ImagesUsage {
    total: usize,
    /// Bytes on the disk, layers included.
    size: u64,
    /// Files and folders.
    inodes: u64,
}

pub(super) fn run(globals: &Globals, args: &SystemArgs) -> anyhow::Result<u8> {
    let SystemCommand::Df(args) = &args.command;
    let store = globals.store()?;
    let usage = store.usage()?;
    let images = ImagesUsage {
        total: store.list()?.len(),
        size: usage.bytes,
        inodes: usage.inodes,
    };
    if args.json {
        super::print_json(&UsageView { images })?;
    } else {
        let mut table = Table::new(["TYPE", "TOTAL", "SIZE", "INODES"]);
        table.row([
            "Images".to_owned(),
            images.total.to_string(),
            size::human(images.size),
            images.inodes.to_string(),
        ]);
        super::print(&table.render())?;
    }
    Ok(0)
}
