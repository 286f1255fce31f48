//! A running guest that moves from one process to another: how long it stands still, as it is seen
//! from outside, how long the migration takes, and how much is sent, by podvisor and by QEMU.
//!
//! `monitor` starts each monitor, twice: the source and the target. The guest's init
//! (`benches/guest/migrate.c`) writes to its memory at a set rate and puts the next byte of a
//! sequence on its serial console once per millisecond; [`console`] reads both consoles with the
//! time of each byte. [`control`] speaks with the monitors, [`load`] is what the guest does,
//! [`run`] moves it once, and [`report`] creates the table.

mod console;
mod control;
mod load;
mod report;
mod run;

use anyhow::{Result, ensure};

use crate::boot::{Stage, ahead_of_others};
use crate::monitor::{Device, MonitorArgs};
use crate::output;
use load::Load;
use report::Report;
use run::Costs;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    monitors: MonitorArgs,
    #[command(flatten)]
    load: Load,
}

pub(crate) fn command(args: &Args) -> Result<()> {
    let load = args.load;
    ensure!(
        (1..=load.fill).contains(&load.region),
        "--region {} is no part of --fill {}",
        load.region,
        load.fill
    );
    let stage = Stage::new()?;
    let device = Device {
        parameters: format!(
            "fill={} region={} pages={}",
            load.fill, load.region, load.pages
        ),
        podvisor: Vec::new(),
        backend: vec![
            "-object".to_owned(),
            "rng-random,id=random,filename=/dev/urandom".to_owned(),
        ],
        mmio: "virtio-rng-device,rng=random".to_owned(),
        pci: "virtio-rng-pci,rng=random,disable-legacy=on".to_owned(),
    };
    let subjects = args.monitors.subjects(&stage, &device)?;
    let _first = ahead_of_others();
    let costs: Vec<Vec<Costs>> = args
        .monitors
        .measure(&subjects, |subject| run::run(subject, load, stage.path()))?;
    let names = subjects.iter().map(|subject| subject.name);
    let report = Report::new(args.monitors.icount, load, names.zip(&costs));
    output::print(&report, args.monitors.json.as_deref())?;
    output::draw(&report.plot(), args.monitors.plot.as_deref())
}
