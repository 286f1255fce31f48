//! All that KVM makes of a VM: its memory and interrupt controllers, devices on its bus, and vCPUs.

use std::io::Write;
use std::sync::{Arc, Mutex};

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use podvisor_devices::legacy::serial::{self, SerialPort};
use podvisor_devices::virtio::VirtioDevice;
use vmm_sys_util::eventfd::EventFd;

use super::attach::{self, Attachments};
use super::bus::Bus;
use super::error::BuildError;
use super::io::{Faults, LoopsBuilder};
use crate::cpuid;
use crate::kvm::{self, KvmError};
use crate::memory::{GuestMemory, Memslots};

/// A machine with nothing in its memory.
pub(super) struct Hardware {
    pub(super) vm_fd: VmFd,
    pub(super) slots: Memslots,
    /// With their CPUID, as after RESET.
    pub(super) vcpus: Vec<VcpuFd>,
    pub(super) bus: Arc<Bus>,
    pub(super) devices: Attachments,
    pub(super) loops: LoopsBuilder,
    pub(super) faults: Faults,
}

impl Hardware {
    /// Creates it around `memory`, which KVM then knows, and may be written meanwhile.
    pub(super) fn new(
        kvm: &Kvm,
        memory: &GuestMemory,
        devices: Vec<Box<dyn VirtioDevice>>,
        serial: Option<Box<dyn Write + Send>>,
        vcpus: u8,
    ) -> Result<Self, BuildError> {
        let vm_fd = kvm::create_vm(kvm)?;
        // Memory before vCPUs, because every memslot added later waits for a grace period.
        let slots = Memslots::default();
        slots.add_all(&vm_fd, memory.ram())?;
        kvm::create_chips(&vm_fd)?;
        let faults = Faults::default();
        let bus = Bus::new();
        let mut loops =
            LoopsBuilder::new(faults.clone()).map_err(|source| BuildError::Descriptor {
                what: "an event loop",
                source,
            })?;
        let devices = attach::attach(&vm_fd, memory.ram(), devices, &bus, &mut loops)?;
        if let Some(out) = serial {
            attach_serial(&vm_fd, &bus, out)?;
        }
        let vcpus = create_vcpus(kvm, &vm_fd, vcpus)?;
        Ok(Self {
            vm_fd,
            slots,
            vcpus,
            bus: Arc::new(bus),
            devices,
            loops,
            faults,
        })
    }
}

fn create_vcpus(kvm: &Kvm, vm: &VmFd, count: u8) -> Result<Vec<VcpuFd>, BuildError> {
    let mut vcpus = Vec::with_capacity(usize::from(count));
    let mut base_cpuid = None;
    for id in 0..count {
        let vcpu = vm
            .create_vcpu(u64::from(id))
            .map_err(KvmError::ioctl("KVM_CREATE_VCPU"))?;
        let base = match &base_cpuid {
            Some(base) => base,
            None => base_cpuid.insert(cpuid::guest_cpuid(kvm, count, vcpu.get_tsc_khz().ok())?),
        };
        vcpu.set_cpuid2(&cpuid::for_vcpu(base, id))
            .map_err(KvmError::ioctl("KVM_SET_CPUID2"))?;
        vcpus.push(vcpu);
    }
    Ok(vcpus)
}

fn attach_serial(vm: &VmFd, bus: &Bus, out: Box<dyn Write + Send>) -> Result<(), BuildError> {
    let descriptor = |source| BuildError::Descriptor {
        what: "the serial port's interrupt eventfd",
        source,
    };
    let line = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(descriptor)?;
    vm.register_irqfd(&line, serial::IRQ)
        .map_err(KvmError::ioctl("KVM_IRQFD"))?;
    let port = Arc::new(Mutex::new(SerialPort::new(line, out)));
    bus.ports
        .insert(u64::from(serial::PORT), u64::from(serial::PORTS), port)
        .map_err(|error| BuildError::Addresses(Box::new(error)))
}
