//! The VirtualMachineInstance: one running VM.
//!
//! A file per subject holds the types of that part with their defaults and their rules;
//! this one puts them together in KubeVirt's order.

mod clock;
mod cloud_init;
mod cpu;
mod credentials;
mod defaults;
mod devices;
mod disks;
mod dns;
mod features;
mod filesystems;
mod firmware;
mod interfaces;
mod memory;
mod meta;
mod networks;
mod probes;
mod references;
mod refused;
mod resources;
mod scheduling;
mod status;
mod unapplied;
mod update;
mod volumes;

use std::collections::BTreeMap;

use serde_json::Value;

pub use clock::{Clock, ClockUtc, Timer, TimerSet};
pub use cloud_init::CloudInit;
pub use cpu::{Cpu, CpuFeature, CpuTopology};
pub use credentials::{
    AccessCredential, AgentMethod, CredentialMethod, CredentialSource, PasswordCredential,
    SecretSource, SshCredential,
};
pub use devices::{Devices, IoThreads, Rng};
pub use disks::{BlockSize, CdromTarget, CustomBlockSize, Disk, DiskTarget, MatchVolume};
pub use dns::{DnsConfig, DnsOption};
pub use features::{ApicFeature, FeatureState, Features, KvmFeature};
pub use filesystems::{Filesystem, Virtiofs};
pub use firmware::{
    Bios, Bootloader, Chassis, Efi, Firmware, KernelBoot, KernelBootContainer, Machine,
};
pub use interfaces::{
    Binding, DhcpOptions, Interface, InterfacePort, PortRange, PrivateDhcpOption,
};
pub use memory::{Hugepages, Memory};
pub use meta::{RESERVED_LABELS, validate_meta};
pub use networks::{MultusNetwork, Network, PodNetwork};
pub use probes::{ExecProbe, HttpGetProbe, HttpHeader, Probe, ProbeHandler, TcpSocketProbe};
pub use references::LocalReference;
pub use resources::Resources;
pub use scheduling::EVICTION_STRATEGIES;
pub use status::{
    Condition, GuestOsInfo, InterfaceStatus, MemoryStatus, MigrationState, PhaseTransition,
    VmiStatus, VolumeStatus,
};
pub use update::{validate_spec_update, validate_system_spec_update};
pub use volumes::{
    ClaimSource, ConfigMapVolume, ContainerDisk, DataVolumeSource, DownwardApiVolume, EmptyDisk,
    EphemeralVolume, MemoryDumpVolume, SecretVolume, ServiceAccountVolume, Volume,
};

use crate::{Cause, Causes, ClusterConfig, FieldPath};

object! {
    /// What is to run (`spec`).
    pub struct VmiSpec {
        /// The machine.
        pub domain: Domain,
        /// The networks that interfaces attach to.
        pub networks: Vec<Network>,
        /// The volumes that disks and file systems show.
        pub volumes: Vec<Volume>,
        /// Whether the guest is alive.
        pub liveness_probe: Option<Probe>,
        /// Whether the guest serves.
        pub readiness_probe: Option<Probe>,
        /// The guest's host name; the VMI's name where it is missing.
        pub hostname: Option<String>,
        /// Subdomain of the host name.
        pub subdomain: Option<String>,
        /// Where the guest's name servers come from.
        pub dns_policy: Option<String>,
        /// Name servers.
        pub dns_config: Option<DnsConfig>,
        /// Keys and passwords of the guest's users.
        pub access_credentials: Vec<AccessCredential>,
        /// What happens when the node is drained.
        pub eviction_strategy: Option<String>,
        /// `Paused`: the VM starts paused.
        pub start_strategy: Option<String>,
        /// Seconds between the request to shut down and the kill.
        pub termination_grace_period_seconds: Option<i64>,
        /// Labels of the nodes that may run it.
        pub node_selector: BTreeMap<String, String>,
        /// As a pod's.
        pub affinity: Option<Value>,
        /// As a pod's.
        pub tolerations: Vec<Value>,
        /// As a pod's.
        pub topology_spread_constraints: Vec<Value>,
        /// As a pod's.
        pub scheduler_name: Option<String>,
        /// As a pod's.
        pub priority_class_name: Option<String>,
        /// The service account of the pod.
        pub service_account_name: Option<String>,
        /// The guest's architecture.
        pub architecture: Option<String>,
        /// Refused.
        pub resource_claims: Option<Value>,
        /// Refused.
        pub utility_volumes: Option<Value>,
    }

    /// The machine (`spec.domain`).
    pub struct Domain {
        /// Requests and limits of the pod.
        pub resources: Resources,
        /// vCPUs.
        pub cpu: Option<Cpu>,
        /// Guest memory.
        pub memory: Option<Memory>,
        /// Machine type.
        pub machine: Option<Machine>,
        /// Identity and boot.
        pub firmware: Option<Firmware>,
        /// The clock's base and its timers.
        pub clock: Option<Clock>,
        /// Features of the machine.
        pub features: Option<Features>,
        /// Devices.
        pub devices: Devices,
        /// How disks share I/O threads.
        pub io_threads_policy: Option<String>,
        /// The pool of I/O threads.
        pub io_threads: Option<IoThreads>,
        /// The chassis that the firmware tables name.
        pub chassis: Option<Chassis>,
        /// What a reboot from inside does.
        pub reboot_policy: Option<String>,
        /// Refused.
        pub launch_security: Option<Value>,
    }
}

impl VmiSpec {
    /// Every cause to refuse this specification, below `path` (`spec` of a VMI,
    /// `spec.template.spec` of a VM). Meant for a specification that has its defaults.
    #[must_use]
    pub fn validate(&self, config: &ClusterConfig, path: &FieldPath) -> Vec<Cause> {
        let mut causes = Causes::default();
        let domain = path.child("domain");
        scheduling::validate_names(self, path, &mut causes);
        resources::validate(self, config, &domain, &mut causes);
        firmware::validate_machine(self, config, &domain, &mut causes);
        cpu::validate(self, config, &domain, &mut causes);
        scheduling::validate_strategies(self, path, &mut causes);
        devices::validate(&self.domain, &domain, &mut causes);
        disks::validate(self, &domain.child("devices.disks"), &mut causes);
        filesystems::validate(self, &domain.child("devices.filesystems"), &mut causes);
        probes::validate(self, path, &mut causes);
        interfaces::validate(
            self,
            config,
            &domain.child("devices.interfaces"),
            &mut causes,
        );
        networks::validate(self, &path.child("networks"), &mut causes);
        dns::validate(self, path, &mut causes);
        volumes::validate(self, &path.child("volumes"), &mut causes);
        credentials::validate(self, &path.child("accessCredentials"), &mut causes);
        firmware::validate(&self.domain, &domain, &mut causes);
        features::validate(&self.domain, &domain, &mut causes);
        clock::validate(&self.domain, &domain, &mut causes);
        refused::validate(self, path, &mut causes);
        causes.into_vec()
    }

    /// What is accepted and yet works otherwise than the user may expect.
    #[must_use]
    pub fn warnings(&self, path: &FieldPath) -> Vec<String> {
        let mut warnings = disks::warnings(self, &path.child("domain.devices.disks"));
        warnings.extend(unapplied::warnings(self, path));
        warnings
    }

    /// The networks that the pod has: those without a card that is absent.
    pub fn attached_networks(&self) -> impl Iterator<Item = &Network> {
        let cards = &self.domain.devices.interfaces;
        self.networks.iter().filter(|network| {
            let mut cards = cards.iter().filter(|card| card.name == network.name);
            !cards.any(Interface::is_absent)
        })
    }

    /// Whether the default network of the pod is among the networks.
    pub(crate) fn has_pod_network(&self) -> bool {
        self.networks.iter().any(|network| network.pod.is_some())
    }
}

/// How many of these are given.
pub(crate) fn count(given: &[bool]) -> usize {
    given.iter().filter(|given| **given).count()
}
