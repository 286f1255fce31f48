//! What KVM provides for a VM, newly created, with devices on its bus.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use kvm_bindings::CpuId;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use podvisor_devices::GuestRam;
use podvisor_devices::legacy::events::{self, Event, EventRegister, Events};
use podvisor_devices::legacy::firmware::FirmwareDevices;
use podvisor_devices::legacy::serial::{self as com, SerialPort};
use podvisor_devices::virtio::SavedDevice;
use rustix::rand::{GetRandomFlags, getrandom};
use vm_memory::{Bytes as _, GuestAddress};

use super::early::EarlyVm;
use crate::kvm::{self, KvmError};
use crate::memory::{self, GuestMemory, MemoryError};
use crate::migration::VmAhead;
use crate::snapshot::SnapshotError;
use crate::transport::Transport;
use crate::vm::devices::attach::{self, AttachContext, Attachments, NewDevice, TransportRegisters};
use crate::vm::error::BuildError;
use crate::vm::hardware::bus::Bus;
use crate::vm::hardware::events::{EventDevice, EventPort};
use crate::vm::hardware::firmware::{self, FirmwarePorts};
use crate::vm::hardware::io::{Faults, LoopsBuilder};
use crate::vm::hardware::line::Line;
use crate::vm::hardware::pci::PciRoot;
use crate::{cpuid, layout};

/// A machine whose memory is empty.
pub(crate) struct Hardware {
    pub(crate) vm_fd: Arc<VmFd>,
    /// With their CPUID set, otherwise as after RESET.
    pub(crate) vcpus: Vec<VcpuFd>,
    /// Their CPUID, except for their numbers.
    pub(crate) cpuid: CpuId,
    /// The maximum number of vCPUs.
    pub(crate) max_vcpus: u8,
    /// The offset of the vCPUs' time stamp counters, if a snapshot set it.
    pub(crate) tsc_offset: Option<u64>,
    pub(crate) bus: Arc<Bus>,
    /// `None` if devices are on MMIO.
    pub(crate) pci: Option<PciRoot>,
    pub(crate) devices: Attachments,
    pub(crate) loops: LoopsBuilder,
    pub(crate) serial: Option<Arc<Mutex<SerialPort>>>,
    /// `None` if the guest is told of no events.
    pub(crate) events: Option<EventPort>,
    /// `None` unless the VM boots by a firmware.
    pub(crate) firmware: Option<FirmwarePorts>,
    pub(crate) faults: Faults,
}

impl Hardware {
    /// Creates it around `memory`, which KVM then knows, and which may be written meanwhile.
    pub(crate) fn new(
        kvm: &Kvm,
        begin: Begin,
        memory: &GuestMemory,
        board: Board,
        devices: Vec<NewDevice>,
        vcpus: Vcpus<'_>,
    ) -> Result<Self, BuildError> {
        let VmAhead {
            vm_fd,
            vcpus: created,
        } = match begin {
            Begin::Ahead(ahead) => ahead,
            Begin::New(early) => {
                let vm_fd = match early.and_then(EarlyVm::take) {
                    Some(created) => created,
                    None => kvm::create_vm(kvm)?,
                };
                let vm_fd = Arc::new(vm_fd);
                // Memory before vCPUs, because every memslot added later waits for a grace period.
                memory::add_memslots(&vm_fd, memory.all())?;
                kvm::create_chips(&vm_fd)?;
                let vcpus = Vec::new();
                VmAhead { vm_fd, vcpus }
            }
        };
        let faults = Faults::default();
        let bus = Bus::new();
        let pci = match board.transport {
            Transport::Mmio => None,
            Transport::Pci => Some(PciRoot::new(&vm_fd, &bus, board.has_firmware)?),
        };
        let mut loops =
            LoopsBuilder::new(faults.clone()).map_err(|source| BuildError::Descriptor {
                what: "an event loop",
                source,
            })?;
        let context = AttachContext {
            vm: &vm_fd,
            mem: memory,
            bus: &bus,
            pci: pci.as_ref(),
        };
        let devices = attach::attach(context, devices, &mut loops)?;
        let max_vcpus = vcpus.max;
        kvm::limit_vcpus(&vm_fd, max_vcpus);
        let (vcpus, cpuid) = create_vcpus(kvm, &vm_fd, created, vcpus)?;
        Ok(Self {
            vm_fd,
            vcpus,
            cpuid,
            max_vcpus,
            tsc_offset: None,
            bus: Arc::new(bus),
            pci,
            devices,
            loops,
            serial: None,
            events: None,
            firmware: None,
            faults,
        })
    }

    /// Registers with KVM the addresses at which drivers will notify devices.
    pub(crate) fn prepare_notifications(&self) {
        for device in &self.devices.devices {
            if let TransportRegisters::Pci(function) = &device.registers {
                function.prepare();
            }
        }
    }

    /// Adds a serial port, in a saved state or as after RESET.
    pub(crate) fn add_serial(
        &mut self,
        out: Box<dyn Write + Send>,
        saved: Option<&SavedDevice>,
    ) -> Result<(), BuildError> {
        let line = Line::new(&self.vm_fd, com::IRQ);
        let port = match saved {
            None => SerialPort::new(line, out),
            Some(saved) => SerialPort::restored(line, out, saved)
                .map_err(SnapshotError::of_device("serial"))?,
        };
        let port = Arc::new(Mutex::new(port));
        self.serial = Some(port.clone());
        self.bus
            .ports
            .insert(u64::from(com::PORT), u64::from(com::PORTS), port)
            .map_err(|error| BuildError::Addresses(Box::new(error)))
    }

    /// Adds a firmware's clock and timer, in a saved state or as after RESET.
    pub(crate) fn add_firmware_devices(
        &mut self,
        saved: Option<&SavedDevice>,
    ) -> Result<(), BuildError> {
        let devices = match saved {
            None => FirmwareDevices::default(),
            Some(saved) => {
                FirmwareDevices::restored(saved).map_err(SnapshotError::of_device("firmware"))?
            }
        };
        let devices = Arc::new(Mutex::new(devices));
        self.firmware = Some(devices.clone());
        firmware::insert(&self.bus.ports, &devices)
            .map_err(|error| BuildError::Addresses(Box::new(error)))
    }

    /// Adds the register for these events, in a saved state or as after RESET; none if there are no
    /// events.
    pub(crate) fn add_events(
        &mut self,
        known: Events,
        saved: Option<&SavedDevice>,
    ) -> Result<(), BuildError> {
        let line = || Line::new(&self.vm_fd, events::IRQ);
        let mut register = match saved {
            Some(saved) => EventRegister::restored(line(), saved)
                .map_err(SnapshotError::of_device("events"))?,
            None if known.is_empty() => return Ok(()),
            None => EventRegister::new(line(), known),
        };
        register.set_cpus(u8::try_from(self.vcpus.len()).unwrap_or(u8::MAX));
        let known = register.known();
        let ports = match known.has(Event::PciSlots) {
            true => events::PORTS_WITH_SLOTS.into(),
            false if known.has(Event::Cpus) => events::PORTS_WITH_CPUS.into(),
            false => 1,
        };
        let port = Arc::new(EventDevice::new(register));
        self.events = Some(port.clone());
        self.bus
            .ports
            .insert(events::PORT.into(), ports, port)
            .map_err(|error| BuildError::Addresses(Box::new(error)))
    }

    /// Gives the guest a generation ID that no other VM has, and tells it so, if it has one.
    pub(crate) fn renew_generation_id(&self, memory: &GuestMemory) -> Result<(), BuildError> {
        let Some(port) = &self.events else {
            return Ok(());
        };
        if port.has(Event::NewGeneration) {
            write_generation_id(memory.ram())?;
            port.raise(Event::NewGeneration);
        }
        Ok(())
    }
}

/// What a VM begins with.
#[derive(Debug)]
pub(crate) enum Begin {
    /// Nothing, or what was created while its configuration was not known yet.
    New(Option<EarlyVm>),
    /// What was made for one that moves here, with the same memory.
    Ahead(VmAhead),
}

/// What devices are attached to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Board {
    /// The bus of virtio devices.
    pub(crate) transport: Transport,
    /// Whether the VM boots by a firmware, which recognises the machine by its host bridge.
    pub(crate) has_firmware: bool,
}

/// The number of vCPUs, and the CPUID of their guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vcpus<'a> {
    pub(crate) count: u8,
    /// The maximum number of vCPUs.
    pub(crate) max: u8,
    /// Except for their numbers; `None` is what this host offers to a new guest.
    pub(crate) cpuid: Option<&'a CpuId>,
}

fn create_vcpus(
    kvm: &Kvm,
    vm: &VmFd,
    mut created: Vec<VcpuFd>,
    vcpus: Vcpus<'_>,
) -> Result<(Vec<VcpuFd>, CpuId), BuildError> {
    let count = vcpus.count;
    for id in created.len() as u64..u64::from(count) {
        let vcpu = vm.create_vcpu(id);
        created.push(vcpu.map_err(KvmError::ioctl("KVM_CREATE_VCPU"))?);
    }
    created.iter().for_each(kvm::count_as_the_host);
    let tsc_khz = created.first().and_then(|vcpu| vcpu.get_tsc_khz().ok());
    let cpuid = match vcpus.cpuid {
        Some(cpuid) => cpuid.clone(),
        None => cpuid::guest_cpuid(kvm, vcpus.max, tsc_khz)?,
    };
    for (id, vcpu) in (0..count).zip(&created) {
        let set = vcpu.set_cpuid2(&cpuid::for_vcpu(&cpuid, id));
        match set.map_err(KvmError::ioctl("KVM_SET_CPUID2")) {
            Err(error) if vcpus.cpuid.is_some() => Err(SnapshotError::Cpuid(error))?,
            other => other?,
        }
    }
    Ok((created, cpuid))
}

/// Writes a random generation ID to where the guest's tables say that it is.
pub(crate) fn write_generation_id(ram: &GuestRam) -> Result<(), BuildError> {
    let mut id = [0; 16];
    rustix::io::retry_on_intr(|| getrandom(&mut id[..], GetRandomFlags::empty())).map_err(
        |error| BuildError::Descriptor {
            what: "a generation ID",
            source: error.into(),
        },
    )?;
    let address = layout::GENERATION_ID;
    ram.write_slice(&id, GuestAddress(address))
        .map_err(|error| {
            BuildError::Memory(MemoryError::Transfer {
                what: "write",
                address,
                source: io::Error::other(error),
            })
        })
}
