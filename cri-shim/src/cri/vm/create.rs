//! CreateContainer of a virtual machine: everything is checked, then its disks are made. The
//! sandbox's process learns of it when it is started.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use podvisor_cloud_init::GuestMount;
use podvisor_cri_messages::{ContainerConfig, ContainerEventType};
use podvisor_images::Store;
use podvisor_network::cni::Dns;
use podvisor_sandbox::machine::{MachineIdentity, MachineShare};
use podvisor_sandbox::{SupplementalGroups, random_id};
use tracing::{info, warn};

use super::attachment::Attachment;
use super::disks::{self, DiskFiles};
use super::honour::FileMount;
use super::seed::{SeedSource, read_files};
use super::shares::WantedShare;
use super::vmi::{self, VmiDisks};
use super::{honour, images, migration};
use crate::blocking::{apart, in_place};
use crate::cri::config::VmSettings;
use crate::cri::containers::log_path;
use crate::cri::error::{CriError, Result};
use crate::cri::image_names::ImageNames;
use crate::cri::limits::memory_limit;
use crate::cri::node::{Container, Node, Pod, now};
use crate::cri::resolver;
use crate::cri::state::{ContainerPhase, ContainerRecord, PodPhase, PodRecord, ROOT, VmRecord};
use crate::cri::vm_spec::{Booter, FIRMWARE, VmSpec, VmiBoot, VmiMachine};
use crate::sandbox::ContainerStats;

/// Signal that is recorded as the one that asks a machine to end: SIGTERM. It is its power button.
const SIGTERM: u32 = 15;

/// The directory of a machine's disks, in that of its container's volumes.
const DIR: &str = "machine";

impl Node {
    /// Creates the container of a pod that is a virtual machine. The pod's turn is held.
    pub(in crate::cri) async fn create_vm(
        self: &Arc<Self>,
        pod: &Arc<Pod>,
        config: ContainerConfig,
    ) -> Result<String> {
        if pod.phase() != PodPhase::Ready {
            return Err(pod.not_ready());
        }
        let described = Described::of(pod)?;
        match &described {
            Described::Annotations(_) => honour::check_container(&config, false)?,
            Described::Attachment(attachment) => attachment.check_container(&config)?,
            Described::Vmi(_) => {
                honour::check_container(&config, true)?;
                vmi::check_container(&config)?;
            }
        }
        self.only_container(pod)?;
        let id = random_id().map_err(CriError::host("make up an id"))?;
        let made = self.make_vm(pod, &id, config, described).await;
        if let Err(error) = made {
            if let Err(error) = self.unshare_directories(pod, &id) {
                warn!(container = id, %error, "directories are unmounted later");
            }
            if let Err(error) = self.remove_image_volumes(&pod.id, &id).await {
                warn!(container = id, %error, "the disks of a failed create are removed later");
            }
            return Err(error);
        }
        info!(container = id, pod = pod.id, "the machine's disks are made");
        Ok(id)
    }

    /// Refuses a second container beside one that runs or may run: init containers and sidecars
    /// are containers, too.
    fn only_container(&self, pod: &Pod) -> Result<()> {
        let others = self.containers_of(&pod.id);
        let mut others = others.iter().filter(|other| other.phase().is_there());
        match others.next() {
            Some(other) => Err(CriError::SecondContainer {
                other: other.id.clone(),
            }),
            None => Ok(()),
        }
    }

    async fn make_vm(
        self: &Arc<Self>,
        pod: &Arc<Pod>,
        id: &str,
        config: ContainerConfig,
        described: Described,
    ) -> Result<()> {
        let of_container = config.clone();
        let looked = apart("vm-mounts", move || {
            let passed = described.passed(&of_container)?;
            Ok::<_, CriError>((described, passed))
        });
        let looked = looked.await;
        let (described, (files, wanted)) =
            looked.map_err(CriError::host("look at the machine's mounts"))??;
        let shares = self.share_directories(pod, id, &wanted).await?;
        let names = shares.iter().map(|share| share.name.clone());
        let names: BTreeSet<String> = names.collect();
        let record = pod.record();
        let network_dns = self.cni.dns(&pod.id)?;
        let dns = dns_of(
            &record.config.dns_config.clone().unwrap_or_default(),
            network_dns,
        );
        let making = Making {
            store: self.store.clone(),
            names: self.config.image_names.clone(),
            settings: self.config.vm.clone(),
            files: self.disk_files(&pod.id, id),
            pod: record,
            container: config.clone(),
            passed: files,
            mounts: wanted.iter().map(WantedShare::guest_mount).collect(),
            shares,
            dns,
        };
        // A file server that does not answer must not hold up the node.
        let made = apart("vm-disks", move || {
            making.files.prepare()?;
            let (vm, image) = match described {
                Described::Annotations(spec) => making.of_annotations(spec)?,
                Described::Attachment(_) => making.of_nothing(),
                Described::Vmi(machine) => making.of_vmi(&machine)?,
            };
            Ok::<_, CriError>((vm, image, making.pod))
        });
        let (vm, image, record) = made
            .await
            .map_err(CriError::host("make the machine's disks"))??;
        let named = config.image.clone().unwrap_or_default();
        let image_tag = match named.user_specified_image.is_empty() {
            true => named.image,
            false => named.user_specified_image,
        };
        let record = ContainerRecord {
            id: id.to_owned(),
            pod: pod.id.clone(),
            image_ref: image.clone(),
            image,
            stop_signal: SIGTERM,
            log_path: log_path(&record.config.log_directory, &config.log_path)?,
            volumes: names.into_iter().collect(),
            process: Default::default(),
            user: String::new(),
            groups: SupplementalGroups::default(),
            identity: None,
            image_tag,
            start_error: None,
            mounted_images: Vec::new(),
            exit_before_removal: None,
            vm: Some(vm),
            created_at: now(),
            phase: ContainerPhase::Created,
            config,
        };
        let container = Container::new(record, Arc::clone(pod));
        self.add_new_container(&container)?;
        if let Err(error) = container.write(&self.database) {
            self.delete_failed_record(&container);
            return Err(error.into());
        }
        self.set_importance(pod);
        self.emit(&container, ContainerEventType::ContainerCreatedEvent);
        Ok(())
    }

    /// The files of a machine's disks, which are removed with the container's volumes.
    pub(super) fn disk_files(&self, pod: &str, container: &str) -> DiskFiles {
        let dir: PathBuf = self.image_volumes_dir(pod).join(container).join(DIR);
        DiskFiles::at(dir)
    }

    /// Adds what a machine's guest wrote, which its own process cannot see: a kubelet evicts a pod
    /// that takes too much of the node's disk.
    pub(in crate::cri) fn add_disks(&self, container: &Container, figures: &mut ContainerStats) {
        let of = |record: &ContainerRecord| Some((record.vm.clone()?, record.pod.clone()));
        let Some((vm, pod)) = container.with_record(of) else {
            return;
        };
        let files = self.disk_files(&pod, &container.id);
        if let Ok(usage) = in_place(|| files.usage(&vm)) {
            figures.writable_bytes = usage.capacity;
            figures.writable_used_bytes = usage.bytes;
            figures.writable_inodes = usage.max_files;
            figures.writable_used_inodes = usage.files;
        }
    }
}

/// What describes a pod's machine.
#[derive(Debug)]
enum Described {
    /// Virtlet's annotations.
    Annotations(VmSpec),
    /// KubeVirt's object.
    Vmi(Box<VmiMachine>),
    /// There is none.
    Attachment(Attachment),
}

impl Described {
    /// Reads a pod's annotations, which were checked when it was created.
    fn of(pod: &Pod) -> Result<Self> {
        let annotations = pod.with_record(|record| record.config.annotations.clone());
        if let Some(attachment) = Attachment::of_annotations(&annotations)? {
            return Ok(Self::Attachment(attachment));
        }
        if let Some(machine) = VmiMachine::of_annotations(&annotations)? {
            return Ok(Self::Vmi(Box::new(machine)));
        }
        let spec = VmSpec::of_annotations(&annotations).map_err(CriError::Annotations)?;
        Ok(Self::Annotations(spec))
    }

    /// Returns the files and the directories of a container's mounts that the machine gets. It
    /// blocks.
    fn passed(&self, config: &ContainerConfig) -> Result<(Vec<FileMount>, Vec<WantedShare>)> {
        match self {
            Self::Annotations(_) => {
                let passed = honour::passed_mounts(config)?;
                Ok((passed.files, WantedShare::of_mounts(passed.directories)))
            }
            Self::Vmi(machine) => Ok((Vec::new(), machine.wanted_shares(config)?)),
            Self::Attachment(_) => Ok((Vec::new(), Vec::new())),
        }
    }
}

/// What the files of a machine are made of. It blocks.
#[derive(Debug)]
struct Making {
    store: Store,
    names: ImageNames,
    settings: VmSettings,
    files: DiskFiles,
    pod: PodRecord,
    container: ContainerConfig,
    /// Mounts whose files are copied.
    passed: Vec<FileMount>,
    /// What cloud-init mounts, where it is told.
    mounts: Vec<GuestMount>,
    shares: Vec<MachineShare>,
    dns: Dns,
}

impl Making {
    fn image(&self) -> &str {
        let image = self.container.image.as_ref();
        image.map_or("", |image| image.image.as_str())
    }

    /// Returns what is recorded of the machine, and the id of the container's image.
    fn of_annotations(&self, spec: VmSpec) -> Result<(VmRecord, String)> {
        let size = self.pod.size;
        let memory = machine_memory(&self.container, size.memory)?;
        let images::BootDisk { disk, image } =
            images::boot_disk(&self.store, &self.names, self.image())?;
        let devices = disks::devices(&self.container.devices)?;
        let (root_size, booter) = (spec.root_size, spec.booter);
        self.settings.check(booter, FIRMWARE)?;
        let agent = self.settings.agent_of(&spec)?;
        let uuid = spec.uuid.unwrap_or_else(|| uuid_of(&self.pod.id));
        let seed = SeedSource {
            spec,
            pod: &self.pod,
            container: &self.container,
            devices: &devices,
            files: read_files(&self.passed)?,
            mounts: self.mounts.clone(),
            dns: self.dns.clone(),
            agent,
        };
        let seed = seed.seed()?;
        let vm = VmRecord {
            disks: self.files.of_image(&disk, root_size, &seed, devices)?,
            shares: self.shares.clone(),
            root: ROOT.to_owned(),
            booter,
            kernel: None,
            uuid,
            identity: MachineIdentity::default(),
            vcpus: size.vcpus,
            memory,
            starts_paused: false,
            ends_at_reboot: false,
            incoming: None,
            is_idle: false,
        };
        Ok((vm, image))
    }

    /// Returns what is recorded of a container without a machine.
    fn of_nothing(&self) -> (VmRecord, String) {
        let size = self.pod.size;
        let vm = VmRecord {
            disks: Vec::new(),
            shares: Vec::new(),
            root: String::new(),
            booter: Booter::default(),
            kernel: None,
            uuid: uuid_of(&self.pod.id),
            identity: MachineIdentity::default(),
            vcpus: size.vcpus,
            memory: size.memory,
            starts_paused: false,
            ends_at_reboot: false,
            incoming: None,
            is_idle: true,
        };
        (vm, images::NONE_ID.to_owned())
    }

    /// The same for KubeVirt's object.
    fn of_vmi(&self, machine: &VmiMachine) -> Result<(VmRecord, String)> {
        self.settings.check(machine.booter, VmiMachine::EFI)?;
        let spec = VmSpec::of_annotations(&self.pod.config.annotations);
        let agent = self
            .settings
            .agent_of(&spec.map_err(CriError::Annotations)?)?;
        let (disk, image) = match images::is_none(self.image()) {
            true => (None, images::NONE_ID.to_owned()),
            false => {
                let images::BootDisk { disk, image } =
                    images::boot_disk(&self.store, &self.names, self.image())?;
                (Some(disk), image)
            }
        };
        let making = VmiDisks {
            machine,
            container: &self.container,
            image: disk.as_ref(),
            store: &self.store,
            files: &self.files,
            host_name: resolver::hostname(&self.pod.config)?,
            agent,
        };
        let vm = VmRecord {
            disks: making.make()?,
            shares: self.shares.clone(),
            root: match &machine.boot {
                VmiBoot::Disk(serial) => serial.clone(),
                VmiBoot::Kernel { .. } => String::new(),
            },
            booter: machine.booter,
            kernel: making.kernel()?,
            uuid: machine.uuid.unwrap_or_else(|| uuid_of(&self.pod.id)),
            identity: machine.identity.clone(),
            vcpus: machine.vcpus,
            memory: machine.memory,
            starts_paused: machine.starts_paused,
            ends_at_reboot: machine.ends_at_reboot,
            incoming: migration::incoming(&self.pod.config.annotations)?,
            is_idle: false,
        };
        Ok((vm, image))
    }
}

/// The machine's memory: its container's limit, else all that the pod was created for.
fn machine_memory(config: &ContainerConfig, pod: u64) -> Result<u64> {
    const FIELD: &str = "config.linux.resources.memory_limit_in_bytes";
    let resources = config
        .linux
        .as_ref()
        .and_then(|linux| linux.resources.as_ref());
    let limit = resources.map_or(0, memory_limit);
    // The unit of guests' memory.
    let limit = limit - limit % (1 << 20);
    match limit {
        0 => Ok(pod),
        limit if limit > pod => Err(CriError::invalid(
            FIELD,
            format!(
                "{} MiB, but the pod was created for {} MiB: the pod's own limit must be as high",
                limit >> 20,
                pod >> 20
            ),
        )),
        limit => Ok(limit),
    }
}

/// The UUID of a pod's machine: that of its id, which is random, in the form of a random one (RFC
/// 9562, §5.4). It stays the same for all attempts.
fn uuid_of(pod: &str) -> [u8; 16] {
    let digits = pod
        .get(..32)
        .and_then(|digits| u128::from_str_radix(digits, 16).ok());
    let mut uuid = digits.unwrap_or_default().to_be_bytes();
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

/// The name servers of the pod, or of its network if it names none.
pub(super) fn dns_of(config: &podvisor_cri_messages::DnsConfig, network: Dns) -> Dns {
    match config.servers.is_empty() {
        true => network,
        false => Dns {
            nameservers: config.servers.clone(),
            search: config.searches.clone(),
            options: config.options.clone(),
        },
    }
}

#[cfg(test)]
mod tests {
    use podvisor_cri_messages::{DnsConfig, LinuxContainerConfig, LinuxContainerResources};

    use super::*;

    #[test]
    fn a_machine_has_its_containers_limit_and_at_most_its_pods() {
        let with = |limit: i64| ContainerConfig {
            linux: Some(LinuxContainerConfig {
                resources: Some(LinuxContainerResources {
                    memory_limit_in_bytes: limit,
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let pod = 1 << 30;
        assert_eq!(
            machine_memory(&ContainerConfig::default(), pod).unwrap(),
            pod
        );
        assert_eq!(machine_memory(&with(0), pod).unwrap(), pod);
        assert_eq!(
            machine_memory(&with(512 << 20 | 7), pod).unwrap(),
            512 << 20
        );
        let error = machine_memory(&with(2 << 30), pod).unwrap_err().to_string();
        assert!(
            error.contains("2048 MiB") && error.contains("1024 MiB"),
            "{error}"
        );
    }

    #[test]
    fn a_machine_keeps_the_uuid_of_its_pod() {
        let uuid = uuid_of(&"c3".repeat(32));
        assert_eq!(uuid, uuid_of(&"c3".repeat(32)));
        assert_eq!((uuid[0], uuid[6], uuid[8]), (0xc3, 0x43, 0x83));
        assert_ne!(uuid, uuid_of(&"c4".repeat(32)));
    }

    #[test]
    fn name_servers_of_the_pod_go_before_those_of_its_network() {
        let network = Dns {
            nameservers: vec!["10.0.0.1".to_owned()],
            ..Dns::default()
        };
        let none = DnsConfig::default();
        assert_eq!(dns_of(&none, network.clone()).nameservers, ["10.0.0.1"]);
        let own = DnsConfig {
            servers: vec!["10.96.0.10".to_owned()],
            searches: vec!["svc.cluster.local".to_owned()],
            ..Default::default()
        };
        let dns = dns_of(&own, network);
        assert_eq!((dns.nameservers, dns.search), (own.servers, own.searches));
    }
}
