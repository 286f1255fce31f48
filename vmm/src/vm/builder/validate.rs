//! What is wrong with a configuration.

use std::any::Any;
use std::collections::BTreeSet;

use podvisor_devices::mem::MemDevice;
use podvisor_devices::virtio::DeviceType;

use super::boot::ValidBoot;
use super::restore::RestoreBuilder;
use super::settings::{Boot, Parts, VmBuilder};
use crate::boot::{self, Firmware, Smbios};
use crate::cpuid;
use crate::memory::{self, HOTPLUG_UNIT, MemoryShape, MemorySize, PAGE_SIZE};
use crate::transport::Transport;
use crate::vm::devices::id::{self, IdFault};
use crate::vm::error::{BuildError, ConfigError, ConfigErrors};

impl VmBuilder {
    /// Finds everything that is wrong, where KVM takes `max_vcpus` vCPUs.
    pub(super) fn validate(&mut self, max_vcpus: u8) -> Result<ValidBoot, BuildError> {
        let Boot {
            kernel,
            firmware,
            initramfs,
            cmdline,
            transport,
            ..
        } = &self.source;
        let mut errors = Vec::new();
        let has_firmware = firmware.is_some();
        let also = |what| ConfigError::FirmwareAndKernel { what };
        match (firmware, kernel) {
            (None, None) => errors.push(ConfigError::NoKernel),
            (None, Some(_)) => {}
            (Some(_), _) if *transport != Transport::Pci => {
                errors.push(ConfigError::FirmwareTransport);
            }
            (Some(_), Some(_)) => errors.push(also("kernel")),
            (Some(_), None) if initramfs.is_some() => errors.push(also("initial file system")),
            (Some(_), None) if !cmdline.is_empty() => errors.push(also("command line")),
            (Some(_), None) => {}
        }
        let vcpus = self.source.vcpus.unwrap_or(1);
        if vcpus == 0 || vcpus > max_vcpus {
            errors.push(ConfigError::Vcpus {
                vcpus,
                max: max_vcpus,
            });
        }
        let most = self.source.max_vcpus.unwrap_or(vcpus);
        // Without an explicit maximum, the error about the count itself suffices.
        if self.source.max_vcpus.is_some() && (most < vcpus || most > max_vcpus) {
            errors.push(ConfigError::MaxVcpus {
                max_vcpus: most,
                vcpus,
                max: max_vcpus,
            });
        }
        let size = self.source.memory.unwrap_or(MemorySize::mib(128));
        if size < MemorySize::MIN || !size.as_bytes().is_multiple_of(PAGE_SIZE) {
            errors.push(ConfigError::Memory { size });
        }
        let hotplug = self.source.hotplug_memory.unwrap_or(MemorySize::bytes(0));
        if !hotplug.as_bytes().is_multiple_of(HOTPLUG_UNIT) {
            errors.push(ConfigError::HotplugMemory { size: hotplug });
        }
        let shape = MemoryShape {
            boot: size,
            hotplug,
        };
        // Memory that may be plugged in is only address space until the owner requests it.
        errors.extend(more_than_host(size));
        let (end, bits) = (shape.end(), cpuid::MOST_PHYSICAL_BITS);
        if end > 1 << bits {
            errors.push(ConfigError::AddressSpace { end, bits });
        }
        let transport = *transport;
        let own = usize::from(hotplug.as_bytes() > 0);
        let cmdline = boot::check_cmdline(cmdline, kernel.as_ref());
        errors.extend(self.parts.mistakes(own, transport));
        errors.extend(cmdline.err().map(ConfigError::Cmdline));
        let identity = self.source.smbios.iter().flat_map(Smbios::mistakes);
        errors.extend(identity.map(|(field, why)| ConfigError::Smbios { field, why }));
        let firmware = self.source.firmware.take().map(Firmware::into_kernel);
        match firmware.or_else(|| self.source.kernel.take()) {
            Some(kernel) if errors.is_empty() => Ok(ValidBoot {
                kernel,
                vcpus,
                max_vcpus: most,
                memory: shape,
                transport,
                has_firmware,
            }),
            _ => Err(BuildError::Config(ConfigErrors(errors))),
        }
    }
}

impl RestoreBuilder {
    /// Finds settings that contradict the snapshot, and what this host lacks, where KVM takes
    /// `max_vcpus` vCPUs.
    pub(crate) fn validate(&mut self, max_vcpus: u8) -> Result<(), BuildError> {
        let snapshot = &self.source.snapshot;
        let mut errors = Vec::new();
        if self.parts.serial.is_some() && snapshot.state().serial.is_none() {
            errors.push(ConfigError::NoSerial);
        }
        let vcpus = snapshot.max_vcpus();
        if vcpus > max_vcpus {
            errors.push(ConfigError::Vcpus {
                vcpus,
                max: max_vcpus,
            });
        }
        errors.extend(more_than_host(snapshot.memory()));
        let own = usize::from(snapshot.memory_device().is_some());
        let transport = snapshot.state().transport();
        errors.extend(self.parts.mistakes(own, transport));
        if errors.is_empty() {
            return Ok(());
        }
        Err(BuildError::Config(ConfigErrors(errors)))
    }
}

fn more_than_host(size: MemorySize) -> Option<ConfigError> {
    let host = memory::host_memory();
    (size > host).then_some(ConfigError::MoreMemoryThanHost { size, host })
}

impl Parts {
    /// Finds what is wrong with the devices, of which the builder adds `own`.
    fn mistakes(&mut self, own: usize, transport: Transport) -> Vec<ConfigError> {
        let mut errors = Vec::new();
        let count = self.devices.len() + own;
        if count > transport.max_devices() {
            errors.push(ConfigError::TooManyDevices { count, transport });
        }
        let is_memory = |any: &dyn Any| any.is::<MemDevice>();
        if self.devices.iter().any(|given| is_memory(&*given.device)) {
            errors.push(ConfigError::MemoryDevice);
        }
        let types = self.devices.iter();
        let types = types.map(|given| given.device.info().device_type);
        let count = types.filter(|one| *one == DeviceType::Vsock).count();
        if count > 1 {
            errors.push(ConfigError::SocketDevices { count });
        }
        let ids = self.devices.iter().filter_map(|given| given.id.as_deref());
        let mut seen = BTreeSet::new();
        errors.extend(ids.filter_map(|id| {
            let fault = match id::check(id) {
                Ok(()) if seen.insert(id) => return None,
                Ok(()) => IdFault::Taken,
                Err(fault) => fault,
            };
            Some(ConfigError::DeviceId {
                id: id.to_owned(),
                why: fault.why(),
            })
        }));
        let broken = std::mem::take(&mut self.broken_disks);
        errors.extend(broken.into_iter().map(ConfigError::Disk));
        errors
    }
}
