//! What every VM needs of its owner, and what one that boots needs besides.

use std::any::Any;
use std::fmt;
use std::io::Write;

use kvm_ioctls::Kvm;
use podvisor_devices::balloon::BalloonDevice;
use podvisor_devices::blk::{BlockDevice, BlockDeviceError};
use podvisor_devices::console::{ConsoleDevice, PortsDevice};
use podvisor_devices::fs::FsDevice;
use podvisor_devices::legacy::events::Events;
use podvisor_devices::net::NetDevice;
use podvisor_devices::pmem::PmemDevice;
use podvisor_devices::rng::RngDevice;
use podvisor_devices::virtio::VirtioDevice;
use podvisor_devices::vsock::VsockDevice;

use super::early::EarlyVm;
use crate::boot::{Firmware, Initramfs, Kernel, Smbios};
use crate::kvm::{self, KvmDevice, KvmError};
use crate::memory::{MemorySize, PageMap};
use crate::transport::Transport;
use crate::vm::devices::attach::GivenDevice;
use crate::vm::seccomp::Seccomp;

/// The configuration of a VM that boots ([`Vm::builder`](crate::Vm::builder)), or that is restored
/// from a snapshot ([`Snapshot::builder`](crate::Snapshot::builder)).
///
/// What both need is set by methods of either: a function that adds devices to any builder takes a
/// `VmBuilder<S>`.
#[must_use = "nothing happens before `build`"]
pub struct VmBuilder<S = Boot> {
    pub(super) source: S,
    pub(super) parts: Parts,
}

/// What a VM boots, in a [`VmBuilder`].
#[derive(Debug, Default)]
pub struct Boot {
    pub(super) kernel: Option<Kernel>,
    pub(super) firmware: Option<Firmware>,
    pub(super) initramfs: Option<Initramfs>,
    pub(super) cmdline: String,
    pub(super) vcpus: Option<u8>,
    pub(super) max_vcpus: Option<u8>,
    pub(super) memory: Option<MemorySize>,
    pub(super) hotplug_memory: Option<MemorySize>,
    pub(super) transport: Transport,
    pub(super) events: Events,
    pub(super) smbios: Option<Smbios>,
}

/// What every VM gets from its owner.
#[derive(Default)]
pub(super) struct Parts {
    pub(super) serial: Option<Box<dyn Write + Send>>,
    pub(super) devices: Vec<GivenDevice>,
    pub(super) broken_disks: Vec<BlockDeviceError>,
    pub(super) early: Option<EarlyVm>,
    pub(super) kvm: Option<Result<Kvm, KvmError>>,
    pub(super) page_map: Option<PageMap>,
    pub(super) seccomp: Seccomp,
}

impl<S: fmt::Debug> fmt::Debug for VmBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VmBuilder")
            .field("source", &self.source)
            .field("serial", &self.parts.serial.is_some())
            .field("devices", &self.parts.devices)
            .field("early", &self.parts.early)
            .field("seccomp", &self.parts.seccomp)
            .finish_non_exhaustive()
    }
}

impl Parts {
    /// The open `/dev/kvm` that the owner gave, else one that is opened now.
    pub(super) fn open_kvm(&mut self) -> Result<Kvm, KvmError> {
        self.kvm.take().unwrap_or_else(kvm::open)
    }
}

impl<S> VmBuilder<S> {
    /// Uses this open `/dev/kvm`; by default, `build` opens it by its path.
    pub fn kvm(mut self, device: &KvmDevice) -> Self {
        self.parts.kvm = Some(device.kvm());
        self
    }

    /// Uses this open `/proc/self/pagemap`; by default, snapshots and migrations open it by its
    /// path.
    pub fn page_map(mut self, page_map: &PageMap) -> Self {
        self.parts.page_map = Some(page_map.clone());
        self
    }

    /// A serial port (COM1, `console=ttyS0`) whose output goes to `writer`, byte by byte, on the
    /// vCPU's thread: a writer that blocks stalls the guest, one that calls `Vm::serial_input`
    /// deadlocks, and one that panics poisons the VM. By default there is none, since each byte
    /// costs an exit. A VM from a snapshot has one if the
    /// VM in the snapshot had: without a writer, its output is dropped.
    pub fn serial(mut self, writer: impl Write + Send + 'static) -> Self {
        self.parts.serial = Some(Box::new(writer));
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
    /// for more. See `Vm::balloon`.
    pub fn balloon(self) -> Self {
        self.device(BalloonDevice::new())
    }

    /// A virtio console (`console=hvc0`): cheaper than a serial port, but available to the guest
    /// only once its driver runs.
    pub fn console(self, console: ConsoleDevice) -> Self {
        self.device(console)
    }

    /// Ports with names, by which programs of the host and in the guest exchange bytes, such as
    /// QEMU's guest agent (`org.qemu.guest_agent.0`). See [`Vm::ports`](crate::Vm::ports).
    pub fn ports(self, ports: PortsDevice) -> Self {
        self.device(ports)
    }

    /// A virtio device of any type that `DeviceType` names, including the program's own devices.
    /// A `MemDevice` is added by [`Self::hotplug_memory`].
    pub fn device(self, device: impl VirtioDevice + 'static) -> Self {
        self.add(None, device)
    }

    /// As [`Self::device`], with an id that the program chooses: handles, errors, counters and
    /// snapshots call the device so, and not by its type and number. It begins with a letter and
    /// has 1 to 32 letters, digits, `-` and `_`; it is neither another device's nor one that a
    /// device without an id could have, such as `blk0`. A device of a snapshot with an id is
    /// restored into one with the same id.
    ///
    /// ```
    /// # use podvisor_vmm::{BlockDevice, Vm};
    /// # fn disks(disk: BlockDevice, scratch: BlockDevice) {
    /// let vm = Vm::builder()
    ///     .device_as("root", disk)
    ///     .device_as("scratch", scratch);
    /// // Later: `vm.block("scratch")?.resize()`, `vm.unplug("scratch")`.
    /// # }
    /// ```
    pub fn device_as(self, id: impl Into<String>, device: impl VirtioDevice + 'static) -> Self {
        self.add(Some(id.into()), device)
    }

    fn add(mut self, id: Option<String>, mut device: impl VirtioDevice + 'static) -> Self {
        let any: &mut dyn Any = &mut device;
        let checked = any.downcast_mut().map(BlockDevice::check);
        self.parts
            .broken_disks
            .extend(checked.and_then(Result::err));
        let device = Box::new(device);
        self.parts.devices.push(GivenDevice { id, device });
        self
    }

    /// Whether the VM's threads are confined to the system calls that they need; by default they
    /// are. The program's own serial writers, disks, devices and vsock listeners are called on
    /// these threads, too: there they may read and write, but neither signal, open files, nor
    /// create sockets other than pairs, nor connect any, nor start threads. The same holds for the
    /// program's `tracing` subscriber: one that opens files, for example to rotate them at
    /// midnight, needs a thread for that. Their stacks have 256 KiB. The host side of a socket
    /// device that uses paths has its own thread, which may create Unix sockets, connect them and
    /// remove paths ([`VsockHost::uses_paths`](podvisor_devices::vsock::VsockHost::uses_paths)).
    pub fn seccomp(mut self, seccomp: Seccomp) -> Self {
        self.parts.seccomp = seccomp;
        self
    }

    /// Uses a VM that KVM creates already, instead of waiting for a new one.
    pub fn early(mut self, vm: EarlyVm) -> Self {
        self.parts.early = Some(vm);
        self
    }
}
