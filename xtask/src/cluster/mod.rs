//! `cargo xtask cluster`: builds a real Kubernetes API server and its etcd, and on request the
//! rest of a cluster's programs, into `target/cluster/bin`.
//!
//! No Debian package has them, so they are built from Go modules: `xtask/cluster/go.mod` says
//! which, and go.sum has the digest of each. The results are kept under the digest of both files.
//! [`toolchain`] finds a Go that can build them.

mod toolchain;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};

use crate::process::{self, Group, Lock};
use crate::report::{self, Step};
use crate::{paths, space};
use toolchain::Go;

/// To be raised when this file builds different programs from the same modules.
const RECIPE: &str = "1";

/// The module from which Kubernetes' programs are built.
const KUBERNETES: &str = "k8s.io/kubernetes";

/// The environment variable by which tests learn the directory of the programs.
pub(crate) const VARIABLE: &str = "PODVISOR_CLUSTER_BIN";

/// A program, and the Go package that it is built from.
#[derive(Debug, Clone, Copy)]
struct Program {
    name: &'static str,
    package: &'static str,
}

const fn program(name: &'static str, package: &'static str) -> Program {
    Program { name, package }
}

/// What objects, admission, API and controllers are tested with.
const API_SERVER: &[Program] = &[
    program("etcd", "go.etcd.io/etcd/server/v3"),
    program("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
];

/// What else a cluster of one node needs.
const OTHERS: &[Program] = &[
    program("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
    program(
        "kube-controller-manager",
        "k8s.io/kubernetes/cmd/kube-controller-manager",
    ),
    program("kubelet", "k8s.io/kubernetes/cmd/kubelet"),
    program("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Build the scheduler, the controller manager, the kubelet and kubectl, too
    #[arg(long)]
    all: bool,
}

pub(crate) fn command(args: &Args) -> Result<()> {
    let others = if args.all { OTHERS } else { &[] };
    for name in build(&[API_SERVER, others], Output::Shown)? {
        println!("{}", paths::display(&name));
    }
    Ok(())
}

/// Returns `target/cluster/bin`, with etcd and kube-apiserver in it.
pub(crate) fn ensure() -> Result<PathBuf> {
    build(&[API_SERVER], Output::Shown)?;
    Ok(bin())
}

/// Like [`ensure`], on a thread of its own and without a progress line.
pub(crate) fn ensure_in_background() -> JoinHandle<Result<PathBuf>> {
    std::thread::spawn(|| {
        build(&[API_SERVER], Output::Silent)?;
        Ok(bin())
    })
}

fn bin() -> PathBuf {
    paths::target().join("cluster/bin")
}

/// Whether a build shows its progress: of two at the same time, one may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Output {
    Shown,
    Silent,
}

/// Builds those of `groups` that are missing or outdated; returns the paths of all.
fn build(groups: &[&[Program]], output: Output) -> Result<Vec<PathBuf>> {
    let modules = paths::root().join("xtask/cluster");
    let read = |name: &str| {
        let path = modules.join(name);
        fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))
    };
    let go_mod = read("go.mod")?;
    let key = process::key(&[RECIPE, &go_mod, &read("go.sum")?])?;
    let programs = groups.iter().copied().flatten();
    let outdated: Vec<Program> = programs
        .clone()
        .filter(|program| !is_current(program, &key))
        .copied()
        .collect();
    if !outdated.is_empty() {
        let _lock = Lock::take(&paths::target().join("cluster"))?;
        space::ensure(space::CLUSTER)?;
        let version = required(&go_mod, KUBERNETES)
            .with_context(|| format!("xtask/cluster/go.mod does not require {KUBERNETES}"))?;
        let mut go = None;
        for program in &outdated {
            // Another xtask may have built it while this one waited for the lock.
            if is_current(program, &key) {
                continue;
            }
            let go = match &go {
                Some(found) => found,
                None => go.insert(toolchain::find(minimum(&go_mod)?)?),
            };
            build_one(go, program, &modules, version, output)?;
            fs::write(key_file(program), &key)?;
        }
    }
    Ok(programs.map(|program| bin().join(program.name)).collect())
}

fn key_file(program: &Program) -> PathBuf {
    paths::target()
        .join("cluster")
        .join(format!("{}.key", program.name))
}

fn is_current(program: &Program, key: &str) -> bool {
    bin().join(program.name).is_file()
        && fs::read_to_string(key_file(program)).is_ok_and(|built| built == key)
}

fn build_one(
    go: &Go,
    program: &Program,
    modules: &Path,
    version: &str,
    output: Output,
) -> Result<()> {
    fs::create_dir_all(bin())?;
    let _ = fs::remove_file(key_file(program));
    let result = bin().join(program.name);
    let partial = result.with_extension("partial");
    let mut step = Step::begin(format!(
        "building {} with {}",
        program.name,
        go.description()
    ));
    let mut command = process::tied("nice");
    command
        // It takes minutes of all CPUs.
        .args(["-n", "10"])
        .arg(go.program())
        .args(["build", "-v", "-trimpath", "-buildvcs=false", "-ldflags"])
        .arg(linker_flags(version))
        .arg("-o")
        .arg(&partial)
        .arg(program.package)
        .current_dir(modules)
        .env("GOFLAGS", "-mod=readonly")
        .env("GOWORK", "off")
        .env("GOTOOLCHAIN", go.selection())
        .env("CGO_ENABLED", "0")
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .stderr(Stdio::piped());
    let mut group = Group::spawn(&mut command)?;
    let mut log = String::new();
    let mut packages = 0_usize;
    if let Some(stderr) = group.child().stderr.take() {
        for line in BufReader::new(stderr).split(b'\n') {
            let line = String::from_utf8_lossy(&line?).into_owned();
            if is_package(&line) {
                packages += 1;
            } else {
                log.push_str(&line);
                log.push('\n');
            }
            if output == Output::Shown {
                step.progress(&format!("{packages} packages: {line}"));
            }
        }
    }
    let status = group.wait()?;
    if !status.success() {
        let path = paths::target().join(format!("cluster/{}.log", program.name));
        fs::write(&path, &log)?;
        bail!(
            "failed to build {} ({status}): {}\nthe whole log is {}; modules come from \
             `go env GOPROXY`: is the network up?",
            program.name,
            first_error(&log),
            paths::display(&path)
        );
    }
    fs::rename(&partial, &result)?;
    step.done();
    if output == Output::Silent {
        report::note(&format!("{} is built", program.name));
    }
    Ok(())
}

/// Kubernetes' programs print their version, and compare it with those of others.
fn linker_flags(version: &str) -> String {
    let mut parts = version.trim_start_matches('v').split('.');
    let (major, minor) = (parts.next().unwrap_or("0"), parts.next().unwrap_or("0"));
    let value =
        |name: &str, value: &str| format!(" -X k8s.io/component-base/version.{name}={value}");
    format!(
        "-s -w{}{}{}",
        value("gitVersion", version),
        value("gitMajor", major),
        value("gitMinor", minor)
    )
}

/// Returns whether `go build -v` printed the name of a package that it compiles.
fn is_package(line: &str) -> bool {
    !line.is_empty() && !line.contains([' ', ':'])
}

/// Returns the first line of a failed build's log that is not about a download.
fn first_error(log: &str) -> &str {
    log.lines()
        .find(|line| !line.starts_with("go: downloading") && !line.starts_with('#'))
        .unwrap_or("no error was printed")
}

/// Returns the version of a module that `go_mod` requires.
fn required<'a>(go_mod: &'a str, module: &str) -> Option<&'a str> {
    go_mod.lines().find_map(|line| {
        let mut words = line
            .trim()
            .trim_start_matches("require ")
            .split_whitespace();
        (words.next() == Some(module)).then(|| words.next())?
    })
}

/// Returns the oldest Go that can build `go_mod`.
fn minimum(go_mod: &str) -> Result<toolchain::Version> {
    go_mod
        .lines()
        .find_map(|line| line.strip_prefix("go "))
        .and_then(toolchain::Version::parse)
        .context("xtask/cluster/go.mod has no line with the version of Go")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_come_from_the_list_of_modules() {
        let go_mod = fs::read_to_string(paths::root().join("xtask/cluster/go.mod")).unwrap();
        let version = required(&go_mod, KUBERNETES).unwrap();
        assert!(version.starts_with("v1."), "{version}");
        assert!(minimum(&go_mod).is_ok());
        assert_eq!(required(&go_mod, "k8s.io/kubernete"), None);
    }

    #[test]
    fn every_program_is_a_tool_of_the_list_of_modules() {
        let go_mod = fs::read_to_string(paths::root().join("xtask/cluster/go.mod")).unwrap();
        for program in API_SERVER.iter().chain(OTHERS) {
            assert!(
                go_mod.lines().any(|line| line.trim() == program.package),
                "{}",
                program.package
            );
        }
    }

    #[test]
    fn programs_are_given_their_version() {
        let flags = linker_flags("v1.36.3");
        for flag in ["gitVersion=v1.36.3", "gitMajor=1", "gitMinor=36"] {
            assert!(flags.contains(&format!("version.{flag}")), "{flags}");
        }
    }

    #[test]
    fn an_error_is_told_from_progress() {
        assert!(is_package("k8s.io/api/core/v1"));
        assert!(!is_package("go: downloading k8s.io/api v0.36.3"));
        let log = "go: downloading a v1\n# a\na/b.go:3:1: undefined: c\n";
        assert_eq!(first_error(log), "a/b.go:3:1: undefined: c");
    }
}
