//! The cost of a guest's network: TCP in both directions, and a byte there and back, over MMIO and
//! over PCI, by podvisor and by QEMU.
//!
//! `monitor` starts each monitor, [`tap`] creates the tap that all of them use, one after the
//! other, and [`run`] talks to a guest (`benches/guest/net.c`) and samples the CPU time of the
//! monitor's threads before and after.

mod report;
mod run;
mod tap;

use anyhow::Result;

use crate::boot::Stage;
use crate::monitor::{Device, MonitorArgs};
use crate::output;
use report::Report;
use run::Costs;
use tap::Tap;

/// The same for all, so that the host's neighbour entry stays valid.
const MAC: &str = "02:00:00:00:00:09";

/// The size of the measurement.
const SIZE: Size = Size {
    bytes: 64 << 20,
    round_trips: 2000,
};

/// The amount of work with a guest's network.
#[derive(Clone, Copy, Debug)]
struct Size {
    /// The number of bytes in each direction.
    bytes: usize,
    round_trips: u32,
}

pub(crate) fn command(args: &MonitorArgs) -> Result<()> {
    let tap = Tap::new()?;
    let stage = Stage::new()?;
    let number = tap.number();
    let on_bus = |device: &str| format!("{device},netdev=net,mac={MAC}");
    let device = Device {
        parameters: String::new(),
        podvisor: vec![MAC.to_owned(), number.to_string()],
        backend: vec![
            // In its own process, as podvisor's device is.
            "-netdev".to_owned(),
            format!("tap,id=net,fd={number},vhost=off"),
        ],
        mmio: on_bus("virtio-net-device"),
        pci: on_bus("virtio-net-pci,disable-legacy=on,romfile="),
    };
    let subjects = args.subjects(&stage, &device)?;
    let costs: Vec<Vec<Costs>> =
        args.measure(&subjects, |subject| run::run(subject, SIZE, stage.path()))?;
    let names = subjects.iter().map(|subject| subject.name);
    let report = Report::new(args.icount, names.zip(&costs));
    output::print(&report, args.json.as_deref())?;
    output::draw(&report.plot(), args.plot.as_deref())
}
