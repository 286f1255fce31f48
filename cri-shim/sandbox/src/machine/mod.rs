//! A virtual machine as podvisor uses it: every call to the VMM library is in this module.
//!
//! A [`MachineConfig`], all of whose files are open, becomes a running [`Machine`], which reports
//! how it ended ([`MachineExit`]) and is killed when it is dropped. This module knows nothing about
//! containers, the agent in the guest, or the command line.

mod announce;
mod assets;
mod console;
mod disk;
mod error;
mod migrate;
mod nic;
mod own_os;
mod panic;
mod pause;
mod serial_port;
mod share;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use podvisor_vmm::{
    BlockDevice, BlockHandle, FsDevice, HandleError, Initramfs, Kernel, MemorySize, PortsHandle,
    State, Vm, VmBuilder, VmExit, VsockDevice, VsockHandle,
};
use tokio::sync::watch;
use tracing::debug;

use console::Console;
pub use error::MachineError;
pub use error::causes;

pub use assets::{AssetError, Assets, GUEST_DIR_VARIABLE, GuestFile};
pub use disk::{Disk, PluggedDisk};
pub(crate) use migrate::{Arrival, ArriveError};
pub use nic::Nic;
pub use own_os::{DiskContents, DiskMove, MachineDisk, MachineIdentity, MachineNic};
pub(crate) use own_os::{HostFiles, MachinePlan};
pub use panic::KernelPanic;
use pause::{PauseCall, UndoPause};
pub use podvisor_network::guest::NicKind;
pub use podvisor_vmm::{
    BlockDeviceError, EarlyVm, IoEngine, OverlayFormat, Snapshot, Transport, WorkingSet,
    create_grown_overlay, grow_overlay, open_disk_for_writing,
};
pub(crate) use podvisor_vmm::{
    MigrateError, MigrationOptions, MigrationProgress, MigrationReport, MigrationStep, MovingDisk,
};
pub(crate) use serial_port::SerialPort;
pub(crate) use share::OpenShare;
pub use share::{MachineShare, SharedDir, UserRange};

/// The guest's vsock address, the lowest that a guest may have; guests of different
/// machines do not see each other.
const GUEST_CID: u64 = 3;

/// The kernel command line of every guest: reset instead of hanging after a kernel panic.
const COMMAND_LINE: &str = concat!(
    "panic=-1 reboot=k",
    // Mounting and unmounting, which containers do a lot, does not wait for normal RCU grace
    // periods.
    " rcupdate.rcu_expedited=1",
    // The TSC is not checked twice a second on hosts where it is not invariant: there kvm-clock is
    // the clock anyway.
    " tsc=nowatchdog",
    // No dummy interface by default.
    " dummy.numdummies=0",
);

/// Added for guests without a console: be quiet, and do not probe for serial ports, which do not
/// exist.
const UNWATCHED: &str = " quiet 8250.nr_uarts=0";

/// Added for guests with a serial console. Nothing else differs, so that what is seen there is
/// what happens without it.
const WATCHED: &str = " console=ttyS0";

/// The size of the conntrack hash table, for 131072 connections: otherwise the kernel derives it
/// from the memory at boot. It takes 128 KiB, which clones share until they use it.
const CONNECTIONS: &str = " nf_conntrack.hashsize=16384";

/// Added for guests without a PCI bus.
const NO_PCI: &str = " pci=off";

/// Added for guests that start with one CPU. Atomic instructions are not patched for a single CPU,
/// which costs more at boot than a pod ever gains by it. Memory of each CPU is allocated by pages:
/// by huge pages, one CPU's area is 2 MiB, and the array that records which memory cgroup is
/// charged for each part of it takes 4 MiB.
const ONE_CPU: &str = " noreplace-smp percpu_alloc=page";

/// Added for guests that count pressure stall information.
const PSI: &str = " psi=1";

/// The kernel and initramfs that a machine boots.
#[derive(Debug)]
pub struct GuestFiles {
    kernel: Kernel,
    initramfs: Initramfs,
}

impl GuestFiles {
    /// Opens a kernel (ELF vmlinux or bzImage) and an initramfs.
    ///
    /// # Errors
    /// A file cannot be read, or the first one is not a kernel.
    pub fn open(kernel: &Path, initramfs: &Path) -> Result<Self, MachineError> {
        Ok(Self {
            kernel: Kernel::open(kernel)?,
            initramfs: Initramfs::open(initramfs)?,
        })
    }

    /// Uses files that are open already.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_files(kernel: File, initramfs: File) -> Result<Self, MachineError> {
        Ok(Self {
            kernel: Kernel::from_file(kernel)?,
            initramfs: Initramfs::from_file(initramfs)?,
        })
    }
}

/// How a machine starts.
#[derive(Debug)]
pub enum Boot {
    /// By booting.
    Cold(GuestFiles),
    /// As a clone of a machine with the same CPUs, memory and devices.
    Warm(Snapshot),
    /// As such a clone, but only if its guest knows all features of this host's CPU. A guest that
    /// booted before a microcode or kernel update of the host would not use what the update
    /// brought.
    Template(Snapshot),
}

/// Stack of the thread that waits for a machine's end. The usual 2 MiB can become a huge page,
/// which the machine would then have for as long as it lives.
const STACK: usize = 256 << 10;

/// The tag of the directory that a machine shares.
pub const SHARE_TAG: &str = "shared";

/// The library's name of that directory's device.
const SHARE_DEVICE: &str = "fs0";

/// The unit of [`MachineConfig::growth`] in bytes.
pub const GROWTH_UNIT: u64 = 128 << 20;

/// The configuration of a machine. None of its files is opened by path.
#[derive(Debug)]
pub struct MachineConfig {
    /// How it starts.
    pub boot: Boot,
    /// Virtual CPUs.
    pub cpus: u8,
    /// The maximum of vCPUs for [`Machine::add_cpus`]; at least `cpus`.
    pub max_cpus: u8,
    /// Memory in bytes.
    pub memory: u64,
    /// Bytes that [`Machine::grow`] may add at run time: a multiple of [`GROWTH_UNIT`].
    pub growth: u64,
    /// Disks that exist from the start.
    pub disks: Vec<Disk>,
    /// Disks that are empty until [`Machine::insert_disk`] fills them.
    pub spare_disks: u8,
    /// Network cards.
    pub nics: Vec<Nic>,
    /// The directory that the guest finds under [`SHARE_TAG`].
    pub share: Option<SharedDir>,
    /// The bus of its devices.
    pub transport: Transport,
    /// Whether the guest's kernel counts pressure stall information.
    pub psi: bool,
    /// The file for the serial console's output; `None` makes the boot faster.
    pub console: Option<File>,
    /// A VM that KVM creates already.
    pub early: Option<EarlyVm>,
}

/// A machine that is built and has not run yet: everything that needs a path or a privilege is
/// done, and no thread has been started.
#[derive(Debug)]
pub struct BuiltMachine {
    vm: Arc<Vm>,
    spare: Vec<BlockHandle>,
    ports: Ports,
    console: Option<Arc<Console>>,
}

/// A running machine, which is killed when it is dropped.
#[derive(Debug)]
pub struct Machine {
    vm: Arc<Vm>,
    spare: Vec<BlockHandle>,
    ports: Ports,
    console: Option<Arc<Console>>,
    stopped: watch::Receiver<bool>,
    exit: watch::Receiver<Option<MachineExit>>,
}

/// Access to the vsock ports of a machine's guest.
#[derive(Debug, Clone)]
pub struct Ports(VsockHandle);

impl Ports {
    /// Opens a stream to a port of the guest. Data that is written waits until the guest accepts;
    /// the stream ends if the guest refuses.
    ///
    /// # Errors
    /// The machine does not run, or no more connections are possible.
    pub async fn connect(&self, port: u32) -> Result<UnixStream, MachineError> {
        let vsock = self.0.clone();
        // The device may be busy.
        let connect = tokio::task::spawn_blocking(move || vsock.connect(port));
        match connect.await {
            Ok(connected) => Ok(connected?),
            Err(error) => Err(MachineError::Thread(io::Error::other(error))),
        }
    }
}

/// A vsock port of the host that the guest may connect to.
pub struct HostPort {
    /// Its number.
    pub port: u32,
    /// Called with each connection, on the device's event loop: it must not block.
    pub on_connect: Box<dyn FnMut(UnixStream) + Send>,
}

impl fmt::Debug for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPort")
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

/// What was read from a machine's disks and written to them, since it was built.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskTraffic {
    /// Requests to read.
    pub reads: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Requests to write.
    pub writes: u64,
    /// Bytes that were written.
    pub write_bytes: u64,
}

/// How a machine ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MachineExit {
    /// The guest powered itself off.
    PoweredOff,
    /// The guest asked for a reset.
    Reset,
    /// The guest's kernel panicked, and asked for a reset.
    Panicked(KernelPanic),
    /// A fault that the guest could not handle.
    TripleFault,
    /// The host killed it.
    Killed,
    /// It runs on another host.
    Moved,
    /// The library or the host failed; the error's text.
    Failed(String),
}

impl fmt::Display for MachineExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PoweredOff => f.write_str("powered itself off"),
            Self::Reset => f.write_str("reset itself"),
            Self::Panicked(panic) => write!(f, "ended by a kernel panic: {panic}"),
            Self::TripleFault => f.write_str("ended by a triple fault"),
            Self::Killed => f.write_str("was killed"),
            Self::Moved => f.write_str("runs on another host"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

/// What a machine has, however it starts.
struct Parts<'a> {
    early: Option<EarlyVm>,
    disks: Vec<Disk>,
    spare_disks: u8,
    nics: Vec<Nic>,
    share: Option<SharedDir>,
    host_ports: Vec<HostPort>,
    console: Option<&'a Arc<Console>>,
}

impl Parts<'_> {
    fn add_to<S>(self, mut builder: VmBuilder<S>) -> Result<VmBuilder<S>, MachineError> {
        if let Some(vm) = self.early {
            builder = builder.early(vm);
        }
        for Disk { file, serial } in self.disks {
            let disk = BlockDevice::from_file(file)?.read_only();
            builder = builder.block(disk.serial(&serial));
        }
        for _ in 0..self.spare_disks {
            builder = builder.block(BlockDevice::spare());
        }
        for nic in self.nics {
            builder = builder.net(nic.device()?);
        }
        if let Some(share) = self.share {
            builder = builder.fs(share.device()?);
        }
        let mut vsock = VsockDevice::in_process(GUEST_CID)?;
        for HostPort { port, on_connect } in self.host_ports {
            vsock.listen(port, on_connect);
        }
        if let Some(console) = self.console {
            builder = builder.serial(console.writer());
        }
        // The guest's free memory is returned to the host automatically.
        Ok(builder.vsock(vsock).rng().balloon())
    }
}

impl BuiltMachine {
    /// Builds a machine whose guest can connect to `host_ports` of the host over vsock.
    ///
    /// # Errors
    /// [`MachineError`]; nothing is left of the machine then.
    pub fn new(config: MachineConfig, host_ports: Vec<HostPort>) -> Result<Self, MachineError> {
        let MachineConfig {
            boot,
            cpus,
            max_cpus,
            memory,
            growth,
            disks,
            spare_disks,
            nics,
            share,
            transport,
            psi,
            console,
            early,
        } = config;
        let for_console = match console {
            None => UNWATCHED,
            Some(_) => WATCHED,
        };
        let console = console.map(Console::new).transpose();
        let console = console.map_err(MachineError::ConsoleFile)?;
        let first_spare = disks.len();
        let parts = Parts {
            early,
            disks,
            spare_disks,
            nics,
            share,
            host_ports,
            console: console.as_ref(),
        };
        let vm = match boot {
            Boot::Warm(snapshot) => parts.add_to(snapshot.builder())?.build()?,
            Boot::Template(snapshot) => {
                let builder = snapshot.builder().require_same_cpu();
                parts.add_to(builder)?.build()?
            }
            Boot::Cold(files) => {
                let for_bus = match transport {
                    Transport::Mmio => NO_PCI,
                    Transport::Pci => "",
                };
                let for_cpus = if cpus == 1 { ONE_CPU } else { "" };
                let for_figures = if psi { PSI } else { "" };
                let builder = Vm::builder()
                    .kernel(files.kernel)
                    .initramfs(files.initramfs)
                    .vcpus(cpus)
                    .max_vcpus(max_cpus)
                    .transport(transport)
                    .memory(MemorySize::bytes(memory))
                    .cmdline(format!(
                        "{COMMAND_LINE}{for_console}{CONNECTIONS}{for_bus}{for_cpus}{for_figures}"
                    ));
                let builder = match growth {
                    0 => builder,
                    most => builder.hotplug_memory(MemorySize::bytes(most)),
                };
                parts.add_to(builder)?.build()?
            }
        };
        let vm = Arc::new(vm);
        if let Some(console) = &console {
            let console = Arc::clone(console);
            vm.on_serial_drained(move || console.drained());
        }
        let spare = (first_spare..first_spare + usize::from(spare_disks))
            .map(|number| vm.block(&format!("blk{number}")))
            .collect::<Result<_, _>>()?;
        let ports = Ports(vm.vsock()?);
        Ok(Self {
            vm,
            spare,
            ports,
            console,
        })
    }

    /// Whether [`Machine::add_cpus`] may add vCPUs.
    #[must_use]
    pub fn may_grow_cpus(&self) -> bool {
        self.vm.max_vcpus() > self.vm.vcpus()
    }

    /// Starts the guest.
    ///
    /// # Errors
    /// [`MachineError`]; nothing is left of the machine then.
    pub fn start(self) -> Result<Machine, MachineError> {
        self.vm.start()?;
        self.watch()
    }

    /// Waits from now on for the end of a machine, which has been started or is paused.
    fn watch(self) -> Result<Machine, MachineError> {
        let Self {
            vm,
            spare,
            ports,
            console,
        } = self;
        let (stops, stopped) = watch::channel(false);
        let (sender, exit) = watch::channel(None);
        let (waited, output) = (Arc::clone(&vm), console.clone());
        let wait = move || {
            waited.wait_until_stopped();
            // There is no receiver if the machine has been dropped.
            let _ = stops.send(true);
            let exit = match waited.wait() {
                Ok(VmExit::Reset) => {
                    let panic = KernelPanic::find(|at, bytes| waited.read_memory(at, bytes));
                    panic.map_or(MachineExit::Reset, MachineExit::Panicked)
                }
                Ok(exit) => MachineExit::from(exit),
                Err(error) => MachineExit::Failed(causes(&error)),
            };
            debug!(%exit, "the machine has ended");
            if let Some(console) = output {
                console.close();
            }
            // There is no receiver if the machine has been dropped.
            let _ = sender.send(Some(exit));
        };
        thread::Builder::new()
            .name("vm-wait".to_owned())
            .stack_size(STACK)
            .spawn(wait)
            .map_err(MachineError::Thread)?;
        Ok(Machine {
            vm,
            spare,
            ports,
            console,
            stopped,
            exit,
        })
    }
}

impl Machine {
    /// Returns access to the guest's vsock ports.
    #[must_use]
    pub fn ports(&self) -> &Ports {
        &self.ports
    }

    /// Pauses the guest between two instructions. It continues with [`Self::resume`], or if the
    /// future of this call is dropped.
    ///
    /// # Errors
    /// The machine does not run, or a device is in the middle of a long operation.
    pub async fn pause(&self) -> Result<(), MachineError> {
        let call = Arc::new(PauseCall::default());
        let _undo = UndoPause {
            vm: Arc::clone(&self.vm),
            call: Arc::clone(&call),
        };
        let attempts = Arc::clone(&call);
        let paused = self.blocking(move |vm| attempts.carry_out(|| vm.pause(), || vm.resume()));
        let paused = paused.await;
        call.deliver();
        paused
    }

    /// Resumes a paused guest.
    ///
    /// # Errors
    /// The machine is not paused.
    pub async fn resume(&self) -> Result<(), MachineError> {
        self.blocking(|vm| match vm.state() {
            // It has arrived paused from another host.
            State::Created => vm.start(),
            _ => vm.resume(),
        })
        .await
    }

    async fn blocking<E: Send + 'static>(
        &self,
        work: impl FnOnce(&Vm) -> Result<(), E> + Send + 'static,
    ) -> Result<(), MachineError>
    where
        MachineError: From<E>,
    {
        let vm = Arc::clone(&self.vm);
        match tokio::task::spawn_blocking(move || work(&vm)).await {
            Ok(done) => Ok(done?),
            Err(error) => Err(MachineError::Thread(io::Error::other(error))),
        }
    }

    /// Writes the state of a paused guest to a new directory, from which clones can start.
    ///
    /// # Errors
    /// The machine is not paused, or the directory cannot be written.
    pub async fn snapshot(&self, dir: PathBuf) -> Result<(), MachineError> {
        self.blocking(move |vm| vm.snapshot(dir)).await
    }

    /// As [`Self::snapshot`], to two empty files.
    ///
    /// # Errors
    /// The machine is not paused, or the files cannot be written: they are empty then.
    pub(crate) fn snapshot_to(&self, state: &File, memory: &File) -> Result<(), MachineError> {
        Ok(self.vm.snapshot_to(state, memory)?)
    }

    /// Returns the memory that a machine that started as a clone has written since.
    ///
    /// # Errors
    /// It did not start as a clone.
    pub fn working_set(&self) -> Result<WorkingSet, MachineError> {
        Ok(self.vm.working_set()?)
    }

    /// Becomes true when the guest no longer runs, though it is not known yet how the machine
    /// ended: that may take some time, after which [`Self::ended`] is certain to return.
    #[must_use]
    pub fn stopped(&self) -> watch::Receiver<bool> {
        self.stopped.clone()
    }

    /// Counters of the guest's vsock connections by name: which side closed them.
    #[must_use]
    pub fn vsock_counters(&self) -> Vec<(&'static str, u64)> {
        let devices = self.vm.counters().into_iter();
        let vsock = devices.filter(|counted| counted.device.starts_with("vsock"));
        let counters = vsock.flat_map(|counted| counted.counters);
        counters
            .map(|counter| (counter.name, counter.value))
            .collect()
    }

    /// What was read from the disks and written to them, all together.
    #[must_use]
    pub fn disk_traffic(&self) -> DiskTraffic {
        let mut sum = DiskTraffic::default();
        let devices = self.vm.counters().into_iter();
        let disks = devices.filter(|counted| counted.device.starts_with("blk"));
        for counter in disks.flat_map(|counted| counted.counters) {
            let field = match counter.name {
                "reads" => &mut sum.reads,
                "read_bytes" => &mut sum.read_bytes,
                "writes" => &mut sum.writes,
                "write_bytes" => &mut sum.write_bytes,
                _ => continue,
            };
            *field = field.saturating_add(counter.value);
        }
        sum
    }

    /// Whether the guest is paused.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.vm.state() == podvisor_vmm::State::Paused
    }

    /// Returns the numbers of the disks, from 0 in their order, that have taken a request and not
    /// answered it.
    #[must_use]
    pub fn waiting_disks(&self) -> Vec<usize> {
        let of_disk = |device: &str| device.strip_prefix("blk").and_then(|it| it.parse().ok());
        let counted = self.vm.counters();
        let disks = counted.iter().filter_map(|counted| {
            let number: usize = of_disk(&counted.device)?;
            let counters = counted.counters.iter();
            let counters: Vec<_> = counters.map(|it| (it.name, it.value)).collect();
            own_os::has_unanswered(&counters).then_some(number)
        });
        disks.collect()
    }

    /// Has the guest see how large the disk with this number is now.
    pub(crate) fn look_at_disk(&self, number: usize) -> Result<(), MachineError> {
        Ok(self.vm.block(&format!("blk{number}"))?.resize()?)
    }

    /// Whether a thread of the machine, which has ended, was left behind in a request of the guest:
    /// it may still write to a disk.
    pub(crate) fn has_abandoned(&self) -> bool {
        !self.vm.abandoned().is_empty()
    }

    /// Waits until there is no such thread any more.
    pub(crate) fn wait_abandoned(&self) {
        self.vm.wait_abandoned();
    }

    /// Waits until the machine ends. There may be any number of callers.
    pub async fn ended(&self) -> MachineExit {
        let mut exit = self.exit.clone();
        let known = exit.wait_for(Option::is_some).await;
        match known.as_deref() {
            Ok(Some(exit)) => exit.clone(),
            _ => MachineExit::Failed("the thread that waited for it is gone".to_owned()),
        }
    }

    /// Changes the guest's additional memory to `bytes`, or as near to it as possible within
    /// `patience`: memory in use is not taken away. Returns how much additional memory it has then.
    ///
    /// # Errors
    /// The machine was built without growth, or has ended.
    pub async fn grow(&self, bytes: u64, patience: Duration) -> Result<u64, MachineError> {
        let memory = self.vm.hotplug_memory()?;
        let reach = move || memory.request_and_wait(MemorySize::bytes(bytes), patience);
        match tokio::task::spawn_blocking(reach).await {
            Ok(reached) => Ok(reached?.as_bytes()),
            Err(error) => Err(MachineError::Thread(io::Error::other(error))),
        }
    }

    /// Counts files and directories that were removed on the host but are kept because the guest
    /// still knows them, though it does not have them open. Each call looks at one part of the
    /// shared directory: see [`FsDevice::count_removed_objects`].
    ///
    /// # Errors
    /// The machine does not run, or its file system device does not answer.
    pub async fn count_removed_objects(&self) -> Result<usize, MachineError> {
        // Machines without a shared directory have nothing to count.
        let Ok(share) = self.vm.fs(SHARE_DEVICE) else {
            return Ok(0);
        };
        let look = move || share.run(FsDevice::count_removed_objects);
        match tokio::task::spawn_blocking(look).await {
            Ok(found) => Ok(found?),
            Err(error) => Err(MachineError::Thread(io::Error::other(error))),
        }
    }

    /// Adds vCPUs until there are `count`; the guest has to bring them up then. None are removed.
    ///
    /// # Errors
    /// The machine was built for fewer vCPUs, or does not run.
    pub async fn add_cpus(&self, count: u8) -> Result<(), MachineError> {
        if count <= self.vm.vcpus() {
            return Ok(());
        }
        self.blocking(move |vm| vm.add_vcpus(count)).await
    }

    /// Connects a stream to the guest's serial console: it gets recent output and all that follows,
    /// and its input is typed. This does not depend on the guest's answering. The stream ends with
    /// the machine.
    ///
    /// # Errors
    /// [`MachineError::NoConsole`], or too many clients are connected.
    pub fn attach_console(&self, stream: UnixStream) -> Result<(), MachineError> {
        let console = self.console.as_ref().ok_or(MachineError::NoConsole)?;
        console
            .attach(&self.vm, stream)
            .map_err(MachineError::Console)
    }

    /// Presses the power button, which a guest that knows it takes as the request to power itself
    /// off.
    ///
    /// # Errors
    /// The machine has no such button, or does not run.
    pub fn press_power_button(&self) -> Result<(), MachineError> {
        Ok(self.vm.press_power_button()?)
    }

    /// Returns whether a program in the guest has the port of QEMU's guest agent open.
    ///
    /// # Errors
    /// The machine has no such port, or does not run.
    pub async fn has_guest_agent(&self) -> Result<bool, MachineError> {
        self.on_ports(|ports| ports.is_open(podvisor_guest_agent::PORT))
            .await
    }

    /// Connects to the port of QEMU's guest agent. The stream of an earlier call is closed.
    ///
    /// # Errors
    /// As [`Self::has_guest_agent`].
    pub async fn connect_guest_agent(&self) -> Result<UnixStream, MachineError> {
        self.on_ports(|ports| ports.connect(podvisor_guest_agent::PORT))
            .await
    }

    async fn on_ports<T: Send + 'static>(
        &self,
        work: impl FnOnce(&PortsHandle) -> Result<T, HandleError> + Send + 'static,
    ) -> Result<T, MachineError> {
        let ports = self.vm.ports()?;
        // The device may be busy.
        match tokio::task::spawn_blocking(move || work(&ports)).await {
            Ok(done) => Ok(done?),
            Err(error) => Err(MachineError::Thread(io::Error::other(error))),
        }
    }

    /// Powers the machine off immediately. Returns when its threads have ended.
    pub fn kill(&self) {
        // Refused if it has stopped already.
        if let Err(error) = self.vm.stop() {
            debug!(%error, "the machine was not running");
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
    }
}

impl From<VmExit> for MachineExit {
    fn from(exit: VmExit) -> Self {
        match exit {
            VmExit::Shutdown => Self::PoweredOff,
            VmExit::Reset => Self::Reset,
            VmExit::TripleFault { .. } => Self::TripleFault,
            VmExit::Moved => Self::Moved,
            _ => Self::Killed,
        }
    }
}
