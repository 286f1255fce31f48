//! `cargo xtask test`: all checks for a change.
//!
//! Format, lints, tests on this machine (including the fuzz targets' bodies), tests with guests in
//! test hosts, and the documentation. A failing step does not prevent the others. A test whose own
//! name starts with `guest_` needs KVM guests and runs in a host; all others run on this machine.
//! One that starts with `guest_long_` takes minutes there: it runs with `--long`, or with a filter
//! that it matches. `--long` builds the documentation, too. The last lines count all.

mod guests;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::cargo::{self, TestProgram, cargo};
use crate::host;
use crate::libtest::{self, Count};
use crate::report::{self, Step};
use crate::{cluster, guest, images, paths, process, programs as peer_programs, setup, space};

/// Number of slowest tests that are listed at the end.
const SLOWEST: usize = 12;

/// How long one program's tests on this machine may take, in seconds: more than ten times the
/// longest one; a hanging one must not prevent the others.
const LIMIT: &str = "900";

/// What the names of tests with guests begin with that take minutes.
const LONG: &str = "guest_long_";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only these steps
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Name>,
    /// Run what takes long, too: the long tests with guests, and the documentation
    #[arg(long)]
    long: bool,
    /// Run only the tests whose path contains this
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Name {
    Format,
    Clippy,
    Machine,
    Guest,
    Doc,
}

#[derive(Debug, Default)]
struct Results {
    times: Vec<(&'static str, Duration)>,
    failed: Vec<&'static str>,
    machine: Count,
    guests: Count,
    /// Number of the long tests that were left out.
    left_out: usize,
}

impl Results {
    /// Runs a step, regardless of the results of earlier ones.
    fn step(&mut self, name: &'static str, work: impl FnOnce(&mut Self) -> Result<()>) {
        let step = Step::begin(name);
        let began = Instant::now();
        match work(self) {
            Ok(()) => self.times.push((name, step.done())),
            Err(error) => {
                drop(step);
                report::error(&error);
                self.times.push((name, began.elapsed()));
                self.failed.push(name);
            }
        }
    }
}

pub(crate) fn command(args: &Args) -> Result<ExitCode> {
    space::ensure(space::TEST)?;
    setup::ensure(&[
        setup::KERNEL,
        setup::HOST,
        setup::BUILD,
        setup::TEST,
        setup::SMALL,
    ])?;
    let runs = |name: Name| match args.only.is_empty() {
        true => args.long || name != Name::Doc,
        false => args.only.contains(&name),
    };
    let with_guests = runs(Name::Guest);
    let mut results = Results::default();
    // Half of it waits for downloads. A filter may leave no test that needs it.
    let mut api_server =
        (runs(Name::Machine) && args.filter.is_none()).then(cluster::ensure_in_background);

    if runs(Name::Format) {
        results.step("format", |_| {
            process::run(
                process::tied(cargo::program())
                    .args(["fmt", "--all", "--check"])
                    .current_dir(paths::root())
                    .stdin(Stdio::null()),
            )
            .context("`cargo fmt --all` puts it right")
        });
    }
    if runs(Name::Clippy) {
        results.step("clippy", |_| {
            process::run(
                cargo("clippy")
                    .args(["--quiet", "--workspace", "--all-targets"])
                    .args(["--", "-D", "warnings"]),
            )
        });
    }
    let mut programs = Vec::new();
    if runs(Name::Machine) || with_guests {
        results.step("building the tests", |results| {
            programs = listed(
                cargo::build_tests(&["--workspace"])?,
                args.filter.as_deref(),
            )?;
            if with_guests && !args.long && args.filter.is_none() {
                results.left_out = leave_out_long(&mut programs);
            }
            Ok(())
        });
    }
    if runs(Name::Machine) {
        let mut assets = Vec::new();
        if api_server.is_some() || programs.iter().any(Listed::needs_api_server) {
            results.step("API server for tests", |_| {
                let built = match api_server.take() {
                    Some(thread) => thread
                        .join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?,
                    None => cluster::ensure()?,
                };
                assets.push((cluster::VARIABLE, built));
                Ok(())
            });
        }
        results.step("tests on this machine", |results| {
            results.machine = on_this_machine(&programs, &assets, args.filter.as_deref())?;
            results.machine.check()
        });
    }
    if runs(Name::Doc) {
        results.step("documentation", |_| {
            process::run(
                cargo("doc")
                    .args(["--quiet", "--workspace", "--no-deps"])
                    .env("RUSTDOCFLAGS", "-D warnings"),
            )
        });
    }
    if with_guests {
        results.step("kernel and agent", |_| guest::ensure().map(drop));
        results.step("loader and small system", |_| {
            guest::ensure_loader()?;
            guest::ensure_agent()?;
            images::small::ensure().map(drop)
        });
        results.step("tests with guests", |results| {
            let assets = [
                ("PODVISOR_GUEST_DIR", paths::guest()),
                ("PODVISOR_TEST_IMAGES", images::ensure()?),
                ("PODVISOR_TEST_PROGRAMS", peer_programs::ensure()?),
                ("PODVISOR_TEST_VMLINUZ", host::distribution_kernel()?),
                ("PODVISOR_TEST_SMALL", images::small::ensure()?),
            ];
            results.guests = guests::run(&programs, &assets)?;
            results.guests.check()?;
            if results.guests.passed == 0 {
                bail!("no test with guests ran");
            }
            Ok(())
        });
    }
    Ok(conclude(&results))
}

/// Prints the durations and counts.
fn conclude(results: &Results) -> ExitCode {
    println!();
    for (name, time) in &results.times {
        let mark = if results.failed.contains(name) {
            "  FAILED"
        } else {
            ""
        };
        println!("{:>12}  {name}{mark}", report::time(*time));
    }
    let all = results.machine.plus(&results.guests);
    for (time, test) in all.slowest(SLOWEST) {
        println!("{:>12}  {test}", report::time(time));
    }
    for failed in results
        .machine
        .failures
        .iter()
        .chain(&results.guests.failures)
    {
        println!("failed: {failed}");
    }
    for unsteady in &results.guests.unsteady {
        println!("unsteady, it failed and then passed: {unsteady}");
    }
    println!("on this machine: {}", results.machine);
    println!("with guests: {}", results.guests);
    if results.left_out > 0 {
        println!(
            "left out: {} long tests with guests; `--long` runs them, and builds the documentation",
            results.left_out
        );
    }
    if !results.failed.is_empty() {
        println!("failed steps: {}", results.failed.join(", "));
    }
    println!("{all}");
    let _ = std::io::stdout().flush();
    if results.failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// A program with its tests, sorted by where they run.
#[derive(Debug)]
struct Listed {
    program: TestProgram,
    here: Vec<String>,
    guests: Vec<String>,
}

impl Listed {
    /// Returns whether the tests on this machine are those of the cluster's side.
    fn needs_api_server(&self) -> bool {
        self.program.name.starts_with("cluster::") && !self.here.is_empty()
    }
}

fn listed(programs: Vec<TestProgram>, filter: Option<&str>) -> Result<Vec<Listed>> {
    programs
        .into_iter()
        .map(|program| {
            let text = process::output(
                Command::new(&program.path)
                    .args(["--list", "--format", "terse"])
                    .current_dir(&program.directory),
            )?;
            let (guests, here) = text
                .lines()
                .filter_map(|line| line.strip_suffix(": test"))
                .filter(|test| filter.is_none_or(|filter| test.contains(filter)))
                .map(str::to_owned)
                .partition(|test| needs_guests(test));
            Ok(Listed {
                program,
                here,
                guests,
            })
        })
        .collect()
}

/// Returns whether a test's own name, not that of its module, says that it needs guests.
fn needs_guests(test: &str) -> bool {
    own_name(test).starts_with("guest_")
}

/// Returns a test's name without its modules'.
fn own_name(test: &str) -> &str {
    test.rsplit("::").next().unwrap_or_default()
}

/// Takes the long tests with guests out of their programs; returns their number.
fn leave_out_long(programs: &mut [Listed]) -> usize {
    let mut number = 0;
    for listed in programs {
        let all = listed.guests.len();
        listed
            .guests
            .retain(|test| !own_name(test).starts_with(LONG));
        number += all - listed.guests.len();
    }
    number
}

/// Runs the tests that need no guests; `assets` are environment variables with paths for them.
fn on_this_machine(
    programs: &[Listed],
    assets: &[(&str, PathBuf)],
    filter: Option<&str>,
) -> Result<Count> {
    let mut count = Count::default();
    for Listed { program, here, .. } in programs {
        if here.is_empty() {
            continue;
        }
        println!("--- {}", program.name);
        let mut command = process::tied("timeout");
        command
            .args(["--kill-after", "10", LIMIT])
            .arg(&program.path)
            .arg("--exact")
            .args(here)
            .current_dir(&program.directory)
            .env("CARGO_MANIFEST_DIR", &program.directory)
            .envs(assets.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null());
        count.add(libtest::read(&mut command, &program.name, here.len())?);
    }
    println!("--- documentation's examples");
    let mut command = cargo("test");
    // The packages that the tests were built with: others mean other features, and another build.
    command.args(["--workspace", "--doc", "--quiet"]);
    if let Some(filter) = filter {
        command.arg("--").arg(filter);
    }
    count.add(libtest::read(&mut command, "documentation's examples", 0)?);
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_test_itself_decides() {
        assert!(needs_guests("guest_boots"));
        assert!(needs_guests("vm::tests::guest_boots"));
        assert!(!needs_guests("guest_memory::tests::reads_back"));
        assert!(!needs_guests("the_guest_boots"));
    }

    #[test]
    fn long_tests_are_left_out_and_counted() {
        let mut programs = [Listed {
            program: TestProgram {
                path: "/t/one-1".into(),
                directory: "/w".into(),
                name: "vmm::one".to_owned(),
            },
            here: vec!["guest_long_is_no_module::is_here".to_owned()],
            guests: vec![
                "guest_boots".to_owned(),
                "life::guest_long_boots_often".to_owned(),
            ],
        }];
        assert_eq!(leave_out_long(&mut programs), 1);
        assert_eq!(programs[0].guests, ["guest_boots"]);
        assert_eq!(programs[0].here.len(), 1);
    }
}
