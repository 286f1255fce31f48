//! Programs that no Debian package has, built from Go modules.
//!
//! A directory of xtask has a `go.mod` that says which, and a `go.sum` with the digest of each
//! module. The programs are kept in `target/` under the digest of both files. [`toolchain`] finds
//! a Go that can build them.

mod toolchain;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};

use crate::process::{self, Group, Lock};
use crate::report::{self, Step};
use crate::{paths, space};
use toolchain::Go;

/// A program, and the Go package that it is built from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) package: &'static str,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// `go build`.
    Command,
    /// `go test -c`.
    Tests,
}

pub(crate) const fn program(name: &'static str, package: &'static str) -> Program {
    Program {
        name,
        package,
        kind: Kind::Command,
    }
}

/// The tests of a package as a program.
pub(crate) const fn tests(name: &'static str, package: &'static str) -> Program {
    Program {
        name,
        package,
        kind: Kind::Tests,
    }
}

/// A list of modules, and where what is built of them is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Modules {
    /// The directory of go.mod and go.sum, in the workspace.
    pub(crate) directory: &'static str,
    /// The directory of the results, in `target/`.
    pub(crate) results: &'static str,
    /// To be raised when different programs are built of the same modules.
    pub(crate) recipe: &'static str,
    /// Makes the linker's flags from go.mod.
    pub(crate) linker_flags: fn(&str) -> Result<String>,
}

/// Whether a build shows its progress: of two at the same time, one may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    Shown,
    Silent,
}

impl Modules {
    /// Returns the directory of the programs.
    pub(crate) fn bin(&self) -> PathBuf {
        self.results().join("bin")
    }

    fn results(&self) -> PathBuf {
        paths::target().join(self.results)
    }

    /// Builds those of `groups` that are missing or outdated; returns the paths of all.
    pub(crate) fn build(&self, groups: &[&[Program]], output: Output) -> Result<Vec<PathBuf>> {
        let modules = paths::root().join(self.directory);
        let read = |name: &str| {
            let path = modules.join(name);
            fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))
        };
        let go_mod = read("go.mod")?;
        let key = process::key(&[self.recipe, &go_mod, &read("go.sum")?])?;
        let programs = groups.iter().copied().flatten();
        let outdated: Vec<Program> = programs
            .clone()
            .filter(|program| !self.is_current(program, &key))
            .copied()
            .collect();
        if !outdated.is_empty() {
            let _lock = Lock::take(&self.results())?;
            space::ensure(space::GO)?;
            let flags = (self.linker_flags)(&go_mod)?;
            let mut go = None;
            for program in &outdated {
                // Another xtask may have built it while this one waited for the lock.
                if self.is_current(program, &key) {
                    continue;
                }
                let go = match &go {
                    Some(found) => found,
                    None => go.insert(toolchain::find(self.minimum(&go_mod)?)?),
                };
                self.build_one(go, program, &flags, output)?;
                fs::write(self.key_file(program), &key)?;
            }
        }
        Ok(programs
            .map(|program| self.bin().join(program.name))
            .collect())
    }

    fn key_file(&self, program: &Program) -> PathBuf {
        self.results().join(format!("{}.key", program.name))
    }

    fn is_current(&self, program: &Program, key: &str) -> bool {
        self.bin().join(program.name).is_file()
            && fs::read_to_string(self.key_file(program)).is_ok_and(|built| built == key)
    }

    fn build_one(&self, go: &Go, program: &Program, flags: &str, output: Output) -> Result<()> {
        let modules = paths::root().join(self.directory);
        fs::create_dir_all(self.bin())?;
        let _ = fs::remove_file(self.key_file(program));
        let result = self.bin().join(program.name);
        let partial = result.with_extension("partial");
        let mut step = Step::begin(format!(
            "building {} with {}",
            program.name,
            go.description()
        ));
        let mut group = Group::spawn(
            command(go, program, flags, &modules, &partial)
                .stdin(Stdio::null())
                .stdout(std::io::stderr())
                .stderr(Stdio::piped()),
        )?;
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
            let path = self.results().join(format!("{}.log", program.name));
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

    /// Returns the oldest Go that can build the modules.
    fn minimum(&self, go_mod: &str) -> Result<toolchain::Version> {
        go_mod
            .lines()
            .find_map(|line| line.strip_prefix("go "))
            .and_then(toolchain::Version::parse)
            .with_context(|| {
                format!(
                    "{}/go.mod has no line with the version of Go",
                    self.directory
                )
            })
    }
}

/// Returns the command that builds `program` into the file `result`.
fn command(
    go: &Go,
    program: &Program,
    flags: &str,
    modules: &Path,
    result: &Path,
) -> std::process::Command {
    let mut command = process::tied("nice");
    // It takes minutes of all CPUs.
    command.args(["-n", "10"]).arg(go.program());
    match program.kind {
        Kind::Command => command.args(["build", "-v"]),
        Kind::Tests => command.args(["test", "-c"]),
    };
    command
        .args(["-trimpath", "-buildvcs=false", "-ldflags"])
        .arg(flags)
        .arg("-o")
        .arg(result)
        .arg(program.package)
        .current_dir(modules)
        .env("GOFLAGS", "-mod=readonly")
        .env("GOWORK", "off")
        .env("GOTOOLCHAIN", go.selection())
        .env("CGO_ENABLED", "0");
    command
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
pub(crate) fn required<'a>(go_mod: &'a str, module: &str) -> Result<&'a str> {
    let version = go_mod.lines().find_map(|line| {
        let mut words = line
            .trim()
            .trim_start_matches("require ")
            .split_whitespace();
        (words.next() == Some(module)).then(|| words.next())?
    });
    version.with_context(|| format!("go.mod does not require {module}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_come_from_the_list_of_modules() {
        let go_mod = "module m\n\ngo 1.26.0\n\nrequire (\n\ta.io/b v1.2.3\n)\nrequire c v2\n";
        assert_eq!(required(go_mod, "a.io/b").unwrap(), "v1.2.3");
        assert_eq!(required(go_mod, "c").unwrap(), "v2");
        let error = required(go_mod, "a.io").unwrap_err().to_string();
        assert_eq!(error, "go.mod does not require a.io");
    }

    #[test]
    fn an_error_is_told_from_progress() {
        assert!(is_package("k8s.io/api/core/v1"));
        assert!(!is_package("go: downloading k8s.io/api v0.36.3"));
        let log = "go: downloading a v1\n# a\na/b.go:3:1: undefined: c\n";
        assert_eq!(first_error(log), "a/b.go:3:1: undefined: c");
    }
}
