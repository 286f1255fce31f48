//! EDK2's source, as Debian has it: fetched from the mirror that apt is configured with, checked,
//! and patched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::report::Step;
use crate::{paths, process};

/// The version of Debian's package.
const VERSION: &str = "2022.11-6+deb12u2";

/// Where it is on a mirror.
const POOL: &str = "pool/main/e/edk2";

/// EDK2 itself, without what Debian removes of it.
const ORIGINAL: (&str, &str) = (
    "edk2_2022.11.orig.tar.xz",
    "64257dd8a2778c969b8a869cd3b6eda2db2a346bfcf24dc729859745968f1fd6",
);

/// Debian's patches.
const PATCHES: (&str, &str) = (
    "edk2_2022.11-6+deb12u2.debian.tar.xz",
    "a1d848115ae9b140e64d3ab34f7c08210b665bee473e3242a6801c163678780e",
);

/// Those that are not applied: it disables the shell if Secure Boot is on, which this platform is
/// built without, and it needs libraries of Secure Boot.
const LEFT_OUT: &[&str] = &["Disable-the-Shell-when-SecureBoot-is-enabled.patch"];

/// apt's program to download a file and check its digest.
const FETCH: &str = "/usr/lib/apt/apt-helper";

/// Returns what identifies the source.
pub(super) fn identity() -> String {
    [ORIGINAL.1, PATCHES.1, &LEFT_OUT.join(" ")].join(" ")
}

/// Fetches the source and unpacks it into a new directory of `directory`; returns that.
pub(super) fn unpack(directory: &Path) -> Result<PathBuf> {
    let mirrors = mirrors()?;
    let mut step = Step::begin(format!(
        "downloading EDK2 {VERSION}, Debian's source package"
    ));
    for (name, digest) in [ORIGINAL, PATCHES] {
        step.progress(name);
        fetch(&mirrors, name, digest, &directory.join(name))?;
    }
    step.done();

    let mut step = Step::begin("unpacking EDK2");
    let tree = directory.join("source");
    if tree.exists() {
        fs::remove_dir_all(&tree)
            .with_context(|| format!("{} cannot be removed", paths::display(&tree)))?;
    }
    fs::create_dir_all(&tree)?;
    let unpack = |name: &str, options: &[&str]| {
        let mut tar = process::tied("tar");
        tar.arg("-xJf")
            .arg(directory.join(name))
            .arg("-C")
            .arg(&tree);
        process::run(tar.args(options))
    };
    unpack(ORIGINAL.0, &["--strip-components=1"])?;
    unpack(PATCHES.0, &[])?;
    let patches = tree.join("debian/patches");
    let series = fs::read_to_string(patches.join("series"))
        .context("Debian's patches have no list of themselves")?;
    for name in applied(&series)? {
        step.progress(name);
        let mut patch = process::tied("patch");
        patch.args(["-p1", "--silent", "--forward", "-i"]);
        process::run(patch.arg(patches.join(name)).current_dir(&tree))
            .with_context(|| format!("Debian's {name} cannot be applied to EDK2"))?;
    }
    step.done();
    Ok(tree)
}

/// Returns the patches of a list in their order.
fn applied(series: &str) -> Result<Vec<&str>> {
    let all: Vec<&str> = series
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    for name in LEFT_OUT {
        ensure!(
            all.contains(name),
            "Debian's patches of EDK2 {VERSION} have no {name}"
        );
    }
    Ok(all
        .into_iter()
        .filter(|name| !LEFT_OUT.contains(name))
        .collect())
}

/// Returns the mirrors of Debian that apt is configured with.
fn mirrors() -> Result<Vec<String>> {
    let listed = process::output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(SITE)",
        "Origin: Debian",
        "Component: main",
    ]))?;
    let mut mirrors: Vec<String> = Vec::new();
    for mirror in listed.lines().map(|line| line.trim_end_matches('/')) {
        if !mirrors.iter().any(|known| known == mirror) {
            mirrors.push(mirror.to_owned());
        }
    }
    if mirrors.is_empty() {
        bail!("apt has no source of Debian's: add one, and run `apt-get update`");
    }
    Ok(mirrors)
}

/// Downloads a file from the first mirror that has it, unless it is there.
fn fetch(mirrors: &[String], name: &str, digest: &str, to: &Path) -> Result<()> {
    if to.is_file() && process::sha256(to)? == digest {
        return Ok(());
    }
    let mut last = None;
    for mirror in mirrors {
        let url = format!("{mirror}/{POOL}/{}", name.replace('+', "%2b"));
        let fetched = process::output(
            process::tied(FETCH)
                .arg("download-file")
                .arg(&url)
                .arg(to)
                .arg(format!("SHA256:{digest}")),
        );
        match fetched {
            Ok(_) if process::sha256(to)? == digest => return Ok(()),
            Ok(_) => bail!("{url} is another file than edk2 {VERSION} has"),
            Err(error) => last = Some(error),
        }
    }
    let error = last.context("apt has no source of Debian's")?;
    Err(error.context(format!(
        "{name} cannot be downloaded from {}: it belongs to Debian's source package edk2 \
         {VERSION}; put the file into {} yourself if no mirror has it any more",
        mirrors.join(", "),
        to.parent().map(paths::display).unwrap_or_default()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_are_applied_in_order_and_one_that_is_left_out_must_be_there() {
        let series = "# comment\na.diff\n\nDisable-the-Shell-when-SecureBoot-is-enabled.patch\nb\n";
        assert_eq!(applied(series).unwrap(), ["a.diff", "b"]);
        let error = applied("a.diff\n").unwrap_err().to_string();
        assert!(error.contains("Disable-the-Shell"), "{error}");
    }
}
