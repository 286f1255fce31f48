//! Calls cargo, always in the workspace's root and with the unchanged lock file.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::{paths, process};

/// What is built for: this machine, named, so that flags for it do not apply to build scripts.
pub(crate) const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// Returns `cargo SUBCOMMAND --locked`, for [`process::run`].
pub(crate) fn cargo(subcommand: &str) -> Command {
    let mut command = process::tied(program());
    command
        .args([subcommand, "--locked"])
        .current_dir(paths::root())
        .stdin(Stdio::null());
    // What the cargo above has set for this program itself. A build script that runs again when it
    // changes (ring's) would have half of the tree built anew after each cargo that is run by hand.
    for (name, _) in std::env::vars_os() {
        if is_of_this_package(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    command
}

/// Whether cargo sets a variable of this name to describe the package that it runs.
fn is_of_this_package(name: &str) -> bool {
    ["CARGO_PKG_", "CARGO_MANIFEST_"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

/// Returns the cargo that runs this program, or the one on PATH.
pub(crate) fn program() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Builds the programs `bins` and the `examples` of `package` with the profile of development;
/// returns their directory.
pub(crate) fn build(package: &str, bins: &[&str], examples: &[&str]) -> Result<PathBuf> {
    let mut command = cargo("build");
    command.args(["--quiet", "--package", package]);
    for bin in bins {
        command.args(["--bin", bin]);
    }
    for example in examples {
        command.args(["--example", example]);
    }
    process::run(command.stdout(std::io::stderr()))?;
    Ok(paths::cargo_target().join("debug"))
}

/// Builds the program `bin` of `package`, with the release profile or that of development.
pub(crate) fn build_bin(package: &str, bin: &str, release: bool) -> Result<PathBuf> {
    let mut command = cargo("build");
    command.args(["--quiet", "--package", package, "--bin", bin]);
    if release {
        command.arg("--release");
    }
    process::run(command.stdout(std::io::stderr()))?;
    let profile = if release { "release" } else { "debug" };
    Ok(paths::cargo_target().join(profile).join(bin))
}

/// Builds the programs of `packages` as they are shipped: optimised, static, and reproducible in
/// any directory; returns their directory.
pub(crate) fn build_static(packages: &[&str]) -> Result<PathBuf> {
    let mut command = cargo("build");
    command
        .args(["--quiet", "--bins"])
        .args(packages.iter().flat_map(|package| ["--package", package]))
        .stdout(std::io::stderr());
    process::run(as_shipped(&mut command))?;
    Ok(paths::cargo_target().join(TRIPLE).join("release"))
}

/// Makes `command` build programs as they are shipped.
fn as_shipped(command: &mut Command) -> &mut Command {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let mut flags = vec!["-C target-feature=+crt-static".to_owned()];
    let root = paths::root();
    for (path, name) in [(Some(root), "podvisor"), (home.as_deref(), "cargo")] {
        if let Some(path) = path {
            flags.push(format!("--remap-path-prefix={}=/{name}", path.display()));
        }
    }
    command
        .args(["--release", "--target", TRIPLE])
        .env("CARGO_ENCODED_RUSTFLAGS", encoded(&flags))
}

/// Encodes flags for `CARGO_ENCODED_RUSTFLAGS`, so that paths may contain spaces.
fn encoded(flags: &[String]) -> String {
    let words = flags.iter().map(|flag| flag.replacen("-C ", "-C\u{1f}", 1));
    words.collect::<Vec<_>>().join("\u{1f}")
}

/// A test program, as `cargo test --no-run` built it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TestProgram {
    /// The file to run.
    pub(crate) path: PathBuf,
    /// The package's directory, which is its working directory.
    pub(crate) directory: PathBuf,
    /// `PACKAGE-DIRECTORY::TARGET`, for people.
    pub(crate) name: String,
}

/// Builds and returns the test programs that `selection` names, or those of the default members.
pub(crate) fn build_tests(selection: &[&str]) -> Result<Vec<TestProgram>> {
    test_build(cargo("test"), selection)
}

/// Like [`build_tests`], with the programs as they are shipped and with optimised tests.
pub(crate) fn build_tests_as_shipped(selection: &[&str]) -> Result<Vec<TestProgram>> {
    let mut command = cargo("test");
    as_shipped(&mut command);
    test_build(command, selection)
}

fn test_build(mut command: Command, selection: &[&str]) -> Result<Vec<TestProgram>> {
    command
        .args(["--no-run", "--message-format", "json-render-diagnostics"])
        .args(selection)
        .stdout(Stdio::piped());
    let mut group = process::Group::spawn(&mut command)?;
    let mut text = String::new();
    if let Some(mut stdout) = group.child().stdout.take() {
        std::io::Read::read_to_string(&mut stdout, &mut text)?;
    }
    let status = group.wait()?;
    anyhow::ensure!(status.success(), "`cargo test --no-run` failed ({status})");
    test_programs(&text)
}

fn test_programs(messages: &str) -> Result<Vec<TestProgram>> {
    let mut programs = BTreeMap::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: serde_json::Value =
            serde_json::from_str(line).context("cargo printed a line that is no JSON")?;
        let is_test = message["profile"]["test"] == true;
        let (Some(path), Some(manifest)) = (
            message["executable"].as_str(),
            message["manifest_path"].as_str(),
        ) else {
            continue;
        };
        if !is_test {
            continue;
        }
        let directory = PathBuf::from(manifest)
            .parent()
            .context("a manifest lies in no directory")?
            .to_owned();
        let target = message["target"]["name"].as_str().unwrap_or_default();
        let name = format!("{}::{target}", paths::display(&directory));
        programs.insert(
            PathBuf::from(path),
            TestProgram {
                path: path.into(),
                directory,
                name,
            },
        );
    }
    Ok(programs.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_is_not_told_of_the_package_that_calls_it() {
        // The tests' own cargo has set them.
        assert!(std::env::var_os("CARGO_PKG_NAME").is_some());
        let command = cargo("build");
        let removed: Vec<_> = command
            .get_envs()
            .filter(|(_, value)| value.is_none())
            .map(|(name, _)| name.to_string_lossy().into_owned())
            .collect();
        for name in ["CARGO_PKG_NAME", "CARGO_MANIFEST_DIR"] {
            assert!(removed.iter().any(|removed| removed == name), "{removed:?}");
        }
        assert!(!is_of_this_package("CARGO_HOME") && !is_of_this_package("CARGO_TARGET_DIR"));
    }

    #[test]
    fn only_programs_of_tests_are_taken() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"a"},"profile":{"test":true},"executable":"/t/a-1"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"b"},"profile":{"test":false},"executable":"/t/b"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"c"},"profile":{"test":true},"executable":null}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        let programs = test_programs(messages).unwrap();
        assert_eq!(programs.len(), 1);
        assert_eq!(programs[0].path, PathBuf::from("/t/a-1"));
        assert_eq!(programs[0].directory, PathBuf::from("/w/a"));
        assert!(programs[0].name.ends_with("::a"));
    }
}
