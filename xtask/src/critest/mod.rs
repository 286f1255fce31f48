//! `cargo xtask critest`: Kubernetes' validation suite for runtimes, unmodified, against
//! `podvisor serve`, in a host with working KVM.
//!
//! The suite is built from the Go module that `xtask/critest/go.mod` names. It wants images of
//! several registries: [`images`] makes them of Debian's busybox and nginx and pushes them to a
//! registry of this machine, which serves them in the host as a mirror of each, so that their names
//! stay. [`outcome`] reads the suite's report, and knows which specs cannot pass and why.

mod images;
mod outcome;
mod script;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::go::{Modules, Output, Program, tests};
use crate::host::{self, Request};
use crate::report::{self, Step};
use crate::{cargo, guest, paths, process, setup, space};
use outcome::Outcome;
use script::Selection;

const MODULES: Modules = Modules {
    directory: "xtask/critest",
    results: "critest",
    recipe: "1",
    linker_flags: |_| Ok("-s -w".to_owned()),
};

const SUITE: &[Program] = &[tests("critest", "sigs.k8s.io/cri-tools/cmd/critest")];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only the specs whose name matches this regular expression; repeat for more
    #[arg(long, value_name = "REGEX")]
    focus: Vec<String>,
    /// Leave out the specs whose name matches; repeat for more
    #[arg(long, value_name = "REGEX")]
    skip: Vec<String>,
    /// Build podvisor with the release profile
    #[arg(long)]
    release: bool,
    /// Run, even if the same programs had a result for the same specs before
    #[arg(long)]
    again: bool,
    /// Stop after this many seconds; what has no result by then is not in the table
    #[arg(long, value_name = "SECONDS", default_value_t = 7200)]
    timeout: u64,
}

pub(crate) fn command(args: &Args) -> Result<ExitCode> {
    setup::ensure(&[
        setup::KERNEL,
        setup::HOST,
        setup::BUILD,
        setup::TEST,
        setup::CRITEST,
    ])?;
    space::ensure(space::DEMO)?;
    let suite = MODULES.build(&[SUITE], Output::Shown)?;
    let suite = suite.first().context("no suite was built")?;
    let step = Step::begin("building podvisor");
    let podvisor = cargo::build_bin("podvisor-cri", "podvisor", args.release)?;
    step.done();
    let guest_files = guest::ensure()?;
    let images = images::ensure(&results())?;

    let selection = Selection {
        focus: &args.focus,
        skip: &args.skip,
    };
    let key = key(&podvisor, suite, &guest_files, &images, &selection)?;
    let kept = results().join("results");
    let stored = kept.join(format!("{key}.json"));
    if stored.is_file() && !args.again {
        report::note(&format!(
            "nothing has changed since {} was written; --again runs the suite again",
            paths::display(&stored)
        ));
        return print(&stored);
    }
    let step = Step::begin("critest");
    let run = kept.join("run");
    if run.exists() {
        fs::remove_dir_all(&run)?;
    }
    fs::create_dir_all(&run)?;
    // The host reads it by its path: a build that goes on must not change it.
    let copy = run.join("podvisor");
    fs::copy(&podvisor, &copy)?;
    let script = script::write(&run, &copy, suite, &images, &selection)?;
    let status = host::run_request(Request {
        command: vec!["sh".to_owned(), script.display().to_string()],
        environment: vec![(
            "PODVISOR_GUEST_DIR".to_owned(),
            paths::guest().display().to_string(),
        )],
        shares: vec![run.clone()],
        limit: Some(Duration::from_secs(args.timeout)),
        ..Request::default()
    })?;
    step.done();
    let written = run.join(script::REPORT);
    if !written.is_file() {
        bail!(
            "critest wrote no report (status {status}); its output is {}, the daemon's log {}",
            paths::display(&run.join(script::LOG)),
            paths::display(&run.join(script::DAEMON_LOG)),
        );
    }
    fs::rename(&written, &stored)?;
    print(&stored)
}

/// Returns `target/critest`.
fn results() -> PathBuf {
    paths::target().join(MODULES.results)
}

/// Returns the digest of all that decides about a result.
fn key(
    podvisor: &Path,
    suite: &Path,
    guest_files: &[PathBuf],
    images: &Path,
    selection: &Selection<'_>,
) -> Result<String> {
    let mut parts = vec![format!("{selection:?}")];
    for file in [podvisor, suite]
        .into_iter()
        .chain(guest_files.iter().map(PathBuf::as_path))
    {
        parts.push(process::sha256(file)?);
    }
    parts.push(fs::read_to_string(images.join(images::KEY))?);
    // What the host does with them.
    parts.push(include_str!("script.rs").to_owned());
    process::key(&parts.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Prints the table of a report; the suite failed if a spec did that should pass.
fn print(stored: &Path) -> Result<ExitCode> {
    let text = fs::read_to_string(stored)?;
    let outcome = Outcome::parse(&text)
        .with_context(|| format!("{} is not a report of critest", paths::display(stored)))?;
    print!("{outcome}");
    Ok(match outcome.is_as_expected() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
