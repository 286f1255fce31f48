//! The cost of a run: time, CPU, bytes written, and disk usage afterwards.

use std::collections::HashSet;
use std::fs;
use std::ops::Sub;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Linux's unit of CPU time in /proc, on all architectures that it runs virtual machines on.
const TICKS_PER_SECOND: f64 = 100.0;

/// One pull.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// The time from the start of the first program to the end of the last.
    pub(super) wall: Duration,
    /// The same, plus the time until everything is on the disk.
    pub(super) synced: Duration,
    pub(super) cost: Cost,
    /// Disk usage of the pull.
    pub(super) disk: Disk,
    /// Additional disk usage of a second root file system of the same image.
    pub(super) second: Disk,
}

/// CPU time and writes of a process and the children that it has waited for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    pub(super) cpu_seconds: f64,
    pub(super) written: u64,
}

impl Cost {
    /// Returns the cost of process `pid` (`self` for this one) so far.
    pub(super) fn of(pid: &str) -> Result<Self> {
        let read = |file: &str| {
            let path = format!("/proc/{pid}/{file}");
            fs::read_to_string(&path).with_context(|| format!("{path} cannot be read"))
        };
        let stat = read("stat")?;
        // The name before it may contain any character. Then utime is the 12th field, and stime,
        // cutime and cstime follow.
        let fields = stat
            .rsplit_once(") ")
            .context("/proc/PID/stat is unknown")?;
        let ticks = fields.1.split(' ').skip(11).take(4);
        let ticks: u64 = ticks.map(str::parse::<u64>).sum::<Result<_, _>>()?;
        let io = read("io")?;
        let written = io
            .lines()
            .find_map(|line| line.strip_prefix("write_bytes: "))
            .context("/proc/PID/io is unknown")?;
        Ok(Self {
            cpu_seconds: ticks as f64 / TICKS_PER_SECOND,
            written: written.parse()?,
        })
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            cpu_seconds: self.cpu_seconds + other.cpu_seconds,
            written: self.written + other.written,
        }
    }
}

impl Sub for Cost {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            cpu_seconds: self.cpu_seconds - before.cpu_seconds,
            written: self.written - before.written,
        }
    }
}

/// Disk usage of a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Disk {
    /// Bytes of allocated blocks.
    pub(super) bytes: i64,
    pub(super) inodes: i64,
}

impl Disk {
    /// Returns the usage of `directory` and everything below it; files with several names count
    /// once.
    pub(super) fn of(directory: &Path) -> Result<Self> {
        let mut disk = Self::default();
        let mut seen = HashSet::new();
        let mut paths = vec![directory.to_owned()];
        while let Some(path) = paths.pop() {
            let fault = || format!("{} cannot be read", path.display());
            let meta = fs::symlink_metadata(&path).with_context(fault)?;
            if seen.insert((meta.dev(), meta.ino())) {
                disk.bytes += i64::try_from(meta.blocks())? * 512;
                disk.inodes += 1;
            }
            if meta.is_dir() {
                for entry in fs::read_dir(&path).with_context(fault)? {
                    paths.push(entry?.path());
                }
            }
        }
        Ok(disk)
    }
}

impl Sub for Disk {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            bytes: self.bytes - before.bytes,
            inodes: self.inodes - before.inodes,
        }
    }
}

/// Times `work` in `directory`. `daemon` is a process that works on its behalf.
pub(super) fn timed(
    directory: &Path,
    daemon: Option<u32>,
    work: impl FnOnce() -> Result<()>,
) -> Result<(Duration, Duration, Cost)> {
    let costs = || -> Result<Cost> {
        let own = Cost::of("self")?;
        daemon.map_or(Ok(own), |pid| Ok(own.plus(Cost::of(&pid.to_string())?)))
    };
    // Earlier writes must not be counted.
    sync(directory)?;
    let before = costs()?;
    let began = Instant::now();
    work()?;
    let wall = began.elapsed();
    let cost = costs()? - before;
    let flushing = Instant::now();
    sync(directory)?;
    Ok((wall, wall + flushing.elapsed(), cost))
}

/// Flushes the file system of `directory` to the disk.
fn sync(directory: &Path) -> Result<()> {
    run(Command::new("sync").arg("-f").arg(directory)).map(drop)
}

/// Runs a program to its end; returns its stdout.
pub(super) fn run(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{name} cannot be started"))?;
    if !status.success() {
        bail!(
            "{name} failed ({status}): {}",
            String::from_utf8_lossy(&stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_was_waited_for_counts() {
        let file = tempfile::NamedTempFile::new_in(".").unwrap();
        let before = Cost::of("self").unwrap();
        let script =
            "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; head -c 1000000 /dev/zero >$0";
        run(Command::new("sh").args(["-c", script]).arg(file.path())).unwrap();
        let cost = Cost::of("self").unwrap() - before;
        assert!(cost.cpu_seconds > 0.0, "{cost:?}");
        assert!(cost.written >= 1_000_000, "{cost:?}");
    }

    #[test]
    fn disk_use_counts_blocks_and_files_once() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let empty = Disk::of(dir.path()).unwrap();
        fs::write(dir.path().join("a"), [1; 10_000]).unwrap();
        fs::hard_link(dir.path().join("a"), dir.path().join("b")).unwrap();
        let used = Disk::of(dir.path()).unwrap() - empty;
        assert_eq!(used.inodes, 1);
        assert!((10_000..100_000).contains(&used.bytes), "{used:?}");
    }
}
