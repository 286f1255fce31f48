//! The cost of a container from the command to its program's end: `podvisor run` of `true`, by
//! booting and as a clone, compared with `runc run` of the same program; several in parallel; and
//! the memory of idle ones.
//!
//! [`podvisor`] and [`runc`] define how each is asked for a container.

mod podvisor;
mod runc;

use std::fmt;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, bail};
use serde::Serialize;

use crate::boot::Stage;
use crate::output::{self, Criterion, ms};
use crate::spread::percentile;
pub(crate) use podvisor::wait_for_templates;
use podvisor::{Boot, Idle, Podvisor};
use runc::Runc;

/// Time relative to runc's: a container whose machine boots, and one whose machine is a clone.
const COLD_LIMIT: f64 = 0.7;
const WARM_LIMIT: f64 = 0.35;
/// From the command to its end, including the machine's boot, in virtual ms.
const COLD_MS_LIMIT: f64 = 80.0;
/// Memory of an idle machine, including the guest's, in MiB.
const COLD_MEMORY_LIMIT: f64 = 24.0;
const WARM_MEMORY_LIMIT: f64 = 6.0;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The program `podvisor`
    #[arg(long, value_name = "FILE")]
    podvisor: PathBuf,
    /// The directory of the guest's kernel and initramfs
    #[arg(long, value_name = "DIR")]
    guest: PathBuf,
    /// An archive with the image busybox
    #[arg(long, value_name = "FILE")]
    image: PathBuf,
    /// The busybox that is in it
    #[arg(long, value_name = "FILE", default_value = "/bin/busybox")]
    busybox: PathBuf,
    /// A runc to compare with
    #[arg(long, value_name = "FILE")]
    runc: Option<PathBuf>,
    /// Runs of each, after one that warms the caches
    #[arg(long, value_name = "N", default_value_t = 20)]
    runs: usize,
    /// Containers that are started at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    at_once: usize,
    /// Idle containers whose memory is looked at
    #[arg(long, value_name = "N", default_value_t = 8)]
    idle: usize,
    /// Time is counted in instructions here: one nanosecond each
    #[arg(long)]
    icount: bool,
    /// Write the results as JSON to this file, or to stdout (`-`)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report {
    unit: &'static str,
    runs: usize,
    at_once: usize,
    ways: Vec<Way>,
    criteria: Vec<Criterion>,
}

/// One way to a container. Times in ms, from starting the command.
#[derive(Debug, Serialize)]
struct Way {
    name: &'static str,
    /// Times of one at a time.
    p50: f64,
    p90: f64,
    /// The time until the last of those that were started in parallel has ended.
    all_at_once: f64,
    /// When each phase was reached, in the last run.
    phases: Vec<(&'static str, f64)>,
    idle: Option<Idle>,
}

pub(crate) fn command(args: &Args) -> Result<()> {
    if args.runs == 0 || args.at_once == 0 || args.idle == 0 {
        bail!("--runs 0, --at-once 0 and --idle 0 measure nothing: give 1 or more");
    }
    let stage = Stage::new()?;
    let podvisor = Podvisor::stage(args, &stage)?;
    let mut ways = Vec::new();
    for boot in [Boot::Cold, Boot::Warm] {
        podvisor.prepare(boot)?;
        let mut way = Way::measure(boot.name(), args, || podvisor.start(boot))?;
        way.phases = podvisor.phases(boot)?;
        way.idle = Some(podvisor.idle(boot, args.idle)?);
        ways.push(way);
    }
    if let Some(program) = &args.runc {
        let runc = Runc::stage(program, &args.busybox, &stage)?;
        ways.push(Way::measure("runc", args, || runc.start())?);
    }
    let criteria = criteria(args, &ways);
    let report = Report {
        unit: match args.icount {
            true => "virtual ms",
            false => "ms",
        },
        runs: args.runs,
        at_once: args.at_once,
        ways,
        criteria,
    };
    output::print(&report, args.json.as_deref())
}

fn criteria(args: &Args, ways: &[Way]) -> Vec<Criterion> {
    let mut criteria = Vec::new();
    // Without it the host emulates a guest's code twice, which is not the VM's fault.
    if args.icount
        && let [cold, warm, rest @ ..] = ways
    {
        criteria.push(Criterion::at_most(
            "by booting, virtual ms",
            COLD_MS_LIMIT,
            cold.p50,
        ));
        if let [runc] = rest {
            for (what, limit, way) in [
                ("by booting over runc", COLD_LIMIT, cold),
                ("as a clone over runc", WARM_LIMIT, warm),
            ] {
                criteria.push(Criterion::at_most(what, limit, way.p50 / runc.p50));
            }
        }
    }
    let memory = |way: Option<&Way>, of: fn(&Idle) -> f64| way?.idle.as_ref().map(of);
    if let Some(mib) = memory(ways.first(), |idle| idle.pss_mib) {
        criteria.push(Criterion::at_most(
            "memory of an idle one that booted, guest included, MiB",
            COLD_MEMORY_LIMIT,
            mib,
        ));
    }
    if let Some(mib) = memory(ways.get(1), |idle| idle.private_mib) {
        criteria.push(Criterion::at_most(
            "memory private to an idle clone, guest included, MiB",
            WARM_MEMORY_LIMIT,
            mib,
        ));
    }
    criteria
}

/// A command that was started.
trait Ends {
    /// Waits for its end, and fails if it did not succeed.
    fn end(self) -> Result<()>;
}

impl Way {
    fn measure<S: Ends>(
        name: &'static str,
        args: &Args,
        start: impl Fn() -> Result<S>,
    ) -> Result<Self> {
        start()?.end()?;
        let mut times = Vec::new();
        for _ in 0..args.runs {
            let began = Instant::now();
            start()?.end()?;
            times.push(ms(began.elapsed()));
        }
        times.sort_by(f64::total_cmp);
        let began = Instant::now();
        let started = (0..args.at_once)
            .map(|_| start())
            .collect::<Result<Vec<_>>>()?;
        for one in started {
            one.end()?;
        }
        Ok(Self {
            name,
            p50: percentile(&times, 50),
            p90: percentile(&times, 90),
            all_at_once: ms(began.elapsed()),
            phases: Vec::new(),
            idle: None,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "A container that runs `true`, from the command to its end, in {}: {} runs one by one, then {} at once",
            self.unit, self.runs, self.at_once
        )?;
        writeln!(
            f,
            "{:24} {:>8} {:>8} {:>12}",
            "", "p50", "p90", "all at once"
        )?;
        for way in &self.ways {
            let Way {
                name,
                p50,
                p90,
                all_at_once,
                ..
            } = way;
            writeln!(f, "{name:24} {p50:8.1} {p90:8.1} {all_at_once:12.1}")?;
            if !way.phases.is_empty() {
                let phases = way.phases.iter();
                let phases: Vec<String> =
                    phases.map(|(what, at)| format!("{what} {at:.1}")).collect();
                writeln!(f, "    {}", phases.join(", "))?;
            }
        }
        for way in &self.ways {
            if let Some(idle) = &way.idle {
                writeln!(f, "{}, idle: {idle}", way.name)?;
            }
        }
        for criterion in &self.criteria {
            writeln!(f, "{criterion}")?;
        }
        Ok(())
    }
}
