//! `cargo xtask soak`: what takes too long for `cargo xtask test`: VMs that move again and again,
//! and processes that are killed while they do.
//!
//! On this machine, two nodes as they are (`podvisor serve`, `podvisor-cluster node`) and the
//! cluster's controller move a guest of a few instructions that checks its own memory. In the host,
//! a Linux guest that writes to memory and disk and talks over TCP moves between two machines.

use std::process::ExitCode;

use anyhow::{Context, Result, ensure};

use crate::cargo::{self, TestProgram};
use crate::host::{self, Request, quote};
use crate::report::Step;
use crate::{cluster, guest, paths, process, setup};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How many migrations, undisturbed
    #[arg(long, value_name = "N", default_value_t = 20)]
    moves: u32,
    /// How many migrations during which a process is killed, each at a random moment
    #[arg(long, value_name = "N", default_value_t = 20)]
    rounds: u32,
    /// What the random moments begin with: the same seed kills the same processes
    #[arg(long, value_name = "N", default_value_t = 47)]
    seed: u64,
    /// Leave out the Linux guest in the host
    #[arg(long)]
    no_guest: bool,
}

/// The tests, which are short without the variables.
const MOVES: &str = "joined::a_vm_moves_between_two_daemons_and_comes_back";
const KILLS: &str = "joined::one_copy_runs_whatever_was_killed_while_it_moved";

/// How long a round may take in an emulated host.
const SECONDS_OF_ROUND: u32 = 120;

pub(crate) fn command(args: &Args) -> Result<ExitCode> {
    setup::ensure(&[setup::CLUSTER, setup::BUILD, setup::TEST])?;
    let bin = cluster::ensure()?;
    let step = Step::begin("building the tests");
    cargo::build_bin("podvisor-cri", "podvisor", false)?;
    let served = one(&["--package", "podvisor-cluster", "--test", "served"])?;
    step.done();
    for (test, variable, count) in [
        (MOVES, "PODVISOR_SOAK_MOVES", args.moves),
        (KILLS, "PODVISOR_SOAK_ROUNDS", args.rounds),
    ] {
        let step = Step::begin(test);
        let mut command = process::tied(&served.path);
        command
            .args(["--exact", "--nocapture", test])
            .current_dir(&served.directory)
            .env(cluster::VARIABLE, &bin)
            .env("PODVISOR_SOAK_SEED", args.seed.to_string())
            .env(variable, count.to_string());
        let status = command.status().context("the tests cannot be started")?;
        ensure!(status.success(), "{test} failed ({status})");
        step.done();
    }
    if args.no_guest {
        return Ok(ExitCode::SUCCESS);
    }
    in_host(args.moves)
}

/// Moves a Linux guest.
fn in_host(moves: u32) -> Result<ExitCode> {
    setup::ensure(&[setup::KERNEL, setup::HOST])?;
    guest::ensure()?;
    let step = Step::begin("building the guest's tests");
    let rounds = one(&["--package", "podvisor-vmm", "--test", "guest_rounds"])?;
    step.done();
    let script = format!(
        "cd {} && exec {} --test-threads=1 --nocapture moves_again",
        quote(&rounds.directory.display().to_string()),
        quote(&rounds.path.display().to_string()),
    );
    let limit = u64::from(SECONDS_OF_ROUND) * u64::from(moves.max(5));
    let status = host::run_request(Request {
        command: vec!["sh".to_owned(), "-c".to_owned(), script],
        environment: vec![
            (
                "PODVISOR_GUEST_DIR".to_owned(),
                paths::guest().display().to_string(),
            ),
            ("PODVISOR_TEST_ROUNDS".to_owned(), moves.to_string()),
        ],
        limit: Some(std::time::Duration::from_secs(limit)),
        ..Request::default()
    })?;
    Ok(ExitCode::from(status))
}

fn one(selection: &[&str]) -> Result<TestProgram> {
    let programs = cargo::build_tests(selection)?;
    programs.into_iter().next().context("cargo built no test")
}
