//! Medians, the table and the JSON.

use std::fmt;

use serde::Serialize;

use super::run::{Cost, Costs};
use super::{SIZE, Size};

#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Of CPU.
    unit: &'static str,
    runs: usize,
    rows: Vec<Row>,
    ratios: Vec<Ratio>,
}

/// Medians of one monitor on one transport.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    to_guest: Flow,
    from_guest: Flow,
    round_trip: RoundTrip,
}

/// A direction. CPU is per MiB.
#[derive(Debug, Serialize)]
struct Flow {
    mb_per_second: f64,
    own: f64,
    vcpu: f64,
}

/// A byte there and back. CPU is for one.
#[derive(Debug, Serialize)]
struct RoundTrip {
    microseconds: f64,
    own: f64,
    vcpu: f64,
}

/// podvisor to QEMU on the same transport. Of throughputs the larger one is better, of the others
/// the smaller one.
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
}

impl Row {
    fn new(name: &'static str, costs: &[Costs], size: Size) -> Self {
        let mib = size.bytes as f64 / f64::from(1 << 20);
        let flow = |of: fn(&Costs) -> Cost| Flow {
            mb_per_second: median(costs, |costs| {
                size.bytes as f64 / 1e6 / of(costs).time.as_secs_f64()
            }),
            own: median(costs, |costs| of(costs).own as f64 / 1e3 / mib),
            vcpu: median(costs, |costs| of(costs).vcpu as f64 / 1e3 / mib),
        };
        let trips = f64::from(size.round_trips);
        let of = |costs: &Costs| costs.round_trips;
        Self {
            name,
            to_guest: flow(|costs| costs.to_guest),
            from_guest: flow(|costs| costs.from_guest),
            round_trip: RoundTrip {
                microseconds: median(costs, |costs| of(costs).time.as_secs_f64() * 1e6 / trips),
                own: median(costs, |costs| of(costs).own as f64 / 1e3 / trips),
                vcpu: median(costs, |costs| of(costs).vcpu as f64 / 1e3 / trips),
            },
        }
    }
}

impl Flow {
    fn cpu(&self) -> f64 {
        self.own + self.vcpu
    }
}

impl RoundTrip {
    fn cpu(&self) -> f64 {
        self.own + self.vcpu
    }
}

impl Ratio {
    fn of(podvisor: &Row, qemu: &Row) -> Self {
        let flow = |of: fn(&Row) -> &Flow| {
            let [ours, theirs] = [of(podvisor), of(qemu)];
            (
                ours.mb_per_second / theirs.mb_per_second,
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
            round_trip: ours.microseconds / theirs.microseconds,
            round_trip_cpu: ours.cpu() / theirs.cpu(),
        }
    }
}

fn median(costs: &[Costs], of: impl Fn(&Costs) -> f64) -> f64 {
    let mut values: Vec<f64> = costs.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len().saturating_sub(1) / 2;
    values.get(middle).copied().unwrap_or(0.0)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { unit, runs, .. } = self;
        writeln!(
            f,
            "TCP over a tap, medians of {runs} runs; CPU in {unit}, per MiB and per round trip"
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
                let Flow {
                    mb_per_second,
                    own,
                    vcpu,
                } = flow;
                write!(f, " {mb_per_second:7.1} {own:7.0} {vcpu:7.0}")?;
            }
            let RoundTrip {
                microseconds,
                own,
                vcpu,
            } = &row.round_trip;
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
        assert!((row.to_guest.own - 2000.0).abs() < 0.1);
        assert!((row.to_guest.mb_per_second - 67.1).abs() < 0.1);
        assert!((row.round_trip.microseconds - 500.0).abs() < 0.1);
        assert!((report.ratios[0].from_guest - 4.0).abs() < 0.01);
        assert!((report.ratios[0].round_trip_cpu - 0.5).abs() < 0.01);
        assert!((report.ratios[1].to_guest - 1.0).abs() < 0.01);
        assert!(report.to_string().contains("ours to theirs"));
    }
}
