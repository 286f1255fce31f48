//! A virtual machine as podvisor uses it: every call to the VMM library is in this module.
//!
//! A [`MachineConfig`], all of whose files are open, becomes a running [`Machine`], which reports
//! how it ended ([`MachineExit`]) and is killed when it is dropped. This module knows nothing about
//! containers, the agent in the guest, or the command line.

mod announce;
mod assets;
mod build;
mod config;
mod console;
mod disk;
mod error;
mod exit;
mod machine_disk;
mod machine_size;
mod migrate;
mod nic;
mod origin;
mod own_os;
mod panic;
mod pause;
mod running;
mod serial_port;
mod share;
mod user_range;

pub use assets::{AssetError, Assets, GUEST_DIR_VARIABLE, GuestFile};
pub use build::BuiltMachine;
pub use config::{Boot, GROWTH_UNIT, GuestFiles, MachineConfig, VsockPort};
pub use disk::{Disk, PluggedDisk};
pub use error::MachineError;
pub use error::causes;
pub use exit::MachineExit;
pub use machine_disk::{DiskContents, DiskMove, MachineDisk};
pub(crate) use machine_size::MachineSize;
pub(crate) use migrate::{Arrival, ArriveError};
pub use nic::Nic;
pub use origin::{BootProgram, ContinueAs, KeptKernel, SavedMachine};
pub(crate) use own_os::{HostFiles, MachinePlan, PluggedIn};
pub use own_os::{MachineIdentity, MachineNic};
pub use panic::KernelPanic;
pub use podvisor_network::guest::NicKind;
pub use podvisor_vmm::{
    BlockDevice, BlockDeviceError, BootError, EarlyVm, Firmware, IoEngine, OverlayFormat, Snapshot,
    Transport, WorkingSet, create_grown_overlay, create_qcow2, flatten_disk, grow_overlay,
    open_disk_for_writing,
};
pub(crate) use podvisor_vmm::{
    MigrateError, MigrationOptions, MigrationProgress, MigrationReport, MigrationStep, MovingDisk,
};
pub use running::{DiskTraffic, Machine, Ports};
pub(crate) use serial_port::SerialPort;
pub(crate) use share::OpenShare;
pub use share::{MachineShare, SHARE_TAG, SharedDir};
pub use user_range::UserRange;
