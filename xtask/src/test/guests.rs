//! Tests with guests: in as many parallel test hosts as this machine has CPUs. Programs of few
//! tests share a host, because booting one takes as long as a test; a program of many has its own.
//! If a host hangs, the tests of its programs fail.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::Listed;
use crate::host::quote;
use crate::libtest::{Count, read_labelled};
use crate::{host, paths, process, report};

/// How long the programs of one host may take: several times their duration in an emulated host on
/// an idle machine.
const LIMIT: Duration = Duration::from_secs(2400);

/// Programs share a host until they have this many tests together.
const TESTS_OF_A_HOST: usize = 6;

/// Up to this many failed tests are run again in an emulated host. More are not a coincidence.
const SECOND_RUNS: usize = 2;

/// Runs all tests that need guests; `assets` are environment variables with the paths of their
/// files.
pub(super) fn run(programs: &[Listed], assets: &[(&str, PathBuf)]) -> Result<Count> {
    let mut wanted: Vec<&Listed> = programs
        .iter()
        .filter(|listed| !listed.guests.is_empty())
        .collect();
    if wanted.is_empty() {
        bail!("no test with guests was found");
    }
    // Long programs must not run alone at the end: first the programs of many tests, that of the
    // most before the others, then those with one or two tests, which are long.
    wanted.sort_by_key(|listed| listed.guests.len());
    let few = wanted.partition_point(|listed| listed.guests.len() < TESTS_OF_A_HOST);
    wanted[few..].reverse();
    wanted.rotate_left(few);
    let shared = shared_out(wanted);
    // On this machine itself, they would conflict in its network and its cgroups.
    let hosts = if host::is_emulated() {
        std::thread::available_parallelism().map_or(1, usize::from)
    } else {
        1
    };
    let waiting = Mutex::new(VecDeque::from(shared));
    let next = || {
        let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.pop_front()
    };
    std::thread::scope(|scope| {
        let work = || -> Result<Count> {
            let mut count = Count::default();
            while let Some(programs) = next() {
                count.add(in_host(&programs, assets, "console")?);
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
    .and_then(|mut count| {
        if host::is_emulated() {
            run_again(&mut count, programs, assets)?;
        }
        Ok(count)
    })
}

/// Runs failed tests again if they are few, each in its own host. An emulated host depends on the
/// load of its machine, and its CPU emulation has bugs; a test that passes then counts as passed,
/// and is named.
fn run_again(count: &mut Count, programs: &[Listed], assets: &[(&str, PathBuf)]) -> Result<()> {
    if count.failures.len() > SECOND_RUNS {
        return Ok(());
    }
    for test in count.failures.clone() {
        let Some(only) = alone(programs, &test) else {
            report::note(&format!("{test} failed; it is not one test of one program"));
            continue;
        };
        report::note(&format!("{test} failed, and runs once more"));
        // The logs of the host in which it failed are kept.
        count.again(&test, in_host(&[&only], assets, "console-second")?);
    }
    Ok(())
}

/// Returns the program of a test with no other test; `None` if no program has it, or several.
fn alone(programs: &[Listed], test: &str) -> Option<Listed> {
    let mut with = programs
        .iter()
        .filter(|listed| listed.guests.iter().any(|guest| guest == test));
    let (listed, None) = (with.next()?, with.next()) else {
        return None;
    };
    Some(Listed {
        program: listed.program.clone(),
        here: Vec::new(),
        guests: vec![test.to_owned()],
    })
}

/// Groups programs that share a host, in order.
fn shared_out(programs: Vec<&Listed>) -> Vec<Vec<&Listed>> {
    let mut hosts: Vec<Vec<&Listed>> = Vec::new();
    for listed in programs {
        match hosts.last_mut() {
            Some(host) if tests_of(host) < TESTS_OF_A_HOST => host.push(listed),
            _ => hosts.push(vec![listed]),
        }
    }
    hosts
}

fn tests_of(programs: &[&Listed]) -> usize {
    programs.iter().map(|listed| listed.guests.len()).sum()
}

/// Returns the target's name of each program.
fn names_of(programs: &[&Listed]) -> Vec<String> {
    let target = |listed: &&Listed| {
        let name = &listed.program.name;
        name.rsplit("::").next().unwrap_or_default().to_owned()
    };
    programs.iter().map(target).collect()
}

/// Runs the programs' tests in a host, and up to twice again if the emulated host itself hung. The
/// name of its log starts with `log`.
fn in_host(programs: &[&Listed], assets: &[(&str, PathBuf)], log: &str) -> Result<Count> {
    let names = names_of(programs);
    let name = format!("{} with guests", names.join(", "));
    let once = |log: &str| {
        let mut command = command(programs, &format!("{log}-{}", names.join("-")))?;
        command
            .envs(assets.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null());
        read_labelled(&mut command, |line| {
            let name = line.strip_prefix(BEGINS)?;
            Some(format!("{name}: "))
        })
    };
    let (mut count, mut status) = once(log)?;
    for again in ["again", "again-2"] {
        if status.code() != Some(host::HUNG.into()) {
            break;
        }
        report::note(&format!("{name}: once more"));
        // The logs of those that hung are kept.
        (count, status) = once(&format!("{log}-{again}"))?;
    }
    count.complete(
        &name,
        tests_of(programs),
        status.success(),
        &status.to_string(),
    );
    Ok(count)
}

fn command(programs: &[&Listed], log: &str) -> Result<Command> {
    let own = std::env::current_exe().context("this program's own file cannot be found")?;
    let mut command = process::tied(own);
    command
        .args(["host", "--timeout", &LIMIT.as_secs().to_string(), "--log"])
        .arg(paths::host().join(format!("{log}.log")))
        .args(["--", "sh", "-c", &script(programs)])
        .current_dir(paths::root());
    Ok(command)
}

/// Prefix of the line that a host prints before each program, followed by the name of its target.
const BEGINS: &str = "--- ";

/// Returns a script that runs one program after the other, each in its directory, and fails if one
/// of them does.
fn script(programs: &[&Listed]) -> String {
    let mut text = String::from("failed=0");
    for (listed, name) in programs.iter().zip(names_of(programs)) {
        let Listed {
            program, guests, ..
        } = listed;
        let directory = quote(&program.directory.display().to_string());
        text.push_str(&format!(
            "\necho {}\ncd {directory} && \
             CARGO_MANIFEST_DIR={directory} {} --test-threads=1 --exact",
            quote(&format!("{BEGINS}{name}")),
            quote(&program.path.display().to_string()),
        ));
        for test in guests {
            text.push(' ');
            text.push_str(&quote(test));
        }
        text.push_str(" || failed=$?");
    }
    text.push_str("\nexit $failed");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cargo::TestProgram;

    fn listed(name: &str, guests: usize) -> Listed {
        Listed {
            program: TestProgram {
                path: format!("/t/{name}-1").into(),
                directory: "/w/it's".into(),
                name: format!("vmm::{name}"),
            },
            here: vec!["a".to_owned()],
            guests: (0..guests).map(|n| format!("x::guest_{n}")).collect(),
        }
    }

    #[test]
    fn a_host_runs_exactly_the_guest_tests_of_its_programs() {
        let (one, two) = (listed("one", 2), listed("two", 1));
        let command = command(&[&one, &two], "console-one-two").unwrap();
        let words: Vec<_> = command
            .get_args()
            .map(|word| word.to_string_lossy())
            .collect();
        let [.., dashes, shell, flag, script] = &words[..] else {
            panic!("{words:?}");
        };
        assert_eq!([&**dashes, &**shell, &**flag], ["--", "sh", "-c"]);
        let directory = r"'/w/it'\''s'";
        let of = |name: &str, tests: &str| {
            format!(
                "echo '--- {name}'\ncd {directory} && CARGO_MANIFEST_DIR={directory} \
                 '/t/{name}-1' --test-threads=1 --exact {tests} || failed=$?\n"
            )
        };
        let expected = of("one", "'x::guest_0' 'x::guest_1'") + &of("two", "'x::guest_0'");
        assert_eq!(**script, format!("failed=0\n{expected}exit $failed"));
    }

    #[test]
    fn a_test_of_one_program_can_run_alone() {
        let programs = [listed("one", 2), listed("two", 3)];
        let only = alone(&programs, "x::guest_2").unwrap();
        assert_eq!(only.program.name, "vmm::two");
        assert_eq!(only.guests, ["x::guest_2"]);
        assert!(only.here.is_empty());
        assert!(alone(&programs, "x::guest_1").is_none(), "two have it");
        assert!(alone(&programs, "one: 2 tests did not come to an end").is_none());
    }

    #[test]
    fn programs_of_few_tests_share_a_host() {
        let listed = [8, 20, 1, 2, 2, 3, 3, 5].map(|guests| listed("p", guests));
        let hosts = shared_out(listed.iter().collect());
        let tests: Vec<Vec<usize>> = hosts
            .iter()
            .map(|host| host.iter().map(|listed| listed.guests.len()).collect())
            .collect();
        assert_eq!(tests, [vec![8], vec![20], vec![1, 2, 2, 3], vec![3, 5]]);
    }
}
