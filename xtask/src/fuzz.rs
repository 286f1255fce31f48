//! `cargo xtask fuzz`: runs the fuzz targets with libFuzzer, one after the other. Findings are kept
//! in `target/fuzz`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};

use anyhow::{Context, Result, bail};

use crate::report::Step;
use crate::{cargo, paths, process, setup};

/// Coverage for libFuzzer, AddressSanitizer, and all checks of debug builds.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions \
    -Coverflow-checks -Zsanitizer=address";

/// Longer inputs find nothing new.
const INPUT_MAX: &str = "16384";
/// Seconds that one input may take.
const INPUT_TIME: &str = "10";
/// Memory that a target may take, in MiB.
const MEMORY: &str = "2048";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Targets; all of them when none is named
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,
    /// Seconds for each target
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u32,
}

pub(crate) fn command(args: &Args) -> Result<ExitCode> {
    let known = targets()?;
    let wanted = if args.targets.is_empty() {
        &known
    } else {
        &args.targets
    };
    if let Some(unknown) = wanted.iter().find(|target| !known.contains(target)) {
        bail!(
            "there is no fuzz target {unknown:?}; there are {}",
            known.join(", ")
        );
    }
    setup::ensure(&[setup::BUILD, setup::TEST])?;
    let programs = build()?;
    let mut failed = Vec::new();
    for target in wanted {
        let step = Step::begin(format!("fuzzing {target} for {} s", args.seconds));
        if !run(&programs, target, args.seconds)? {
            failed.push(target.as_str());
        }
        step.done();
    }
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    bail!(
        "faults were found in {}; the inputs are in {}, and `cargo xtask fuzz TARGET` tries them again",
        failed.join(", "),
        paths::display(&directory().join("artifacts"))
    )
}

fn directory() -> PathBuf {
    paths::target().join("fuzz")
}

/// The names of all targets.
fn targets() -> Result<Vec<String>> {
    let sources = paths::root().join("fuzz/fuzz_targets");
    let unreadable = || format!("{} cannot be read", sources.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(&sources).with_context(unreadable)? {
        let path = entry.with_context(unreadable)?.path();
        names.extend(path.file_stem().map(|name| name.display().to_string()));
    }
    names.sort();
    Ok(names)
}

fn build() -> Result<PathBuf> {
    let step = Step::begin("building the fuzz targets");
    let target = directory().join("build");
    let mut command = cargo::cargo("build");
    command
        .args([
            "--quiet",
            "--release",
            "--package",
            "podvisor-fuzz",
            "--bins",
        ])
        // With a target given, build scripts and macros are built without the flags.
        .args(["--target", crate::cargo::TRIPLE, "--target-dir"])
        .arg(&target)
        .env("RUSTFLAGS", FLAGS)
        // The sanitizer comes with rustup's compilers, but its flag is not a stable one.
        .env("RUSTC_BOOTSTRAP", "1")
        // Optimising each target as a whole would take longer than it saves.
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .stdout(std::io::stderr());
    process::run(&mut command)?;
    step.done();
    Ok(target.join(crate::cargo::TRIPLE).join("release"))
}

/// Tries earlier findings, then libFuzzer's inputs; returns false after a fault.
fn run(programs: &Path, target: &str, seconds: u32) -> Result<bool> {
    let corpus = directory().join("corpus").join(target);
    let artifacts = directory().join("artifacts").join(target);
    for directory in [&corpus, &artifacts] {
        fs::create_dir_all(directory)
            .with_context(|| format!("{} cannot be made", directory.display()))?;
    }
    let mut command = process::tied(programs.join(target));
    command
        .arg(format!("-max_total_time={seconds}"))
        .args([
            format!("-max_len={INPUT_MAX}"),
            format!("-timeout={INPUT_TIME}"),
        ])
        .args([
            format!("-rss_limit_mb={MEMORY}"),
            "-print_final_stats=1".to_owned(),
        ])
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args([&corpus, &artifacts]);
    let seeds = paths::root().join("fuzz/seeds").join(target);
    if seeds.is_dir() {
        command.arg(seeds);
    }
    command.stdin(Stdio::null()).stdout(std::io::stderr());
    Ok(process::Group::spawn(&mut command)?.wait()?.success())
}
