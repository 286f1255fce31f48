//! The flags of `vm run`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use clap::{ArgAction, Args};
use podvisor_images::Checksum;

use crate::cli::advice;
use crate::cli::container::{NetworkArgs, Volume};
use crate::cli::env_file::parse_label;
use crate::cli::guest::{parse_cpus, parse_guest_memory};
use crate::cli::keys::{DetachKeys, parse as parse_keys};
use crate::cli::registries::RegistryArgs;
use crate::cli::run::parse_hostname;
use crate::cli::settings::MAX_GROWTH;
use crate::cli::size;
use crate::machine::{Assets, Firmware, GROWTH_UNIT};

/// The name of the firmware that is installed with podvisor.
const INSTALLED_FIRMWARE: &str = "uefi";

/// The largest disk: that of the qcow2 files which store what guests write.
const MAX_DISK: u64 = 64 << 40;

#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub(super) struct RunArgs {
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,

    /// Print the VM's id instead of connecting to its console
    #[arg(short, long)]
    pub(super) detach: bool,

    /// Keys that leave the console, with commas between several; the VM goes on
    #[arg(long, value_name = "KEYS", default_value = "ctrl-]", value_parser = parse_keys)]
    pub(super) detach_keys: DetachKeys,

    /// Name of the VM [default: the beginning of its id]
    #[arg(long, value_name = "NAME")]
    pub(super) name: Option<String>,

    /// Host name that cloud-init gives the guest [default: the VM's name]
    #[arg(short = 'h', long, value_name = "NAME", value_parser = parse_hostname)]
    pub(super) hostname: Option<String>,

    /// Label of the VM
    #[arg(short, long, value_name = "KEY[=VALUE]", value_parser = parse_label)]
    pub(super) label: Vec<(String, String)>,

    /// Remove the VM with its disk once it is off
    #[arg(long)]
    pub(super) rm: bool,

    /// Virtual CPUs
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_cpus)]
    pub(super) cpus: u8,

    /// Virtual CPUs that `vm resize` may give it while it runs [default: those of --cpus]
    #[arg(long, value_name = "N", value_parser = parse_cpus)]
    pub(super) max_cpus: Option<u8>,

    /// Memory, with a unit: 512M, 2G
    #[arg(short, long, value_name = "SIZE", default_value = "1G")]
    #[arg(value_parser = parse_guest_memory)]
    pub(super) memory: u64,

    /// Memory that `vm resize` may give it while it runs: that of --memory and a multiple of 128M
    #[arg(long, value_name = "SIZE", value_parser = parse_guest_memory)]
    pub(super) max_memory: Option<u64>,

    /// Size of the disk, which the guest's file system grows to [default: the image's]
    #[arg(long, value_name = "SIZE", value_parser = parse_disk_size)]
    pub(super) disk: Option<u64>,

    /// Public SSH key that users of the guest are logged in by, besides podvisor's own
    #[arg(long, value_name = "FILE")]
    pub(super) ssh_key: Vec<PathBuf>,

    /// The guest's user-data, for cloud-init
    #[arg(long, value_name = "FILE")]
    pub(super) user_data: Option<PathBuf>,

    /// Configuration of Ignition, as JSON, for an image that reads it in place of cloud-init's
    #[arg(long, value_name = "FILE", conflicts_with = "user_data")]
    pub(super) ignition: Option<PathBuf>,

    /// Install podvisor's guest agent by cloud-init, for `vm exec` and others: for an image without
    /// qemu-guest-agent
    #[arg(long, conflicts_with = "ignition")]
    pub(super) agent: bool,

    /// Ask for a user and a password on the console, instead of a shell at once
    #[arg(long)]
    pub(super) no_autologin: bool,

    /// Directory of this host that the guest mounts by virtio-fs: by the tag, or cloud-init at the
    /// path
    #[arg(short, long = "volume", value_name = "DIR:TAG|DIR:/PATH[:ro]")]
    #[arg(value_parser = super::volumes::parse)]
    pub(super) volumes: Vec<Volume>,

    #[command(flatten)]
    pub(super) network: NetworkArgs,

    /// Boot by a UEFI firmware, in place of the loader: `uefi` for the installed one, or a file as
    /// `cargo xtask firmware` builds it
    #[arg(long, value_name = "uefi|FILE", conflicts_with = "no_kept_kernel")]
    pub(super) firmware: Option<PathBuf>,

    /// Boot by the loader, without keeping the kernel that it finds for the image's next VMs
    #[arg(long)]
    pub(super) no_kept_kernel: bool,

    /// Wait until the guest has booted, and show how long each phase took
    #[arg(long)]
    pub(super) timings: bool,

    /// Expected checksum of the file behind a URL: sha256:... or sha512:...
    #[arg(long, value_name = "CHECKSUM")]
    pub(super) checksum: Option<Checksum>,

    #[command(flatten)]
    pub(super) registries: RegistryArgs,

    /// Show no progress of fetching the image
    #[arg(short, long)]
    pub(super) quiet: bool,

    /// Do not jail the machine's process: for hosts that do not let podvisor do so
    #[arg(long)]
    pub(super) no_jail: bool,

    /// Disk image: the file of one, raw or qcow2; its https:// URL; or an OCI image that holds one
    /// in its directory /disk
    #[arg(value_name = "IMAGE|URL|FILE")]
    pub(super) image: String,
}

impl RunArgs {
    /// Returns an error for flags that mean nothing together.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(
            !self.network.names_hosts(),
            "--add-host is for containers, whose /etc/hosts is podvisor's; a VM's is its own: \
             write it by --user-data"
        );
        let (cpus, most) = (self.cpus, self.max_cpus.unwrap_or(self.cpus));
        ensure!(
            most >= cpus,
            "--max-cpus {most} is less than the {cpus} of --cpus"
        );
        if let Some(most) = self.max_memory {
            growth_between(self.memory, most)?;
        }
        super::volumes::check(&self.volumes)
    }

    /// Returns the path of the firmware, which is one; `None`: the loader boots.
    pub(super) fn firmware(&self) -> anyhow::Result<Option<PathBuf>> {
        let Some(named) = &self.firmware else {
            return Ok(None);
        };
        let path = match named == Path::new(INSTALLED_FIRMWARE) {
            true => Assets::of_this_process()
                .firmware()
                .map_err(advice::missing_file)?,
            // Also for later boots, from another directory.
            false => std::path::absolute(named)?,
        };
        Firmware::open(&path).context("--firmware")?;
        Ok(Some(path))
    }

    /// Bytes of memory that the VM may get while it runs.
    pub(super) fn growth(&self) -> u64 {
        let most = self.max_memory.unwrap_or(self.memory);
        most.saturating_sub(self.memory)
    }
}

/// Returns the bytes that a VM of `memory` bytes may get while it runs, up to `most`.
pub(super) fn growth_between(memory: u64, most: u64) -> anyhow::Result<u64> {
    let growth = most.checked_sub(memory);
    let growth =
        growth.filter(|growth| growth.is_multiple_of(GROWTH_UNIT) && *growth <= MAX_GROWTH);
    growth.with_context(|| {
        format!(
            "--max-memory {}: it is the VM's {} and a multiple of 128M more, up to 1T more",
            size::human(most),
            size::human(memory)
        )
    })
}

/// Parses the size of a disk: whole sectors, at most what a qcow2 file holds.
pub(super) fn parse_disk_size(text: &str) -> Result<u64, String> {
    let usage = "write a size with a unit, such as 20G";
    let bytes = size::parse(text).map_err(|error| format!("{error}; {usage}"))?;
    match bytes {
        0 => Err(format!("a disk has at least one sector; {usage}")),
        bytes if bytes > MAX_DISK => Err(format!("a disk has at most {} TiB", MAX_DISK >> 40)),
        bytes => Ok(bytes.next_multiple_of(512)),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: RunArgs,
    }

    fn parsed(line: &str) -> Result<RunArgs, clap::Error> {
        let words = ["vm"].into_iter().chain(line.split(' '));
        Line::try_parse_from(words).map(|line| line.args)
    }

    #[test]
    fn one_image_is_all_that_a_vm_takes() {
        let args = parsed("debian.qcow2").unwrap();
        assert_eq!((args.cpus, args.memory, args.disk), (1, 1 << 30, None));
        assert_eq!(args.detach_keys.to_string(), "ctrl-]");
        args.check().unwrap();
        assert!(parsed("--cpus 2").is_err());
        assert!(parsed("a.qcow2 b.qcow2").is_err());
    }

    #[test]
    fn what_may_be_plugged_in_is_at_least_what_there_is() {
        let size = |line: &str| {
            let args = parsed(&format!("{line} x")).unwrap();
            args.check().map(|()| (args.max_cpus, args.growth()))
        };
        assert_eq!(size("--cpus 2").unwrap(), (None, 0));
        let both = size("--max-cpus 8 -m 1G --max-memory 4G").unwrap();
        assert_eq!(both, (Some(8), 3 << 30));
        for (bad, said) in [
            ("--cpus 4 --max-cpus 2", "--max-cpus"),
            ("-m 2G --max-memory 1G", "--max-memory"),
            ("-m 1G --max-memory 1100M", "128M"),
        ] {
            let error = size(bad).unwrap_err().to_string();
            assert!(error.contains(said), "{bad}: {error}");
        }
    }

    #[test]
    fn a_disk_has_whole_sectors_and_a_bound() {
        let disk = |size: &str| parsed(&format!("--disk {size} x")).map(|args| args.disk);
        assert_eq!(disk("20G").unwrap(), Some(20 << 30));
        assert_eq!(disk("513").unwrap(), Some(1024));
        for bad in ["0", "65T", "16777216T", "much", "-1"] {
            assert!(disk(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_firmware_is_checked_before_anything_is_fetched() {
        assert_eq!(parsed("x").unwrap().firmware().unwrap(), None);
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("firmware");
        std::fs::write(&file, "a text").unwrap();
        let args = parsed(&format!("--firmware {} x", file.display())).unwrap();
        let said = format!("{:#}", args.firmware().unwrap_err());
        assert!(
            said.contains("--firmware") && said.contains("a text"),
            "{said}"
        );
        assert!(parsed("--firmware uefi --no-kept-kernel x").is_err());
    }

    #[test]
    fn the_agent_is_installed_where_it_is_asked_for_and_by_cloud_init_alone() {
        assert!(!parsed("x").unwrap().agent);
        assert!(parsed("--agent x").unwrap().agent);
        let said = parsed("--agent --ignition f x").unwrap_err().to_string();
        assert!(said.contains("--agent"), "{said}");
    }

    #[test]
    fn a_flag_of_containers_alone_is_refused_by_its_name() {
        let args = parsed("--add-host a:1.2.3.4 x").unwrap();
        let said = args.check().unwrap_err().to_string();
        assert!(
            said.contains("--add-host") && said.contains("--user-data"),
            "{said}"
        );
    }
}
