//! Configures a VM: every mistake is found before anything is created, and all are reported
//! together.

use std::any::Any;
use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use kvm_bindings::CpuId;
use kvm_ioctls::Kvm;
use podvisor_devices::balloon::BalloonDevice;
use podvisor_devices::blk::{BlockDevice, BlockDeviceError};
use podvisor_devices::console::ConsoleDevice;
use podvisor_devices::fs::FsDevice;
use podvisor_devices::mem::MemDevice;
use podvisor_devices::net::NetDevice;
use podvisor_devices::pmem::PmemDevice;
use podvisor_devices::rng::RngDevice;
use podvisor_devices::virtio::{DeviceType, VirtioDevice};
use podvisor_devices::vsock::VsockDevice;

use super::attach::{self, Transport};
use super::control::Control;
use super::early::EarlyVm;
use super::error::{BuildError, ConfigError, ConfigErrors};
use super::hardware::{Hardware, Vcpus};
use super::kick::Kicker;
use super::pci::PciRoot;
use super::pmem::{self, Images};
use super::restore;
use super::seccomp::Seccomp;
use super::threads::in_parallel;
use super::vcpu::{Machine, VcpuContext, VcpuCounters};
use super::vcpus::SpareVcpu;
use super::{StartParts, Vm};
use crate::boot::{self, Initramfs, Kernel, Platform};
use crate::cpuid;
use crate::kvm::{self, KvmDevice, KvmError};
use crate::memory::{self, GuestMemory, HOTPLUG_UNIT, MemoryShape, MemorySize, PAGE_SIZE};
use crate::snapshot::{Identity, Snapshot};

/// The configuration of a VM. See [`Vm::builder`].
#[derive(Default)]
#[must_use = "nothing happens before `build`"]
pub struct VmBuilder {
    kernel: Option<Kernel>,
    initramfs: Option<Initramfs>,
    cmdline: String,
    vcpus: Option<u8>,
    max_vcpus: Option<u8>,
    memory: Option<MemorySize>,
    hotplug_memory: Option<MemorySize>,
    serial: Option<Box<dyn Write + Send>>,
    devices: Vec<Box<dyn VirtioDevice>>,
    broken_disks: Vec<BlockDeviceError>,
    snapshot: Option<Snapshot>,
    early: Option<EarlyVm>,
    kvm: Option<Result<Kvm, KvmError>>,
    seccomp: Seccomp,
    transport: Option<Transport>,
    requires_same_cpu: bool,
}

impl fmt::Debug for VmBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VmBuilder")
            .field("kernel", &self.kernel)
            .field("initramfs", &self.initramfs)
            .field("cmdline", &self.cmdline)
            .field("vcpus", &self.vcpus)
            .field("max_vcpus", &self.max_vcpus)
            .field("memory", &self.memory)
            .field("hotplug_memory", &self.hotplug_memory)
            .field("serial", &self.serial.is_some())
            .field("devices", &self.devices)
            .field("snapshot", &self.snapshot)
            .field("early", &self.early)
            .field("seccomp", &self.seccomp)
            .field("transport", &self.transport)
            .field("requires_same_cpu", &self.requires_same_cpu)
            .finish_non_exhaustive()
    }
}

impl VmBuilder {
    pub(crate) fn from_snapshot(snapshot: Snapshot) -> Self {
        Self {
            snapshot: Some(snapshot),
            ..Self::default()
        }
    }

    /// Refuses a snapshot whose guest does not know everything that this host's processor and KVM
    /// offer. It would never use what new microcode or a new kernel has added since then, most
    /// importantly mitigations. No effect on a VM that boots.
    pub fn require_same_cpu(mut self) -> Self {
        self.requires_same_cpu = true;
        self
    }

    /// Uses this open `/dev/kvm`; by default, [`Self::build`] opens it by its path.
    pub fn kvm(mut self, device: &KvmDevice) -> Self {
        self.kvm = Some(device.kvm());
        self
    }

    /// The kernel to boot. Required, except for a VM that comes from a snapshot.
    pub fn kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = Some(kernel);
        self
    }

    /// The initial file system.
    pub fn initramfs(mut self, initramfs: Initramfs) -> Self {
        self.initramfs = Some(initramfs);
        self
    }

    /// The kernel's command line. The parameters that name virtio devices are added by
    /// [`Self::build`].
    pub fn cmdline(mut self, cmdline: impl Into<String>) -> Self {
        self.cmdline = cmdline.into();
        self
    }

    /// The number of vCPUs; default: 1.
    pub fn vcpus(mut self, count: u8) -> Self {
        self.vcpus = Some(count);
        self
    }

    /// The maximum number of vCPUs; by default the number at boot. All of them are listed in the
    /// guest's firmware tables. Those that [`Vm::add_vcpus`] creates later are offline until the
    /// guest brings them online: Linux gets the parameter `maxcpus`, unless its command line has
    /// it, and brings one online at a write of `1` to `/sys/devices/system/cpu/cpuN/online`. One
    /// that does not exist yet costs only what the guest's kernel allocates for it, 180 KiB in
    /// Linux.
    pub fn max_vcpus(mut self, count: u8) -> Self {
        self.max_vcpus = Some(count);
        self
    }

    /// The amount of guest memory; default: 128 MiB. It is allocated on the host as the guest
    /// touches it.
    pub fn memory(mut self, size: MemorySize) -> Self {
        self.memory = Some(size);
        self
    }

    /// Adds a virtio-mem device that can plug in up to this much memory while the guest runs: a
    /// multiple of 128 MiB, limited by the address space, not by the host's memory. Default: none.
    /// See [`Vm::hotplug_memory`]. Linux brings new memory online by itself: the kernel's command
    /// line is extended accordingly, unless it has `memhp_default_state`.
    pub fn hotplug_memory(mut self, most: MemorySize) -> Self {
        self.hotplug_memory = Some(most);
        self
    }

    /// A serial port (COM1, `console=ttyS0`) whose output goes to `writer`, byte by byte, on the
    /// vCPU's thread: a writer that blocks stalls the guest, one that calls [`Vm::serial_input`]
    /// deadlocks, and one that panics poisons the VM. By default there is none, since each byte
    /// costs an exit.
    pub fn serial(mut self, writer: impl Write + Send + 'static) -> Self {
        self.serial = Some(Box::new(writer));
        self
    }

    /// A disk. The first one is `/dev/vda`.
    pub fn block(self, disk: BlockDevice) -> Self {
        self.device(disk)
    }

    /// A file that the guest sees as read-only memory. The first one is `/dev/pmem0`. Files of a
    /// file system in it are read in place if that is mounted with `-o dax`. All guests that have
    /// the image share the host's pages of it.
    pub fn pmem(self, image: PmemDevice) -> Self {
        self.device(image)
    }

    /// The socket device, by which host and guest communicate. A guest accepts one.
    pub fn vsock(self, vsock: VsockDevice) -> Self {
        self.device(vsock)
    }

    /// A network card. The first one is the guest's first Ethernet device.
    pub fn net(self, card: NetDevice) -> Self {
        self.device(card)
    }

    /// A directory of the host, which the guest mounts by its tag
    /// (`mount -t virtiofs TAG DIR`).
    pub fn fs(self, share: FsDevice) -> Self {
        self.device(share)
    }

    /// An entropy device, fed by the host's random numbers.
    pub fn rng(self) -> Self {
        self.device(RngDevice::new())
    }

    /// A memory balloon, by which the host gets back memory that is free in the guest, and may ask
    /// for more. See [`Vm::balloon`].
    pub fn balloon(self) -> Self {
        self.device(BalloonDevice::new())
    }

    /// A virtio console (`console=hvc0`): cheaper than a serial port, but available to the guest
    /// only once its driver runs.
    pub fn console(self, console: ConsoleDevice) -> Self {
        self.device(console)
    }

    /// A virtio device of any type that [`DeviceType`] names, including the program's own devices.
    /// A [`MemDevice`] is added by [`Self::hotplug_memory`].
    pub fn device(mut self, mut device: impl VirtioDevice + 'static) -> Self {
        let any: &mut dyn Any = &mut device;
        if let Some(Err(error)) = any.downcast_mut().map(BlockDevice::check) {
            self.broken_disks.push(error);
        }
        self.devices.push(Box::new(device));
        self
    }

    /// Whether the VM's threads are confined to the system calls that they need; by default they
    /// are. The program's own serial writers, disks, devices and vsock listeners are called on
    /// these threads, too: there they may read, write and signal, but neither open files, nor
    /// create sockets other than pairs, nor connect any, nor start threads. The same holds for the
    /// program's `tracing` subscriber: one that opens files, for example to rotate them at
    /// midnight, needs a thread for that. Their stacks have 256 KiB. The host side of a socket
    /// device that uses paths has its own thread, which may create Unix sockets, connect them and
    /// remove paths ([`VsockHost::uses_paths`](podvisor_devices::vsock::VsockHost::uses_paths)).
    pub fn seccomp(mut self, seccomp: Seccomp) -> Self {
        self.seccomp = seccomp;
        self
    }

    /// Uses a VM that KVM creates already, instead of waiting for a new one.
    pub fn early(mut self, vm: EarlyVm) -> Self {
        self.early = Some(vm);
        self
    }

    /// The bus of all virtio devices; default: [`Transport::Mmio`].
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = Some(transport);
        self
    }

    /// Validates the configuration, then creates the VM, loads the kernel or the snapshot's state,
    /// and makes the VM ready to start.
    ///
    /// # Errors
    /// [`BuildError::Config`] lists everything that is wrong with the configuration; the others are
    /// failures of the host, or say why a snapshot cannot be restored here.
    pub fn build(mut self) -> Result<Vm, BuildError> {
        let kvm = match self.kvm.take().unwrap_or_else(kvm::open) {
            Ok(kvm) => kvm,
            // Mistakes that can be found without KVM are reported first.
            Err(error) => {
                self.check_without_kvm()?;
                return Err(error.into());
            }
        };
        match self.snapshot.take() {
            None => self.boot(kvm),
            Some(snapshot) => self.restore(kvm, &snapshot),
        }
    }

    fn boot(mut self, kvm: Kvm) -> Result<Vm, BuildError> {
        let Validated {
            kernel,
            vcpus,
            max_vcpus,
            memory,
            transport,
        } = self.validate(kvm::max_vcpus(&kvm))?;

        let mut devices = std::mem::take(&mut self.devices);
        devices.extend(memory_device(memory)?);
        let mut devices = attach::named(devices);
        pmem::place(&mut devices, memory);
        let end = pmem::end(&devices, memory);
        // KVM takes a while to tell its CPUID, and few machines need to know it this early.
        if end > 1 << cpuid::LEAST_PHYSICAL_BITS {
            check_address_space(end, &cpuid::guest_cpuid(&kvm, max_vcpus, None)?)?;
        }
        let mut memory = GuestMemory::anonymous(memory)?;
        let images = Images::map(&kvm, &devices, &mut memory)?;
        let mem = &memory.boot_ram();
        let initramfs = self.initramfs.as_ref();
        let new = Vcpus {
            count: vcpus,
            max: max_vcpus,
            cpuid: None,
        };
        let (serial, early) = (self.serial.take(), self.early.take());
        // Reading files keeps a CPU busy, while KVM's ioctls mostly wait for grace periods.
        let (loaded, hardware) = in_parallel(
            "vm-load",
            || boot::load(mem, &kernel, initramfs),
            || {
                let mut hardware = Hardware::new(&kvm, early, &memory, transport, devices, new)?;
                hardware.prepare_notifications();
                images.insert(&hardware.bus)?;
                if let Some(out) = serial {
                    hardware.add_serial(out, None)?;
                }
                Ok::<_, BuildError>(hardware)
            },
        );
        let (loaded, hardware) = (loaded?, hardware?);
        let mut parameters = hardware.devices.cmdline.clone();
        if self.hotplug_memory.is_some() && !self.cmdline.contains("memhp_default_state") {
            parameters.push(ONLINE.to_owned());
        }
        if max_vcpus > vcpus && !self.cmdline.contains("maxcpus=") {
            parameters.push(format!("maxcpus={vcpus}"));
        }
        let cmdline = with_parameters(&self.cmdline, &parameters);
        let platform = Platform {
            cpus: max_vcpus,
            windows: hardware.devices.windows.clone(),
            has_pci: hardware.pci.is_some(),
            has_serial: hardware.serial.is_some(),
        };
        let entry = boot::write_boot_params(mem, &kernel, &loaded, &cmdline, &platform)?;
        for (id, vcpu) in hardware.vcpus.iter().enumerate() {
            boot::boot_registers(vcpu, (id == 0).then_some(&entry))?;
        }
        let memory = (memory, images);
        Ok(assemble(kvm, memory, hardware, self.seccomp, None))
    }

    fn restore(mut self, kvm: Kvm, snapshot: &Snapshot) -> Result<Vm, BuildError> {
        let state = snapshot.state();
        let errors = self.contradictions(snapshot, kvm::max_vcpus(&kvm));
        if !errors.is_empty() {
            return Err(BuildError::Config(ConfigErrors(errors)));
        }
        let mut devices = std::mem::take(&mut self.devices);
        if let Some(place) = snapshot.memory_device() {
            let own = memory_device(state.memory)?;
            let place = place.min(devices.len());
            devices.splice(place..place, own);
        }
        let devices = restore::device_states(devices, &state.devices)?;
        let here = cpuid::guest_cpuid(&kvm, snapshot.max_vcpus(), None)?;
        snapshot.check_cpu(here.as_slice())?;
        let end = pmem::end(&devices, state.memory);
        check_address_space(end, &state.cpuid)?;
        check_address_space(end, &here)?;

        let mut memory = snapshot.map()?;
        let images = Images::map(&kvm, &devices, &mut memory)?;
        let vcpus = Vcpus {
            count: snapshot.vcpus(),
            max: snapshot.max_vcpus(),
            cpuid: Some(&state.cpuid),
        };
        let early = self.early.take();
        let build = || {
            let transport = state.transport();
            let mut hardware = Hardware::new(&kvm, early, &memory, transport, devices, vcpus)?;
            if let (true, Some(vcpu)) = (self.requires_same_cpu, hardware.vcpus.first()) {
                snapshot.check_same_cpu(here.as_slice(), vcpu)?;
            }
            images.insert(&hardware.bus)?;
            restore::machine(&mut hardware, state)?;
            if let Some(saved) = &state.serial {
                let out = self.serial.take();
                let out = out.unwrap_or_else(|| Box::new(std::io::sink()));
                hardware.add_serial(out, Some(saved))?;
            }
            Ok::<_, BuildError>(hardware)
        };
        let hardware = match &state.working_set {
            // As at a boot: copying pages keeps a CPU busy.
            Some(set) => {
                let (_, hardware) = in_parallel("vm-load", || memory.make_own(set.pages()), build);
                hardware?
            }
            None => build()?,
        };
        let origin = snapshot.full().cloned();
        let memory = (memory, images);
        Ok(assemble(kvm, memory, hardware, self.seccomp, origin))
    }

    /// Settings that the snapshot already determines, and devices that this host lacks.
    pub(super) fn contradictions(
        &mut self,
        snapshot: &Snapshot,
        max_vcpus: u8,
    ) -> Vec<ConfigError> {
        let given = [
            ("kernel", self.kernel.is_some()),
            ("initramfs", self.initramfs.is_some()),
            ("cmdline", !self.cmdline.is_empty()),
            ("vcpus", self.vcpus.is_some()),
            ("max_vcpus", self.max_vcpus.is_some()),
            ("memory", self.memory.is_some()),
            ("hotplug_memory", self.hotplug_memory.is_some()),
            ("transport", self.transport.is_some()),
        ];
        let mut errors: Vec<_> = given
            .into_iter()
            .filter(|(_, given)| *given)
            .map(|(what, _)| ConfigError::OfSnapshot { what })
            .collect();
        if self.serial.is_some() && snapshot.state().serial.is_none() {
            errors.push(ConfigError::NoSerial);
        }
        let vcpus = snapshot.max_vcpus();
        if vcpus > max_vcpus {
            errors.push(ConfigError::Vcpus {
                vcpus,
                max: max_vcpus,
            });
        }
        let (size, host) = (snapshot.state().memory.boot, memory::host_memory());
        if size > host {
            errors.push(ConfigError::MoreMemoryThanHost { size, host });
        }
        let own = usize::from(snapshot.memory_device().is_some());
        errors.extend(self.too_many_devices(own, snapshot.state().transport()));
        errors.extend(self.misplaced_devices());
        let broken = std::mem::take(&mut self.broken_disks);
        errors.extend(broken.into_iter().map(ConfigError::Disk));
        errors
    }

    /// Counts the configured devices and `own` ones that the builder adds.
    fn too_many_devices(&self, own: usize, transport: Transport) -> Option<ConfigError> {
        let count = self.devices.len() + own;
        (count > transport.max_devices())
            .then_some(ConfigError::TooManyDevices { count, transport })
    }

    /// Finds devices that would not work together with the others.
    fn misplaced_devices(&self) -> impl Iterator<Item = ConfigError> {
        let memory = self.devices.iter().any(|device| {
            let any: &dyn Any = &**device;
            any.is::<MemDevice>()
        });
        let sockets = self.devices.iter().map(|device| device.info().device_type);
        let count = sockets.filter(|one| *one == DeviceType::Vsock).count();
        let memory = memory.then_some(ConfigError::MemoryDevice);
        let sockets = (count > 1).then_some(ConfigError::SocketDevices { count });
        memory.into_iter().chain(sockets)
    }

    /// Finds what is wrong with the configuration, independently of KVM's limits.
    pub(super) fn check_without_kvm(&mut self) -> Result<(), BuildError> {
        match self.snapshot.take() {
            None => self.validate(u8::MAX).map(drop),
            Some(snapshot) => match self.contradictions(&snapshot, u8::MAX) {
                errors if errors.is_empty() => Ok(()),
                errors => Err(BuildError::Config(ConfigErrors(errors))),
            },
        }
    }

    fn validate(&mut self, max_vcpus: u8) -> Result<Validated, BuildError> {
        let mut errors = Vec::new();
        if self.kernel.is_none() {
            errors.push(ConfigError::NoKernel);
        }
        let vcpus = self.vcpus.unwrap_or(1);
        if vcpus == 0 || vcpus > max_vcpus {
            errors.push(ConfigError::Vcpus {
                vcpus,
                max: max_vcpus,
            });
        }
        let most = self.max_vcpus.unwrap_or(vcpus);
        // Without an explicit maximum, the error about the count itself suffices.
        if self.max_vcpus.is_some() && (most < vcpus || most > max_vcpus) {
            errors.push(ConfigError::MaxVcpus {
                max_vcpus: most,
                vcpus,
                max: max_vcpus,
            });
        }
        let size = self.memory.unwrap_or(MemorySize::mib(128));
        if size < MemorySize::MIN || !size.as_bytes().is_multiple_of(PAGE_SIZE) {
            errors.push(ConfigError::Memory { size });
        }
        let hotplug = self.hotplug_memory.unwrap_or(MemorySize::bytes(0));
        if !hotplug.as_bytes().is_multiple_of(HOTPLUG_UNIT) {
            errors.push(ConfigError::HotplugMemory { size: hotplug });
        }
        let shape = MemoryShape {
            boot: size,
            hotplug,
        };
        // Memory that may be plugged in is only address space until the owner requests it.
        let host = memory::host_memory();
        if size > host {
            errors.push(ConfigError::MoreMemoryThanHost { size, host });
        }
        let (end, bits) = (shape.end(), cpuid::MOST_PHYSICAL_BITS);
        if end > 1 << bits {
            errors.push(ConfigError::AddressSpace { end, bits });
        }
        let transport = self.transport.unwrap_or_default();
        let own = usize::from(hotplug.as_bytes() > 0);
        errors.extend(self.too_many_devices(own, transport));
        errors.extend(self.misplaced_devices());
        let cmdline = boot::check_cmdline(&self.cmdline, self.kernel.as_ref());
        errors.extend(cmdline.err().map(ConfigError::Cmdline));
        errors.extend(
            std::mem::take(&mut self.broken_disks)
                .into_iter()
                .map(ConfigError::Disk),
        );
        match self.kernel.take() {
            Some(kernel) if errors.is_empty() => Ok(Validated {
                kernel,
                vcpus,
                max_vcpus: most,
                memory: shape,
                transport,
            }),
            _ => Err(BuildError::Config(ConfigErrors(errors))),
        }
    }
}

/// Checks that a guest with this CPUID can address everything below `end`.
fn check_address_space(end: u64, cpuid: &CpuId) -> Result<(), BuildError> {
    let bits = cpuid::physical_bits(cpuid);
    // All addresses are below a limit of 64 bits or more.
    if 1u64.checked_shl(bits).is_none_or(|limit| end <= limit) {
        return Ok(());
    }
    let error = ConfigError::AddressSpace { end, bits };
    Err(BuildError::Config(ConfigErrors(vec![error])))
}

/// Assembles a VM from parts that are ready.
fn assemble(
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
        faults,
        seccomp,
        origin,
    }
}

struct Validated {
    kernel: Kernel,
    vcpus: u8,
    max_vcpus: u8,
    memory: MemoryShape,
    transport: Transport,
}

/// Makes Linux bring plugged memory online: as movable memory, which can be unplugged again, in
/// proportion to its other memory.
const ONLINE: &str = "memhp_default_state=online memory_hotplug.online_policy=auto-movable";

/// The device that plugs and unplugs memory, if the VM has hotplug memory.
fn memory_device(shape: MemoryShape) -> Result<Option<Box<dyn VirtioDevice>>, BuildError> {
    let Some(region) = shape.hotplug_region() else {
        return Ok(None);
    };
    let device = MemDevice::new(region).map_err(|error| BuildError::Addresses(Box::new(error)))?;
    Ok(Some(Box::new(device)))
}

/// Inserts parameters for the kernel before a ` -- `, after which everything is init's.
fn with_parameters(cmdline: &str, parameters: &[String]) -> String {
    let (kernel, init) = match cmdline.find(" -- ") {
        Some(at) => cmdline.split_at(at),
        None => (cmdline, ""),
    };
    let mut line = kernel.trim_end().to_owned();
    for parameter in parameters {
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(parameter);
    }
    line.push_str(init);
    line
}

#[cfg(test)]
mod tests;
