//! `cargo xtask cluster`: builds a real Kubernetes API server and its etcd, and on request the
//! rest of a cluster's programs, into `target/cluster/bin`, from the modules of `xtask/cluster`;
//! and KubeVirt's client from those of `xtask/virtctl`. With `--try` and `--figures` it runs a
//! cluster of one node, with `--migrate` one of two.

mod attempt;

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread::JoinHandle;

use anyhow::Result;
use attempt::Attempt;

use crate::go::{self, Modules, Output, Program, program};
use crate::paths;

/// The module from which Kubernetes' programs are built.
const KUBERNETES: &str = "k8s.io/kubernetes";

/// The module from which KubeVirt's client is built.
const KUBEVIRT: &str = "kubevirt.io/kubevirt";

/// The environment variable by which tests learn the directory of the programs.
pub(crate) const VARIABLE: &str = "PODVISOR_CLUSTER_BIN";

const MODULES: Modules = Modules {
    directory: "xtask/cluster",
    results: "cluster",
    recipe: "1",
    linker_flags: |go_mod| Ok(linker_flags(go::required(go_mod, KUBERNETES)?)),
};

/// KubeVirt requires other versions of the same modules than Kubernetes does.
const CLIENT_MODULES: Modules = Modules {
    directory: "xtask/virtctl",
    results: "cluster",
    recipe: "1",
    linker_flags: |go_mod| Ok(client_flags(go::required(go_mod, KUBEVIRT)?)),
};

/// What the API is tested with as users have it.
const CLIENT: &[Program] = &[program("virtctl", "kubevirt.io/kubevirt/cmd/virtctl")];

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
    /// Run a cluster of one node with them in the test host, and a virtual machine in it
    #[arg(long = "try")]
    attempt: bool,
    /// Run a cluster of two nodes in the test host, between which a virtual machine moves
    #[arg(long, conflicts_with = "attempt")]
    migrate: bool,
    /// Run a cluster of one node in the test host, and print what virtual machines cost beside pods
    #[arg(long, conflicts_with_all = ["attempt", "migrate"])]
    figures: bool,
}

pub(crate) fn command(args: &Args) -> Result<ExitCode> {
    let attempt = match (args.attempt, args.migrate, args.figures) {
        (true, ..) => Some(Attempt::Life),
        (_, true, _) => Some(Attempt::Migration),
        (.., true) => Some(Attempt::Figures),
        _ => None,
    };
    let others = if args.all || attempt.is_some() {
        OTHERS
    } else {
        &[]
    };
    let mut programs = MODULES.build(&[API_SERVER, others], Output::Shown)?;
    programs.extend(CLIENT_MODULES.build(&[CLIENT], Output::Shown)?);
    if let Some(attempt) = attempt {
        return attempt::run(&MODULES.bin(), attempt);
    }
    for name in programs {
        println!("{}", paths::display(&name));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns `target/cluster/bin`, with etcd, kube-apiserver and virtctl in it.
pub(crate) fn ensure() -> Result<PathBuf> {
    build_for_tests(Output::Shown)
}

/// Like [`ensure`], on a thread of its own and without a progress line.
pub(crate) fn ensure_in_background() -> JoinHandle<Result<PathBuf>> {
    std::thread::spawn(|| build_for_tests(Output::Silent))
}

fn build_for_tests(output: Output) -> Result<PathBuf> {
    MODULES.build(&[API_SERVER], output)?;
    CLIENT_MODULES.build(&[CLIENT], output)?;
    Ok(MODULES.bin())
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

/// virtctl compares its version with that of the API, and warns where they differ.
fn client_flags(version: &str) -> String {
    format!("-s -w -X kubevirt.io/client-go/version.gitVersion={version}")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn every_program_is_a_tool_of_the_list_of_modules() {
        for (modules, module, programs) in [
            (MODULES, KUBERNETES, &[API_SERVER, OTHERS].concat()[..]),
            (CLIENT_MODULES, KUBEVIRT, CLIENT),
        ] {
            let path = paths::root().join(modules.directory).join("go.mod");
            let go_mod = fs::read_to_string(path).unwrap();
            let version = go::required(&go_mod, module).unwrap();
            assert!(version.starts_with("v1."), "{version}");
            for program in programs {
                let is_tool =
                    |line: &str| line.trim_start_matches("tool ").trim() == program.package;
                assert!(go_mod.lines().any(is_tool), "{}", program.package);
            }
        }
    }

    #[test]
    fn programs_are_given_their_version() {
        let flags = linker_flags("v1.36.3");
        for flag in ["gitVersion=v1.36.3", "gitMajor=1", "gitMinor=36"] {
            assert!(flags.contains(&format!("version.{flag}")), "{flags}");
        }
    }
}
