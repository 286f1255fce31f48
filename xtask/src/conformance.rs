//! `cargo xtask conformance`: tests a runtime for what a kubelet expects of every runtime.
//!
//! These are the tests that `cargo xtask test` runs against podvisor. If another runtime passes
//! them, too, the suite is right; docs/cri.md has the differences.

use std::process::{ExitCode, Stdio};

use anyhow::{Context, Result};

use crate::cargo;
use crate::report::Step;
use crate::{guest, libtest, paths, process, programs, setup};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The runtime: podvisor, containerd (Debian's, with runc), containerd-behind-podvisor (as its
    /// host's runtime), or the path of a socket that is served in the host
    #[arg(long, value_name = "RUNTIME", default_value = "podvisor")]
    against: String,
    /// Build podvisor and the tests with the release profile
    #[arg(long)]
    release: bool,
    /// Stop after this many seconds; another runtime's containers are stopped with grace
    #[arg(long, value_name = "SECONDS", default_value_t = 3000)]
    timeout: u32,
    /// Run only the tests whose path contains one of these
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
}

pub(crate) fn command(args: &Args) -> Result<ExitCode> {
    setup::ensure(&[setup::KERNEL, setup::HOST, setup::BUILD, setup::TEST])?;
    let step = Step::begin("building the tests");
    let suite = ["--package", "podvisor-cri", "--test", "conformance"];
    let suites = if args.release {
        cargo::build_tests_as_shipped(&suite)?
    } else {
        cargo::build_tests(&suite)?
    };
    let program = suites.first().context("cargo built no suite")?;
    step.done();
    guest::ensure()?;
    let step = Step::begin("conformance");
    let own = std::env::current_exe().context("this program's own file cannot be found")?;
    let mut command = process::tied(own);
    command
        .args(["host", "--timeout", &args.timeout.to_string(), "--env"])
        .arg(format!("PODVISOR_CONFORMANCE_AGAINST={}", args.against))
        .arg("--")
        .arg(&program.path)
        .arg("--test-threads=1")
        .args(&args.filters)
        .current_dir(paths::root())
        .env("PODVISOR_GUEST_DIR", paths::guest())
        .env("PODVISOR_TEST_PROGRAMS", programs::ensure()?)
        .stdin(Stdio::null());
    let count = libtest::read(&mut command, &args.against, 0)?;
    step.done();
    for failed in &count.failures {
        println!("failed: {failed}");
    }
    println!("{}: {count}", args.against);
    Ok(match count.failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}
