//! A VM that boots a kernel.

use kvm_ioctls::Kvm;
use podvisor_devices::legacy::events::Event;

use super::assemble::{assemble, check_address_space, memory_device};
use super::hardware::{Begin, Board, Hardware, Vcpus, write_generation_id};
use super::settings::{Boot, Parts, VmBuilder};
use crate::boot::{self, Firmware, Initramfs, Kernel, Platform, Smbios};
use crate::memory::{GuestMemory, MemoryShape, MemorySize};
use crate::transport::Transport;
use crate::vm::devices::attach::{self, GivenDevice};
use crate::vm::devices::images::{self, Images};
use crate::vm::error::BuildError;
use crate::vm::lifecycle::Vm;
use crate::vm::threads::in_parallel;
use crate::{cpuid, kvm};

/// Makes Linux bring plugged memory online: as movable memory, which can be unplugged again, in
/// proportion to its other memory.
const ONLINE: &str = "memhp_default_state=online memory_hotplug.online_policy=auto-movable";

/// A valid configuration of a VM that boots.
#[derive(Debug)]
pub(super) struct ValidBoot {
    pub(super) kernel: Kernel,
    pub(super) vcpus: u8,
    pub(super) max_vcpus: u8,
    pub(super) memory: MemoryShape,
    pub(super) transport: Transport,
    /// Whether the kernel is a firmware.
    pub(super) has_firmware: bool,
}

impl Vm {
    /// Starts a configuration.
    pub fn builder() -> VmBuilder {
        VmBuilder::new()
    }
}

impl VmBuilder {
    fn new() -> Self {
        Self {
            source: Boot::default(),
            parts: Parts::default(),
        }
    }

    /// The kernel to boot. Required, unless there is a firmware.
    pub fn kernel(mut self, kernel: Kernel) -> Self {
        self.source.kernel = Some(kernel);
        self
    }

    /// A firmware, which boots what it finds on the disks, instead of a kernel. It needs
    /// [`Transport::Pci`], and takes no initial file system and no command line. Such a machine has
    /// a clock and a timer for it, on ports.
    pub fn firmware(mut self, firmware: Firmware) -> Self {
        self.source.firmware = Some(firmware);
        self
    }

    /// The initial file system.
    pub fn initramfs(mut self, initramfs: Initramfs) -> Self {
        self.source.initramfs = Some(initramfs);
        self
    }

    /// The kernel's command line. The parameters that name virtio devices are added by
    /// [`Self::build`].
    pub fn cmdline(mut self, cmdline: impl Into<String>) -> Self {
        self.source.cmdline = cmdline.into();
        self
    }

    /// The number of vCPUs; default: 1.
    pub fn vcpus(mut self, count: u8) -> Self {
        self.source.vcpus = Some(count);
        self
    }

    /// The maximum number of vCPUs; by default the number at boot. All of them are listed in the
    /// guest's firmware tables. Those that [`Vm::add_vcpus`] creates later are offline until the
    /// guest brings them online: Linux gets the parameter `maxcpus`, unless its command line has
    /// it, and brings one online at a write of `1` to `/sys/devices/system/cpu/cpuN/online`. One
    /// that does not exist yet costs only what the guest's kernel allocates for it, 180 KiB in
    /// Linux.
    pub fn max_vcpus(mut self, count: u8) -> Self {
        self.source.max_vcpus = Some(count);
        self
    }

    /// The amount of guest memory; default: 128 MiB. It is allocated on the host as the guest
    /// touches it.
    pub fn memory(mut self, size: MemorySize) -> Self {
        self.source.memory = Some(size);
        self
    }

    /// Adds a virtio-mem device that can plug in up to this much memory while the guest runs: a
    /// multiple of 128 MiB, limited by the address space, not by the host's memory. Default: none.
    /// See [`Vm::hotplug_memory`]. Linux brings new memory online by itself: the kernel's command
    /// line is extended accordingly, unless it has `memhp_default_state`.
    pub fn hotplug_memory(mut self, most: MemorySize) -> Self {
        self.source.hotplug_memory = Some(most);
        self
    }

    /// The bus of all virtio devices; default: [`Transport::Mmio`].
    pub fn transport(mut self, transport: Transport) -> Self {
        self.source.transport = transport;
        self
    }

    /// A power button, by ACPI, which [`Vm::press_power_button`] presses. The guest needs drivers
    /// for ACPI's generic event device and buttons (Linux: `CONFIG_ACPI`, `CONFIG_ACPI_BUTTON`).
    pub fn power_button(mut self) -> Self {
        self.source.events = self.source.events.with(Event::PowerButton);
        self
    }

    /// A generation ID, by ACPI: 16 random bytes, which change, with a notice to the guest, in each
    /// VM that is restored from a snapshot of this one. Linux 5.18 and later reseeds its random
    /// numbers then (`CONFIG_VMGENID`).
    pub fn generation_id(mut self) -> Self {
        self.source.events = self.source.events.with(Event::NewGeneration);
        self
    }

    /// Slots whose devices come and go, by ACPI: the guest is told of what
    /// [`Vm::plug`] adds, and can be asked to release it by [`Vm::request_unplug`]. It needs
    /// drivers for ACPI's generic event device and PCI hot-plug (Linux: `CONFIG_ACPI`,
    /// `CONFIG_HOTPLUG_PCI_ACPI`), and [`Transport::Pci`].
    pub fn pci_hotplug(mut self) -> Self {
        self.source.events = self.source.events.with(Event::PciSlots);
        self
    }

    /// CPUs that come while the guest runs, by ACPI: the guest is told of what [`Vm::add_vcpus`]
    /// adds, up to [`Self::max_vcpus`]. Its firmware tables say which ones are there: it needs no
    /// parameter on its command line. It needs drivers for ACPI's generic event device and
    /// processors (Linux: `CONFIG_ACPI_HOTPLUG_CPU`), and brings the CPU online itself: Linux at a
    /// write of `1` to `/sys/devices/system/cpu/cpuN/online`, which a udev rule may do.
    pub fn cpu_hotplug(mut self) -> Self {
        self.source.events = self.source.events.with(Event::Cpus);
        self
    }

    /// What the machine is called in SMBIOS tables; without it, there are none.
    pub fn smbios(mut self, identity: Smbios) -> Self {
        self.source.smbios = Some(identity);
        self
    }

    /// Validates the configuration, then creates the VM, loads the kernel, and makes the VM ready
    /// to start.
    ///
    /// # Errors
    /// [`BuildError::Config`] lists everything that is wrong with the configuration; the others are
    /// failures of the host.
    pub fn build(mut self) -> Result<Vm, BuildError> {
        match self.parts.open_kvm() {
            Ok(kvm) => {
                let validated = self.validate(kvm::max_vcpus(&kvm))?;
                boot_on(kvm, self, validated)
            }
            // Mistakes that can be found without KVM are reported first.
            Err(error) => {
                self.validate(u8::MAX)?;
                Err(error.into())
            }
        }
    }
}

fn boot_on(kvm: Kvm, builder: VmBuilder, validated: ValidBoot) -> Result<Vm, BuildError> {
    let ValidBoot {
        kernel,
        vcpus,
        max_vcpus,
        memory,
        transport,
        has_firmware,
    } = validated;
    let VmBuilder { source, parts } = builder;
    let mut devices = parts.devices;
    let own = memory_device(memory)?;
    devices.extend(own.map(|device| GivenDevice { id: None, device }));
    let mut devices = attach::named(devices);
    images::place(&mut devices, memory);
    let end = images::end(&devices, memory);
    // KVM takes a while to tell its CPUID, and few machines need to know it this early.
    if end > 1 << cpuid::LEAST_PHYSICAL_BITS {
        check_address_space(end, &cpuid::guest_cpuid(&kvm, max_vcpus, None)?)?;
    }
    let mut memory = GuestMemory::anonymous(memory)?;
    memory.set_page_map(parts.page_map);
    let images = Images::map(&kvm, &devices, &mut memory)?;
    let mem = &memory.boot_ram();
    let initramfs = source.initramfs.as_ref();
    let new = Vcpus {
        count: vcpus,
        max: max_vcpus,
        cpuid: None,
    };
    let (serial, early) = (parts.serial, parts.early);
    // Reading files keeps a CPU busy, while KVM's ioctls mostly wait for grace periods.
    let (loaded, hardware) = in_parallel(
        "vm-load",
        || boot::load(mem, &kernel, initramfs),
        || {
            let board = Board {
                transport,
                has_firmware,
            };
            let begin = Begin::New(early);
            let mut hardware = Hardware::new(&kvm, begin, &memory, board, devices, new)?;
            hardware.prepare_notifications();
            if has_firmware {
                hardware.add_firmware_devices(None)?;
            }
            images.insert(&hardware.bus)?;
            if let Some(out) = serial {
                hardware.add_serial(out, None)?;
            }
            hardware.add_events(source.events, None)?;
            Ok::<_, BuildError>(hardware)
        },
    );
    let (loaded, hardware) = (loaded?, hardware?);
    let mut parameters = hardware.devices.cmdline.clone();
    let has = |name| has_parameter(&source.cmdline, name);
    if source.hotplug_memory.is_some() && !has("memhp_default_state") {
        parameters.push(ONLINE.to_owned());
    }
    if max_vcpus > vcpus && !source.events.has(Event::Cpus) && !has("maxcpus") {
        parameters.push(format!("maxcpus={vcpus}"));
    }
    let cmdline = with_parameters(&source.cmdline, &parameters);
    let platform = Platform {
        cpus: max_vcpus,
        boot_cpus: vcpus,
        windows: hardware.devices.windows.clone(),
        has_pci: hardware.pci.is_some(),
        has_serial: hardware.serial.is_some(),
        events: source.events,
        smbios: source.smbios,
        has_firmware,
    };
    let entry = boot::write_boot_params(mem, &kernel, &loaded, &cmdline, &platform)?;
    if source.events.has(Event::NewGeneration) {
        write_generation_id(mem)?;
    }
    for (id, vcpu) in hardware.vcpus.iter().enumerate() {
        boot::boot_registers(vcpu, (id == 0).then_some(&entry))?;
    }
    let memory = (memory, images);
    Ok(assemble(kvm, memory, hardware, parts.seccomp, None))
}

/// Splits a command line into the kernel's part and, from `--` on, that of init.
fn split(cmdline: &str) -> (&str, &str) {
    if cmdline == "--" || cmdline.starts_with("-- ") {
        return ("", cmdline);
    }
    match cmdline.find(" -- ") {
        Some(at) => cmdline.split_at(at),
        None => (cmdline, ""),
    }
}

/// Whether the kernel's part of a command line sets a parameter.
pub(super) fn has_parameter(cmdline: &str, name: &str) -> bool {
    let (kernel, _) = split(cmdline);
    let mut parameters = kernel.split_ascii_whitespace();
    parameters.any(|parameter| parameter.split('=').next() == Some(name))
}

/// Inserts parameters for the kernel before a `--`, after which everything is init's.
pub(super) fn with_parameters(cmdline: &str, parameters: &[String]) -> String {
    let (kernel, init) = split(cmdline);
    let mut line = kernel.trim_end().to_owned();
    for parameter in parameters {
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(parameter);
    }
    if !line.is_empty() && init.starts_with('-') {
        line.push(' ');
    }
    line.push_str(init);
    line
}
