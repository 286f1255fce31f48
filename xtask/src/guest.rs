//! `cargo xtask guest`: builds the kernel and the agent's initramfs, from which every guest boots,
//! the loader's, which boot the disks of distributions, and the agent that these may get.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result};

use crate::report::Step;
use crate::{cargo, kernel, paths, process, setup};

pub(crate) fn command() -> Result<()> {
    let own_os = ensure_loader()?.into_iter().chain([ensure_agent()?]);
    for path in ensure()?.into_iter().chain(own_os) {
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

/// Whether a kernel and an initramfs were built, however old they are.
pub(crate) fn is_there() -> bool {
    let built = |name| paths::guest().join(name).exists();
    built("vmlinux") && built("initramfs.cpio")
}

/// Builds both if they are missing; returns their paths.
pub(crate) fn ensure() -> Result<[PathBuf; 2]> {
    Ok([kernel::ensure()?, initramfs()?])
}

/// Builds what boots disks of distributions, if it is missing: the loader's kernel and its program.
pub(crate) fn ensure_loader() -> Result<[PathBuf; 2]> {
    let program = program("podvisor-loader", "loader.cpio", "building the loader")?;
    Ok([kernel::ensure_loader()?, program])
}

/// Builds the guest agent of systems that bring none, if it is missing.
pub(crate) fn ensure_agent() -> Result<PathBuf> {
    let step = Step::begin("building the guest agent");
    let program = build("podvisor-ga")?;
    let output = paths::guest().join("podvisor-ga");
    replace(&output, &program)?;
    step.done();
    Ok(output)
}

fn initramfs() -> Result<PathBuf> {
    let step = "building the agent and its initramfs";
    program("podvisor-agent", "initramfs.cpio", step)
}

/// Builds a package's program statically and packs it as `/init`, with the one file that the kernel
/// needs before it: /dev/console, for its first messages.
fn program(package: &str, archive: &str, what: &'static str) -> Result<PathBuf> {
    let step = Step::begin(what);
    let init = build(package)?;
    let mut cpio = podvisor_cpio::Writer::new(Vec::new());
    cpio.directory("dev")?;
    cpio.character_device("dev/console", 0o600, (5, 1))?;
    cpio.file("init", 0o755, &init)?;
    let output = paths::guest().join(archive);
    replace(&output, &cpio.finish()?)?;
    step.done();
    Ok(output)
}

/// Builds a package's program statically; returns it.
fn build(package: &str) -> Result<Vec<u8>> {
    setup::ensure(&[setup::BUILD])?;
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
                package,
            ])
            .args(["--target", cargo::TRIPLE, "--target-dir"])
            .arg(&target)
            .current_dir(paths::root())
            .env("RUSTFLAGS", FLAGS.join(" "))
            .stdin(Stdio::null())
            .stdout(std::io::stderr()),
    )?;
    let built = target.join(cargo::TRIPLE).join("guest").join(package);
    fs::read(&built).with_context(|| format!("{} is missing", built.display()))
}

/// Writes a file whole, unless it has these bytes.
fn replace(output: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(output).is_ok_and(|present| present == bytes) {
        return Ok(());
    }
    let partial = output.with_extension("partial");
    fs::write(&partial, bytes)
        .with_context(|| format!("{} cannot be written", partial.display()))?;
    Ok(fs::rename(&partial, output)?)
}
