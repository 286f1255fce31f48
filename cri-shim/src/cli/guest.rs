//! The guest of a command: its flags, and the settings that result.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;

use super::advice;
use super::settings::parse_memory;
use crate::machine::{Assets, GuestFiles, Snapshot};
use crate::sandbox::SnapshotMaker;

/// Maximum number of CPUs of podvisor's own kernel (`CONFIG_NR_CPUS`); it would leave more of them
/// idle.
const OWN_KERNEL_CPUS: u8 = 64;

#[derive(Debug, Args)]
pub(super) struct GuestArgs {
    /// Virtual CPUs of the guest; of 1.5 it has two, which together are used for 1.5
    #[arg(long, value_name = "N", default_value = "1", value_parser = CpuTime::parse)]
    cpus: CpuTime,

    /// Memory of the guest, with a unit: 512M, 2G
    #[arg(short, long, value_name = "SIZE", default_value = "512M")]
    #[arg(value_parser = parse_guest_memory)]
    memory: u64,

    /// Kernel to boot, vmlinux or bzImage [default: podvisor's own]
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
}

/// An amount of CPU time, in thousandths of a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CpuTime(u32);

impl CpuTime {
    /// Reads a number of CPUs with up to three decimals.
    fn parse(text: &str) -> Result<Self, String> {
        let usage = || "write a number of CPUs from 0.01 to 255, such as 2 or 1.5".to_owned();
        let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
        let is_number = |digits: &str| digits.bytes().all(|digit| digit.is_ascii_digit());
        if !is_number(whole) || !is_number(fraction) || fraction.is_empty() || fraction.len() > 3 {
            return Err(usage());
        }
        let whole: u32 = match whole {
            "" => 0,
            whole => whole.parse().map_err(|_| usage())?,
        };
        let fraction: u32 = format!("{fraction:0<3}").parse().map_err(|_| usage())?;
        let thousandths = whole.checked_mul(1000).ok_or_else(usage)? + fraction;
        match (10..=255_000).contains(&thousandths) {
            true => Ok(Self(thousandths)),
            false => Err(usage()),
        }
    }

    /// Returns how many CPUs it takes.
    fn vcpus(self) -> u8 {
        u8::try_from(self.0.div_ceil(1000)).unwrap_or(u8::MAX)
    }

    /// Returns the thousandths that its CPUs are limited to; `None` if they are used in full.
    fn limit(self) -> Option<u32> {
        (!self.0.is_multiple_of(1000)).then_some(self.0)
    }
}

/// A guest whose files exist and whose memory the host has.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) cpus: u8,
    /// Thousandths of a CPU that all of them together are used for, if that is less.
    pub(super) cpu_limit: Option<u32>,
    pub(super) memory: u64,
    pub(super) kernel: PathBuf,
    pub(super) initramfs: PathBuf,
    /// The directory of templates, unless the guest has to boot.
    pub(super) templates: Option<PathBuf>,
    /// The snapshot that it is restored from.
    pub(super) snapshot: Option<PathBuf>,
    /// Whether it can share directories of the host; `None` for one that boots, which always can.
    pub(super) shares: Option<bool>,
    /// Whether it has a network card; `None` for one that boots, which gets what its network needs.
    pub(super) has_card: Option<bool>,
}

impl GuestArgs {
    /// Returns the guest, with the kernel that the user gave or podvisor's own. Its files are
    /// opened once before an image is pulled, so that errors are reported immediately.
    pub(super) fn guest(&self, templates: Option<PathBuf>) -> anyhow::Result<Guest> {
        let assets = Assets::of_this_process();
        let kernel = match &self.kernel {
            Some(kernel) => absolute(kernel)?,
            None if self.cpus.vcpus() > OWN_KERNEL_CPUS => anyhow::bail!(
                "--cpus {}: podvisor's own kernel is built for {OWN_KERNEL_CPUS}; ask for fewer, or give one that is built for more by --kernel",
                self.cpus.vcpus()
            ),
            None => assets.kernel().map_err(advice::missing_file)?,
        };
        let initramfs = assets.initramfs().map_err(advice::missing_file)?;
        GuestFiles::open(&kernel, &initramfs)?;
        check_memory(
            self.memory,
            &fs::read_to_string("/proc/meminfo").unwrap_or_default(),
        )?;
        Ok(Guest {
            cpus: self.cpus.vcpus(),
            cpu_limit: self.cpus.limit(),
            memory: self.memory,
            kernel,
            initramfs,
            templates,
            snapshot: None,
            shares: None,
            has_card: None,
        })
    }
}

impl Guest {
    /// Returns an error for a fraction of a CPU: only a container can be limited to one.
    pub(super) fn check_whole_cpus(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.cpu_limit.is_none(),
            "--cpus: this machine has whole CPUs; write --cpus {}",
            self.cpus
        );
        Ok(())
    }

    /// Returns the guest that is restored from a snapshot.
    pub(super) fn of_snapshot(dir: &Path) -> anyhow::Result<Self> {
        let dir = absolute(dir)?;
        let snapshot = Snapshot::open(&dir)
            .with_context(|| format!("cannot use the snapshot {}", dir.display()))?;
        let maker = SnapshotMaker::of(&dir)
            .with_context(|| format!("cannot use the snapshot {}", dir.display()))?;
        if let Some(told) = check_maker(maker, &dir)? {
            super::notice(&told);
        }
        let memory = snapshot.memory().as_bytes();
        check_memory(
            memory,
            &fs::read_to_string("/proc/meminfo").unwrap_or_default(),
        )?;
        let assets = Assets::of_this_process();
        let devices = snapshot.devices();
        Ok(Self {
            cpus: snapshot.vcpus(),
            cpu_limit: None,
            memory,
            kernel: assets.kernel().map_err(advice::missing_file)?,
            initramfs: assets.initramfs().map_err(advice::missing_file)?,
            templates: None,
            snapshot: Some(dir),
            shares: Some(devices.iter().any(|name| name.starts_with("fs"))),
            has_card: Some(devices.iter().any(|name| name.starts_with("net"))),
        })
    }
}

/// Refuses a snapshot whose agent is not understood, and says where it is of another podvisor.
fn check_maker(maker: Option<SnapshotMaker>, dir: &Path) -> anyhow::Result<Option<String>> {
    let current = SnapshotMaker::current();
    let dir = dir.display();
    let of = match &maker {
        Some(maker) => format!("podvisor {}", maker.version),
        None => "an older podvisor".to_owned(),
    };
    let again = "create it again with `podvisor snapshot`";
    let protocol = maker.as_ref().map(|maker| maker.agent_protocol);
    anyhow::ensure!(
        protocol == Some(current.agent_protocol),
        "cannot use the snapshot {dir}: {of} made it, whose agent speaks another version of the \
         protocol; {again}"
    );
    let is_other = maker.is_some_and(|maker| maker.version != current.version);
    Ok(is_other.then(|| {
        format!("the snapshot {dir} has the kernel and the agent of {of}; to update them, {again}")
    }))
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("cannot find {}", path.display()))
}

pub(super) fn parse_cpus(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(cpus) if cpus > 0 => Ok(cpus),
        _ => Err("a guest has whole CPUs; write a number from 1 to 255".to_owned()),
    }
}

pub(super) fn parse_guest_memory(text: &str) -> Result<u64, String> {
    let whole = parse_memory(text)?.checked_next_multiple_of(1 << 20);
    whole.ok_or_else(|| "no machine has so much".to_owned())
}

/// Returns an error for a guest larger than the host's memory: it would be killed while it runs.
pub(super) fn check_memory(wanted: u64, meminfo: &str) -> anyhow::Result<()> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    match kilobytes.and_then(|kilobytes| kilobytes.checked_mul(1024)) {
        Some(total) if wanted > total => anyhow::bail!(
            "--memory {}M is more than the {}M that this machine has; ask for less",
            wanted >> 20,
            total >> 20
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fraction_of_a_cpu_takes_a_whole_one_and_limits_it() {
        let read = |text: &str| {
            let cpus = CpuTime::parse(text).unwrap();
            (cpus.vcpus(), cpus.limit())
        };
        for (text, expected) in [
            ("2", (2, None)),
            ("2.0", (2, None)),
            ("255", (255, None)),
            ("1.5", (2, Some(1500))),
            (".5", (1, Some(500))),
            ("0.01", (1, Some(10))),
            ("3.125", (4, Some(3125))),
        ] {
            assert_eq!(read(text), expected, "{text}");
        }
        for bad in [
            "0", "-1", "", ".", "1.", "1.2345", "255.1", "256", "+1", "1e2", "x", "0.001",
        ] {
            assert!(CpuTime::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn cpus_are_whole_and_positive() {
        assert_eq!(parse_cpus("2"), Ok(2));
        for bad in ["0", "-1", "1.5", "", "256", "x"] {
            assert!(parse_cpus(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn memory_has_a_least_size_and_whole_mebibytes() {
        assert_eq!(parse_guest_memory("512M"), Ok(512 << 20));
        assert_eq!(parse_guest_memory("104857601"), Ok(101 << 20));
        let message = parse_guest_memory("1M").unwrap_err();
        assert!(message.contains("64M"), "{message}");
        assert!(parse_guest_memory("lots").is_err());
        assert!(parse_guest_memory("16777215T").is_ok());
        assert!(parse_guest_memory("18446744073709551615").is_err());
    }

    #[test]
    fn a_snapshot_of_another_protocol_is_refused_and_of_another_podvisor_is_told() {
        let told = |maker| check_maker(maker, Path::new("/srv/warm"));
        let current = SnapshotMaker::current();
        assert_eq!(told(Some(current.clone())).unwrap(), None);
        let other = SnapshotMaker {
            version: "0.0.1".to_owned(),
            ..current.clone()
        };
        let notice = told(Some(other)).unwrap().unwrap();
        assert!(
            notice.contains("podvisor 0.0.1") && notice.contains("/srv/warm"),
            "{notice}"
        );
        let unlike = SnapshotMaker {
            agent_protocol: current.agent_protocol + 1,
            ..current
        };
        for maker in [Some(unlike), None] {
            let refused = told(maker).unwrap_err().to_string();
            assert!(refused.contains("podvisor snapshot"), "{refused}");
        }
    }

    #[test]
    fn more_memory_than_the_machine_has_is_refused() {
        let meminfo = "MemTotal:       24689460 kB\nMemFree: 1 kB\n";
        assert!(check_memory(24 << 30, meminfo).is_err());
        assert!(check_memory(8 << 30, meminfo).is_ok());
        assert!(check_memory(24 << 30, "").is_ok());
    }
}
