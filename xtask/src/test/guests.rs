//! Tests with guests: each program in a test host of its own, as many hosts at once as this
//! machine has CPUs. A host that hangs takes one program's tests with it.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::{Count, Listed, read_labelled};
use crate::{host, paths, process, report};

/// How long one program may take; the emulated host is slow.
const LIMIT: Duration = Duration::from_secs(1200);

/// Runs all tests that need guests; `assets` are variables that lead them to their files.
pub(super) fn run(programs: &[Listed], assets: &[(&str, PathBuf)]) -> Result<Count> {
    let mut wanted: Vec<&Listed> = programs
        .iter()
        .filter(|listed| !listed.guests.is_empty())
        .collect();
    if wanted.is_empty() {
        bail!("no test with guests was found");
    }
    // The longest first, so that no host is left alone with one at the end.
    wanted.sort_by_key(|listed| std::cmp::Reverse(listed.guests.len()));
    // On this machine itself they would meet in its network and its cgroups.
    let hosts = if host::is_emulated() {
        std::thread::available_parallelism().map_or(1, usize::from)
    } else {
        1
    };
    let waiting = Mutex::new(VecDeque::from(wanted));
    let next = || {
        let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.pop_front()
    };
    std::thread::scope(|scope| {
        let work = || -> Result<Count> {
            let mut count = Count::default();
            while let Some(listed) = next() {
                count.add(in_host(listed, assets)?);
            }
            Ok(count)
        };
        let workers: Vec<_> = (0..hosts).map(|_| scope.spawn(work)).collect();
        let mut count = Count::default();
        for worker in workers {
            match worker.join() {
                Ok(counted) => count.add(counted?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(count)
    })
}

/// Runs one program's tests in a host, and once more where the emulated host itself hung.
fn in_host(listed: &Listed, assets: &[(&str, PathBuf)]) -> Result<Count> {
    let program = &listed.program;
    let target = program.name.rsplit("::").next().unwrap_or_default();
    let name = format!("{} with guests", program.name);
    let once = |log: &str| {
        let mut command = command(listed, log)?;
        command
            .envs(assets.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null());
        read_labelled(&mut command, &format!("{target}: "))
    };
    let (mut count, mut status) = once("console")?;
    if status.code() == Some(host::HUNG.into()) {
        report::note(&format!("{name}: once more"));
        // What is known of the one that hung stays.
        (count, status) = once("console-again")?;
    }
    count.settle(
        &name,
        listed.guests.len(),
        status.success(),
        &status.to_string(),
    );
    Ok(count)
}

fn command(
    Listed {
        program, guests, ..
    }: &Listed,
    log: &str,
) -> Result<Command> {
    let own = std::env::current_exe().context("this program's own file cannot be found")?;
    let mut command = process::tied(own);
    let log = paths::host().join(format!("{log}-{}.log", program.name.replace("::", "-")));
    command
        .args(["host", "--timeout", &LIMIT.as_secs().to_string(), "--log"])
        .arg(log)
        .arg("--env")
        .arg(format!("CARGO_MANIFEST_DIR={}", program.folder.display()))
        .arg("--")
        .arg(&program.path)
        .args(["--test-threads=1", "--exact"])
        .args(guests)
        .current_dir(&program.folder);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cargo::TestProgram;

    #[test]
    fn a_host_runs_exactly_the_guest_tests() {
        let listed = Listed {
            program: TestProgram {
                path: "/t/vmm-1".into(),
                folder: "/w/it's".into(),
                name: "vmm::vmm".to_owned(),
            },
            here: vec!["a".to_owned()],
            guests: vec!["x::guest_b".to_owned()],
        };
        let command = command(&listed, "console").unwrap();
        let words: Vec<_> = command
            .get_args()
            .map(|word| word.to_string_lossy())
            .collect();
        let end = [
            "--",
            "/t/vmm-1",
            "--test-threads=1",
            "--exact",
            "x::guest_b",
        ];
        assert!(words.ends_with(&end.map(Into::into)), "{words:?}");
        assert_eq!(command.get_current_dir(), Some("/w/it's".as_ref()));
    }
}
