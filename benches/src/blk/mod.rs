//! The cost of disk reads: 4 KiB at random, one at a time and eight in flight, and 1 MiB in order,
//! over MMIO and over PCI, by podvisor and by QEMU.
//!
//! `monitor` starts each monitor. The guest's init (`benches/guest/blk.c`)
//! reports when it starts and ends each of the three ways and how long that took; [`run`] reads
//! that, and samples the CPU time of the monitor's threads at the same lines. [`report`] creates
//! the table.

mod report;
mod run;

use anyhow::Result;

use crate::boot::{Stage, ahead_of_others};
use crate::monitor::{Device, MonitorArgs};
use crate::output;
use report::Report;
use run::Costs;

/// The size of the disk, which fits in the page cache.
const DISK: usize = 64 << 20;

pub(crate) fn command(args: &MonitorArgs) -> Result<()> {
    let stage = Stage::new()?;
    let disk = stage.path().join("disk");
    std::fs::write(&disk, vec![0x5a; DISK])?;
    let disk = disk.display().to_string();
    let device = Device {
        parameters: String::new(),
        podvisor: vec![disk.clone()],
        backend: vec![
            // The device's work is done by a thread other than the monitor's main thread.
            "-object".to_owned(),
            "iothread,id=io".to_owned(),
            "-drive".to_owned(),
            format!("id=disk,if=none,format=raw,read-only=on,cache=writeback,file={disk}"),
        ],
        mmio: "virtio-blk-device,drive=disk,iothread=io".to_owned(),
        pci: "virtio-blk-pci,drive=disk,disable-legacy=on,iothread=io".to_owned(),
    };
    let subjects = args.subjects(&stage, &device)?;
    let _first = ahead_of_others();
    let costs: Vec<Vec<Costs>> =
        args.measure(&subjects, |subject| run::run(subject, stage.path()))?;
    let names = subjects.iter().map(|subject| subject.name);
    let report = Report::new(args.icount, names.zip(&costs));
    output::print(&report, args.json.as_deref())?;
    output::draw(&report.plot(), args.plot.as_deref())
}
