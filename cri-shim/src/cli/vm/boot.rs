//! Boots a VM: its network, its sandbox, and then the machine.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tracing::debug;

use super::{disk, seed};
use crate::cli::container::events::Events;
use crate::cli::container::{Entry, NetworkArgs};
use crate::cli::{advice, io_limits};
use crate::machine::Assets;
use crate::sandbox::{BootMachine, DEFAULT_CGROUP_PARENT, JailMode, LaunchConfig, SandboxClient};

/// The loader's command line: messages go to the console, and a loader that fails ends the machine.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 reboot=k";

/// The loader: what boots what is on a disk.
#[derive(Debug)]
pub(super) struct Loader {
    kernel: PathBuf,
    initramfs: PathBuf,
}

impl Loader {
    /// Finds it, so that what is missing is reported before an image is fetched.
    pub(super) fn find() -> anyhow::Result<Self> {
        let found = Assets::of_this_process().loader();
        let (kernel, initramfs) = found.map_err(advice::missing_file)?;
        Ok(Self { kernel, initramfs })
    }

    fn open(path: &Path) -> anyhow::Result<File> {
        File::open(path).with_context(|| format!("failed to open {}", path.display()))
    }
}

/// Boots the VM, which goes on without this process. After a failure, its sandbox may still run.
pub(super) async fn boot(
    entry: &Entry,
    loader: &Loader,
    network: &NetworkArgs,
) -> anyhow::Result<SandboxClient> {
    let record = &entry.record;
    let mut attached = network.attach(entry).await?;
    debug!(network = %record.network, "the network is made");
    let disks = vec![
        disk::open_root(&entry.dir)?,
        seed::create(&entry.dir, record, &attached)?,
    ];
    let config = LaunchConfig {
        hostname: record.hostname.clone(),
        vcpus: record.cpus,
        max_vcpus: record.cpus,
        memory: record.memory,
        nics: std::mem::take(&mut attached.nics),
        events: Events::of_container(&entry.dir).open(),
        jail: match record.jailed {
            true => JailMode::Enforced,
            false => JailMode::Disabled,
        },
        cgroup_parent: Some(DEFAULT_CGROUP_PARENT.to_owned()),
        ..LaunchConfig::of_own_os(record.id.clone(), entry.dir.clone())
    };
    let launching = crate::sandbox::Launching::begin(config).await;
    let launching = launching.map_err(|error| io_limits::advised(error.into()))?;
    let client = launching.finish(attached.network).await?;
    let mut boot = BootMachine::new(record.id.clone(), Loader::open(&loader.kernel)?);
    boot.initramfs = Some(Loader::open(&loader.initramfs)?);
    boot.cmdline = format!("{CMDLINE} -- --root {}", disk::SERIAL);
    boot.vcpus = record.cpus;
    boot.memory = record.memory;
    boot.disks = disks;
    boot.loader_limit = Some(BootMachine::LOADER_LIMIT);
    boot.log = Some(entry.open_log()?.into());
    client.boot_machine(boot).await?;
    client.end_with(&record.id).await?;
    debug!("the machine runs");
    Ok(client)
}
