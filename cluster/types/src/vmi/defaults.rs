//! The defaults, in the order in which KubeVirt applies them.

use super::{
    Binding, Cpu, Devices, Disk, DiskTarget, Features, Firmware, Interface, Machine, Network,
    PodNetwork, VmiSpec, clock, cpu, disks, features, memory, probes, resources, volumes,
};
use crate::{
    ClusterDefaults,
    config::{ARCHITECTURE, DefaultBinding, MACHINE_TYPE},
};

/// Name of the interface and the network that a specification without any gets.
const DEFAULT_NETWORK: &str = "default";

impl VmiSpec {
    /// Fills in what the user left out. Applied twice, it changes nothing more.
    ///
    /// `firmware.uuid` is left to [`VmiSpec::set_firmware_uuid`]: it is the one default that is
    /// not a function of the specification.
    pub fn apply_defaults(&mut self, defaults: &ClusterDefaults) {
        self.architecture
            .get_or_insert_with(|| ARCHITECTURE.to_owned());
        let machine = self.domain.machine.get_or_insert_with(Machine::default);
        if machine.kind.is_empty() {
            machine.kind = MACHINE_TYPE.to_owned();
        }
        resources::apply_defaults(&mut self.domain.resources, defaults);
        memory::apply_defaults(&mut self.domain);
        cpu::apply_default_topology(&mut self.domain);
        volumes::apply_defaults(&mut self.volumes);
        if self.eviction_strategy.is_none() {
            self.eviction_strategy
                .clone_from(&defaults.eviction_strategy);
        }
        self.attach_pod_network(defaults.binding);
        self.append_missing_disks();
        self.domain.firmware.get_or_insert_with(Firmware::default);
        features::apply_defaults(self.domain.features.get_or_insert_with(Features::default));
        clock::apply_defaults(self.domain.clock.as_mut());
        disks::apply_defaults(&mut self.domain.devices.disks);
        for probe in [&mut self.liveness_probe, &mut self.readiness_probe]
            .into_iter()
            .flatten()
        {
            probes::apply_defaults(probe);
        }
        let cpu = self.domain.cpu.get_or_insert_with(Cpu::default);
        cpu::apply_default_model(cpu, defaults);
        if defaults.live_update {
            cpu::apply_max_sockets(cpu, defaults);
            memory::apply_max_guest(self.domain.memory.as_mut(), defaults);
        }
    }

    /// Sets `firmware.uuid` where there is none.
    pub fn set_firmware_uuid(&mut self, uuid: impl FnOnce() -> String) {
        let firmware = self.domain.firmware.get_or_insert_with(Firmware::default);
        firmware.uuid.get_or_insert_with(uuid);
    }

    fn attach_pod_network(&mut self, binding: DefaultBinding) {
        let Devices {
            interfaces,
            autoattach_pod_interface,
            ..
        } = &mut self.domain.devices;
        if !interfaces.is_empty()
            || !self.networks.is_empty()
            || *autoattach_pod_interface == Some(false)
        {
            return;
        }
        let mut interface = Interface {
            name: DEFAULT_NETWORK.to_owned(),
            ..Default::default()
        };
        match binding {
            DefaultBinding::Bridge => interface.bridge = Some(Binding::default()),
            DefaultBinding::Masquerade => interface.masquerade = Some(Binding::default()),
        }
        interfaces.push(interface);
        self.networks.push(Network {
            name: DEFAULT_NETWORK.to_owned(),
            pod: Some(PodNetwork::default()),
            ..Default::default()
        });
    }

    fn append_missing_disks(&mut self) {
        let devices = &mut self.domain.devices;
        let shown: std::collections::BTreeSet<String> = devices
            .disks
            .iter()
            .map(|disk| &disk.name)
            .chain(
                devices
                    .filesystems
                    .iter()
                    .map(|filesystem| &filesystem.name),
            )
            .cloned()
            .collect();
        for volume in self
            .volumes
            .iter()
            .filter(|volume| !volume.is_memory_dump() && !shown.contains(&volume.name))
        {
            devices.disks.push(Disk {
                name: volume.name.clone(),
                disk: Some(DiskTarget::default()),
                ..Default::default()
            });
        }
    }
}
