//! `cargo xtask guest`: builds the kernel and the agent's initramfs, from which every guest boots.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result};

use crate::report::Step;
use crate::{cargo, cpio, kernel, paths, process, setup};

pub(crate) const TRIPLE: &str = "x86_64-unknown-linux-gnu";

pub(crate) fn command() -> Result<()> {
    for path in ensure()? {
        println!("{}", paths::display(&path));
    }
    Ok(())
}

/// The agent is in every guest and is started for every container: static, without relocations
/// (there is no need for address randomization in an initramfs), without unwind tables (a panic
/// aborts), identical functions merged.
const FLAGS: [&str; 4] = [
    "-C target-feature=+crt-static",
    "-C relocation-model=static",
    "-C force-unwind-tables=no",
    "-C link-arg=-Wl,--icf=all",
];

/// Builds both if they are missing; returns their paths.
pub(crate) fn ensure() -> Result<[PathBuf; 2]> {
    Ok([kernel::ensure()?, initramfs()?])
}

/// Builds the agent as a static program and packs it as `/init`, with the one file that the kernel
/// needs before it: /dev/console, for its first messages.
fn initramfs() -> Result<PathBuf> {
    setup::ensure(&[setup::BUILD])?;
    let step = Step::begin("building the agent and its initramfs");
    // A separate target directory: with other flags, cargo would rebuild everything each time.
    let target = paths::guest().join("agent");
    process::run(
        process::tied(cargo::program())
            .args([
                "build",
                "--quiet",
                "--profile",
                "guest",
                "--locked",
                "--package",
                "podvisor-agent",
            ])
            .args(["--target", TRIPLE, "--target-dir"])
            .arg(&target)
            .current_dir(paths::root())
            .env("RUSTFLAGS", FLAGS.join(" "))
            .stdin(Stdio::null())
            .stdout(std::io::stderr()),
    )?;
    let agent = target.join(TRIPLE).join("guest/podvisor-agent");
    let init = fs::read(&agent).with_context(|| format!("{} is missing", agent.display()))?;
    let mut archive = cpio::Writer::new(Vec::new());
    archive.directory("dev")?;
    archive.character_device("dev/console", 0o600, (5, 1))?;
    archive.file("init", 0o755, &init)?;
    let output = paths::guest().join("initramfs.cpio");
    let bytes = archive.finish()?;
    if fs::read(&output).is_ok_and(|present| present == bytes) {
        step.done();
        return Ok(output);
    }
    let partial = output.with_extension("partial");
    fs::write(&partial, bytes)
        .with_context(|| format!("{} cannot be written", partial.display()))?;
    fs::rename(&partial, &output)?;
    step.done();
    Ok(output)
}
