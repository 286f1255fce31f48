//! Medians, criteria, the table, the JSON and the plot.

use std::fmt;

use serde::Serialize;

use super::run::{Costs, Reads};
use crate::output::{self, Criterion};
use crate::plot::{Bar, Better, Panel, Plot};
use crate::spread::Spread;

/// MiB of each sequential read (`benches/guest/blk.c`).
const PIECE: f64 = 1.0;

/// Instructions, or CPU time, of a read over PCI relative to one over MMIO.
const PCI_CPU: f64 = 0.9;
/// Time of a read over MMIO relative to one of microvm's.
const MMIO_LATENCY: f64 = 0.4;
/// Time of a read over PCI relative to one over MMIO.
const PCI_LATENCY: f64 = 0.55;
/// IOPS with eight in flight relative to those with one.
const EIGHT: f64 = 2.5;
/// MiB/s of sequential reads relative to those of the faster QEMU.
const SEQUENTIAL: f64 = 1.0;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// The unit of CPU costs.
    unit: &'static str,
    runs: usize,
    rows: Vec<Row>,
    criteria: Vec<Criterion>,
}

/// One monitor on one transport.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    single: Single,
    eight: Eight,
    sequential: Sequential,
}

/// 4 KiB at random, one at a time. CPU costs are per read.
#[derive(Debug, Serialize)]
struct Single {
    total: Spread,
    own: Spread,
    vcpu: Spread,
    microseconds: Spread,
    iops: Spread,
}

/// 4 KiB at random, eight in flight.
#[derive(Debug, Serialize)]
struct Eight {
    iops: Spread,
}

/// 1 MiB in order, one at a time.
#[derive(Debug, Serialize)]
struct Sequential {
    mib_per_second: Spread,
}

/// A line of the table and a panel of the plot.
struct Measure {
    name: String,
    better: Better,
    of: fn(&Row) -> Spread,
}

impl Report {
    /// Reports podvisor over MMIO and over PCI, and QEMU's microvm and q35 if they were measured.
    pub(super) fn new<'a>(
        icount: bool,
        results: impl Iterator<Item = (&'static str, &'a Vec<Costs>)>,
    ) -> Self {
        let mut runs = 0;
        let rows: Vec<Row> = results
            .map(|(name, costs)| {
                runs = costs.len();
                Row::new(name, costs)
            })
            .collect();
        Self {
            unit: match icount {
                true => "thousands of instructions",
                false => "µs",
            },
            runs,
            criteria: criteria(&rows),
            rows,
        }
    }

    fn measures(&self) -> Vec<Measure> {
        use Better::{Less, More};
        let [single, eight] = ["4 KiB, one at a time", "4 KiB, eight in flight"];
        let measure = |name, better, of| Measure { name, better, of };
        vec![
            measure(format!("{single}: µs"), Less, |row| {
                row.single.microseconds
            }),
            measure(format!("{single}: IOPS"), More, |row| row.single.iops),
            measure(format!("{eight}: IOPS"), More, |row| row.eight.iops),
            measure("1 MiB, in order: MiB/s".to_owned(), More, |row| {
                row.sequential.mib_per_second
            }),
            measure(format!("{single}: CPU, total"), Less, |row| {
                row.single.total
            }),
            measure(format!("{single}: CPU, own"), Less, |row| row.single.own),
            measure(format!("{single}: CPU, vCPU"), Less, |row| row.single.vcpu),
        ]
    }

    pub(super) fn plot(&self) -> Plot {
        let panels = self.measures().into_iter().map(|measure| Panel {
            bars: self
                .rows
                .iter()
                .map(|row| Bar {
                    name: row.name,
                    spread: (measure.of)(row),
                })
                .collect(),
            title: measure.name,
            better: measure.better,
        });
        Plot {
            title: format!(
                "Reads of a disk, medians and ranges of {}; CPU in {}",
                output::runs(self.runs),
                self.unit
            ),
            columns: 2,
            panels: panels.collect(),
        }
    }
}

impl Row {
    fn new(name: &'static str, costs: &[Costs]) -> Self {
        let spread = |of: &dyn Fn(&Costs) -> f64| Spread::of(costs.iter().map(of));
        Self {
            name,
            single: Single {
                total: spread(&|costs| costs.single.cpu(|reads| reads.own + reads.vcpu)),
                own: spread(&|costs| costs.single.cpu(|reads| reads.own)),
                vcpu: spread(&|costs| costs.single.cpu(|reads| reads.vcpu)),
                microseconds: spread(&|costs| costs.single.latency.as_secs_f64() * 1e6),
                iops: spread(&|costs| costs.single.per_second()),
            },
            eight: Eight {
                iops: spread(&|costs| costs.eight.per_second()),
            },
            sequential: Sequential {
                mib_per_second: spread(&|costs| PIECE * costs.sequential.per_second()),
            },
        }
    }
}

impl Reads {
    fn per_second(&self) -> f64 {
        f64::from(self.count) / self.time.as_secs_f64()
    }

    /// Returns the CPU cost per read, in µs or thousands of instructions.
    fn cpu(&self, of: fn(&Self) -> u64) -> f64 {
        of(self) as f64 / f64::from(self.count) / 1e3
    }
}

fn criteria(rows: &[Row]) -> Vec<Criterion> {
    let [mmio, pci, others @ ..] = rows else {
        return Vec::new();
    };
    let latency = |row: &Row| row.single.microseconds.median;
    let gain = |row: &Row| row.eight.iops.median / row.single.iops.median;
    let speed = |row: &Row| row.sequential.mib_per_second.median;
    let mut criteria = vec![Criterion::at_most(
        "CPU of a read over PCI to one over MMIO",
        PCI_CPU,
        pci.single.total.median / mmio.single.total.median,
    )];
    if let [microvm, ..] = others {
        criteria.push(Criterion::at_most(
            "time of a read over MMIO to microvm's",
            MMIO_LATENCY,
            latency(mmio) / latency(microvm),
        ));
    }
    criteria.extend([
        Criterion::at_most(
            "time of a read over PCI to one over MMIO",
            PCI_LATENCY,
            latency(pci) / latency(mmio),
        ),
        Criterion::at_least(
            "IOPS of eight in flight over MMIO to those of one",
            EIGHT,
            gain(mmio),
        ),
        Criterion::at_least(
            "IOPS of eight in flight over PCI to those of one",
            EIGHT,
            gain(pci),
        ),
    ]);
    if !others.is_empty() {
        let fastest = others.iter().map(speed).fold(0.0, f64::max);
        criteria.extend([
            Criterion::at_least(
                "1 MiB in order over MMIO to the faster QEMU",
                SEQUENTIAL,
                speed(mmio) / fastest,
            ),
            Criterion::at_least(
                "1 MiB in order over PCI to the faster QEMU",
                SEQUENTIAL,
                speed(pci) / fastest,
            ),
        ]);
    }
    criteria
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "Reads around the guest's page cache: medians of {} (least–most); CPU in {}, per read",
            output::runs(self.runs),
            self.unit
        )?;
        output::table(f, &self.plot().panels)?;
        for criterion in &self.criteria {
            writeln!(f, "{criterion}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Creates reads that take `time` ns each.
    fn reads(count: u32, time: u64) -> Reads {
        Reads {
            count,
            time: Duration::from_nanos(time) * count,
            latency: Duration::from_nanos(time),
            own: u64::from(count) * time / 4,
            vcpu: u64::from(count) * time / 2,
        }
    }

    fn costs(single: u64, eight: u64, sequential: u64) -> Costs {
        Costs {
            single: reads(2000, single),
            eight: reads(2000, eight),
            sequential: reads(128, sequential),
        }
    }

    fn report(subjects: usize) -> Report {
        let results = [
            ("ours", vec![costs(40_000, 10_000, 1_000_000); 3]),
            ("ours too", vec![costs(20_000, 10_000, 2_000_000); 3]),
            ("theirs", vec![costs(80_000, 10_000, 4_000_000); 3]),
            (
                "others",
                vec![
                    costs(80_000, 1, 9_000_000),
                    costs(70_000, 1, 2_000_000),
                    costs(90_000, 1, 1_000_000),
                ],
            ),
        ];
        let results = results.iter().map(|(name, costs)| (*name, costs));
        Report::new(true, results.take(subjects))
    }

    #[test]
    fn figures_are_medians_of_runs_with_their_range() {
        let row = &report(4).rows[3];
        let Spread {
            median,
            least,
            most,
        } = row.single.microseconds;
        assert_eq!([least, median, most], [70.0, 80.0, 90.0]);
        assert_eq!(row.single.own.median, 20.0);
        assert_eq!(row.single.total.median, 60.0);
        assert_eq!(row.single.iops.median, 12_500.0);
        assert_eq!(row.sequential.mib_per_second.median, 500.0);
        let table = report(4).to_string();
        assert!(table.contains("80.0 (70.0–90.0)"), "{table}");
    }

    #[test]
    fn criteria_compare_medians_and_what_does_not_hold_is_said() {
        let criteria = report(4).criteria;
        let values: Vec<(f64, bool)> = criteria.iter().map(|c| (c.value, c.holds)).collect();
        let expected = [
            (0.5, true),
            (0.5, false),
            (0.5, true),
            (4.0, true),
            (2.0, false),
            (2.0, true),
            (1.0, true),
        ];
        assert_eq!(values, expected);
        assert!(report(4).to_string().contains("DOES NOT HOLD"));
    }

    #[test]
    fn without_qemu_podvisor_is_compared_with_itself() {
        let report = report(2);
        assert_eq!(report.criteria.len(), 4);
        assert_eq!(report.plot().panels[0].bars.len(), 2);
    }

    #[test]
    fn the_picture_has_a_panel_for_each_line_of_the_table() {
        let report = report(4);
        let plot = report.plot();
        assert_eq!(plot.panels.len(), report.measures().len());
        assert!(plot.panels.iter().all(|panel| panel.bars.len() == 4));
        assert!(plot.to_string().contains(">80.0 (70.0–90.0)</text>"));
    }
}
