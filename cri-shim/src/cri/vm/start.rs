//! StartContainer of a virtual machine: the loader boots its disks.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use podvisor_images::Disk;
use podvisor_network::cni::{DhcpServer, GuestNames};
use podvisor_sandbox::machine::{Firmware, causes};
use podvisor_sandbox::{
    BootMachine, BootProgram, IncomingMachine, KeptKernel, SandboxClient, Started,
};
use tracing::{info, warn};

use super::create::dns_of;
use super::images;
use super::pod::cards;
use crate::blocking::apart;
use crate::cri::config::{VM_HANDLER, VmSettings};
use crate::cri::error::{CriError, Result};
use crate::cri::node::{Container, Node};
use crate::cri::resolver;
use crate::cri::state::{KernelRecord, VmRecord};
use crate::cri::vm_spec::{Booter, GUEST_AGENT, VmSpec};
use crate::kept_kernels::{self, Unkept};

/// The command line of the loader's kernel: its messages are the first of the console, and a panic
/// ends the machine. What follows the dashes is the loader's.
const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 reboot=k -- --no-self-tests --root ";

/// The field of errors about a machine that an older daemon made.
const FIELD: &str = "container_id";

impl Node {
    /// Boots a container's machine.
    pub(in crate::cri) async fn start_vm(
        &self,
        container: &Container,
        vm: VmRecord,
        client: &SandboxClient,
        log: Option<OwnedFd>,
    ) -> Result<Started> {
        if vm.is_idle {
            let mut idle = BootMachine::new(&container.id, open(Path::new("/dev/null"))?);
            idle.is_idle = true;
            idle.memory = vm.memory;
            idle.log = log;
            return Ok(client.boot_machine(idle).await?);
        }
        let files = self.disk_files(&container.pod.id, &container.id);
        let (store, settings) = (self.store.clone(), self.config.vm.clone());
        let id = container.id.clone();
        let starts_paused = vm.starts_paused && vm.incoming.is_none();
        if vm.incoming.is_some() {
            self.must_come_from_elsewhere(container)?;
        }
        let dhcp = self.dhcp_servers(container)?;
        let image_of = match settings.keeps_kernels {
            true => vm.fresh_root().map(str::to_owned),
            false => None,
        };
        let size = container.pod.record().size;
        let loader = [settings.kernel.clone(), settings.initramfs.clone()];
        let opened = apart("vm-open", move || -> Result<_> {
            let image = match image_of {
                Some(id) => images::stored_disk(&store, &id)?,
                None => None,
            };
            if vm.disks.is_empty() && vm.kernel.is_none() {
                let reason = "an older podvisor created it: remove it, and create it again";
                return Err(CriError::invalid(FIELD, reason));
            }
            let mut boot = match &vm.kernel {
                None if vm.booter == Booter::Firmware => BootMachine {
                    program: BootProgram::Firmware,
                    ..BootMachine::new(id, open(&settings.firmware)?)
                },
                None => {
                    let mut boot = BootMachine::new(id, open(&settings.kernel)?);
                    boot.initramfs = Some(open(&settings.initramfs)?);
                    boot.cmdline = format!("{COMMAND_LINE}{}", vm.root);
                    boot.loader_limit = Some(BootMachine::LOADER_LIMIT);
                    boot
                }
                Some(own) => {
                    let mut boot = BootMachine::new(id, files.read(KernelRecord::KERNEL)?);
                    if own.has_initramfs {
                        boot.initramfs = Some(files.read(KernelRecord::INITRAMFS)?);
                    }
                    boot.cmdline.clone_from(&own.cmdline);
                    boot
                }
            };
            boot.uuid = Some(vm.uuid);
            boot.identity = vm.identity.clone();
            boot.vcpus = vm.vcpus;
            boot.max_vcpus = size.max_vcpus;
            boot.memory = vm.memory;
            boot.growth = size.growth;
            boot.disks = files.open(&store, &vm)?;
            boot.shares = vm.shares.clone();
            boot.dhcp = dhcp;
            boot.ends_at_reboot = vm.ends_at_reboot;
            boot.incoming = vm.incoming.map(|migration| IncomingMachine {
                migration,
                limit: IncomingMachine::LIMIT,
            });
            boot.log = log;
            Ok((boot, image))
        });
        let (mut boot, image) = opened
            .await
            .map_err(CriError::host("open the machine's files"))??;
        let mut unkept = None;
        if let Some(image) = image {
            (boot.kept, unkept) = kept_kernel(&boot, &image, &loader, client).await;
        }
        let started = client.boot_machine(boot).await?;
        if let Some(unkept) = unkept {
            // The machine runs, and nobody waits for the node's disk.
            tokio::spawn(async move {
                if let Ok(Err(error)) = apart("keep-kernel", move || unkept.keep()).await {
                    let why = causes(&error);
                    warn!(why, "the image's kernel is not kept for its next machines");
                }
            });
        }
        if starts_paused {
            client.pause().await?;
        }
        Ok(started)
    }

    /// Prepares the servers that tell the guest its addresses.
    fn dhcp_servers(&self, container: &Container) -> Result<Vec<DhcpServer>> {
        let pod = container.pod.record();
        let Some(network) = &pod.network else {
            return Ok(Vec::new());
        };
        let dns = pod.config.dns_config.clone().unwrap_or_default();
        let names = GuestNames {
            host_name: resolver::hostname(&pod.config)?,
            dns: dns_of(&dns, self.cni.dns(&pod.id)?),
        };
        let mut cards = cards(&pod.config.annotations)?;
        let mut servers = self.cni.dhcp(&pod.id, network, &names)?;
        for server in &mut servers {
            let mac = server.config.client.0;
            let interface = network.interfaces.iter().find(|one| one.mac == mac);
            let card = interface.and_then(|interface| cards.remove(&interface.name));
            server.config.others = card.map(|card| card.dhcp).unwrap_or_default();
        }
        Ok(servers)
    }
}

/// Returns the kernel that a fresh disk of an image boots, and what keeps it if it was read now. A
/// machine without it boots by the loader.
async fn kept_kernel(
    boot: &BootMachine,
    image: &Disk,
    loader: &[PathBuf; 2],
    client: &SandboxClient,
) -> (Option<KeptKernel>, Option<Unkept>) {
    let container = &boot.id;
    let loader = loader.each_ref().map(PathBuf::as_path);
    let reads = || info!(container, "reading the image's kernel");
    match kept_kernels::of_image(client, image, loader, boot.memory, reads).await {
        Ok((kernel, unkept)) => {
            let (title, is_new) = (&kernel.title, unkept.is_some());
            info!(container, title, is_new, "the image's kernel is known");
            (Some(kernel), unkept)
        }
        Err(error) => {
            let why = causes(&error);
            warn!(
                container,
                why, "the image's kernel is not known: the loader finds it"
            );
            (None, None)
        }
    }
}

impl VmSettings {
    /// Checks that this node has what starts a machine's system, for which `field` asks.
    pub(super) fn check(&self, booter: Booter, field: &'static str) -> Result<()> {
        if booter == Booter::Loader {
            return Ok(());
        }
        let path = &self.firmware;
        Firmware::open(path).map_err(|error| {
            let why = causes(&error);
            CriError::invalid(
                field,
                format!(
                    "this node has no UEFI firmware: {why}; build it with `cargo xtask firmware` \
                     in podvisor's source, and put it there or name it in the setting `vm.firmware`"
                ),
            )
        })?;
        Ok(())
    }

    /// Returns the guest agent's program, if a machine is to have it.
    pub(super) fn agent_of(&self, spec: &VmSpec) -> Result<Option<Vec<u8>>> {
        if !spec.installs_agent {
            return Ok(None);
        }
        let path = &self.guest_agent;
        let read = std::fs::read(path).map_err(|error| {
            CriError::invalid(
                GUEST_AGENT,
                format!(
                    "this node has no guest agent at {}: {error}; install podvisor's package, or \
                     build it with `cargo xtask guest` in podvisor's source and put it there",
                    path.display()
                ),
            )
        });
        read.map(Some)
    }

    /// Why no machine can be booted; `None` if the loader is there.
    pub(in crate::cri) fn fault(&self) -> Option<CriError> {
        let missing = [&self.kernel, &self.initramfs].into_iter();
        let path = missing.into_iter().find(|path| !path.exists())?;
        Some(CriError::NoKernel {
            handler: VM_HANDLER.to_owned(),
            kernel: path.clone(),
        })
    }
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(CriError::io("open the loader", path))
}
