//! `cargo xtask bench`: builds podvisor as a user would, and the harness, and runs the harness
//! where KVM is sound. All measuring is in benches/.

mod args;
mod measurement;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::{guest, images, kernel, paths, process, setup};
pub(crate) use args::Args;
use args::{
    BlkArgs, BootArgs, Clock, CriArgs, ImageArgs, InterruptArgs, MigrateArgs, NetArgs, PullArgs,
    RestoreArgs, StartArgs, Subject, VmArgs,
};
use measurement::Measurement;

pub(crate) fn command(args: &Args) -> Result<ExitCode> {
    match &args.subject {
        Subject::Blk(args) => blk(args),
        Subject::Boot(args) => boot(args),
        Subject::Cri(args) => cri(args),
        Subject::Image(args) => image(args),
        Subject::Interrupt(args) => interrupt(args),
        Subject::Migrate(args) => migrate(args),
        Subject::Net(args) => net(args),
        Subject::Pull(args) => pull(args),
        Subject::Restore(args) => restore(args),
        Subject::Start(args) => start(args),
        Subject::Vm(args) => vm(args),
    }
}

fn boot(args: &BootArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::HOST, setup::BUILD])?;
    let kernel = match &args.kernel {
        Some(kernel) => measurement::absolute(kernel)?,
        None => kernel::ensure()?,
    };
    let initramfs = initramfs("init.S", &["-nostdlib", "-Wl,-z,noseparate-code"])?;
    let mut measurement = Measurement::new("boot", args.clock)?
        .with("--qemu", qemu()?)
        .with("--runs", args.runs)
        .with_path("--kernel", &kernel)
        .with_path("--initramfs", &initramfs)
        .with_program("--podvisor", "boot-podvisor")
        .with_file("--firecracker", args.firecracker.as_deref())?
        .with_file("--cloud-hypervisor", args.cloud_hypervisor.as_deref())?
        .with_json(&args.json)?;
    if let Some(cmdline) = &args.cmdline {
        measurement = measurement.with("--cmdline", cmdline);
    }
    if let Some(memory) = args.memory {
        measurement = measurement.with("--memory", memory);
    }
    measurement.run(Duration::from_secs(900))
}

fn blk(args: &BlkArgs) -> Result<ExitCode> {
    let runs = args.runs.unwrap_or(rounds(args.clock));
    devices("blk", args.clock, runs)?
        .with_json(&args.json)?
        .with_plot(&args.plot)?
        .run(Duration::from_secs(90 + 60 * runs as u64))
}

fn net(args: &NetArgs) -> Result<ExitCode> {
    let runs = args.runs.unwrap_or(rounds(args.clock));
    devices("net", args.clock, runs)?
        .with_json(&args.json)?
        .with_plot(&args.plot)?
        .run(Duration::from_secs(120 + 120 * runs as u64))
}

fn migrate(args: &MigrateArgs) -> Result<ExitCode> {
    devices("migrate", args.clock, args.runs)?
        .with("--fill", args.fill)
        .with("--region", args.region)
        .with("--pages", args.pages)
        .with("--downtime", args.downtime)
        .with_json(&args.json)?
        .with_plot(&args.plot)?
        .run(Duration::from_secs(120 + 120 * args.runs as u64))
}

/// Rounds of a measurement in which everything runs once: where instructions are counted, all are
/// alike.
fn rounds(clock: Clock) -> usize {
    if clock.icount { 1 } else { 3 }
}

/// A measurement of a device of podvisor and of QEMU, whose guest is named like it.
fn devices(subject: &str, clock: Clock, runs: usize) -> Result<Measurement> {
    setup::ensure(&[setup::HOST, setup::BUILD])?;
    let kernel = kernel::ensure()?;
    let initramfs = initramfs(&format!("{subject}.c"), &["-O2"])?;
    Ok(Measurement::new(subject, clock)?
        .with("--qemu", qemu()?)
        .with("--runs", runs)
        .with_path("--kernel", &kernel)
        .with_path("--initramfs", &initramfs)
        .with_program("--podvisor", &format!("{subject}-podvisor")))
}

fn image(args: &ImageArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::HOST, setup::BUILD])?;
    let kernel = kernel::ensure()?;
    let initramfs = initramfs("image.c", &["-O2"])?;
    let mut measurement = Measurement::new("image", args.clock)?
        .with_path("--kernel", &kernel)
        .with_path("--initramfs", &initramfs)
        .with_program("--podvisor", "image-podvisor")
        .with_json(&args.json)?;
    if let Some(way) = &args.memory_of {
        measurement = measurement
            .with("--memory-of", way)
            .with("--machines", args.machines);
    }
    measurement.run(Duration::from_secs(600))
}

fn restore(args: &RestoreArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::HOST, setup::BUILD])?;
    let [kernel, initramfs] = guest::ensure()?;
    let runs = if args.clock.icount { 3 } else { 20 };
    Measurement::new("restore", args.clock)?
        .with_path("--kernel", &kernel)
        .with_path("--initramfs", &initramfs)
        .with_program("--program", "agent-podvisor")
        .with("--runs", args.runs.unwrap_or(runs))
        .with("--transport", &args.transport)
        .with("--clones", args.clones)
        .with("--memory", args.memory)
        .with_file("--firecracker", args.firecracker.as_deref())?
        .run(Duration::from_secs(900))
}

fn interrupt(args: &InterruptArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::HOST, setup::BUILD])?;
    Measurement::of_one_unit("interrupt", args.clock)?.run(Duration::from_secs(300))
}

fn start(args: &StartArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::HOST, setup::BUILD, setup::IMAGES, setup::BENCH_START])?;
    guest::ensure()?;
    let image = images::ensure()?.join("busybox.oci.tar");
    let runc = process::output(Command::new("sh").args(["-c", "command -v runc"]))?;
    Measurement::new("start", args.clock)?
        .with("--runc", runc)
        .with("--runs", args.runs.unwrap_or(pods(args.clock)))
        .with_program("--podvisor", "podvisor")
        .with_path("--guest", &paths::guest())
        .with_path("--image", &image)
        .with("--at-once", args.at_once)
        .with("--idle", args.idle)
        .run(Duration::from_secs(1800))
}

fn cri(args: &CriArgs) -> Result<ExitCode> {
    setup::ensure(&[
        setup::HOST,
        setup::BUILD,
        setup::IMAGES,
        setup::BENCH_CRI,
        setup::DEMO,
    ])?;
    guest::ensure()?;
    let registry = images::ensure()?.join("registry/data");
    Measurement::new("cri", args.clock)?
        .with_program("--podvisor", "podvisor")
        .with_path("--guest", &paths::guest())
        .with_path("--registry", &registry)
        .with("--runs", args.runs.unwrap_or(pods(args.clock)))
        .with("--pods", args.pods)
        .run(Duration::from_secs(1800))
}

/// How many containers or pods are started one after the other.
fn pods(clock: Clock) -> usize {
    if clock.icount { 5 } else { 20 }
}

fn vm(args: &VmArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::HOST, setup::BUILD])?;
    let [loader_kernel, loader_initramfs] = guest::ensure_loader()?;
    let system = images::small::ensure()?;
    Measurement::new("vm", args.clock)?
        .with_program("--podvisor", "vm-podvisor")
        .with_path("--loader-kernel", &loader_kernel)
        .with_path("--loader-initramfs", &loader_initramfs)
        .with_path("--system", &system)
        .with("--qemu", qemu()?)
        .with("--runs", args.runs)
        .with_file("--cloud-hypervisor", args.cloud_hypervisor.as_deref())?
        .with_json(&args.json)?
        .run(Duration::from_secs(1200))
}

/// Returns where QEMU is.
fn qemu() -> Result<String> {
    process::output(Command::new("sh").args(["-c", "command -v qemu-system-x86_64"]))
}

/// Runs on this machine, as root, with its disk.
fn pull(args: &PullArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::BUILD, setup::IMAGES, setup::BENCH_PULL])?;
    let images = images::ensure()?;
    let programs = measurement::build()?;
    let mut command = process::tied(programs.join("podvisor-benches"));
    command
        .args(["pull", "--runs", &args.runs.to_string()])
        .arg("--podvisor")
        .arg(programs.join("podvisor"))
        .arg("--registry")
        .arg(images.join("registry/data"))
        .arg("--directory")
        .arg(paths::target().join("bench/pull"))
        .stdin(Stdio::null());
    if let Some(path) = &args.json.path {
        command.arg("--json").arg(path);
    }
    process::run(&mut command)?;
    Ok(ExitCode::SUCCESS)
}

/// Builds an initramfs that only contains one of the harness's own inits, from `benches/guest`.
fn initramfs(source: &str, flags: &[&str]) -> Result<PathBuf> {
    let directory = paths::target().join("bench");
    fs::create_dir_all(&directory)
        .with_context(|| format!("{} cannot be made", directory.display()))?;
    let init = directory.join("init");
    process::run(
        process::tied("gcc")
            .args(["-static", "-s", "-o"])
            .arg(&init)
            .args(flags)
            .arg(paths::root().join("benches/guest").join(source)),
    )?;
    let mut archive = podvisor_cpio::Writer::new(Vec::new());
    archive.directory("dev")?;
    archive.character_device("dev/console", 0o600, (5, 1))?;
    archive.file("init", 0o755, &fs::read(&init)?)?;
    let path = directory.join(source).with_extension("cpio");
    fs::write(&path, archive.finish()?)
        .with_context(|| format!("{} cannot be written", path.display()))?;
    Ok(path)
}
