//! The devices of a VM: a handle of each, their counters, and their failures.

use std::sync::atomic::Ordering;

use podvisor_devices::balloon::BalloonDevice;
use podvisor_devices::blk::BlockDevice;
use podvisor_devices::console::{ConsoleDevice, PortsDevice};
use podvisor_devices::fs::FsDevice;
use podvisor_devices::mem::MemDevice;
use podvisor_devices::net::NetDevice;
use podvisor_devices::pmem::PmemDevice;
use podvisor_devices::virtio::{Counter, ReadCounters, VirtioDevice};
use podvisor_devices::vsock::VsockDevice;

use crate::vm::devices::{
    BalloonHandle, BlockHandle, ConsoleHandle, DeviceHandle, FsHandle, HandleError, MemHandle,
    NetHandle, PmemHandle, PortsHandle, VsockHandle,
};
use crate::vm::hardware::io::DeviceFault;
use crate::vm::lifecycle::Vm;
use crate::vm::lock::lock;

/// The counters of one device, or of the vCPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCounters {
    /// The device type and its number among devices of that type, such as `blk0`; or `vcpu`.
    pub device: String,
    /// The counters.
    pub counters: Vec<Counter>,
}

impl Vm {
    /// Returns the current counters of the devices and vCPUs. Never blocks. Each device counts its
    /// `faults`; after each of them it was parked until its driver reset it.
    #[must_use]
    pub fn counters(&self) -> Vec<DeviceCounters> {
        let counters = &self.context.counters;
        let vcpu = vec![
            Counter {
                name: "mmio_exits",
                value: counters.mmio.load(Ordering::Relaxed),
            },
            Counter {
                name: "port_exits",
                value: counters.port.load(Ordering::Relaxed),
            },
        ];
        let mut all = vec![DeviceCounters {
            device: "vcpu".to_owned(),
            counters: vcpu,
        }];
        all.extend(lock(&self.devices).iter().map(|device| DeviceCounters {
            device: device.name.clone(),
            counters: device.counters.read(),
        }));
        all
    }

    /// Returns the block device named `name`, as in [`Self::counters`]: by its id, or `blk0` for
    /// the first without one.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn block(&self, name: &str) -> Result<BlockHandle, HandleError> {
        DeviceHandle::<BlockDevice>::find(&lock(&self.devices), "block device", Some(name))
    }

    /// Returns the network card named `name`: `net0` is the first.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn net(&self, name: &str) -> Result<NetHandle, HandleError> {
        DeviceHandle::<NetDevice>::find(&lock(&self.devices), "network card", Some(name))
    }

    /// Returns the shared directory named `name`: `fs0` is the first.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn fs(&self, name: &str) -> Result<FsHandle, HandleError> {
        DeviceHandle::<FsDevice>::find(&lock(&self.devices), "shared directory", Some(name))
    }

    /// Returns the memory image named `name`: `pmem0` is the first.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn pmem(&self, name: &str) -> Result<PmemHandle, HandleError> {
        DeviceHandle::<PmemDevice>::find(&lock(&self.devices), "memory image", Some(name))
    }

    /// Returns the first console.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn console(&self) -> Result<ConsoleHandle, HandleError> {
        DeviceHandle::<ConsoleDevice>::find(&lock(&self.devices), "console", None)
    }

    /// Returns the first device of named ports.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn ports(&self) -> Result<PortsHandle, HandleError> {
        DeviceHandle::<PortsDevice>::find(&lock(&self.devices), "device of named ports", None)
    }

    /// Returns the socket device.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn vsock(&self) -> Result<VsockHandle, HandleError> {
        DeviceHandle::<VsockDevice>::find(&lock(&self.devices), "socket device", None)
    }

    /// Returns the memory balloon.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn balloon(&self) -> Result<BalloonHandle, HandleError> {
        DeviceHandle::<BalloonDevice>::find(&lock(&self.devices), "balloon", None)
    }

    /// Returns the device by which memory is plugged and unplugged.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`] for a VM that was built without
    /// [`VmBuilder::hotplug_memory`](crate::VmBuilder::hotplug_memory).
    pub fn hotplug_memory(&self) -> Result<MemHandle, HandleError> {
        DeviceHandle::<MemDevice>::find(&lock(&self.devices), "memory device", None)
    }

    /// Returns a device of any type, by its name.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`], also if it is of another type.
    pub fn device<D: VirtioDevice>(&self, name: &str) -> Result<DeviceHandle<D>, HandleError> {
        DeviceHandle::find(&lock(&self.devices), "device of this type", Some(name))
    }

    /// Returns the failures on the host side of devices so far: the last 64 of them. Their drivers
    /// saw `DEVICE_NEEDS_RESET`.
    #[must_use]
    pub fn faults(&self) -> Vec<DeviceFault> {
        lock(&self.faults).clone()
    }
}
