//! One measurement: what the harness is asked to do, and the host that it does it in.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};

use super::args::{Clock, Json, Plot};
use crate::host::{self, Request};
use crate::report::{self, Step};
use crate::{cargo, paths};

/// What every measurement is built with: another set of packages would be another set of features
/// of what they depend on, for which cargo builds all of it again.
const PACKAGES: [&str; 2] = ["podvisor-benches", "podvisor-cri"];

/// Attempts with hosts that count instructions: one in three stalls while QEMU's guest waits for
/// its device.
const ICOUNT_ATTEMPTS: usize = 5;

/// A command of the harness, with its options so far.
#[derive(Debug)]
pub(super) struct Measurement {
    programs: PathBuf,
    request: Request,
}

impl Measurement {
    /// Builds the harness and podvisor's side of it, optimized for a program that starts once per
    /// pod, and begins the command that measures `subject`.
    pub(super) fn new(subject: &str, clock: Clock) -> Result<Self> {
        let mut measurement = Self::of_one_unit(subject, clock)?;
        if clock.icount {
            measurement.request.command.push("--icount".to_owned());
        }
        Ok(measurement)
    }

    /// As [`Self::new`], for a subject whose figures have the same unit by any clock.
    pub(super) fn of_one_unit(subject: &str, clock: Clock) -> Result<Self> {
        let programs = build()?;
        let harness = paths::text(&programs.join("podvisor-benches"));
        let request = Request {
            command: vec![harness, subject.to_owned()],
            icount: clock.icount,
            ..Request::default()
        };
        Ok(Self { programs, request })
    }

    /// Adds an option.
    pub(super) fn with(mut self, option: &str, value: impl ToString) -> Self {
        self.request
            .command
            .extend([option.to_owned(), value.to_string()]);
        self
    }

    /// Adds an option whose value is a path.
    pub(super) fn with_path(self, option: &str, path: &Path) -> Self {
        self.with(option, paths::text(path))
    }

    /// Adds an option whose value is a program that was built with the harness.
    pub(super) fn with_program(self, option: &str, name: &str) -> Self {
        let path = self.programs.join(name);
        self.with_path(option, &path)
    }

    /// Adds an option whose value is a file of the user's, if there is one.
    pub(super) fn with_file(self, option: &str, file: Option<&Path>) -> Result<Self> {
        Ok(match file {
            Some(file) => self.with_path(option, &absolute(file)?),
            None => self,
        })
    }

    /// Has the results written as JSON, too.
    pub(super) fn with_json(self, json: &Json) -> Result<Self> {
        self.with_output("--json", json.path.as_deref())
    }

    /// Has a picture drawn.
    pub(super) fn with_plot(self, plot: &Plot) -> Result<Self> {
        self.with_output("--plot", plot.path.as_deref())
    }

    fn with_output(mut self, option: &str, path: Option<&Path>) -> Result<Self> {
        if let Some(path) = path {
            output(option, path, &mut self.request)?;
        }
        Ok(self)
    }

    /// Measures within a time limit, and again in another host if one that counts instructions
    /// stalls.
    pub(super) fn run(mut self, limit: Duration) -> Result<ExitCode> {
        self.request.limit = Some(limit);
        let attempts = if self.request.icount {
            ICOUNT_ATTEMPTS
        } else {
            1
        };
        let mut status = 0;
        for attempt in 1..=attempts {
            status = host::run_request(self.request.clone())?;
            let has_stalled = [host::TIMED_OUT, host::HUNG].contains(&status);
            if !has_stalled || attempt == attempts {
                break;
            }
            report::note("a host that counts instructions stalls now and then; trying once more");
        }
        Ok(ExitCode::from(status))
    }
}

/// Builds the harness and podvisor; returns the programs' directory.
pub(super) fn build() -> Result<PathBuf> {
    let step = Step::begin("building the benchmarks");
    let programs = cargo::build_static(&PACKAGES)?;
    step.done();
    Ok(programs)
}

/// Returns a file's path as it is in a host, too.
pub(super) fn absolute(path: &Path) -> Result<PathBuf> {
    path.canonicalize()
        .with_context(|| format!("{} cannot be read", path.display()))
}

/// Makes the command write to the file `path`, whose directory must be writable in the host.
fn output(option: &str, path: &Path, request: &mut Request) -> Result<()> {
    request.command.push(option.to_owned());
    if option == "--json" && path == Path::new("-") {
        request.command.push("-".to_owned());
        return Ok(());
    }
    let path = std::path::absolute(path)?;
    let directory = path
        .parent()
        .filter(|_| !path.is_dir())
        .with_context(|| format!("{option} {} names no file", path.display()))?;
    let directory = absolute(directory)?;
    request.command.push(paths::text(&path));
    if !request.shares.contains(&directory) {
        request.shares.push(directory);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_to_directories_that_the_host_shares_once() {
        let here = std::env::current_dir().unwrap();
        let given = |json: &str, plot: Option<&str>| {
            let mut request = Request::default();
            output("--json", Path::new(json), &mut request).unwrap();
            if let Some(plot) = plot {
                output("--plot", Path::new(plot), &mut request).unwrap();
            }
            (request.command, request.shares)
        };
        let at = |name: &str| here.join(name).display().to_string();
        let (command, shares) = given("a.json", Some("./a.svg"));
        assert_eq!(command, ["--json", &at("a.json"), "--plot", &at("a.svg")]);
        assert_eq!(shares, [here.canonicalize().unwrap()]);
        let (command, shares) = given("-", Some("src/a.svg"));
        assert_eq!(command, ["--json", "-", "--plot", &at("src/a.svg")]);
        assert_eq!(shares, [here.join("src").canonicalize().unwrap()]);
        assert!(given("-", None).1.is_empty());
    }

    #[test]
    fn a_directory_that_is_missing_is_named_before_anything_runs() {
        let try_plot = |path| output("--plot", Path::new(path), &mut Request::default());
        let error = try_plot("missing/a.svg").unwrap_err();
        assert!(error.to_string().contains("missing"));
        assert!(try_plot("src").is_err());
    }
}
