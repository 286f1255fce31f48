//! The machine that an object describes: a pure function of it.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use podvisor_cloud_init::Form;
use podvisor_cluster_types::vmi::{Cpu, DhcpOptions, Firmware, KernelBoot, VmiSpec};
use podvisor_cluster_types::{ClusterConfig, ClusterDefaults, FieldPath, Quantity};
use podvisor_network::cni::Ipv4Option;
use podvisor_sandbox::machine::{GROWTH_UNIT, MachineIdentity};

use super::annotations::parse_uuid;
use super::spec::{Booter, MEMORY_UNIT};
use super::vmi::{MAX_REASONS, Vmi, VmiError};

/// Longest serial number of a disk, in bytes (virtio 1.3 §5.2.6.1). A longer one is cut.
pub(in crate::cri) const MAX_SERIAL: usize = 20;

/// Most bytes of a tag (virtio 1.3 §5.11.4).
pub(in crate::cri) const MAX_TAG: usize = 36;

/// Most vCPUs of a machine whose guest finds them by APIC ids of eight bits.
const MAX_VCPUS: u8 = 254;

/// Most bytes by which memory may grow: it reserves addresses.
const MAX_GROWTH: u64 = 1 << 40;

/// The root of the paths in errors.
pub(super) const SPEC: &str = "spec";

/// The name of the pod's first interface, which is that of its own network.
const FIRST_INTERFACE: &str = "eth0";

/// A machine, as its object describes it.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::cri) struct VmiMachine {
    /// Name of the object.
    pub(in crate::cri) name: String,
    /// Its namespace.
    pub(in crate::cri) namespace: String,
    /// vCPUs.
    pub(in crate::cri) vcpus: u8,
    /// vCPUs that may be reached while it runs.
    pub(in crate::cri) max_vcpus: u8,
    /// Memory in bytes.
    pub(in crate::cri) memory: u64,
    /// Bytes that may be added while it runs.
    pub(in crate::cri) growth: u64,
    /// Its UUID; `None`: made from its pod's id.
    pub(in crate::cri) uuid: Option<[u8; 16]>,
    /// What else its firmware tables say.
    pub(in crate::cri) identity: MachineIdentity,
    /// Its disks, in the guest's order.
    pub(in crate::cri) disks: Vec<VmiDisk>,
    /// The volumes that its guest mounts by their names.
    pub(in crate::cri) shares: Vec<VmiShare>,
    /// What it boots.
    pub(in crate::cri) boot: VmiBoot,
    /// What starts the system on its disks.
    pub(in crate::cri) booter: Booter,
    /// Its cards, by the names of the pod's interfaces.
    pub(in crate::cri) cards: BTreeMap<String, VmiCard>,
    /// It is paused as soon as it runs.
    pub(in crate::cri) starts_paused: bool,
    /// A guest that reboots has ended.
    pub(in crate::cri) ends_at_reboot: bool,
}

/// A network card of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cri) struct VmiCard {
    /// Its name in the object.
    pub(in crate::cri) name: String,
    /// Its hardware address, if one is given.
    pub(in crate::cri) mac: Option<[u8; 6]>,
    /// It begins without a link.
    pub(in crate::cri) is_down: bool,
    /// What else DHCP tells the guest on it.
    pub(in crate::cri) dhcp: Vec<Ipv4Option>,
}

/// A disk of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cri) struct VmiDisk {
    /// The path of its volume in the object, for errors.
    pub(in crate::cri) path: String,
    /// The name of its volume.
    pub(in crate::cri) name: String,
    /// The serial number by which the guest finds it, which no other has.
    pub(in crate::cri) serial: String,
    /// The guest cannot write it.
    pub(in crate::cri) is_read_only: bool,
    /// What it shows.
    pub(in crate::cri) source: DiskSource,
}

/// A volume that the guest mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cri) struct VmiShare {
    /// The path of its volume in the object, for errors.
    pub(in crate::cri) path: String,
    /// The name of its volume, which is its tag.
    pub(in crate::cri) name: String,
    /// The guest cannot write it.
    pub(in crate::cri) is_read_only: bool,
}

/// What a disk shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cri) enum DiskSource {
    /// A copy of the disk in the container's image.
    Image,
    /// A copy of the disk in an image that the pod mounts.
    ImageVolume,
    /// A claim.
    Claim,
    /// A copy of a claim.
    Ephemeral,
    /// An empty file of so many bytes.
    Empty(u64),
    /// The files of a ConfigMap, Secret or the like, on a volume with this label.
    Files(String),
    /// What cloud-init is told.
    Seed(VmiSeed),
}

/// What cloud-init is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cri) struct VmiSeed {
    pub(in crate::cri) form: Form,
    pub(in crate::cri) user_data: SeedText,
    pub(in crate::cri) network_data: SeedText,
    /// The indices of the credentials whose keys it has.
    pub(in crate::cri) credentials: Vec<usize>,
}

/// Where a document of cloud-init's is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cri) enum SeedText {
    /// There is none.
    None,
    /// In the object.
    Inline(Vec<u8>),
    /// In a secret that the pod mounts.
    Secret,
}

/// What a machine boots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cri) enum VmiBoot {
    /// What is on the disk with this serial number.
    Disk(String),
    /// A kernel in an image that the pod mounts.
    Kernel {
        /// Its path in the image.
        kernel: String,
        /// The path of its initramfs.
        initrd: Option<String>,
        /// Its command line.
        cmdline: String,
    },
}

/// Reads an object, and collects what is wrong.
pub(super) struct Reader {
    pub(super) spec: VmiSpec,
    errors: Vec<String>,
}

impl VmiMachine {
    /// The field that asks for a UEFI firmware.
    pub(in crate::cri) const EFI: &str = "spec.domain.firmware.bootloader.efi";

    /// Reads what an object describes.
    ///
    /// # Errors
    /// Everything of it that is against the rules, or that this node cannot do.
    pub(in crate::cri) fn of(vmi: Vmi) -> Result<Self, VmiError> {
        let mut spec = vmi.spec;
        spec.apply_defaults(&ClusterDefaults::default());
        let causes = spec.validate(&rules(&spec), &FieldPath::new(SPEC));
        let errors = causes.iter().map(ToString::to_string).collect();
        let mut reader = Reader { spec, errors };
        reader.refuse();
        let disks = reader.disks();
        let machine = Self {
            name: vmi.metadata.name,
            namespace: vmi.metadata.namespace,
            vcpus: reader.vcpus(),
            max_vcpus: reader.max_vcpus(),
            memory: reader.memory(),
            growth: reader.growth(),
            uuid: reader.uuid(),
            identity: reader.identity(),
            boot: reader.boot(&disks),
            booter: reader.booter(),
            shares: reader.shares(),
            disks,
            cards: reader.cards(),
            ends_at_reboot: reader.spec.domain.reboot_policy.as_deref() == Some("Terminate"),
            starts_paused: reader.spec.start_strategy.as_deref() == Some("Paused"),
        };
        match reader.errors.is_empty() {
            true => Ok(machine),
            false => {
                reader.errors.truncate(MAX_REASONS);
                Err(VmiError::Refused(reader.errors))
            }
        }
    }
}

/// The webhooks' rules, without those that the cluster's administrator decides about.
fn rules(spec: &VmiSpec) -> ClusterConfig {
    let mut rules = ClusterConfig::default();
    rules.machine_types = vec!["*".to_owned()];
    let cpu = spec.domain.cpu.as_ref();
    rules.cpu_models = cpu.and_then(|cpu| cpu.model.clone()).into_iter().collect();
    rules.live_update = true;
    rules
}

impl Reader {
    pub(super) fn wrong(&mut self, path: &str, problem: impl std::fmt::Display) {
        if self.errors.len() < MAX_REASONS {
            self.errors.push(format!("{SPEC}.{path} {problem}"));
        }
    }

    /// Refuses what would change how the machine behaves, and is not done here.
    fn refuse(&mut self) {
        let domain = &self.spec.domain;
        let memory = domain.memory.as_ref();
        let cpu = domain.cpu.as_ref();
        let given = [
            (
                memory.is_some_and(|memory| memory.hugepages.is_some()),
                "domain.memory.hugepages",
            ),
            (
                cpu.is_some_and(|cpu| cpu.dedicated_cpu_placement == Some(true)),
                "domain.cpu.dedicatedCpuPlacement",
            ),
        ];
        for (is_given, path) in given {
            if is_given {
                self.wrong(path, "is not supported by this node yet: remove it");
            }
        }
    }

    fn vcpus(&mut self) -> u8 {
        let cpu = self.spec.domain.cpu.clone().unwrap_or_default();
        let count = cpu.vcpus();
        u8::try_from(count).unwrap_or_else(|_| {
            let problem = format!("asks for {count} vCPUs, but a machine has at most 255");
            self.wrong("domain.cpu", problem);
            1
        })
    }

    /// What may be reached: a number that no machine reaches is no mistake, since it may be the
    /// cluster's default.
    fn max_vcpus(&self) -> u8 {
        let cpu = self.spec.domain.cpu.clone().unwrap_or_default();
        let sockets = cpu.max_sockets.max(cpu.sockets);
        let most = Cpu { sockets, ..cpu }.vcpus();
        u8::try_from(most).unwrap_or(MAX_VCPUS).min(MAX_VCPUS)
    }

    /// As much as its memory may grow by, in whole units.
    fn growth(&mut self) -> u64 {
        let memory = self.spec.domain.memory.as_ref();
        let most = memory.and_then(|memory| memory.max_guest.as_ref());
        let most = most.and_then(Quantity::bytes).unwrap_or(0);
        let growth = most.saturating_sub(self.memory()).min(MAX_GROWTH);
        growth - growth % GROWTH_UNIT
    }

    fn memory(&mut self) -> u64 {
        let memory = self.spec.domain.memory.as_ref();
        let guest = memory.and_then(|memory| memory.guest.as_ref());
        let bytes = guest.and_then(Quantity::bytes).unwrap_or(0);
        match bytes - bytes % MEMORY_UNIT {
            0 => {
                self.wrong("domain.memory.guest", "must be at least 1Mi");
                MEMORY_UNIT
            }
            bytes => bytes,
        }
    }

    fn firmware(&self) -> Firmware {
        self.spec.domain.firmware.clone().unwrap_or_default()
    }

    fn uuid(&mut self) -> Option<[u8; 16]> {
        let text = self.firmware().uuid.filter(|text| !text.is_empty())?;
        let uuid = parse_uuid(&text);
        if uuid.is_none() {
            self.wrong("domain.firmware.uuid", "is not a UUID");
        }
        uuid
    }

    fn identity(&self) -> MachineIdentity {
        let chassis = self.spec.domain.chassis.clone().unwrap_or_default();
        MachineIdentity {
            serial: self.firmware().serial,
            chassis_manufacturer: chassis.manufacturer,
            chassis_version: chassis.version,
            chassis_serial: chassis.serial,
            chassis_asset_tag: chassis.asset,
            chassis_sku: chassis.sku,
        }
    }

    fn boot(&mut self, disks: &[VmiDisk]) -> VmiBoot {
        if let Some(boot) = self.firmware().kernel_boot {
            return self.kernel(boot);
        }
        let ordered = self.spec.domain.devices.disks.iter();
        let first = ordered
            .filter_map(|disk| Some((disk.boot_order?, &disk.name)))
            .min()
            .map(|(_, name)| name);
        let found = match first {
            Some(name) => disks.iter().find(|disk| disk.name == *name),
            None => disks.iter().find(|disk| disk.may_have_a_system()),
        };
        match found {
            Some(disk) => VmiBoot::Disk(disk.serial.clone()),
            None => {
                let problem = "has no disk to boot from: add a containerDisk or a claim with an \
                               operating system, or a kernelBoot";
                self.wrong("domain.devices.disks", problem);
                VmiBoot::Disk(String::new())
            }
        }
    }

    /// What an `efi` may say was checked.
    fn booter(&self) -> Booter {
        let bootloader = self.firmware().bootloader;
        match bootloader.and_then(|bootloader| bootloader.efi) {
            Some(_) => Booter::Firmware,
            None => Booter::Loader,
        }
    }

    fn kernel(&mut self, boot: KernelBoot) -> VmiBoot {
        let path = |path: Option<String>| path.filter(|path| !path.is_empty());
        let container = boot.container.unwrap_or_default();
        let kernel = path(container.kernel_path).unwrap_or_else(|| {
            let problem = "is missing: an initramfs alone boots nothing";
            self.wrong("domain.firmware.kernelBoot.container.kernelPath", problem);
            String::new()
        });
        VmiBoot::Kernel {
            kernel,
            initrd: path(container.initrd_path),
            cmdline: boot.kernel_args.unwrap_or_default(),
        }
    }

    /// The pod's interfaces are `eth0` for its own network, and `net1`, `net2` … for the others
    /// (Multus), without those whose cards are absent.
    fn cards(&mut self) -> BTreeMap<String, VmiCard> {
        let mut names = BTreeMap::new();
        let mut others = 0;
        for network in self.spec.attached_networks() {
            let multus = network.multus.as_ref();
            let is_other = multus.is_some_and(|multus| multus.default != Some(true));
            let name = match is_other {
                true => {
                    others += 1;
                    format!("net{others}")
                }
                false => FIRST_INTERFACE.to_owned(),
            };
            names.insert(network.name.clone(), name);
        }
        let mut cards = BTreeMap::new();
        let interfaces = self.spec.domain.devices.interfaces.clone();
        for (index, interface) in interfaces.iter().enumerate() {
            let given = interface.mac_address.as_deref();
            let given = given.filter(|text| !text.is_empty());
            let mac = given.and_then(parse_mac);
            if given.is_some() && mac.is_none() {
                let path = format!("domain.devices.interfaces[{index}].macAddress");
                self.wrong(&path, "is not the address of one card: write 02:…");
            }
            let Some(name) = names.get(&interface.name) else {
                continue;
            };
            let card = VmiCard {
                name: interface.name.clone(),
                mac,
                is_down: interface.is_down(),
                dhcp: dhcp_options(interface.dhcp_options.as_ref()),
            };
            cards.insert(name.clone(), card);
        }
        cards
    }
}

impl VmiDisk {
    fn may_have_a_system(&self) -> bool {
        matches!(
            self.source,
            DiskSource::Image | DiskSource::ImageVolume | DiskSource::Claim | DiskSource::Ephemeral
        )
    }
}

/// Reads what DHCP is to say; the cluster has refused what it cannot.
fn dhcp_options(options: Option<&DhcpOptions>) -> Vec<Ipv4Option> {
    let Some(options) = options else {
        return Vec::new();
    };
    let servers = options.ntp_servers.iter();
    let servers = servers.filter_map(|server| server.parse::<Ipv4Addr>().ok());
    let servers: Vec<u8> = servers.flat_map(|server| server.octets()).collect();
    let text = |text: &Option<String>| text.clone().unwrap_or_default().into_bytes();
    let mut found = vec![
        (Ipv4Option::TIME_SERVERS, servers),
        (Ipv4Option::BOOT_SERVER, text(&options.tftp_server_name)),
        (Ipv4Option::BOOT_FILE, text(&options.boot_file_name)),
    ];
    for private in &options.private_options {
        if let Ok(code) = u8::try_from(private.option) {
            found.push((code, private.value.clone().into_bytes()));
        }
    }
    found.retain(|(_, value)| !value.is_empty());
    let option = |(code, value)| Ipv4Option { code, value };
    found.into_iter().map(option).collect()
}

/// Reads a hardware address of one card, with colons or hyphens.
fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split([':', '-']);
    for byte in &mut mac {
        let part = parts.next().filter(|part| part.len() == 2)?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    let is_of_one = mac[0] & 1 == 0 && mac != [0; 6];
    (parts.next().is_none() && is_of_one).then_some(mac)
}
