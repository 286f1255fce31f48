//! Medians, the criterion, the table, the JSON and the plot.

use std::fmt;

use serde::Serialize;

use super::load::Load;
use super::run::Costs;
use crate::output::{self, Criterion};
use crate::plot::{Bar, Better, Panel, Plot};
use crate::spread::Spread;

/// Downtime relative to that of the QEMU whose guest stands still for less.
const DOWNTIME: f64 = 0.5;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// The unit of CPU costs.
    unit: &'static str,
    runs: usize,
    load: Load,
    rows: Vec<Row>,
    ratios: Vec<Ratio>,
    criteria: Vec<Criterion>,
}

/// One monitor on one transport.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    /// Pages per second that the guest writes before it is sent.
    pages: Spread,
    downtime_ms: Spread,
    /// The longest time between two steps of the guest at its source.
    longest_ms: Spread,
    /// By the source's own clock.
    told_ms: Spread,
    total_ms: Spread,
    sent_mib: Spread,
    cpu: Spread,
}

/// Medians of podvisor relative to those of QEMU on the same transport.
#[derive(Debug, Serialize)]
struct Ratio {
    podvisor: &'static str,
    qemu: &'static str,
    downtime: f64,
    total: f64,
    sent: f64,
    cpu: f64,
}

/// A column of the table, and a panel of the plot.
struct Measure {
    name: String,
    of: fn(&Row) -> Spread,
}

impl Report {
    pub(super) fn new<'a>(
        icount: bool,
        load: Load,
        results: impl Iterator<Item = (&'static str, &'a Vec<Costs>)>,
    ) -> Self {
        let mut runs = 0;
        let rows: Vec<Row> = results
            .map(|(name, costs)| {
                runs = costs.len();
                Row::new(name, load, costs)
            })
            .collect();
        let (mut ratios, mut criteria) = (Vec::new(), Vec::new());
        if let [mmio, pci, microvm, q35] = rows.as_slice() {
            ratios.extend([Ratio::of(mmio, microvm), Ratio::of(pci, q35)]);
            let least = microvm.downtime_ms.median.min(q35.downtime_ms.median);
            for (what, row) in [
                ("downtime over MMIO to the shorter one of QEMU", mmio),
                ("downtime over PCI to the shorter one of QEMU", pci),
            ] {
                let value = row.downtime_ms.median / least;
                criteria.push(Criterion::at_most(what, DOWNTIME, value));
            }
        }
        Self {
            unit: match icount {
                true => "M instructions",
                false => "ms",
            },
            runs,
            load,
            rows,
            ratios,
            criteria,
        }
    }

    fn measures(&self) -> [Measure; 7] {
        let measure = |name: &str, of| Measure {
            name: name.to_owned(),
            of,
        };
        [
            measure("pages written per second before", |row| row.pages),
            measure("downtime, ms", |row| row.downtime_ms),
            measure("longest step while it is sent, ms", |row| row.longest_ms),
            measure("downtime as the source has it, ms", |row| row.told_ms),
            measure("total, ms", |row| row.total_ms),
            measure("sent, MiB", |row| row.sent_mib),
            Measure {
                name: format!("CPU of both sides, {}", self.unit),
                of: |row| row.cpu,
            },
        ]
    }

    pub(super) fn plot(&self) -> Plot {
        let panel = |measure: Measure| Panel {
            title: measure.name,
            better: Better::Less,
            bars: self
                .rows
                .iter()
                .map(|row| Bar {
                    name: row.name,
                    spread: (measure.of)(row),
                })
                .collect(),
        };
        Plot {
            title: format!(
                "A guest that moves, medians and ranges of {}",
                output::runs(self.runs)
            ),
            columns: 3,
            panels: self.measures().into_iter().map(panel).collect(),
        }
    }
}

impl Row {
    fn new(name: &'static str, load: Load, costs: &[Costs]) -> Self {
        let spread = |of: fn(&Costs) -> f64| Spread::of(costs.iter().map(of));
        let pages = |costs: &Costs| costs.rate * f64::from(load.pages);
        Self {
            name,
            pages: Spread::of(costs.iter().map(pages)),
            downtime_ms: spread(|costs| output::ms(costs.downtime)),
            longest_ms: spread(|costs| output::ms(costs.longest)),
            told_ms: spread(|costs| costs.sent.downtime_ms),
            total_ms: spread(|costs| output::ms(costs.total)),
            sent_mib: spread(|costs| costs.sent.bytes as f64 / f64::from(1 << 20)),
            // An instruction takes a nanosecond where they are counted.
            cpu: spread(|costs| costs.cpu as f64 / 1e6),
        }
    }
}

impl Ratio {
    fn of(podvisor: &Row, qemu: &Row) -> Self {
        let ratio = |of: fn(&Row) -> Spread| of(podvisor).median / of(qemu).median;
        Self {
            podvisor: podvisor.name,
            qemu: qemu.name,
            downtime: ratio(|row| row.downtime_ms),
            total: ratio(|row| row.total_ms),
            sent: ratio(|row| row.sent_mib),
            cpu: ratio(|row| row.cpu),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Load {
            fill,
            region,
            pages,
            downtime,
        } = self.load;
        writeln!(
            f,
            "A guest with {fill} MiB of data that writes to {pages} pages of {region} MiB per step \
             of a millisecond, and may stand still for {downtime} ms: medians of {} (least–most)",
            output::runs(self.runs),
        )?;
        output::table(f, &self.plot().panels)?;
        for ratio in &self.ratios {
            writeln!(
                f,
                "{} to {}: downtime {:.2}, total {:.2}, sent {:.2}, CPU {:.2}",
                ratio.podvisor, ratio.qemu, ratio.downtime, ratio.total, ratio.sent, ratio.cpu
            )?;
        }
        for criterion in &self.criteria {
            writeln!(f, "{criterion}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::control::Sent;
    use super::*;

    fn costs(millis: u64) -> Costs {
        Costs {
            rate: 900.0,
            longest: Duration::from_millis(2),
            downtime: Duration::from_millis(millis),
            total: Duration::from_millis(millis * 10),
            sent: Sent {
                bytes: millis << 20,
                downtime_ms: 1.0,
            },
            cpu: millis * 1_000_000,
        }
    }

    #[test]
    fn downtimes_are_medians_and_compared_with_the_shorter_one_of_qemu() {
        let results = [
            ("ours", vec![costs(9), costs(10), costs(500)]),
            ("ours too", vec![costs(12); 3]),
            ("theirs", vec![costs(40); 3]),
            ("others", vec![costs(20); 3]),
        ];
        let load = Load {
            fill: 64,
            region: 16,
            pages: 2,
            downtime: 300,
        };
        let results = results.iter().map(|(name, costs)| (*name, costs));
        let report = Report::new(true, load, results);
        let held: Vec<_> = report.criteria.iter().map(|c| (c.value, c.holds)).collect();
        assert_eq!(held, [(0.5, true), (0.6, false)]);
        assert!((report.ratios[0].downtime - 0.25).abs() < 0.01);
        assert!((report.ratios[1].cpu - 0.6).abs() < 0.01);
        let text = report.to_string();
        assert!(text.contains("10.0 (9.0–500.0)"), "{text}");
        assert!(text.contains("1800"), "{text}");
        assert_eq!(report.plot().panels.len(), 7);
    }
}
