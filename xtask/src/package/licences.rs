//! Copyright and licences of the shipped files.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::cargo::TRIPLE;
use crate::{cargo, process};

/// Prefixes of the names of licence files.
const NAMES: [&str; 4] = ["LICENSE", "LICENCE", "COPYING", "NOTICE"];

/// Returns Debian's copyright file of the package.
pub(super) fn copyright(kernel: &str) -> String {
    format!(
        "\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: podvisor

Files: *
Copyright: the podvisor developers
License: Apache-2.0
 /usr/share/common-licenses/Apache-2.0 is this licence's text. The programs hold crates of
 others, whose licences are in /usr/share/doc/podvisor/third-party-licences.

Files: usr/lib/podvisor/vmlinux*
Copyright: Linus Torvalds and others
License: GPL-2
 /usr/share/common-licenses/GPL-2 is this licence's text. The kernels are built from Debian's
 package linux-source-6.12, version {kernel}, less the lines that
 /usr/share/doc/podvisor/docs/kernel.md names, with the configurations in vmlinux*.config in
 /usr/share/doc/podvisor.
"
    )
}

/// Returns each crate in a package's programs, which are these crates', with its licence, and each
/// licence's text once.
pub(super) fn third_party(programs: &[&str]) -> Result<String> {
    let mut command = cargo::cargo("metadata");
    command.args(["--format-version", "1", "--filter-platform", TRIPLE]);
    let metadata: Value = serde_json::from_str(&process::output(&mut command)?)
        .context("cargo printed metadata that are no JSON")?;
    let mut crates = String::new();
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in shipped(&metadata, programs) {
        let field = |name: &str| package[name].as_str().unwrap_or_default();
        let name = format!("{} {}", field("name"), field("version"));
        let _ = writeln!(crates, "{name}: {}", field("license"));
        let Some(directory) = Path::new(field("manifest_path")).parent() else {
            continue;
        };
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let file = entry.file_name().to_string_lossy().to_uppercase();
            let is_licence = NAMES.iter().any(|name| file.starts_with(name));
            if is_licence && entry.file_type()?.is_file() {
                let text = fs::read_to_string(entry.path())
                    .with_context(|| format!("{} cannot be read", entry.path().display()))?;
                let text = text.trim().replace("\r\n", "\n");
                texts.entry(text).or_default().insert(name.clone());
            }
        }
    }
    let mut all = format!("Crates that podvisor's programs hold\n\n{crates}");
    for (text, of) in texts {
        let of: Vec<String> = of.into_iter().collect();
        let _ = write!(all, "\n----\n{}\n----\n\n{text}\n", of.join(", "));
    }
    Ok(all)
}

/// Returns the third-party packages that the programs depend on, sorted by name, without build and
/// test dependencies.
fn shipped<'a>(metadata: &'a Value, programs: &[&str]) -> Vec<&'a Value> {
    let list = |value: &'static str, of: &'static str| -> Vec<&'a Value> {
        let values = if of.is_empty() {
            &metadata[value]
        } else {
            &metadata[of][value]
        };
        values.as_array().into_iter().flatten().collect()
    };
    let nodes: BTreeMap<&str, &Value> = list("nodes", "resolve")
        .into_iter()
        .filter_map(|node| Some((node["id"].as_str()?, node)))
        .collect();
    let packages = list("packages", "");
    let mut due: Vec<&str> = packages
        .iter()
        .filter(|package| programs.iter().any(|name| package["name"] == *name))
        .filter_map(|package| package["id"].as_str())
        .collect();
    let mut seen = BTreeSet::new();
    while let Some(id) = due.pop() {
        let Some(node) = nodes.get(id).filter(|_| seen.insert(id)) else {
            continue;
        };
        for dependency in node["deps"].as_array().into_iter().flatten() {
            let kinds = dependency["dep_kinds"].as_array();
            let is_normal = |kind: &Value| kind["kind"].is_null();
            if kinds.is_some_and(|kinds| kinds.iter().any(is_normal)) {
                due.extend(dependency["pkg"].as_str());
            }
        }
    }
    let is_shipped = |package: &&Value| {
        let is_ours = package["source"].is_null();
        !is_ours && package["id"].as_str().is_some_and(|id| seen.contains(id))
    };
    let mut shipped: Vec<&Value> = packages.into_iter().filter(is_shipped).collect();
    shipped.sort_by_key(|package| (package["name"].as_str(), package["version"].as_str()));
    shipped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shipped_is_what_programs_depend_on_and_not_their_tests() {
        let dependency = |id: &str, kind: Value| serde_json::json!({ "pkg": id, "dep_kinds": [{ "kind": kind }] });
        let package = |name: &str, source: Value| serde_json::json!({ "id": name, "name": name, "version": "1", "source": source });
        let metadata = serde_json::json!({
            "packages": [
                package("podvisor-cri", Value::Null),
                package("z", "registry".into()), package("used", "registry".into()),
                package("tested", "registry".into()), package("other", "registry".into()),
            ],
            "resolve": { "nodes": [
                { "id": "podvisor-cri", "deps": [
                    dependency("used", Value::Null), dependency("tested", "dev".into())] },
                { "id": "used", "deps": [dependency("z", Value::Null)] },
                { "id": "z", "deps": [] }, { "id": "tested", "deps": [] },
                { "id": "other", "deps": [] },
            ] },
        });
        let names: Vec<_> = shipped(&metadata, &["podvisor-cri"])
            .iter()
            .map(|p| p["name"].clone())
            .collect();
        assert_eq!(names, ["used", "z"]);
    }
}
