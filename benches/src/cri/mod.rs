//! What a kubelet waits for: each call of a pod's lifecycle over the Container Runtime Interface,
//! to podvisor and to containerd with runc, with the same CNI plugins, registry and image.
//!
//! [`runtime`] starts the two, [`pod`] makes the calls and [`memory`] adds up what a pod uses.

mod memory;
mod pod;
mod runtime;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde::Serialize;

use crate::boot::Stage;
use crate::output::{self, Criterion, ms};
use crate::pull::Registry;
use crate::spread::percentile;
use memory::PodMemory;
use pod::{Client, Pod};
use runtime::{Kind, Runtime};

/// The time from the request for a sandbox until its container runs, relative to containerd's: by
/// booting, and as a clone.
const COLD_LIMIT: f64 = 1.0;
const WARM_LIMIT: f64 = 0.5;
/// Memory of a pod on the host beyond its guest's, in MiB.
const OWN_MEMORY_LIMIT: f64 = 6.0;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The program `podvisor`
    #[arg(long, value_name = "FILE")]
    podvisor: PathBuf,
    /// The directory of the guest's kernel and initramfs
    #[arg(long, value_name = "DIR")]
    guest: PathBuf,
    /// A docker-registry's storage, with the image that is pulled
    #[arg(long, value_name = "DIR")]
    registry: PathBuf,
    /// The busybox of the pods' image
    #[arg(long, value_name = "FILE", default_value = "/bin/busybox")]
    busybox: PathBuf,
    /// Pods of each, after one that warms the caches
    #[arg(long, value_name = "N", default_value_t = 20)]
    runs: usize,
    /// Pods for throughput and memory
    #[arg(long, value_name = "N", default_value_t = 8)]
    pods: usize,
    /// Time is counted in instructions here: one nanosecond each
    #[arg(long)]
    icount: bool,
    /// Write the results as JSON to this file, or to stdout (`-`)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The calls, in the order of a pod's lifecycle.
const CALLS: [&str; 8] = [
    "PullImage",
    "RunPodSandbox",
    "CreateContainer",
    "StartContainer",
    "sandbox to running",
    "ExecSync",
    "StopPodSandbox",
    "RemovePodSandbox",
];

/// The number of parallel pods.
const AT_ONCE: usize = 4;

#[derive(Debug, Serialize)]
struct Report {
    unit: &'static str,
    runs: usize,
    pods: usize,
    runtimes: Vec<Measured>,
    criteria: Vec<Criterion>,
}

/// One runtime. Times in ms.
#[derive(Debug, Serialize)]
struct Measured {
    name: &'static str,
    calls: BTreeMap<&'static str, Percentiles>,
    /// Pods created and removed per second: one after the other, and four at a time.
    one_by_one: f64,
    four_at_once: f64,
    memory: PodMemory,
}

#[derive(Debug, Clone, Copy, Default, Serialize)]
struct Percentiles {
    p50: f64,
    p90: f64,
}

impl Percentiles {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self {
            p50: percentile(&values, 50),
            p90: percentile(&values, 90),
        }
    }
}

pub(crate) fn command(args: &Args) -> Result<()> {
    if args.runs == 0 || args.pods == 0 {
        bail!("--runs 0 and --pods 0 measure nothing: give 1 or more");
    }
    let stage = Stage::new()?;
    let registry = Registry::start(&args.registry, &stage.path().join("registry"))?;
    let image = runtime::image(&args.podvisor, &args.busybox, &stage)?;
    let pulled = format!("{}/schema2:1", registry.address());
    let executor = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut runtimes = Vec::new();
    for kind in [Kind::Cold, Kind::Warm, Kind::Containerd] {
        let runtime = Runtime::start(kind, args, &image, &stage)?;
        runtimes.push(executor.block_on(measure(args, &runtime, &pulled))?);
    }
    let report = Report {
        unit: match args.icount {
            true => "virtual ms",
            false => "ms",
        },
        runs: args.runs,
        pods: args.pods,
        criteria: criteria(args, &runtimes),
        runtimes,
    };
    output::print(&report, args.json.as_deref())
}

async fn measure(args: &Args, runtime: &Runtime, pulled: &str) -> Result<Measured> {
    let client = Client::connect(runtime.socket()).await?;
    let mut times: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
    let mut note = |call: &'static str, time: Duration| {
        times.entry(call).or_default().push(ms(time));
    };
    // The first one warms caches, and starts the creation of a template if one is used.
    Pod::run(&client, "first").await?.remove().await?;
    runtime.settled()?;
    for number in 0..args.runs {
        let pod = Pod::run(&client, &format!("timed-{number}")).await?;
        for (call, time) in &pod.times {
            note(call, *time);
        }
        note(
            "sandbox to running",
            pod.times.iter().map(|(_, time)| *time).sum(),
        );
        let began = Instant::now();
        pod.exec().await?;
        note("ExecSync", began.elapsed());
        let (stopped, removed) = pod.remove().await?;
        note("StopPodSandbox", stopped);
        note("RemovePodSandbox", removed);
    }
    // If time is counted in instructions, it jumps while the registry waits for its disk.
    let pulls = if args.icount { 0 } else { args.runs };
    for _ in 0..pulls {
        let began = Instant::now();
        client.pull(pulled).await?;
        note("PullImage", began.elapsed());
        client.remove_image(pulled).await?;
    }

    let began = Instant::now();
    for number in 0..args.pods {
        Pod::run(&client, &format!("one-{number}"))
            .await?
            .remove()
            .await?;
    }
    let one_by_one = per_second(args.pods, began.elapsed());
    let began = Instant::now();
    let lanes = (0..AT_ONCE).map(|lane| {
        let client = client.clone();
        async move {
            for number in (lane..args.pods).step_by(AT_ONCE) {
                Pod::run(&client, &format!("four-{number}"))
                    .await?
                    .remove()
                    .await?;
            }
            Ok::<(), anyhow::Error>(())
        }
    });
    for lane in futures_util::future::join_all(lanes).await {
        lane?;
    }
    let four_at_once = per_second(args.pods, began.elapsed());

    let before = memory::of_all(runtime.guest_memory())?;
    let mut idle = Vec::new();
    for number in 0..args.pods {
        idle.push(Pod::run(&client, &format!("idle-{number}")).await?);
    }
    let memory = memory::of_all(runtime.guest_memory())?.since(before, args.pods);
    for pod in idle {
        pod.remove().await?;
    }
    let calls = times.into_iter();
    Ok(Measured {
        name: runtime.name(),
        calls: calls
            .map(|(call, times)| (call, Percentiles::of(times)))
            .collect(),
        one_by_one,
        four_at_once,
        memory,
    })
}

fn per_second(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64()
}

fn criteria(args: &Args, runtimes: &[Measured]) -> Vec<Criterion> {
    let [cold, warm, containerd] = runtimes else {
        return Vec::new();
    };
    let start = |runtime: &Measured| {
        let calls = runtime.calls.get("sandbox to running");
        calls.map_or(f64::NAN, |percentiles| percentiles.p50)
    };
    let mut criteria = Vec::new();
    // Without it the host emulates a guest's code twice, which is not the VM's fault.
    if args.icount {
        for (what, limit, runtime) in [
            (
                "sandbox to running by booting, over containerd",
                COLD_LIMIT,
                cold,
            ),
            (
                "sandbox to running as a clone, over containerd",
                WARM_LIMIT,
                warm,
            ),
        ] {
            criteria.push(Criterion::at_most(
                what,
                limit,
                start(runtime) / start(containerd),
            ));
        }
    }
    criteria.push(Criterion::at_most(
        "memory of a pod beyond its guest's, MiB",
        OWN_MEMORY_LIMIT,
        warm.memory.own_mib,
    ));
    criteria
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "A pod of one container over the Container Runtime Interface, in {}: p50 and p90 of {}",
            self.unit, self.runs
        )?;
        write!(f, "{:20}", "")?;
        for runtime in &self.runtimes {
            write!(f, " {:>24}", runtime.name)?;
        }
        writeln!(f)?;
        let is_measured = |call: &str| self.runtimes.iter().any(|it| it.calls.contains_key(call));
        for call in CALLS.into_iter().filter(|call| is_measured(call)) {
            write!(f, "{call:20}")?;
            for runtime in &self.runtimes {
                let Percentiles { p50, p90 } = runtime.calls.get(call).copied().unwrap_or_default();
                write!(f, " {:>24}", format!("{p50:.1}  {p90:.1}"))?;
            }
            writeln!(f)?;
        }
        for runtime in &self.runtimes {
            let Measured {
                name,
                one_by_one,
                four_at_once,
                memory,
                ..
            } = runtime;
            writeln!(
                f,
                "{name}: {one_by_one:.2} pods per second one by one, {four_at_once:.2} four at once ({} pods); {memory}",
                self.pods
            )?;
        }
        for criterion in &self.criteria {
            writeln!(f, "{criterion}")?;
        }
        Ok(())
    }
}
