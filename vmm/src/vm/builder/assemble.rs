//! What booted and restored VMs have in common, after their configuration was checked.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use kvm_bindings::CpuId;
use kvm_ioctls::Kvm;
use podvisor_devices::mem::MemDevice;
use podvisor_devices::virtio::VirtioDevice;

use super::hardware::Hardware;
use crate::cpuid;
use crate::memory::{GuestMemory, MemoryShape};
use crate::snapshot::Identity;
use crate::vm::control::Control;
use crate::vm::devices::images::Images;
use crate::vm::error::{BuildError, ConfigError, ConfigErrors};
use crate::vm::hardware::pci::PciRoot;
use crate::vm::lifecycle::{StartParts, Vm};
use crate::vm::seccomp::Seccomp;
use crate::vm::vcpu::kick::Kicker;
use crate::vm::vcpu::spare::SpareVcpu;
use crate::vm::vcpu::{Machine, VcpuContext, VcpuCounters};

/// The device that plugs and unplugs memory, if the VM has hotplug memory.
pub(super) fn memory_device(
    shape: MemoryShape,
) -> Result<Option<Box<dyn VirtioDevice>>, BuildError> {
    let Some(region) = shape.hotplug_region() else {
        return Ok(None);
    };
    let device = MemDevice::new(region).map_err(|error| BuildError::Addresses(Box::new(error)))?;
    Ok(Some(Box::new(device)))
}

/// Checks that a guest with this CPUID can address everything below `end`.
pub(super) fn check_address_space(end: u64, cpuid: &CpuId) -> Result<(), BuildError> {
    let bits = cpuid::physical_bits(cpuid);
    // All addresses are below a limit of 64 bits or more.
    if 1u64.checked_shl(bits).is_none_or(|limit| end <= limit) {
        return Ok(());
    }
    let error = ConfigError::AddressSpace { end, bits };
    Err(BuildError::Config(ConfigErrors(vec![error])))
}

/// Assembles a VM from parts that are ready.
pub(super) fn assemble(
    kvm: Kvm,
    (memory, images): (GuestMemory, Images),
    hardware: Hardware,
    seccomp: Seccomp,
    origin: Option<(PathBuf, Identity)>,
) -> Vm {
    let Hardware {
        vm_fd,
        vcpus,
        cpuid,
        max_vcpus,
        tsc_offset,
        bus,
        pci,
        devices,
        loops,
        serial,
        events,
        firmware,
        faults,
    } = hardware;
    let tsc_khz = vcpus.first().and_then(|vcpu| vcpu.get_tsc_khz().ok());
    let (service, handles) = loops.finish();
    let context = VcpuContext {
        control: Arc::new(Control::new()),
        bus,
        peers: Arc::new(Kicker::default()),
        loops: Arc::new(handles),
        counters: Arc::new(VcpuCounters::default()),
        address_writes: pci.as_ref().and_then(PciRoot::address_writes),
        machine: Arc::new(Machine {
            kvm,
            vm_fd,
            memory,
            images,
            cpuid,
            max_vcpus,
            tsc_khz,
            tsc_offset,
        }),
    };
    Vm {
        context,
        parts: Mutex::new(Some(StartParts { vcpus, service })),
        transition: Mutex::new(()),
        threads: Mutex::new(Vec::new()),
        abandoned: Mutex::new(Vec::new()),
        spare_vcpu: SpareVcpu::default(),
        devices: Mutex::new(devices.devices.into_iter().map(Arc::new).collect()),
        pci,
        serial,
        events,
        firmware,
        faults,
        seccomp,
        origin,
    }
}
