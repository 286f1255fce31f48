//! `cargo xtask bench`: builds podvisor as a user would, and the harness, and runs the harness
//! where KVM is sound. All measuring is in benches/.

mod args;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::host::{self, Request};
use crate::report::{self, Step};
use crate::{cargo, cpio, guest, images, kernel, paths, process, setup};
pub(crate) use args::Args;
use args::{
    BlkArgs, BootArgs, CriArgs, ImageArgs, InterruptArgs, NetArgs, PullArgs, RestoreArgs,
    StartArgs, Subject, VmArgs,
};

/// Attempts with hosts that count instructions: one in three stalls while QEMU's guest waits for
/// its device.
const ICOUNT_ATTEMPTS: usize = 5;

pub(crate) fn command(args: &Args) -> Result<ExitCode> {
    match &args.subject {
        Subject::Blk(args) => blk(args),
        Subject::Boot(args) => boot(args),
        Subject::Cri(args) => cri(args),
        Subject::Image(args) => image(args),
        Subject::Interrupt(args) => interrupt(args),
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
        Some(kernel) => absolute(kernel)?,
        None => kernel::ensure()?,
    };
    let programs = build()?;
    let initramfs = initramfs("init.S", &["-nostdlib", "-Wl,-z,noseparate-code"])?;
    let qemu = process::output(Command::new("sh").args(["-c", "command -v qemu-system-x86_64"]))?;

    let mut command = vec![programs.join("podvisor-benches").display().to_string()];
    let mut add = |words: &[&str]| command.extend(words.iter().map(|word| (*word).to_owned()));
    add(&["boot", "--qemu", &qemu, "--runs", &args.runs.to_string()]);
    add(&["--kernel", &kernel.display().to_string()]);
    add(&["--initramfs", &initramfs.display().to_string()]);
    let podvisor = programs.join("boot-podvisor");
    add(&["--podvisor", &podvisor.display().to_string()]);
    for (option, path) in [
        ("--firecracker", &args.firecracker),
        ("--cloud-hypervisor", &args.cloud_hypervisor),
    ] {
        if let Some(path) = path {
            add(&[option, &absolute(path)?.display().to_string()]);
        }
    }
    if let Some(cmdline) = &args.cmdline {
        add(&["--cmdline", cmdline]);
    }
    if let Some(memory) = args.memory {
        add(&["--memory", &memory.to_string()]);
    }
    if args.icount {
        add(&["--icount"]);
    }
    let shares = outputs(args.json.as_deref(), None, &mut command)?;
    let request = Request {
        command,
        shares,
        icount: args.icount,
        limit: Some(Duration::from_secs(900)),
        ..Request::default()
    };
    host::run_request(request).map(ExitCode::from)
}

fn blk(args: &BlkArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::HOST, setup::BUILD])?;
    let kernel = kernel::ensure()?;
    let programs = build()?;
    let initramfs = initramfs("blk.c", &["-O2"])?;
    let qemu = process::output(Command::new("sh").args(["-c", "command -v qemu-system-x86_64"]))?;
    let mut command = vec![programs.join("podvisor-benches").display().to_string()];
    let mut add = |words: &[&str]| command.extend(words.iter().map(|word| (*word).to_owned()));
    let runs = args.runs.unwrap_or(if args.icount { 1 } else { 3 });
    add(&["blk", "--qemu", &qemu, "--runs", &runs.to_string()]);
    add(&["--kernel", &kernel.display().to_string()]);
    add(&["--initramfs", &initramfs.display().to_string()]);
    let podvisor = programs.join("blk-podvisor");
    add(&["--podvisor", &podvisor.display().to_string()]);
    if args.icount {
        add(&["--icount"]);
    }
    let shares = outputs(args.json.as_deref(), args.plot.as_deref(), &mut command)?;
    let request = Request {
        command,
        shares,
        icount: args.icount,
        limit: Some(Duration::from_secs(90 + 60 * runs as u64)),
        ..Request::default()
    };
    in_hosts(&request)
}

fn image(args: &ImageArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::HOST, setup::BUILD])?;
    let kernel = kernel::ensure()?;
    let programs = build()?;
    let initramfs = initramfs("image.c", &["-O2"])?;
    let mut command = vec![programs.join("podvisor-benches").display().to_string()];
    let mut add = |words: &[&str]| command.extend(words.iter().map(|word| (*word).to_owned()));
    add(&["image", "--kernel", &kernel.display().to_string()]);
    add(&["--initramfs", &initramfs.display().to_string()]);
    let podvisor = programs.join("image-podvisor");
    add(&["--podvisor", &podvisor.display().to_string()]);
    if let Some(way) = &args.memory_of {
        let machines = args.machines.to_string();
        add(&["--memory-of", way, "--machines", &machines]);
    }
    if args.icount {
        add(&["--icount"]);
    }
    let shares = outputs(args.json.as_deref(), None, &mut command)?;
    let request = Request {
        command,
        shares,
        icount: args.icount,
        limit: Some(Duration::from_secs(600)),
        ..Request::default()
    };
    in_hosts(&request)
}

fn net(args: &NetArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::HOST, setup::BUILD])?;
    let kernel = kernel::ensure()?;
    let programs = build()?;
    let initramfs = initramfs("net.c", &["-O2"])?;
    let qemu = process::output(Command::new("sh").args(["-c", "command -v qemu-system-x86_64"]))?;
    let mut command = vec![programs.join("podvisor-benches").display().to_string()];
    let mut add = |words: &[&str]| command.extend(words.iter().map(|word| (*word).to_owned()));
    let runs = args.runs.unwrap_or(if args.icount { 1 } else { 3 });
    add(&["net", "--qemu", &qemu, "--runs", &runs.to_string()]);
    add(&["--kernel", &kernel.display().to_string()]);
    add(&["--initramfs", &initramfs.display().to_string()]);
    let podvisor = programs.join("net-podvisor");
    add(&["--podvisor", &podvisor.display().to_string()]);
    if args.icount {
        add(&["--icount"]);
    }
    let shares = outputs(args.json.as_deref(), args.plot.as_deref(), &mut command)?;
    let request = Request {
        command,
        shares,
        icount: args.icount,
        limit: Some(Duration::from_secs(120 + 120 * runs as u64)),
        ..Request::default()
    };
    in_hosts(&request)
}

/// Runs `request` in a host, and again in another one if a host that counts instructions stalls.
fn in_hosts(request: &Request) -> Result<ExitCode> {
    let attempts = if request.icount { ICOUNT_ATTEMPTS } else { 1 };
    let mut status = 0;
    for attempt in 1..=attempts {
        status = host::run_request(request.clone())?;
        let has_stalled = [host::TIMED_OUT, host::HUNG].contains(&status);
        if !has_stalled || attempt == attempts {
            break;
        }
        report::note("a host that counts instructions stalls now and then; trying once more");
    }
    Ok(ExitCode::from(status))
}

/// Makes `command` write JSON to the file `json` and a picture to the file `plot`; returns their
/// directories, which must be writable in the host.
fn outputs(
    json: Option<&Path>,
    plot: Option<&Path>,
    command: &mut Vec<String>,
) -> Result<Vec<PathBuf>> {
    let mut shares = Vec::new();
    for (option, path) in [("--json", json), ("--plot", plot)] {
        let Some(path) = path else {
            continue;
        };
        command.push(option.to_owned());
        if option == "--json" && path == Path::new("-") {
            command.push("-".to_owned());
            continue;
        }
        let path = std::path::absolute(path)?;
        let directory = path
            .parent()
            .filter(|_| !path.is_dir())
            .with_context(|| format!("{option} {} names no file", path.display()))?;
        let directory = absolute(directory)?;
        command.push(path.display().to_string());
        if !shares.contains(&directory) {
            shares.push(directory);
        }
    }
    Ok(shares)
}

fn restore(args: &RestoreArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::HOST, setup::BUILD])?;
    let [kernel, initramfs] = guest::ensure()?;
    let programs = build()?;
    let mut command = vec![programs.join("podvisor-benches").display().to_string()];
    let mut add = |words: &[&str]| command.extend(words.iter().map(|word| (*word).to_owned()));
    add(&["restore", "--kernel", &kernel.display().to_string()]);
    add(&["--initramfs", &initramfs.display().to_string()]);
    let program = programs.join("agent-podvisor");
    add(&["--program", &program.display().to_string()]);
    let runs = args.runs.unwrap_or(if args.icount { 3 } else { 20 });
    add(&["--runs", &runs.to_string()]);
    add(&["--transport", &args.transport]);
    add(&["--clones", &args.clones.to_string()]);
    add(&["--memory", &args.memory.to_string()]);
    if let Some(path) = &args.firecracker {
        add(&["--firecracker", &absolute(path)?.display().to_string()]);
    }
    if args.icount {
        add(&["--icount"]);
    }
    let request = Request {
        command,
        icount: args.icount,
        limit: Some(Duration::from_secs(900)),
        ..Request::default()
    };
    host::run_request(request).map(ExitCode::from)
}

fn interrupt(args: &InterruptArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::HOST, setup::BUILD])?;
    let programs = build()?;
    let request = Request {
        command: vec![
            programs.join("podvisor-benches").display().to_string(),
            "interrupt".to_owned(),
        ],
        icount: args.icount,
        limit: Some(Duration::from_secs(300)),
        ..Request::default()
    };
    host::run_request(request).map(ExitCode::from)
}

fn start(args: &StartArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::HOST, setup::BUILD, setup::IMAGES, setup::BENCH_START])?;
    guest::ensure()?;
    let image = images::ensure()?.join("busybox.oci.tar");
    let programs = build()?;
    let runc = process::output(Command::new("sh").args(["-c", "command -v runc"]))?;
    let runs = args.runs.unwrap_or(if args.icount { 5 } else { 20 });
    let mut command = vec![programs.join("podvisor-benches").display().to_string()];
    let mut add = |words: &[&str]| command.extend(words.iter().map(|word| (*word).to_owned()));
    add(&["start", "--runc", &runc, "--runs", &runs.to_string()]);
    add(&[
        "--podvisor",
        &programs.join("podvisor").display().to_string(),
    ]);
    add(&["--guest", &paths::guest().display().to_string()]);
    add(&["--image", &image.display().to_string()]);
    add(&["--at-once", &args.at_once.to_string()]);
    add(&["--idle", &args.idle.to_string()]);
    if args.icount {
        add(&["--icount"]);
    }
    let request = Request {
        command,
        icount: args.icount,
        limit: Some(Duration::from_secs(1800)),
        ..Request::default()
    };
    host::run_request(request).map(ExitCode::from)
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
    let programs = build()?;
    let path = |name: &str| programs.join(name).display().to_string();
    let mut command = vec![path("podvisor-benches"), "cri".to_owned()];
    let mut add = |flag: &str, value: String| command.extend([flag.to_owned(), value]);
    add("--podvisor", path("podvisor"));
    add("--guest", paths::guest().display().to_string());
    add("--registry", registry.display().to_string());
    let runs = args.runs.unwrap_or(if args.icount { 5 } else { 20 });
    add("--runs", runs.to_string());
    add("--pods", args.pods.to_string());
    if args.icount {
        command.push("--icount".to_owned());
    }
    let request = Request {
        command,
        icount: args.icount,
        limit: Some(Duration::from_secs(1800)),
        ..Request::default()
    };
    host::run_request(request).map(ExitCode::from)
}

fn vm(args: &VmArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::HOST, setup::BUILD])?;
    let [loader_kernel, loader_initramfs] = guest::ensure_loader()?;
    let system = images::small::ensure()?;
    let programs = build()?;
    let qemu = process::output(Command::new("sh").args(["-c", "command -v qemu-system-x86_64"]))?;
    let text = |path: &Path| path.display().to_string();
    let mut command = vec![text(&programs.join("podvisor-benches")), "vm".to_owned()];
    let mut add = |flag: &str, value: String| command.extend([flag.to_owned(), value]);
    add("--podvisor", text(&programs.join("vm-podvisor")));
    add("--loader-kernel", text(&loader_kernel));
    add("--loader-initramfs", text(&loader_initramfs));
    add("--system", text(&system));
    add("--qemu", qemu);
    add("--runs", args.runs.to_string());
    if let Some(path) = &args.cloud_hypervisor {
        add("--cloud-hypervisor", text(&absolute(path)?));
    }
    if args.icount {
        command.push("--icount".to_owned());
    }
    let shares = outputs(args.json.as_deref(), None, &mut command)?;
    let request = Request {
        command,
        shares,
        icount: args.icount,
        limit: Some(Duration::from_secs(1200)),
        ..Request::default()
    };
    in_hosts(&request)
}

/// Runs on this machine, as root, with its disk.
fn pull(args: &PullArgs) -> Result<ExitCode> {
    setup::ensure(&[setup::BUILD, setup::IMAGES, setup::BENCH_PULL])?;
    let images = images::ensure()?;
    let programs = build()?;
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
    if let Some(path) = &args.json {
        command.arg("--json").arg(path);
    }
    process::run(&mut command)?;
    Ok(ExitCode::SUCCESS)
}

fn absolute(path: &Path) -> Result<PathBuf> {
    path.canonicalize()
        .with_context(|| format!("{} cannot be read", path.display()))
}

/// What every measurement is built with: another set of packages would be another set of features
/// of what they depend on, for which cargo builds all of it again.
const PACKAGES: [&str; 2] = ["podvisor-benches", "podvisor-cri"];

/// Builds the harness and podvisor's side of it, optimized for a program that starts once per pod;
/// returns their directory.
fn build() -> Result<PathBuf> {
    let step = Step::begin("building the benchmarks");
    let programs = cargo::build_static(&PACKAGES)?;
    step.done();
    Ok(programs)
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
    let mut archive = cpio::Writer::new(Vec::new());
    archive.directory("dev")?;
    archive.character_device("dev/console", 0o600, (5, 1))?;
    archive.file("init", 0o755, &fs::read(&init)?)?;
    let path = directory.join(source).with_extension("cpio");
    fs::write(&path, archive.finish()?)
        .with_context(|| format!("{} cannot be written", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_to_directories_that_the_host_shares_once() {
        let here = std::env::current_dir().unwrap();
        let given = |json: &str, plot: Option<&str>| {
            let mut command = Vec::new();
            let shares = outputs(Some(Path::new(json)), plot.map(Path::new), &mut command);
            (command, shares.unwrap())
        };
        let at = |name: &str| here.join(name).display().to_string();
        let (command, shares) = given("a.json", Some("./a.svg"));
        assert_eq!(command, ["--json", &at("a.json"), "--plot", &at("a.svg")]);
        assert_eq!(shares, [here.canonicalize().unwrap()]);
        let (command, shares) = given("-", Some("src/a.svg"));
        assert_eq!(command, ["--json", "-", "--plot", &at("src/a.svg")]);
        assert_eq!(shares, [here.join("src").canonicalize().unwrap()]);
        assert!(given("-", None).1.is_empty());
    }

    #[test]
    fn a_directory_that_is_missing_is_named_before_anything_runs() {
        let path = Path::new("missing/a.svg");
        let error = outputs(None, Some(path), &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("missing"));
        assert!(outputs(None, Some(Path::new("src")), &mut Vec::new()).is_err());
    }
}
