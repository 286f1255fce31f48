//! Debian packages that are unpacked below `target/` instead of being installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::process;
use crate::report::Step;

/// Downloads a package and unpacks it in the new directory `tree` of `download`, which is emptied
/// first; returns that directory. `what` is what the user waits for.
pub(crate) fn unpack(package: &str, what: &str, download: &Path) -> Result<PathBuf> {
    unpack_all(&[package], what, &[], download)
}

/// Like [`unpack`], several packages into one tree, by apt with these options.
pub(crate) fn unpack_all(
    packages: &[&str],
    what: &str,
    options: &[String],
    download: &Path,
) -> Result<PathBuf> {
    let mut step = Step::begin(format!("downloading {what}"));
    if download.exists() {
        fs::remove_dir_all(download)?;
    }
    fs::create_dir_all(download)?;
    step.progress(&packages.join(", "));
    process::run(
        apt_get(options)
            .arg("download")
            .args(packages)
            .current_dir(download)
            .stdin(Stdio::null())
            .stdout(std::io::stderr()),
    )
    .with_context(|| format!("{what} cannot be downloaded; is Debian's archive reachable?"))?;
    let archives: Vec<PathBuf> = fs::read_dir(download)?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .collect();
    if archives.len() != packages.len() {
        bail!("apt-get did not download {}", packages.join(", "));
    }
    step.done();

    let step = Step::begin(format!("unpacking {}", packages.join(", ")));
    let tree = download.join("tree");
    for archive in archives {
        process::run(process::tied("dpkg").arg("-x").arg(&archive).arg(&tree))?;
    }
    step.done();
    Ok(tree)
}

/// apt-get, which may read directories of root's, with these options.
pub(crate) fn apt_get(options: &[String]) -> Command {
    let mut command = process::tied("apt-get");
    command.args(["-qq", "-o", "APT::Sandbox::User=root"]);
    for option in options {
        command.args(["-o", option]);
    }
    command
}
