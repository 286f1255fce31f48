//! Debian packages that are unpacked below `target/` instead of being installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result};

use crate::process;
use crate::report::Step;

/// Downloads a package and unpacks it in the new directory `tree` of `download`, which is emptied
/// first; returns that directory. `what` is what the user waits for.
pub(crate) fn unpack(package: &str, what: &str, download: &Path) -> Result<PathBuf> {
    let mut step = Step::begin(format!("downloading {what}"));
    if download.exists() {
        fs::remove_dir_all(download)?;
    }
    fs::create_dir_all(download)?;
    step.progress(package);
    process::run(
        process::tied("apt-get")
            .args(["-qq", "-o", "APT::Sandbox::User=root", "download", package])
            .current_dir(download)
            .stdin(Stdio::null())
            .stdout(std::io::stderr()),
    )
    .with_context(|| format!("{what} cannot be downloaded; is Debian's archive reachable?"))?;
    let archive = fs::read_dir(download)?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .context("apt-get downloaded no package")?;
    step.done();

    let step = Step::begin(format!("unpacking {package}"));
    let tree = download.join("tree");
    process::run(process::tied("dpkg").arg("-x").arg(&archive).arg(&tree))?;
    step.done();
    Ok(tree)
}
