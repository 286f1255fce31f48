//! Medians, the table, the JSON and the plot.

use std::fmt;

use serde::Serialize;

use super::run::{Cost, Costs};
use super::{SIZE, Size};
use crate::output;
use crate::plot::{Bar, Better, Panel, Plot};
use crate::spread::Spread;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// The unit of CPU costs.
    unit: &'static str,
    runs: usize,
    rows: Vec<Row>,
    ratios: Vec<Ratio>,
}

/// One monitor on one transport.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    to_guest: Flow,
    from_guest: Flow,
    round_trip: RoundTrip,
}

/// A direction. CPU costs are per MiB.
#[derive(Debug, Serialize)]
struct Flow {
    mb_per_second: Spread,
    own: Spread,
    vcpu: Spread,
}

/// A byte there and back. CPU costs are per round trip.
#[derive(Debug, Serialize)]
struct RoundTrip {
    microseconds: Spread,
    own: Spread,
    vcpu: Spread,
}

/// Medians of podvisor relative to those of QEMU on the same transport. For throughputs larger is
/// better, for the others smaller.
#[derive(Debug, Serialize)]
struct Ratio {
    podvisor: &'static str,
    qemu: &'static str,
    to_guest: f64,
    to_guest_cpu: f64,
    from_guest: f64,
    from_guest_cpu: f64,
    round_trip: f64,
    round_trip_cpu: f64,
}

impl Report {
    pub(super) fn new<'a>(
        icount: bool,
        results: impl Iterator<Item = (&'static str, &'a Vec<Costs>)>,
    ) -> Self {
        let mut runs = 0;
        let rows: Vec<Row> = results
            .map(|(name, costs)| {
                runs = costs.len();
                Row::new(name, costs, SIZE)
            })
            .collect();
        let ratios = match rows.as_slice() {
            [mmio, pci, microvm, q35] => vec![Ratio::of(mmio, microvm), Ratio::of(pci, q35)],
            _ => Vec::new(),
        };
        Self {
            unit: match icount {
                true => "thousands of instructions",
                false => "µs",
            },
            runs,
            rows,
            ratios,
        }
    }

    pub(super) fn plot(&self) -> Plot {
        use Better::{Less, More};
        let unit = self.unit;
        let [to, from, trip] = ["to the guest", "from the guest", "round trip"];
        let panel = |title: String, better, of: fn(&Row) -> Spread| Panel {
            title,
            better,
            bars: self
                .rows
                .iter()
                .map(|row| Bar {
                    name: row.name,
                    spread: of(row),
                })
                .collect(),
        };
        Plot {
            title: format!(
                "TCP over a tap, medians and ranges of {}; CPU in {unit}, per MiB and per round \
                 trip",
                output::runs(self.runs)
            ),
            columns: 3,
            panels: vec![
                panel(format!("{to}: MB/s"), More, |row| {
                    row.to_guest.mb_per_second
                }),
                panel(format!("{from}: MB/s"), More, |row| {
                    row.from_guest.mb_per_second
                }),
                panel(format!("{trip}: µs"), Less, |row| {
                    row.round_trip.microseconds
                }),
                panel(format!("{to}: CPU, own"), Less, |row| row.to_guest.own),
                panel(format!("{from}: CPU, own"), Less, |row| row.from_guest.own),
                panel(format!("{trip}: CPU, own"), Less, |row| row.round_trip.own),
                panel(format!("{to}: CPU, vCPU"), Less, |row| row.to_guest.vcpu),
                panel(format!("{from}: CPU, vCPU"), Less, |row| {
                    row.from_guest.vcpu
                }),
                panel(format!("{trip}: CPU, vCPU"), Less, |row| {
                    row.round_trip.vcpu
                }),
            ],
        }
    }
}

impl Row {
    fn new(name: &'static str, costs: &[Costs], size: Size) -> Self {
        let mib = size.bytes as f64 / f64::from(1 << 20);
        let flow = |of: fn(&Costs) -> Cost| Flow {
            mb_per_second: spread(costs, |costs| {
                size.bytes as f64 / 1e6 / of(costs).time.as_secs_f64()
            }),
            own: spread(costs, |costs| of(costs).own as f64 / 1e3 / mib),
            vcpu: spread(costs, |costs| of(costs).vcpu as f64 / 1e3 / mib),
        };
        let trips = f64::from(size.round_trips);
        let of = |costs: &Costs| costs.round_trips;
        Self {
            name,
            to_guest: flow(|costs| costs.to_guest),
            from_guest: flow(|costs| costs.from_guest),
            round_trip: RoundTrip {
                microseconds: spread(costs, |costs| of(costs).time.as_secs_f64() * 1e6 / trips),
                own: spread(costs, |costs| of(costs).own as f64 / 1e3 / trips),
                vcpu: spread(costs, |costs| of(costs).vcpu as f64 / 1e3 / trips),
            },
        }
    }
}

impl Flow {
    fn cpu(&self) -> f64 {
        self.own.median + self.vcpu.median
    }
}

impl RoundTrip {
    fn cpu(&self) -> f64 {
        self.own.median + self.vcpu.median
    }
}

impl Ratio {
    fn of(podvisor: &Row, qemu: &Row) -> Self {
        let flow = |of: fn(&Row) -> &Flow| {
            let [ours, theirs] = [of(podvisor), of(qemu)];
            (
                ours.mb_per_second.median / theirs.mb_per_second.median,
                ours.cpu() / theirs.cpu(),
            )
        };
        let (to_guest, to_guest_cpu) = flow(|row| &row.to_guest);
        let (from_guest, from_guest_cpu) = flow(|row| &row.from_guest);
        let [ours, theirs] = [&podvisor.round_trip, &qemu.round_trip];
        Self {
            podvisor: podvisor.name,
            qemu: qemu.name,
            to_guest,
            to_guest_cpu,
            from_guest,
            from_guest_cpu,
            round_trip: ours.microseconds.median / theirs.microseconds.median,
            round_trip_cpu: ours.cpu() / theirs.cpu(),
        }
    }
}

fn spread(costs: &[Costs], of: impl Fn(&Costs) -> f64) -> Spread {
    Spread::of(costs.iter().map(of))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = self.unit;
        let runs = output::runs(self.runs);
        writeln!(
            f,
            "TCP over a tap, medians of {runs}; CPU in {unit}, per MiB and per round trip"
        )?;
        writeln!(
            f,
            "{:20} {:>23} {:>23} {:>23}",
            "", "to the guest", "from the guest", "a byte there and back"
        )?;
        writeln!(
            f,
            "{:20} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7}",
            "", "MB/s", "own", "vCPU", "MB/s", "own", "vCPU", "µs", "own", "vCPU"
        )?;
        for row in &self.rows {
            write!(f, "{:20}", row.name)?;
            for flow in [&row.to_guest, &row.from_guest] {
                let [mb_per_second, own, vcpu] =
                    [flow.mb_per_second, flow.own, flow.vcpu].map(|spread| spread.median);
                write!(f, " {mb_per_second:7.1} {own:7.0} {vcpu:7.0}")?;
            }
            let trip = &row.round_trip;
            let [microseconds, own, vcpu] =
                [trip.microseconds, trip.own, trip.vcpu].map(|spread| spread.median);
            writeln!(f, " {microseconds:7.1} {own:7.1} {vcpu:7.1}")?;
        }
        for ratio in &self.ratios {
            writeln!(
                f,
                "{} to {}: to the guest {:.2} of the throughput and {:.2} of the CPU, \
                 from it {:.2} and {:.2}, a round trip {:.2} of the time and {:.2} of the CPU",
                ratio.podvisor,
                ratio.qemu,
                ratio.to_guest,
                ratio.to_guest_cpu,
                ratio.from_guest,
                ratio.from_guest_cpu,
                ratio.round_trip,
                ratio.round_trip_cpu,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn costs(own: u64, millis: u64) -> Costs {
        let cost = Cost {
            own,
            vcpu: own,
            time: Duration::from_millis(millis),
        };
        Costs {
            to_guest: cost,
            from_guest: cost,
            round_trips: cost,
        }
    }

    #[test]
    fn medians_are_per_mib_and_per_round_trip_and_ratios_are_of_one_transport() {
        let ours = vec![
            costs(128_000_000, 1000),
            costs(1, 1),
            costs(u64::MAX / 4, 9000),
        ];
        let theirs = vec![costs(256_000_000, 4000); 3];
        let results = [
            ("ours", &ours),
            ("other", &theirs),
            ("theirs", &theirs),
            ("another", &theirs),
        ];
        let report = Report::new(true, results.into_iter());
        let row = &report.rows[0];
        assert!((row.to_guest.own.median - 2000.0).abs() < 0.1);
        assert!((row.to_guest.mb_per_second.median - 67.1).abs() < 0.1);
        assert!((row.round_trip.microseconds.median - 500.0).abs() < 0.1);
        assert!((report.ratios[0].from_guest - 4.0).abs() < 0.01);
        assert!((report.ratios[0].round_trip_cpu - 0.5).abs() < 0.01);
        assert!((report.ratios[1].to_guest - 1.0).abs() < 0.01);
        assert!(report.to_string().contains("ours to theirs"));
    }

    #[test]
    fn the_picture_has_a_panel_for_each_column_with_the_range_of_its_figures() {
        let one = vec![costs(64_000_000, 1000), costs(128_000_000, 2000)];
        let report = Report::new(false, [("one", &one)].into_iter());
        let plot = report.plot();
        assert_eq!(plot.panels.len(), 9);
        assert!(plot.to_string().contains(">500.0 (500.0–1000)</text>"));
    }
}
