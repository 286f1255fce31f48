//! Medians, ratios, the table and the JSON.

use std::fmt;

use serde::Serialize;

use super::{Args, Run};
use crate::output::Criterion;

/// The names of what is compared.
pub(super) const LOADER: &str = "podvisor, by the loader";
pub(super) const KEPT: &str = "podvisor, kernel kept";
pub(super) const DIRECT: &str = "podvisor, kernel given";
pub(super) const CLONE: &str = "podvisor, clone";
pub(super) const QEMU: &str = "QEMU q35, kernel given";
/// With the parameters that podvisor adds to a kept kernel's.
pub(super) const QEMU_LIKEWISE: &str = "QEMU q35, kernel as kept";

/// Boots relative to QEMU's.
const BOOT_LIMIT: f64 = 0.5;
/// A clone relative to the boot of its origin.
const CLONE_LIMIT: f64 = 0.05;
/// What the loader adds, in millions of instructions.
const LOADER_LIMIT: f64 = 60.0;
/// Memory beyond the guest's, in MiB.
const MEMORY_LIMIT: f64 = 8.0;
/// A machine without work, relative to QEMU's.
const IDLE_LIMIT: f64 = 0.5;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    unit: &'static str,
    runs: usize,
    memory_mib: u64,
    ways: Vec<Way>,
    criteria: Vec<Criterion>,
}

/// Medians of one way to a system.
#[derive(Debug, Serialize)]
pub(super) struct Way {
    name: &'static str,
    total: f64,
    own: f64,
    vcpu: f64,
    ms: f64,
    /// Memory beyond the guest's.
    pss_mib: f64,
    /// CPU of a second without work.
    idle: f64,
}

impl Way {
    pub(super) fn new(name: &'static str, runs: &[Run]) -> Self {
        let median = |of: &dyn Fn(&Run) -> f64| {
            let mut values: Vec<f64> = runs.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            let middle = values.len().saturating_sub(1) / 2;
            values.get(middle).copied().unwrap_or(0.0)
        };
        let million = |value: u64| value as f64 / 1e6;
        Self {
            name,
            total: median(&|run| million(run.sample.own() + run.sample.vcpus())),
            own: median(&|run| million(run.sample.own())),
            vcpu: median(&|run| million(run.sample.vcpus())),
            ms: median(&|run| run.sample.to_init.as_secs_f64() * 1e3),
            pss_mib: median(&|run| run.sample.memory.pss as f64 / 1024.0),
            idle: median(&|run| run.idle / 1e6),
        }
    }
}

impl Report {
    pub(super) fn new(args: &Args, ways: Vec<Way>) -> Self {
        Self {
            unit: match args.icount {
                true => "M instructions",
                false => "ms of CPU",
            },
            runs: args.runs,
            memory_mib: args.memory,
            criteria: criteria(args.icount, &ways),
            ways,
        }
    }
}

fn criteria(is_counted: bool, ways: &[Way]) -> Vec<Criterion> {
    let named = |name: &str| ways.iter().find(|way| way.name == name);
    let mut criteria = Vec::new();
    let Some(boot) = named(LOADER) else {
        return criteria;
    };
    if is_counted {
        if let Some(clone) = named(CLONE) {
            let ratio = clone.total / boot.total;
            criteria.push(Criterion::at_most(
                "a clone over its boot",
                CLONE_LIMIT,
                ratio,
            ));
        }
        let kept = named(KEPT);
        if let Some(kept) = kept {
            criteria.push(Criterion::at_most(
                "what the loader adds, M instructions",
                LOADER_LIMIT,
                boot.total - kept.total,
            ));
        }
        if let Some(qemu) = named(QEMU) {
            let kept = kept.map_or(f64::NAN, |kept| kept.total);
            for (what, limit, ratio) in [
                (
                    "a boot of a kept kernel over QEMU's",
                    BOOT_LIMIT,
                    kept / qemu.total,
                ),
                (
                    "a boot by the loader over QEMU's",
                    BOOT_LIMIT,
                    boot.total / qemu.total,
                ),
                (
                    "a second without work over QEMU's",
                    IDLE_LIMIT,
                    boot.idle / qemu.idle,
                ),
            ] {
                criteria.push(Criterion::at_most(what, limit, ratio));
            }
            if let Some(likewise) = named(QEMU_LIKEWISE) {
                criteria.push(Criterion::at_most(
                    "a boot of a kept kernel over QEMU's with its parameters",
                    BOOT_LIMIT,
                    kept / likewise.total,
                ));
            }
        }
    }
    criteria.push(Criterion::at_most(
        "memory beyond the guest's, MiB",
        MEMORY_LIMIT,
        boot.pss_mib,
    ));
    criteria
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "A small Debian until its shell answers: {} MiB, 1 vCPU, {} runs; CPU in {}",
            self.memory_mib, self.runs, self.unit
        )?;
        writeln!(
            f,
            "{:26} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
            "", "total", "own", "vCPU", "ms", "PSS", "idle/s"
        )?;
        for way in &self.ways {
            writeln!(
                f,
                "{:26} {:8.1} {:8.1} {:8.1} {:8.1} {:8.1} {:8.2}",
                way.name, way.total, way.own, way.vcpu, way.ms, way.pss_mib, way.idle
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
    use super::*;

    fn way(name: &'static str, total: f64) -> Way {
        Way {
            name,
            total,
            own: 0.0,
            vcpu: total,
            ms: 0.0,
            pss_mib: 5.0,
            idle: total / 100.0,
        }
    }

    #[test]
    fn each_criterion_compares_with_the_boot_by_the_loader() {
        let ways = [
            way(LOADER, 300.0),
            way(KEPT, 200.0),
            way(DIRECT, 250.0),
            way(CLONE, 12.0),
            way(QEMU, 400.0),
            way(QEMU_LIKEWISE, 250.0),
        ];
        let criteria = super::criteria(true, &ways);
        let values: Vec<_> = criteria.iter().map(|one| (one.value, one.holds)).collect();
        assert_eq!(
            values,
            [
                (0.04, true),
                (100.0, false),
                (0.5, true),
                (0.75, false),
                (0.75, false),
                (0.8, false),
                (5.0, true)
            ]
        );
        // Time on an emulated host says nothing.
        assert_eq!(super::criteria(false, &ways).len(), 1);
        assert!(super::criteria(true, &[]).is_empty());
    }
}
