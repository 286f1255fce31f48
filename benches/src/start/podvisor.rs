//! podvisor's command line: containers that run `true`, and idle ones.

use std::fmt;
use std::fs;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Value;

use super::{Args, Ends};
use crate::boot::{Memory, Stage};

/// The guest's memory in MiB: the minimum.
const MEMORY_MIB: u64 = 64;

/// Messages with `--log-level debug`, and their meaning.
const PHASES: [(&str, &str); 6] = [
    (": begin", "begins"),
    (": the image is here", "image"),
    (": the sandbox runs", "agent answers"),
    (": the program runs", "program runs"),
    (": the program has ended", "program ended"),
    (": done", "over"),
];

/// Where the machine comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Boot {
    Cold,
    Warm,
}

impl Boot {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Cold => "podvisor, by booting",
            Self::Warm => "podvisor, as a clone",
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Warm => "warm",
        }
    }
}

#[derive(Debug)]
pub(super) struct Podvisor {
    program: PathBuf,
    guest: PathBuf,
    root: PathBuf,
    /// The name of the image in the archive.
    image: String,
}

impl Podvisor {
    pub(super) fn stage(args: &Args, stage: &Stage) -> Result<Self> {
        let guest = stage.path().join("guest");
        fs::create_dir(&guest)?;
        for name in ["vmlinux", "initramfs.cpio"] {
            let file = args.guest.join(name);
            fs::copy(&file, guest.join(name))
                .with_context(|| format!("{} cannot be copied", file.display()))?;
        }
        let mut podvisor = Self {
            program: stage.copy(&args.podvisor)?,
            guest,
            root: stage.path().join("root"),
            image: String::new(),
        };
        let mut load = podvisor.command();
        let output = podvisor.output(load.arg("load").arg("--input").arg(&args.image))?;
        let said = String::from_utf8(output.stdout)?;
        let name = said.trim().strip_prefix("Loaded image: ");
        podvisor.image = name.context("`podvisor load` names no image")?.to_owned();
        Ok(podvisor)
    }

    /// Prepares what `boot` needs before it is measured: a clone's template.
    pub(super) fn prepare(&self, boot: Boot) -> Result<()> {
        if boot == Boot::Cold {
            return Ok(());
        }
        // The first one boots, and starts a process that creates the template.
        self.start(boot)?.end()?;
        wait_for_templates(&self.root)
    }

    pub(super) fn start(&self, boot: Boot) -> Result<Run> {
        let child = self
            .run(boot)
            .args(["--rm", &self.image, "true"])
            .stdin(Stdio::null())
            .spawn()
            .context("podvisor cannot be started")?;
        Ok(Run(child))
    }

    /// Returns when each phase of a run was reached, in ms.
    pub(super) fn phases(&self, boot: Boot) -> Result<Vec<(&'static str, f64)>> {
        let mut command = self.command();
        command.args(["--log-level", "debug"]);
        Self::ask(&mut command, boot);
        let began = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let output = self.output(command.args(["--rm", &self.image, "true"]))?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        let began = began.as_secs_f64() % 86_400.0;
        let phases = PHASES.iter().filter_map(|(says, name)| {
            let line = log.lines().find(|line| line.contains(says))?;
            let ms = (time_of_day(line)? - began) * 1e3;
            Some((*name, ms))
        });
        Ok(phases.collect())
    }

    /// Returns the mean memory of `count` containers that sleep.
    pub(super) fn idle(&self, boot: Boot, count: usize) -> Result<Idle> {
        let mut ids = Vec::new();
        for _ in 0..count {
            let mut command = self.run(boot);
            let output = self.output(command.args(["-d", &self.image, "sleep", "100000"]))?;
            ids.push(String::from_utf8(output.stdout)?.trim().to_owned());
        }
        let mut idle = Idle::default();
        for id in &ids {
            let output = self.output(self.command().args(["inspect", id]))?;
            let containers: Value = serde_json::from_slice(&output.stdout)?;
            let pid = containers[0]["State"]["Pid"].as_u64();
            let pid = pid.context("`podvisor inspect` names no process")?;
            idle.add(pid, count as f64)?;
        }
        self.output(self.command().args(["rm", "-f"]).args(&ids))?;
        Ok(idle)
    }

    fn run(&self, boot: Boot) -> Command {
        let mut command = self.command();
        Self::ask(&mut command, boot);
        command
    }

    fn ask(command: &mut Command, boot: Boot) {
        command
            .args(["run", "--quiet", "--network", "none", "--boot", boot.word()])
            .args(["--memory", &format!("{MEMORY_MIB}M")]);
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg("--root")
            .arg(&self.root)
            .env("PODVISOR_GUEST_DIR", &self.guest);
        command
    }

    fn output(&self, command: &mut Command) -> Result<Output> {
        let output = command
            .stdin(Stdio::null())
            .output()
            .context("podvisor cannot be started")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            bail!("podvisor failed ({}): {}", output.status, said.trim());
        }
        Ok(output)
    }
}

/// Waits for all processes that create templates, and checks that there is one below `root`.
pub(crate) fn wait_for_templates(root: &Path) -> Result<()> {
    for pid in makers()? {
        wait(pid)?;
    }
    match fs::read_dir(root.join("templates"))?.next() {
        Some(_) => Ok(()),
        None => bail!("no template was made"),
    }
}

/// Returns the processes that create a template.
fn makers() -> Result<Vec<u32>> {
    let mut makers = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let Some(pid) = path
            .file_name()
            .and_then(|name| name.to_str()?.parse().ok())
        else {
            continue;
        };
        // A process may end meanwhile.
        let words = fs::read(path.join("cmdline")).unwrap_or_default();
        if words.split(|byte| *byte == 0).nth(1) == Some(b"template") {
            makers.push(pid);
        }
    }
    Ok(makers)
}

pub(super) struct Run(Child);

impl Ends for Run {
    fn end(mut self) -> Result<()> {
        let status = self.0.wait()?;
        if !status.success() {
            bail!("`podvisor run` failed ({status})");
        }
        Ok(())
    }
}

/// Mean memory of an idle container in MiB.
#[derive(Debug, Default, Serialize)]
pub(super) struct Idle {
    /// Proportional set size of the process, including the guest's memory.
    pub(super) pss_mib: f64,
    /// The guest's part of that.
    pub(super) guest_mib: f64,
    /// The private part of the PSS.
    pub(super) private_mib: f64,
}

impl Idle {
    /// Adds the memory of the process `pid`, one of `count`.
    fn add(&mut self, pid: u64, count: f64) -> Result<()> {
        let path = Path::new("/proc").join(pid.to_string());
        let rollup = fs::read_to_string(path.join("smaps_rollup"))?;
        let kib = |key: &str| {
            let line = rollup.lines().find(|line| line.starts_with(key));
            let field = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
            field.unwrap_or(0.0)
        };
        let smaps = fs::read_to_string(path.join("smaps"))?;
        let guest = Memory::of(&smaps, MEMORY_MIB * 1024)?.guest as f64;
        let share = 1.0 / (count * 1024.0);
        self.pss_mib += kib("Pss:") * share;
        self.guest_mib += guest * share;
        self.private_mib += (kib("Private_Clean:") + kib("Private_Dirty:")) * share;
        Ok(())
    }
}

impl fmt::Display for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            pss_mib,
            guest_mib,
            private_mib,
        } = self;
        write!(
            f,
            "{pss_mib:.1} MiB PSS, {private_mib:.1} MiB private; {guest_mib:.1} MiB of the guest's memory are resident"
        )
    }
}

/// Returns the time of day of a line of the log, in seconds.
fn time_of_day(line: &str) -> Option<f64> {
    let (_, time) = line.split_whitespace().next()?.split_once('T')?;
    let mut parts = time.trim_end_matches('Z').split(':');
    let mut part = || parts.next()?.parse::<f64>().ok();
    Some(part()? * 3600.0 + part()? * 60.0 + part()?)
}

/// Waits until a process, which is not a child of this one, has ended.
#[allow(unsafe_code)] // pidfd_open and poll
fn wait(pid: u32) -> Result<()> {
    // SAFETY: it takes two integers, and returns a new descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        // It has ended.
        return Ok(());
    }
    // SAFETY: the descriptor is new and not owned elsewhere.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let mut poll = libc::pollfd {
        fd: std::os::fd::AsRawFd::as_raw_fd(&fd),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one structure, which outlives the call.
    let ready = unsafe { libc::poll(&raw mut poll, 1, -1) };
    if ready < 0 {
        return Err(std::io::Error::last_os_error()).context("the template's process");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_line_of_the_log_is_found() {
        let line = "2026-01-31T01:02:03.500000Z DEBUG podvisor_cri: begin";
        assert_eq!(time_of_day(line), Some(3723.5));
        assert_eq!(time_of_day("podvisor: nothing of it"), None);
    }
}
