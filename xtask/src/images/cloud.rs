//! `cargo xtask cloud`: a Debian as it is made for clouds, and the tests that boot it. The disk is in
//! `target/cloud`, for as long as its recipe stays the same.

use std::fs;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use podvisor_test_disks::{Gpt, PartitionType, ext4};

use super::{sources, suite};
use crate::report::Step;
use crate::{cargo, guest, libtest, paths, process, setup};

const RECIPE: &str = include_str!("cloud.sh");
const GRUB: &str = include_str!("cloud-grub.cfg");

/// The UUID of the root.
const UUID: &str = "0b6c1a52-4a0e-4f53-8a6d-636c6f756464";

/// The size of the root, of which half is used. Guests make it larger.
const ROOT_MIB: u64 = 1400;

/// The environment variable with the disk's path.
const VARIABLE: &str = "PODVISOR_TEST_CLOUD";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Stop after this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 5400)]
    timeout: u32,
    /// Only make the image
    #[arg(long)]
    no_run: bool,
    /// Run only the tests whose name contains one of these
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
}

pub(crate) fn command(args: &Args) -> Result<ExitCode> {
    setup::ensure(&[setup::KERNEL, setup::HOST, setup::BUILD, setup::TEST])?;
    let disk = ensure()?;
    println!("{}", paths::display(&disk));
    if args.no_run {
        return Ok(ExitCode::SUCCESS);
    }
    let step = Step::begin("building the tests");
    let suites = cargo::build_tests(&["--package", "podvisor-cri", "--test", "cloud_image"])?;
    let program = suites.first().context("cargo built no suite")?;
    step.done();
    guest::ensure()?;
    guest::ensure_loader()?;
    let step = Step::begin("booting the cloud image");
    let own = std::env::current_exe().context("this program's own file cannot be found")?;
    let mut command = process::tied(own);
    command
        .args(["host", "--timeout", &args.timeout.to_string(), "--"])
        .arg(&program.path)
        .args(["--test-threads=1", "--nocapture"])
        .args(&args.filters)
        .current_dir(paths::root())
        .env("PODVISOR_GUEST_DIR", paths::guest())
        .env(VARIABLE, &disk)
        .stdin(Stdio::null());
    let count = libtest::read(&mut command, "cloud image", 0)?;
    step.done();
    println!("cloud image: {count}");
    Ok(match count.failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// Makes the disk if it is missing; returns its path.
fn ensure() -> Result<PathBuf> {
    let directory = paths::target().join("cloud");
    let disk = directory.join("disk.raw");
    let suite = suite()?;
    let key = process::key(&[RECIPE, GRUB, UUID, &suite, "1"])?;
    let is_current = || fs::read_to_string(directory.join("key")).is_ok_and(|made| made == key);
    if is_current() {
        return Ok(disk);
    }
    let _lock = process::Lock::take(&directory.with_extension("lock"))?;
    if is_current() {
        return Ok(disk);
    }
    setup::ensure(&[setup::IMAGES, setup::SMALL])?;
    if !rustix::process::geteuid().is_root() {
        bail!("only root can make the image, whose files have owners: run this as root");
    }
    let step = Step::begin("making a cloud image with Debian's tools");
    let partial = directory.with_extension("partial");
    for old in [&partial, &directory] {
        if old.exists() {
            fs::remove_dir_all(old)
                .with_context(|| format!("{} cannot be removed", old.display()))?;
        }
    }
    fs::create_dir_all(&partial)?;
    process::run(
        process::tied("sh")
            .arg(paths::root().join("xtask/src/images/cloud.sh"))
            .arg(&suite)
            .args(sources())
            .current_dir(&partial)
            .env(
                "GRUB",
                paths::root().join("xtask/src/images/cloud-grub.cfg"),
            )
            .env("UUID", UUID)
            .env("TMPDIR", &partial)
            .stdin(Stdio::null())
            .stdout(std::io::stderr()),
    )?;
    let (root, image) = (partial.join("root"), partial.join("root.ext4"));
    ext4(&image, ROOT_MIB, UUID, &root)?;
    Gpt::new()
        .partition(1, PartitionType::Linux, &image)
        .write(&partial.join("disk.raw"))?;
    fs::remove_file(&image)?;
    fs::remove_dir_all(&root)?;
    fs::write(partial.join("key"), key)?;
    fs::rename(&partial, &directory)?;
    step.done();
    Ok(disk)
}
