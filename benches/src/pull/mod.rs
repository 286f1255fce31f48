//! From a registry to what a container can start from: podvisor, containerd, and skopeo with umoci,
//! side by side.
//!
//! A docker-registry on loopback serves the images. Each run starts with an empty directory on the
//! same file system and ends with a root file system that is ready; [`peers`] knows the programs,
//! [`measure`] their cost, [`report`] the output.

mod measure;
mod peers;
mod registry;
mod report;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::output;
use measure::Sample;
use peers::Peer;
pub(crate) use registry::{Registry, Server};
use report::Report;

/// What to measure.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The podvisor program
    #[arg(long, value_name = "FILE")]
    podvisor: PathBuf,
    /// A docker-registry's storage with the images
    #[arg(long, value_name = "DIR")]
    registry: PathBuf,
    /// A directory for everything that is written; it is emptied
    #[arg(long, value_name = "DIR")]
    directory: PathBuf,
    /// Images of that registry
    #[arg(long, value_name = "NAME", default_values = ["debian:1", "split:1"])]
    image: Vec<String>,
    /// Pulls by each program
    #[arg(long, value_name = "N", default_value_t = 5)]
    runs: usize,
    /// Write the results as JSON to this file, or to stdout (`-`)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(crate) fn command(args: &Args) -> Result<()> {
    if args.runs == 0 {
        bail!("--runs 0 measures nothing: give 1 or more");
    }
    clear(&args.directory)?;
    let registry = Registry::start(&args.registry, &args.directory.join("registry"))?;
    let mut report = Report::new(args.runs);
    for image in &args.image {
        let name = format!("{}/{image}", registry.address());
        let samples = measure_image(args, &name)?;
        report.add(image, &samples)?;
    }
    drop(registry);
    clear(&args.directory)?;

    output::print(&report, args.json.as_deref())
}

/// Runs all programs in turn, round by round, each round starting with another one; the first round
/// is not counted.
fn measure_image(args: &Args, name: &str) -> Result<Vec<(Peer, Vec<Sample>)>> {
    let mut results: Vec<(Peer, Vec<Sample>)> = Peer::all(&args.podvisor)
        .into_iter()
        .map(|peer| (peer, Vec::new()))
        .collect();
    for round in 0..=args.runs {
        let count = results.len();
        for turn in 0..count {
            let (peer, samples) = &mut results[(round + turn) % count];
            let directory = args.directory.join("store");
            clear(&directory)?;
            let sample = peer
                .measure(name, &directory)
                .with_context(|| format!("{} cannot pull {name}", peer.name()))?;
            if round > 0 {
                samples.push(sample);
            }
        }
    }
    clear(&args.directory.join("store"))?;
    Ok(results)
}

/// Makes `directory` an empty directory.
fn clear(directory: &Path) -> Result<()> {
    let made = match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => fs::create_dir_all(directory),
    };
    made.with_context(|| format!("{} cannot be emptied", directory.display()))
}
