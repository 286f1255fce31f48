//! Machines for guests with an operating system of their own.
//!
//! A [`MachinePlan`] holds everything such a machine is built from, as open files: a guest that
//! reboots gets a new machine from the same plan.

use std::fs::File;
use std::io::Write as _;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use podvisor_network::guest::NicKind;
use podvisor_vmm::{
    Firmware, FsProcess, Initramfs, Kernel, KvmDevice, LinkState, MemorySize, PageMap, PortsDevice,
    RestoreBuilder, Smbios, Snapshot, Transport, Vm, VmBuilder, VsockDevice,
};
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::build::{BuiltMachine, GUEST_CID};
use super::error::MachineError;
use super::machine_disk::{Locks, MachineDisk, again};
use super::machine_size::MachineSize;
use super::nic::Nic;
use super::origin::{BootProgram, ContinueAs, KeptKernel, SavedMachine};
use super::running::Ports;
use super::serial_port::SerialPort;
use super::share::OpenShare;

/// What a process opens before its jail closes, to build machines in it.
#[derive(Debug)]
pub(crate) struct HostFiles {
    kvm: KvmDevice,
    /// Machines whose memory nobody saves do without.
    page_map: Option<PageMap>,
    /// For machines that share directories.
    shares: Option<FsProcess>,
}

impl HostFiles {
    /// Opens them: with what machines that share directories need, or without.
    ///
    /// # Errors
    /// There is no KVM.
    pub(crate) fn open(has_shares: bool) -> Result<Self, MachineError> {
        let shares = has_shares.then(FsProcess::open).transpose();
        let kvm = KvmDevice::open()?;
        let page_map = PageMap::open();
        let page_map = page_map.inspect_err(|error| {
            warn!(%error, "the memory of machines cannot be saved");
        });
        Ok(Self {
            kvm,
            page_map: page_map.ok(),
            shares: shares.map_err(MachineError::ShareProcess)?,
        })
    }

    /// Returns KVM.
    pub(super) fn kvm(&self) -> &KvmDevice {
        &self.kvm
    }

    /// Gives them to a builder.
    pub(super) fn given_to<S>(&self, builder: VmBuilder<S>) -> VmBuilder<S> {
        let builder = builder.kvm(&self.kvm);
        match &self.page_map {
            Some(page_map) => builder.page_map(page_map),
            None => builder,
        }
    }
}

/// Gives a builder a kernel and what goes with it.
fn with_kernel(
    builder: VmBuilder,
    kernel: &File,
    initramfs: Option<&File>,
    cmdline: &str,
) -> Result<VmBuilder, MachineError> {
    let builder = builder
        .kernel(Kernel::from_file(again(kernel)?)?)
        .cmdline(cmdline);
    Ok(match initramfs {
        Some(initramfs) => builder.initramfs(Initramfs::from_file(again(initramfs)?)?),
        None => builder,
    })
}

/// What a machine is built from.
#[derive(Debug)]
pub(crate) struct MachinePlan {
    /// An ELF vmlinux or a bzImage, or a firmware.
    pub kernel: File,
    /// Which of them it is.
    pub program: BootProgram,
    /// Its initial file system.
    pub initramfs: Option<File>,
    /// Its command line.
    pub cmdline: String,
    /// The machine's UUID, which its firmware tables have.
    pub uuid: Option<[u8; 16]>,
    /// What else those tables say of it.
    pub identity: MachineIdentity,
    /// Virtual CPUs and memory.
    pub size: MachineSize,
    /// Disks, the first of which is `/dev/vda`.
    pub disks: Vec<MachineDisk>,
    /// Network cards.
    pub nics: Vec<MachineNic>,
    /// Directories of the host that the guest mounts.
    pub shares: Vec<OpenShare>,
    /// Disks that were plugged in, which the next machine has as well.
    pub plugged: Mutex<Vec<PluggedIn>>,
}

/// A disk that was plugged in.
#[derive(Debug)]
pub(crate) struct PluggedIn {
    /// What it is.
    pub(crate) disk: MachineDisk,
    /// Its device in the machine that runs.
    pub(crate) device: String,
}

impl PluggedIn {
    /// A disk of a machine that is not built yet.
    pub(crate) fn new(disk: MachineDisk) -> Self {
        let device = String::new();
        Self { disk, device }
    }
}

/// Texts of a machine's firmware tables (SMBIOS types 1 and 3); `None` leaves the default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MachineIdentity {
    /// The machine's serial number.
    pub serial: Option<String>,
    /// The chassis' manufacturer.
    pub chassis_manufacturer: Option<String>,
    /// The chassis' version.
    pub chassis_version: Option<String>,
    /// The chassis' serial number.
    pub chassis_serial: Option<String>,
    /// The chassis' asset tag.
    pub chassis_asset_tag: Option<String>,
    /// The chassis' stock keeping unit.
    pub chassis_sku: Option<String>,
}

/// A network card of a machine.
#[derive(Debug)]
pub struct MachineNic {
    /// The name of its interface in the sandbox's network, such as `eth0`.
    pub name: String,
    /// The kind of its backend.
    pub kind: NicKind,
    /// The backend's open descriptor.
    pub fd: OwnedFd,
    /// The guest's hardware address.
    pub mac: [u8; 6],
    /// Largest packet in bytes.
    pub mtu: u16,
    /// The guest's addresses.
    pub addresses: Vec<IpAddr>,
    /// It has no link, in the next machine either.
    pub is_down: AtomicBool,
}

impl MachineNic {
    fn link(&self) -> LinkState {
        match self.is_down.load(Ordering::Relaxed) {
            true => LinkState::Down,
            false => LinkState::Up,
        }
    }
}

impl MachinePlan {
    /// Builds a machine, which has the serial port.
    ///
    /// # Errors
    /// [`MachineError`]; nothing is left of the machine then.
    pub(crate) fn build(
        &self,
        host: &HostFiles,
        port: &SerialPort,
    ) -> Result<BuiltMachine, MachineError> {
        let builder = host.given_to(Vm::builder());
        let builder = match self.program {
            BootProgram::Firmware => builder.firmware(Firmware::from_file(again(&self.kernel)?)?),
            BootProgram::Kernel => with_kernel(
                builder,
                &self.kernel,
                self.initramfs.as_ref(),
                &self.cmdline,
            )?,
        };
        self.booting(builder, host, port)
    }

    /// Builds a machine that starts a kept kernel, which its serial port says.
    ///
    /// # Errors
    /// As [`Self::build`].
    pub(crate) fn build_kept(
        &self,
        kept: &KeptKernel,
        host: &HostFiles,
        port: &SerialPort,
    ) -> Result<BuiltMachine, MachineError> {
        let KeptKernel {
            kernel,
            initramfs,
            cmdline,
            title,
        } = kept;
        let builder = host.given_to(Vm::builder());
        let builder = with_kernel(builder, kernel, initramfs.as_ref(), cmdline)?;
        let machine = self.booting(builder, host, port)?;
        // Output that is lost is no reason to stop.
        let _ = write!(
            port.writer(),
            "podvisor: entry {title:?}: starting the kernel that was kept of the image\r\n"
        );
        Ok(machine)
    }

    /// Builds a machine that boots what its builder knows.
    fn booting(
        &self,
        builder: VmBuilder,
        host: &HostFiles,
        port: &SerialPort,
    ) -> Result<BuiltMachine, MachineError> {
        let mut builder = builder
            .vcpus(self.size.cpus())
            .max_vcpus(self.size.max_cpus)
            .memory(MemorySize::bytes(self.size.memory()))
            .transport(Transport::Pci)
            .power_button()
            .generation_id()
            .pci_hotplug()
            .serial(port.writer());
        if self.size.may_get_cpus() {
            builder = builder.cpu_hotplug();
        }
        let growth = self.size.growth();
        if growth > 0 {
            builder = builder.hotplug_memory(MemorySize::bytes(growth));
        }
        if let Some(tables) = self.smbios() {
            builder = builder.smbios(tables);
        }
        let builder = self.devices(builder, Locks::Taken, PluggedPlaces::New, host)?;
        connected(builder.build()?, port)
    }

    /// Builds the machine that was saved, which has the serial port and has not run yet.
    ///
    /// # Errors
    /// [`MachineError`]; the files are as they were.
    pub(crate) fn continued(
        &self,
        saved: &SavedMachine,
        host: &HostFiles,
        port: &SerialPort,
    ) -> Result<BuiltMachine, MachineError> {
        let snapshot = Snapshot::from_files(again(&saved.state)?, again(&saved.memory)?)?;
        let shape = (
            snapshot.vcpus(),
            snapshot.memory(),
            snapshot.hotplug_memory(),
        );
        let own = (
            self.size.cpus(),
            MemorySize::bytes(self.size.memory()),
            MemorySize::bytes(self.size.growth()),
        );
        // Whoever had CPUs plugged in may have died before it wrote down how many.
        let has_cpus = (own.0..=self.size.max_cpus).contains(&shape.0);
        if !has_cpus || (shape.1, shape.2) != (own.1, own.2) {
            return Err(MachineError::OtherShape {
                saved: shape_of(shape),
                wanted: shape_of(own),
            });
        }
        let builder = snapshot.builder();
        let builder = match saved.continues {
            ContinueAs::Same => builder.same_machine(),
            ContinueAs::Copy => builder,
        };
        let builder = host.given_to(builder).serial(port.writer());
        let places = self.place_plugged(&snapshot.devices());
        let builder = self.devices(builder, Locks::Taken, places, host)?;
        let machine = connected(builder.build()?, port)?;
        self.size.set_cpus(shape.0);
        if saved.continues == ContinueAs::Same {
            // From here on its disks may change.
            let emptied = saved.state.set_len(0);
            let emptied = emptied.and_then(|()| saved.state.sync_all());
            emptied.map_err(MachineError::Spend)?;
        }
        Ok(machine)
    }

    /// Builds a machine that goes on where it was, with these devices in this order: `begin`
    /// returns a builder that knows where. Its disks are not locked.
    ///
    /// # Errors
    /// As [`Self::build`].
    pub(super) fn rebuild(
        &self,
        host: &HostFiles,
        port: &SerialPort,
        names: &[String],
        begin: impl FnOnce(&HostFiles) -> RestoreBuilder,
    ) -> Result<BuiltMachine, MachineError> {
        self.forget_cached();
        let builder = begin(host).serial(port.writer());
        let places = self.place_plugged(names);
        let builder = self.devices(builder, Locks::Later, places, host)?;
        connected(builder.build()?, port)
    }

    fn devices<S>(
        &self,
        mut builder: VmBuilder<S>,
        locks: Locks,
        places: PluggedPlaces,
        host: &HostFiles,
    ) -> Result<VmBuilder<S>, MachineError> {
        for disk in &self.disks {
            builder = builder.block(disk.device(locks)?.serial(&disk.serial));
        }
        let mut plugged = self.plugged();
        let first = match places {
            PluggedPlaces::New => {
                for (index, plugged) in plugged.iter_mut().enumerate() {
                    plugged.device = format!("blk{}", self.disks.len() + index);
                }
                plugged.len()
            }
            PluggedPlaces::Old { first } => first.min(plugged.len()),
        };
        let (first, last) = plugged.split_at(first);
        for PluggedIn { disk, .. } in first {
            builder = builder.block(disk.device(locks)?.serial(&disk.serial));
        }
        for nic in &self.nics {
            let nic = Nic {
                kind: nic.kind,
                fd: nic.fd.try_clone().map_err(MachineError::Duplicate)?,
                mac: nic.mac,
                mtu: nic.mtu,
                link: nic.link(),
            };
            builder = builder.net(nic.device()?);
        }
        for share in &self.shares {
            builder = builder.fs(share.device(host.shares.as_ref())?);
        }
        let vsock = VsockDevice::in_process(GUEST_CID)?;
        let agent = PortsDevice::new([podvisor_guest_agent::PORT])?;
        builder = builder.vsock(vsock).rng().balloon().ports(agent);
        for PluggedIn { disk, .. } in last {
            builder = builder.block(disk.device(locks)?.serial(&disk.serial));
        }
        Ok(builder)
    }

    /// Says where a machine with these devices has the disks that were plugged in, and notes their
    /// names. Those that the guest had when it booted last are in front of its other devices, those
    /// that came since behind all of them.
    fn place_plugged(&self, names: &[String]) -> PluggedPlaces {
        let is_disk = |name: &&String| name.starts_with(DISK);
        let in_front = names.iter().take_while(is_disk).count();
        let disks = names.iter().filter(is_disk).skip(self.disks.len());
        for (plugged, name) in self.plugged().iter_mut().zip(disks) {
            plugged.device.clone_from(name);
        }
        PluggedPlaces::Old {
            first: in_front.saturating_sub(self.disks.len()),
        }
    }

    /// Returns the disks that were plugged in.
    pub(crate) fn plugged(&self) -> MutexGuard<'_, Vec<PluggedIn>> {
        self.plugged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a disk that the guest may write larger, and returns its device. A block device has
    /// grown already, by whoever gave it.
    ///
    /// # Errors
    /// There is no such disk, it is larger, or its file does not grow.
    pub(crate) fn grow_disk(&self, serial: &str, bytes: u64) -> Result<String, MachineError> {
        let plugged = self.plugged();
        let mut disks = self.disks.iter().enumerate();
        let found = disks.find(|(_, disk)| disk.serial == serial);
        let found = found.map(|(number, disk)| (format!("{DISK}{number}"), disk));
        let (device, disk) = match found {
            Some(found) => found,
            None => {
                let found = plugged.iter().find(|one| one.disk.serial == serial);
                let found = found.map(|one| (one.device.clone(), &one.disk));
                found.ok_or_else(|| MachineError::NoDisk(serial.to_owned()))?
            }
        };
        let grown = disk.grow(bytes);
        grown.map_err(|source| MachineError::Grow {
            serial: serial.to_owned(),
            source,
        })?;
        Ok(device)
    }

    /// Returns the disks that the guest may write, by their serial numbers, and the file of each
    /// that has what it wrote. Those that were plugged in come last.
    ///
    /// # Errors
    /// [`MachineError::Duplicate`].
    pub(crate) fn written(&self) -> Result<Vec<(String, File)>, MachineError> {
        let plugged = self.plugged();
        let all = self.disks.iter().chain(plugged.iter().map(|one| &one.disk));
        let written = all.filter_map(|disk| {
            let file = disk.written()?;
            Some(again(file).map(|file| (disk.serial.clone(), file)))
        });
        written.collect()
    }
}

fn shape_of((cpus, memory, growth): (u8, MemorySize, MemorySize)) -> String {
    match growth.as_bytes() {
        0 => format!("{cpus} CPUs and {memory}"),
        _ => format!("{cpus} CPUs, {memory} and up to {growth} more"),
    }
}

/// The beginning of the names of disks' devices.
const DISK: &str = "blk";

/// Where among its devices a machine has the disks that were plugged in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PluggedPlaces {
    /// Behind the other disks: the machine is new.
    New,
    /// The first ones there, and the others behind all other devices.
    Old {
        /// How many.
        first: usize,
    },
}

/// Connects a machine's serial port.
fn connected(vm: Vm, port: &SerialPort) -> Result<BuiltMachine, MachineError> {
    let vm = Arc::new(vm);
    port.connect(&vm);
    let ports = Ports(vm.vsock()?);
    Ok(BuiltMachine {
        vm,
        spare: Vec::new(),
        ports,
        console: None,
    })
}

impl MachinePlan {
    /// Returns the firmware tables; `None` for a machine that nobody has named.
    fn smbios(&self) -> Option<Smbios> {
        if self.uuid.is_none() && self.identity == MachineIdentity::default() {
            return None;
        }
        let mut tables = Smbios::new();
        if let Some(uuid) = self.uuid {
            tables = tables.uuid(uuid);
        }
        let MachineIdentity {
            serial,
            chassis_manufacturer,
            chassis_version,
            chassis_serial,
            chassis_asset_tag,
            chassis_sku,
        } = self.identity.clone();
        type Set = fn(Smbios, String) -> Smbios;
        let texts: [(Option<String>, Set); 6] = [
            (serial, Smbios::serial),
            (chassis_manufacturer, Smbios::chassis_manufacturer),
            (chassis_version, Smbios::chassis_version),
            (chassis_serial, Smbios::chassis_serial),
            (chassis_asset_tag, Smbios::chassis_asset_tag),
            (chassis_sku, Smbios::chassis_sku),
        ];
        for (text, set) in texts {
            if let Some(text) = text {
                tables = set(tables, text);
            }
        }
        Some(tables)
    }
}
