//! A virtual machine monitor as a library: it boots Linux guests on KVM inside the calling
//! process, with virtio devices and without firmware, daemons or helper processes.
//!
//! # A guest in ten lines
//!
//! ```no_run
//! use podvisor_vmm::{BlockDevice, Initramfs, Kernel, MemorySize, Vm};
//!
//! let vm = Vm::builder()
//!     .kernel(Kernel::open("vmlinux")?)
//!     .initramfs(Initramfs::open("initramfs.cpio")?)
//!     .cmdline("console=ttyS0 quiet panic=-1 reboot=k")
//!     .vcpus(2)
//!     .memory(MemorySize::mib(256))
//!     .block(BlockDevice::open("root.erofs")?.read_only())
//!     .serial(std::io::stdout())
//!     .build()?;
//! vm.start()?;
//! println!("{}", vm.wait()?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The programs in `examples/` show more: a guest with a disk, talking to a guest over vsock,
//! clones of a guest, a disk that is plugged in, and a disk of the program's own.
//!
//! # What a VM is
//!
//! [`Vm::builder`] collects a configuration; [`VmBuilder::build`] checks all of it, reports every
//! mistake at once ([`ConfigErrors`]), creates the VM and loads the kernel. The resulting [`Vm`] is
//! [`State::Created`]; [`Vm::start`] runs it, [`Vm::pause`] and [`Vm::resume`] do what they say,
//! [`Vm::stop`] powers it off, and [`Vm::wait`] returns its [`VmExit`], of which [`Vm::exit_fd`]
//! tells an event loop. A call that is illegal in a
//! state returns [`VmError::IllegalState`]; it is never undefined. Every call takes `&self`, from
//! any thread.
//!
//! | call | `Created` | `Running` | `Paused` | `Stopped` | `Poisoned` |
//! | --- | --- | --- | --- | --- | --- |
//! | `start` | `Running` | | | | |
//! | `pause` | | `Paused` | | | |
//! | `snapshot`, `snapshot_difference`, `dump_to` | | | `Paused` | | |
//! | `resume` | | | `Running` | | |
//! | `plug`, `unplug`, `request_unplug`, `add_vcpus`, `press_power_button` | | `Running` | | | |
//! | `insert_disk` | | `Running` | `Paused` | | |
//! | `migrate` | | `Stopped` | `Stopped` | | |
//! | `stop` | `Stopped` | `Stopped` | `Stopped` | `Stopped` | `Poisoned` |
//!
//! A cell is the [`State`] that the call leads to; in an empty cell the call is illegal.
//!
//! After `pause` has returned, no vCPU runs, no request is in flight and no device reads or writes
//! guest memory; `resume` continues from there, and nothing is lost. `pause` fails with
//! [`VmError::Busy`], and the VM keeps running, if a disk or another host side does not stop within
//! 800 ms ([`Vm::pause_within`] has another limit). `stop` abandons such a request: its thread and
//! guest memory stay until the host side returns; [`Vm::abandoned`] names such threads. `counters`
//! never blocks.
//!
//! Devices belong to the VM once it is built. [`Vm::block`], [`Vm::console`], [`Vm::vsock`] and
//! others return handles to control them at run time: swap a disk, resize it, open a
//! stream to a port of the guest.
//!
//! When KVM itself fails, the VM is *poisoned*: [`Vm::wait`] returns [`VmError::Poisoned`] with the
//! cause and the vCPU's registers.
//!
//! [`Vm::plug`] and [`Vm::unplug`] add devices to a running VM and remove them, if its devices are
//! on PCI ([`VmBuilder::transport`]).
//!
//! # Snapshots
//!
//! [`Vm::snapshot`] writes all of a paused VM to a directory. [`Snapshot::open`] creates builders
//! from it, whose VMs continue from there with their own disks, network cards and sockets. Their
//! memory is the snapshot's file until they write it, so any number of them share it. The file must
//! stay as it is while such VMs exist: if it is truncated, or its file system cannot read it, the
//! kernel sends SIGBUS to the thread that touches the missing page, which ends the process. A copy
//! in a memfd that is sealed with `F_SEAL_SHRINK` and `F_SEAL_WRITE`, passed to
//! [`Snapshot::from_files`], cannot be truncated or changed.
//! `docs/snapshot.md` describes the format, and what a guest must do after it was cloned.
//!
//! # Dumps
//!
//! [`Vm::dump_to`] writes the memory of a paused VM and its vCPUs' registers to an ELF core file,
//! which `crash` and `gdb` read.
//!
//! # Live migration
//!
//! [`Vm::migrate`] moves a running VM to an [`IncomingMigration`] at the other end of a connection:
//! its memory while it runs, the rest while it stands still for a moment. `docs/migration.md` says
//! what moves, and which copy runs when something breaks.
//!
//! # What it does to your process
//!
//! A running VM has one thread per vCPU, one for devices that never block, and more for devices
//! that may block or that have much to do: disks, shared directories, network cards with several
//! queues, and socket devices whose host side uses paths. They block every signal except those of
//! the C library. vCPUs are woken by SIGURG, which is sent only to their threads and never
//! delivered; a SIGURG that is sent to a process in which all other threads block it, too, may be
//! lost for the program. The library installs no signal handler, never prints, never exits and does
//! not panic at what a guest does. Guest memory is anonymous memory of the process, or a snapshot's
//! file mapped privately, allocated as the guest touches or writes it. A guest can make the process
//! hold descriptors for files of shared directories and for connections, by default up to a share
//! of its soft limit of open files that is computed for one VM per process: with several, set
//! [`FsDevice::max_open`] of each shared directory and [`VsockDevice::max_connections`] of each
//! socket device, so that all of them together leave enough for the program. Each of these threads
//! is confined by seccomp to the system calls that its kind needs ([`VmBuilder::seccomp`]). Logs
//! are `tracing` events; those that a guest can provoke are rate-limited. Those of a VM's threads
//! are in the span in which the thread was started, by [`Vm::start`], [`Vm::plug`],
//! [`Vm::insert_disk`] or [`Vm::add_vcpus`]: a program with several VMs names them there.
//!
//! # The guest is hostile
//!
//! A driver that breaks the virtio specification gets `DEVICE_NEEDS_RESET`; the device does nothing
//! until it is reset, and nothing else is affected. Host-side failures of a device are reported by
//! [`Vm::faults`]. Kernel and initramfs files are checked like any other input.
//!
//! # What it must not know
//!
//! Pods, containers, images and the Container Runtime Interface. Devices live in
//! `podvisor-devices`, which does not know KVM.

mod boot;
pub mod check;
mod cpuid;
mod dump;
mod host_clock;
mod kvm;
mod layout;
mod memory;
mod migration;
mod snapshot;
mod transport;
mod vm;

#[cfg(feature = "test-utils")]
#[doc(hidden)]
pub use boot::testing as boot_testing;
pub use boot::{BootError, Firmware, Initramfs, InitramfsBuilder, Kernel, KernelFault, Smbios};
pub use kvm::{KvmDevice, KvmError};
pub use memory::{MemoryError, MemorySize, PageMap, ParseMemorySizeError};
#[cfg(feature = "test-utils")]
#[doc(hidden)]
pub use migration::testing as migration_testing;
pub use migration::{
    ArrivedMigration, IncomingMigration, MigrationLimits, MigrationOptions, MigrationProgress,
    MigrationReport, MigrationStep, MovingDisk, PluggedIdentity, ReceiveError, StreamError,
};
pub use podvisor_devices as devices;
pub use podvisor_devices::balloon::BalloonStats;
pub use podvisor_devices::blk::{
    BlockDevice, BlockDeviceError, Disk, DiskPart, FileDisk, IoEngine, OverlayFormat, Qcow2Disk,
    Qcow2Error, UringDisk, create_grown_overlay, create_overlay, create_qcow2, flatten_disk,
    grow_overlay, lock_disk, open_disk, open_disk_for_writing, unlock_disk,
};
pub use podvisor_devices::console::{ConsoleDevice, ConsoleError, PortsDevice, PortsError};
pub use podvisor_devices::fs::{FsDevice, FsDeviceError, FsProcess, IdMap};
pub use podvisor_devices::net::{
    LinkState, MAX_QUEUE_PAIRS, MacAddress, NetDevice, NetDeviceError,
};
pub use podvisor_devices::pci::PciAddress;
pub use podvisor_devices::pmem::{PmemDevice, PmemError, PmemRegion};
pub use podvisor_devices::rng::RngDevice;
pub use podvisor_devices::vsock::{VsockDevice, VsockError, VsockHost};
#[cfg(feature = "test-utils")]
#[doc(hidden)]
pub use snapshot::testing as snapshot_testing;
pub use snapshot::{CpuMismatch, Snapshot, SnapshotError, SnapshotFormatError, WorkingSet};
pub use transport::Transport;
pub use vm::{
    Action, AddVcpusError, BalloonHandle, BlockHandle, Boot, BuildError, ConfigError, ConfigErrors,
    ConsoleHandle, DeviceCounters, DeviceFault, DeviceHandle, DumpError, DumpProgress, EarlyVm,
    FsHandle, HandleError, MemHandle, MigrateError, NetHandle, PlugError, PluggedDevice,
    PmemHandle, Poison, PoisonCause, PortsHandle, PowerButtonError, Registers, Restore,
    RestoreBuilder, Seccomp, State, TakeSnapshotError, UnplugRequest, Vm, VmBuilder, VmError,
    VmExit, VsockHandle,
};
