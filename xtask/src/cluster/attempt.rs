//! `cargo xtask cluster --try`: a cluster of one node in the test host, with podvisor as the
//! kubelet's runtime and KubeVirt's API over it; `--migrate`: of two nodes, between which a VM
//! moves; `--figures`: of one node that starts pods and VMs in turn. `common.sh` makes the cluster,
//! the other scripts are what happens there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::host::{self, Request, quote};
use crate::{cargo, guest, images, paths, process, setup};

/// How long it may take in an emulated host: ten minutes are usual.
const LIMIT: Duration = Duration::from_secs(2400);

/// Objects that would make pods of the components, which run beside the cluster's programs here.
const LEFT_OUT: [&str; 2] = ["Deployment", "PodDisruptionBudget"];

/// What is done with a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    /// A VirtualMachine lives on one node.
    Life,
    /// A VM moves between two nodes.
    Migration,
    /// Pods and VMs start on one node, and what they cost is printed.
    Figures,
}

impl Attempt {
    /// The numbers of its nodes, and what happens there.
    fn script(self) -> (&'static str, &'static str) {
        match self {
            Self::Life => ("1", include_str!("try.sh")),
            Self::Migration => ("1 2", include_str!("migrate.sh")),
            Self::Figures => ("1", include_str!("figures.sh")),
        }
    }
}

/// Builds what is missing, and runs it; `bin` has Kubernetes' programs.
pub(super) fn run(bin: &Path, attempt: Attempt) -> Result<ExitCode> {
    setup::ensure(&[setup::CLUSTER])?;
    guest::ensure()?;
    guest::ensure_loader()?;
    let small = images::small::ensure()?.join("small.raw");
    let podvisor = cargo::build_bin("podvisor-cri", "podvisor", false)?;
    let cluster = cargo::build_bin("podvisor-cluster", "podvisor-cluster", false)?;
    let directory = paths::target().join("cluster/try");
    fs::create_dir_all(&directory)?;
    let install = directory.join("install.json");
    fs::write(&install, manifests(&cluster)?)?;
    let script = directory.join("try.sh");
    let (numbers, rest) = attempt.script();
    let mut text = format!("#!/bin/sh\nNUMBERS={}\n", quote(numbers));
    for (name, path) in [
        ("BIN", bin),
        ("PODVISOR", &podvisor),
        ("CLUSTER", &cluster),
        ("SMALL", &small),
        ("INSTALL", &install),
    ] {
        let value = quote(&path.display().to_string());
        text += &format!("export {name}={value}\n");
    }
    text += include_str!("common.sh");
    text += rest;
    fs::write(&script, text).with_context(|| format!("{} cannot be written", script.display()))?;
    let status = host::run_request(Request {
        command: vec!["sh".to_owned(), script.display().to_string()],
        environment: vec![(
            "PODVISOR_GUEST_DIR".to_owned(),
            paths::guest().display().to_string(),
        )],
        limit: Some(LIMIT),
        // Pages of large programs are read again and again; the API server has a lot to do at once.
        copies: copies(bin, [podvisor, cluster])?,
        cpus: Some(2),
        ..Request::default()
    })?;
    Ok(ExitCode::from(status))
}

/// The programs that run there.
fn copies(bin: &Path, ours: [PathBuf; 2]) -> Result<Vec<PathBuf>> {
    let mut programs = ours.to_vec();
    let failed = || format!("{} cannot be read", bin.display());
    for entry in fs::read_dir(bin).with_context(failed)? {
        programs.push(entry.with_context(failed)?.path());
    }
    Ok(programs)
}

/// What `podvisor-cluster install` prints, without pods.
fn manifests(cluster: &Path) -> Result<String> {
    let printed = process::output(Command::new(cluster).arg("install"))?;
    let mut list: Value = serde_json::from_str(&printed)?;
    if let Some(items) = list.get_mut("items").and_then(Value::as_array_mut) {
        items.retain(|item| !LEFT_OUT.iter().any(|kind| item["kind"] == *kind));
    }
    Ok(list.to_string())
}
