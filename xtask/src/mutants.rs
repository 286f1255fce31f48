//! `cargo xtask mutants`: cargo-mutants breaks one function after the other in a copy of the tree,
//! and this machine's tests show whether they detect it. Its output is kept in `target/mutants`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::report::Step;
use crate::{cargo, paths, process, setup};

/// The release that is installed if it is missing.
const VERSION: &str = "27.1.0";

/// Seconds after which a running test counts as one that detected the mutant.
const TIMEOUT: &str = "180";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The crates to break
    #[arg(
        short,
        long = "package",
        value_name = "CRATE",
        default_value = "podvisor-devices"
    )]
    packages: Vec<String>,
    /// Break only these files: a pattern such as 'vmm/src/vm/**'
    #[arg(short, long = "file", value_name = "GLOB")]
    files: Vec<String>,
    /// Only part N of M, from 0
    #[arg(long, value_name = "N/M")]
    shard: Option<String>,
    /// How many builds and tests at a time
    #[arg(short, long, value_name = "N", default_value_t = 1)]
    jobs: usize,
}

pub(crate) fn command(args: &Args) -> Result<ExitCode> {
    setup::ensure(&[setup::BUILD, setup::TEST])?;
    let program = installed()?;
    let output = paths::target().join("mutants");
    fs::create_dir_all(&output).with_context(|| format!("{} cannot be made", output.display()))?;
    let mut command = process::tied(program);
    command
        .arg("mutants")
        .args(["--no-shuffle", "--colors", "never", "--timeout", TIMEOUT])
        .arg("--jobs")
        .arg(args.jobs.to_string())
        .arg("--output")
        .arg(&output)
        .args(args.packages.iter().flat_map(|name| ["-p", name]))
        .args(args.files.iter().flat_map(|glob| ["-f", glob]))
        .args(args.shard.iter().flat_map(|shard| {
            // Each shard is a sample of the whole.
            ["--sharding", "round-robin", "--shard", shard]
        }))
        // Tests with Linux guests do not belong to a crate's own.
        .args(["--cargo-arg=--locked", "--cargo-arg=--lib"])
        .args(["--", "--", "--skip", "::guest_"])
        .current_dir(paths::root())
        // For the copies, and their build results.
        .env("TMPDIR", &output);
    // Its status says whether there were undetected mutants; so does the report.
    let mut group = process::Group::spawn(&mut command)?;
    group.wait()?;
    let outcomes = output.join("mutants.out/outcomes.json");
    let text = fs::read_to_string(&outcomes)
        .with_context(|| format!("{} is missing: nothing was tried", outcomes.display()))?;
    let report =
        Report::of(&text).with_context(|| format!("{} makes no sense", outcomes.display()))?;
    print!("{report}");
    Ok(ExitCode::SUCCESS)
}

/// Returns the path of cargo-mutants, which is built if it is missing.
fn installed() -> Result<PathBuf> {
    let root = paths::target().join("tools");
    let program = root.join("bin/cargo-mutants");
    if !program.is_file() {
        let step = Step::begin(format!("building cargo-mutants {VERSION}"));
        let mut command = process::tied(cargo::program());
        command
            .args([
                "install",
                "--quiet",
                "--locked",
                "--version",
                VERSION,
                "--root",
            ])
            .arg(&root)
            .arg("cargo-mutants")
            // Outside of the workspace, because of its settings.
            .current_dir(Path::new("/"));
        process::run(&mut command)?;
        step.done();
    }
    Ok(program)
}

/// Results of the mutants that compile.
#[derive(Debug, Default, PartialEq, Eq)]
struct Report {
    caught: usize,
    missed: Vec<String>,
}

impl Report {
    fn of(outcomes: &str) -> Result<Self> {
        let outcomes: Value = serde_json::from_str(outcomes)?;
        let mut report = Self::default();
        for outcome in outcomes["outcomes"].as_array().context("no outcomes")? {
            let mutant = &outcome["scenario"]["Mutant"];
            match outcome["summary"].as_str() {
                _ if mutant.is_null() => {}
                Some("CaughtMutant" | "Timeout") => report.caught += 1,
                Some("MissedMutant") => report
                    .missed
                    .push(mutant["name"].as_str().unwrap_or("?").to_owned()),
                _ => {}
            }
        }
        Ok(report)
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for missed in &self.missed {
            writeln!(f, "not noticed: {missed}")?;
        }
        let viable = self.caught + self.missed.len();
        let percent = (self.caught * 100).checked_div(viable).unwrap_or(0);
        writeln!(
            f,
            "{} of {viable} viable mutants were noticed ({percent} %)",
            self.caught
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutants_that_compile_are_counted() {
        let outcomes = r#"{"outcomes": [
            {"scenario": "Baseline", "summary": "Success"},
            {"scenario": {"Mutant": {"name": "a.rs:1: replace f with ()"}}, "summary": "CaughtMutant"},
            {"scenario": {"Mutant": {"name": "a.rs:2: replace g with 1"}}, "summary": "MissedMutant"},
            {"scenario": {"Mutant": {"name": "a.rs:3: loop"}}, "summary": "Timeout"},
            {"scenario": {"Mutant": {"name": "a.rs:4: no type"}}, "summary": "Unviable"}
        ]}"#;
        let report = Report::of(outcomes).unwrap();
        assert_eq!(report.caught, 2);
        assert_eq!(
            report.to_string(),
            "not noticed: a.rs:2: replace g with 1\n2 of 3 viable mutants were noticed (66 %)\n"
        );
    }

    #[test]
    fn a_report_of_nothing_is_an_error() {
        assert!(Report::of("{}").is_err());
    }
}
