//! Disk images on the command line: the output of `podvisor pull https://…` and `podvisor images
//! --disks`.

use std::time::SystemTime;

use podvisor_images::Disk;
use serde::Serialize;

use super::format::{NONE, SHORT_ID, ago};
use super::size;
use super::table::Table;

/// The JSON representation of a disk image.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DiskView {
    id: String,
    urls: Vec<String>,
    /// Format of the file that was fetched; the store's are all raw.
    source_format: Option<String>,
    /// Size of the disk in bytes.
    virtual_size: u64,
    /// Bytes used on the host's disk.
    size: u64,
    /// RFC 3339.
    fetched: String,
    pinned: bool,
    path: String,
}

impl From<&Disk> for DiskView {
    fn from(disk: &Disk) -> Self {
        Self {
            id: disk.id().to_string(),
            urls: disk.urls().to_vec(),
            source_format: disk.source_format().map(|format| format.to_string()),
            virtual_size: disk.virtual_size(),
            size: disk.size(),
            fetched: humantime::format_rfc3339_seconds(disk.fetched()).to_string(),
            pinned: disk.pinned(),
            path: disk.path().display().to_string(),
        }
    }
}

/// Prints the id of a disk image that was pulled.
pub(super) fn print_pulled(disk: &Disk, json: bool) -> anyhow::Result<()> {
    if json {
        super::print_json(&DiskView::from(disk))
    } else {
        super::print(&format!("{}\n", disk.id()))
    }
}

/// Lists disk images.
pub(super) fn list(disks: &[Disk], quiet: bool, no_trunc: bool, json: bool) -> anyhow::Result<u8> {
    if json {
        let views: Vec<DiskView> = disks.iter().map(DiskView::from).collect();
        super::print_json(&views)?;
    } else if quiet {
        let line = |disk: &Disk| format!("{}\n", shown_id(disk, no_trunc));
        super::print(&disks.iter().map(line).collect::<String>())?;
    } else {
        super::print(&table(disks, no_trunc, SystemTime::now()))?;
    }
    Ok(0)
}

fn table(disks: &[Disk], no_trunc: bool, now: SystemTime) -> String {
    let mut table = Table::new(["URL", "DISK ID", "FORMAT", "FETCHED", "DISK SIZE", "SIZE"]);
    for disk in disks {
        let none = [NONE.to_owned()];
        let urls = match disk.urls() {
            [] => &none,
            urls => urls,
        };
        for url in urls {
            let format = disk.source_format().map(|format| format.to_string());
            table.row([
                url.clone(),
                shown_id(disk, no_trunc),
                format.unwrap_or_else(|| NONE.to_owned()),
                ago(Some(disk.fetched()), now),
                size::human(disk.virtual_size()),
                size::human(disk.size()),
            ]);
        }
    }
    table.render()
}

fn shown_id(disk: &Disk, in_full: bool) -> String {
    if in_full {
        disk.id().to_string()
    } else {
        disk.id().hex().chars().take(SHORT_ID).collect()
    }
}
