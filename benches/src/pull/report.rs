//! Medians, ratios and criteria of pulls, as a table and as JSON.

use std::fmt;

use anyhow::{Context, Result};
use serde::Serialize;

use super::measure::Sample;
use super::peers::Peer;
use crate::output::Criterion;

/// podvisor's wall time relative to containerd's.
const RATIO_LIMIT: f64 = 1.0;

/// The result of a measurement: one table per image.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    runs: usize,
    images: Vec<Pulled>,
}

#[derive(Debug, Serialize)]
struct Pulled {
    image: String,
    programs: Vec<Program>,
    criteria: Vec<Criterion>,
}

/// One program: medians over its pulls.
#[derive(Debug, Serialize)]
struct Program {
    name: &'static str,
    wall_seconds: f64,
    /// The shortest and the longest.
    wall_spread: [f64; 2],
    synced_seconds: f64,
    cpu_seconds: f64,
    written_bytes: f64,
    disk_bytes: f64,
    inodes: f64,
    second_bytes: f64,
    second_inodes: f64,
    /// podvisor's figure relative to this program's.
    ratios: Option<Ratios>,
}

#[derive(Debug, Serialize)]
struct Ratios {
    wall: f64,
    synced: f64,
    cpu: f64,
    written: f64,
    disk: f64,
    inodes: f64,
}

impl Report {
    pub(super) fn new(runs: usize) -> Self {
        Self {
            runs,
            images: Vec::new(),
        }
    }

    /// Adds an image; podvisor comes first in `results`.
    pub(super) fn add(&mut self, image: &str, results: &[(Peer, Vec<Sample>)]) -> Result<()> {
        let mut programs: Vec<Program> = results
            .iter()
            .map(|(peer, samples)| Program::new(peer.name(), samples))
            .collect::<Result<_>>()?;
        let (podvisor, others) = programs.split_first_mut().context("nothing was measured")?;
        let mut criteria = Vec::new();
        for other in others {
            let ratios = Ratios {
                wall: podvisor.wall_seconds / other.wall_seconds,
                synced: podvisor.synced_seconds / other.synced_seconds,
                cpu: podvisor.cpu_seconds / other.cpu_seconds,
                written: podvisor.written_bytes / other.written_bytes,
                disk: podvisor.disk_bytes / other.disk_bytes,
                inodes: podvisor.inodes / other.inodes,
            };
            if other.name.starts_with("containerd") {
                criteria.push(Criterion::at_most(
                    "podvisor's wall time over containerd's",
                    RATIO_LIMIT,
                    ratios.wall,
                ));
            }
            other.ratios = Some(ratios);
        }
        criteria.push(Criterion::at_most(
            "bytes of disk for podvisor's second VM of the image",
            0.0,
            podvisor.second_bytes,
        ));
        self.images.push(Pulled {
            image: image.to_owned(),
            programs,
            criteria,
        });
        Ok(())
    }
}

impl Program {
    fn new(name: &'static str, samples: &[Sample]) -> Result<Self> {
        let of = |value: fn(&Sample) -> f64| {
            let mut values: Vec<f64> = samples.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let median = |value: fn(&Sample) -> f64| {
            let values = of(value);
            let at = values.len().saturating_sub(1) / 2;
            values.get(at).copied().context("nothing was measured")
        };
        let walls = of(|sample| sample.wall.as_secs_f64());
        let spread = walls.first().zip(walls.last());
        let (shortest, longest) = spread.context("nothing was measured")?;
        Ok(Self {
            name,
            wall_seconds: median(|sample| sample.wall.as_secs_f64())?,
            wall_spread: [*shortest, *longest],
            synced_seconds: median(|sample| sample.synced.as_secs_f64())?,
            cpu_seconds: median(|sample| sample.cost.cpu_seconds)?,
            written_bytes: median(|sample| sample.cost.written as f64)?,
            disk_bytes: median(|sample| sample.disk.bytes as f64)?,
            inodes: median(|sample| sample.disk.inodes as f64)?,
            second_bytes: median(|sample| sample.second.bytes as f64)?,
            second_inodes: median(|sample| sample.second.inodes as f64)?,
            ratios: None,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for pulled in &self.images {
            writeln!(
                f,
                "Pull and prepare {}: medians of {} pulls; sizes in MB (10⁶ bytes)",
                pulled.image, self.runs
            )?;
            writeln!(
                f,
                "{:<22} {:>7} {:>15} {:>8} {:>7} {:>8} {:>8} {:>7} {:>8}",
                "", "wall s", "spread", "synced s", "CPU s", "written", "disk", "inodes", "2nd VM"
            )?;
            for p in &pulled.programs {
                let [shortest, longest] = p.wall_spread;
                let spread = format!("{shortest:.2} to {longest:.2}");
                writeln!(
                    f,
                    "{:<22} {:>7.2} {spread:>15} {:>8.2} {:>7.2} {:>8.1} {:>8.1} {:>7} {:>8.3}",
                    p.name,
                    p.wall_seconds,
                    p.synced_seconds,
                    p.cpu_seconds,
                    p.written_bytes / 1e6,
                    p.disk_bytes / 1e6,
                    p.inodes,
                    p.second_bytes / 1e6,
                )?;
            }
            for p in &pulled.programs {
                if let Some(ratios) = &p.ratios {
                    writeln!(
                        f,
                        "podvisor / {}: wall {:.3}, synced {:.3}, CPU {:.3}, written {:.3}, disk {:.3}, inodes {:.4}",
                        p.name,
                        ratios.wall,
                        ratios.synced,
                        ratios.cpu,
                        ratios.written,
                        ratios.disk,
                        ratios.inodes
                    )?;
                }
            }
            for c in &pulled.criteria {
                let verdict = if c.holds { "holds" } else { "DOES NOT HOLD" };
                writeln!(
                    f,
                    "{}: {:.3}, at most {}: {verdict}",
                    c.what, c.value, c.limit
                )?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
