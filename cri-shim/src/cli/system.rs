//! `podvisor system df`: shows podvisor's disk usage.

use clap::{Args, Subcommand};
use serde::Serialize;

use super::table::Table;
use super::{FormatArgs, Globals, size};

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
    #[command(flatten)]
    shown: FormatArgs,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct UsageView {
    images: KindUsage,
    disks: KindUsage,
    /// Total bytes on the host's disk.
    size: u64,
    /// Total number of files and directories.
    inodes: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct KindUsage {
    total: usize,
    /// Bytes on the host's disk, for images with their layers.
    size: u64,
}

pub(super) fn run(globals: &Globals, args: &SystemArgs) -> anyhow::Result<u8> {
    let SystemCommand::Df(args) = &args.command;
    let store = globals.store()?;
    let usage = store.usage()?;
    let disks = store.disks()?;
    let disks = KindUsage {
        total: disks.len(),
        size: disks.iter().map(podvisor_images::Disk::size).sum(),
    };
    let images = KindUsage {
        total: store.list()?.len(),
        // Disks may have been added or removed since the usage was counted.
        size: usage.bytes.saturating_sub(disks.size),
    };
    let view = UsageView {
        images,
        disks,
        size: usage.bytes,
        inodes: usage.inodes,
    };
    if args.shown.is_json() {
        super::print_json(&view)?;
    } else {
        super::print(&view.to_text())?;
    }
    Ok(0)
}

impl UsageView {
    fn to_text(&self) -> String {
        let mut table = Table::new(["TYPE", "TOTAL", "SIZE"]);
        for (name, kind) in [("Images", &self.images), ("Disk images", &self.disks)] {
            let (total, size) = (kind.total.to_string(), size::human(kind.size));
            table.row([name.to_owned(), total, size]);
        }
        let all = size::human(self.size);
        format!("{}\n{all} in all, {} inodes\n", table.render(), self.inodes)
    }
}
