//! Boots a VM: its network, its sandbox, and then the machine.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use podvisor_images::Disk;
use tracing::{debug, warn};

use super::{attached, disk, seed, volumes};
use crate::blocking::apart;
use crate::cli::container::events::Events;
use crate::cli::container::volumes::share_users;
use crate::cli::container::{Entry, NetworkArgs, NetworkMode, Record};
use crate::cli::{advice, io_limits, notice};
use crate::kept_kernels;
use crate::machine::{Assets, causes};
use crate::sandbox::{
    BootEvent, BootMachine, BootPhase, BootProgram, ContinueAs, DEFAULT_CGROUP_PARENT,
    IncomingMachine, JailMode, LaunchConfig, SandboxClient, SavedMachine,
};

/// The loader's command line: messages go to the console, and a loader that fails ends the machine.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 reboot=k -- --no-self-tests";

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

/// How a VM begins.
#[derive(Debug)]
pub(super) enum Beginning {
    /// By booting its disk.
    Boot,
    /// By booting its disk, which is as an image has it.
    Image {
        /// The image.
        image: Disk,
        /// Nobody is told that its kernel is read first.
        is_quiet: bool,
    },
    /// From saved memory: as itself, or as a copy.
    Saved(SavedMachine),
    /// By a migration from another host.
    Arrives(IncomingMachine),
}

impl Beginning {
    /// Whether the guest goes on as the one that it was, with what it was told.
    fn is_same(&self) -> bool {
        match self {
            Self::Saved(saved) => saved.continues == ContinueAs::Same,
            Self::Arrives(_) => true,
            Self::Boot | Self::Image { .. } => false,
        }
    }
}

/// Returns the hardware address of a VM's card, which is the same at each start.
pub(super) fn own_mac(record: &Record) -> [u8; 6] {
    if let Some(mac) = record.vm.as_ref().and_then(|vm| vm.mac) {
        return mac;
    }
    let mut mac = [2, 0, 0, 0, 0, 0];
    let digits = record.id.as_bytes().chunks_exact(2);
    for (byte, pair) in mac.iter_mut().skip(1).zip(digits) {
        let pair = std::str::from_utf8(pair).unwrap_or_default();
        *byte = u8::from_str_radix(pair, 16).unwrap_or_default();
    }
    // That of the other end is 2 and zeroes.
    if let Some(last) = mac.last_mut() {
        *last |= 1;
    }
    mac
}

/// Boots or continues the VM, which goes on without this process. After a failure, its sandbox may
/// still run. The report of the boot begins with what was `before`.
pub(super) async fn boot(
    entry: &Entry,
    loader: &Loader,
    network: &NetworkArgs,
    beginning: Beginning,
    mut before: Vec<BootEvent>,
) -> anyhow::Result<SandboxClient> {
    let record = &entry.record;
    let plugged = attached::open_all(&entry.dir, record)?;
    if let Beginning::Saved(saved) = &beginning {
        // A copy has its own ones from where its memory comes.
        let includes_own = beginning.is_same();
        attached::must_be_unchanged(&entry.dir, record, &saved.state, includes_own)?;
    }
    let mut attached = network.attach(entry).await?;
    if record.network == NetworkMode::Nat {
        // Nobody but the guest and its gateway sees it.
        let mac = own_mac(record);
        for nic in &mut attached.nics {
            nic.mac = mac;
        }
        for interface in &mut attached.network.interfaces {
            interface.mac = mac;
        }
    }
    before.push(BootEvent::now(BootPhase::Network));
    debug!(network = %record.network, "the network is made");
    let disks = vec![
        disk::open_root(&entry.dir)?,
        match beginning.is_same() {
            true => seed::open(&entry.dir)?,
            false => seed::create(&entry.dir, record, &attached)?,
        },
    ];
    let shared_dir = match record.volumes.is_empty() {
        true => None,
        false => {
            volumes::prepare(entry)?;
            Some(entry.shared())
        }
    };
    let own = record.vm.clone().unwrap_or_default();
    let dhcp = network
        .dhcp(entry, &attached)
        .context("cannot serve the guest's addresses by DHCP")?;
    let config = LaunchConfig {
        hostname: record.hostname.clone(),
        vcpus: record.cpus,
        max_vcpus: own.max_cpus.max(record.cpus),
        memory: record.memory.saturating_add(own.grown),
        growth: own.growth.saturating_sub(own.grown),
        nics: std::mem::take(&mut attached.nics),
        shared_dir,
        share_users: share_users(&record.volumes),
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
    before.push(BootEvent::now(BootPhase::Sandbox));
    let firmware = record.vm.as_ref().and_then(|vm| vm.firmware.as_deref());
    let mut boot = match firmware {
        Some(path) => BootMachine {
            program: BootProgram::Firmware,
            ..BootMachine::new(record.id.clone(), Loader::open(path)?)
        },
        None => BootMachine {
            initramfs: Some(Loader::open(&loader.initramfs)?),
            cmdline: format!("{CMDLINE} --root {}", disk::SERIAL),
            loader_limit: Some(BootMachine::LOADER_LIMIT),
            ..BootMachine::new(record.id.clone(), Loader::open(&loader.kernel)?)
        },
    };
    boot.vcpus = record.cpus;
    boot.max_vcpus = own.max_cpus;
    boot.memory = record.memory;
    (boot.growth, boot.grown) = (own.growth, own.grown);
    boot.disks = disks;
    boot.plugged = plugged;
    boot.dhcp = dhcp;
    boot.shares = volumes::mount(&client, &entry.shared(), record)?;
    boot.log = Some(entry.open_log()?.into());
    let mut unkept = None;
    match beginning {
        Beginning::Boot => {}
        Beginning::Saved(saved) => boot.saved = Some(saved),
        Beginning::Arrives(incoming) => boot.incoming = Some(incoming),
        Beginning::Image { image, is_quiet } => {
            let files = [loader.kernel.as_path(), loader.initramfs.as_path()];
            let reads = || {
                if !is_quiet {
                    notice("looking for the kernel that the image boots");
                }
            };
            match kept_kernels::of_image(&client, &image, files, record.memory, reads).await {
                Ok((kernel, new)) => {
                    debug!(
                        title = kernel.title,
                        is_new = new.is_some(),
                        "the kernel is known"
                    );
                    before.push(BootEvent::now(BootPhase::Kernel));
                    boot.kept = Some(kernel);
                    unkept = new;
                }
                Err(error) => {
                    let why = causes(&error);
                    warn!(why, "the image's kernel is not known: the loader finds it");
                }
            }
        }
    }
    boot.before = before;
    client.boot_machine(boot).await?;
    client.end_with(&record.id).await?;
    if let Some(unkept) = unkept {
        // The machine runs: the disk's slowness is nobody's.
        let kept = apart("keep-kernel", move || unkept.keep()).await;
        if let Err(error) = kept? {
            let why = causes(&error);
            warn!(why, "the image's kernel is not kept for its next VMs");
        }
    }
    debug!("the machine runs");
    Ok(client)
}

#[cfg(test)]
mod tests {
    use crate::cli::container::sample_record;

    use super::*;

    #[test]
    fn a_vm_has_one_address_of_its_own_for_its_life() {
        let (one, two) = (sample_record("a", "one"), sample_record("b", "two"));
        assert_eq!(own_mac(&one), own_mac(&one));
        assert_ne!(own_mac(&one), own_mac(&two));
        // Locally administered, of one card, and not the gateway's.
        let zero = own_mac(&sample_record("0", "zero"));
        assert_eq!(zero[0] & 3, 2);
        assert_ne!(zero, [2, 0, 0, 0, 0, 0]);
    }
}
