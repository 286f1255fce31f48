//! Plugs devices into a running guest, and unplugs them.

use std::any::{Any, TypeId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use podvisor_devices::blk::{BlockDevice, BlockDeviceError, Disk};
use podvisor_devices::mem::MemDevice;
use podvisor_devices::pci::PciAddress;
use podvisor_devices::pmem::PmemDevice;
use podvisor_devices::virtio::{DeviceType, Placement, VirtioDevice, Worker};

use crate::vm::devices::HandleError;
use crate::vm::devices::attach::{AttachedDevice, CountersWithFaults, TransportRegisters};
use crate::vm::devices::id::{self, IdFault};
use crate::vm::error::BuildError;
use crate::vm::hardware::events::UnplugRequest;
use crate::vm::hardware::io::{self, NamedQueue, own_loop};
use crate::vm::hardware::transport::{TransportHandle, TransportSetup};
use crate::vm::lifecycle::{Vm, VmError};
use crate::vm::lock::lock;
use crate::vm::state::{Action, State};

/// A device that was plugged in.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PluggedDevice {
    /// Its name, as in [`Vm::counters`]: the id, or the device type and the lowest free number.
    pub name: String,
    /// Where the guest finds it, once it was told or has rescanned the bus.
    pub address: PciAddress,
}

/// Why a device was not plugged in, or not unplugged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlugError {
    /// Devices on MMIO exist for the VM's lifetime.
    #[error("cannot hotplug virtio-mmio devices: build the VM with `.transport(Transport::Pci)`")]
    NotPci,
    /// The VM is not running.
    #[error(transparent)]
    State(#[from] VmError),
    /// The disk cannot do what it claims.
    #[error(transparent)]
    Disk(#[from] BlockDeviceError),
    /// An id that the device cannot have.
    #[error("a device cannot have the id {id:?}: {why}")]
    Id {
        /// The id.
        id: String,
        /// What is wrong with it, and what would be right.
        why: &'static str,
    },
    /// The bus is full, or the host lacks descriptors.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The guest's address space is laid out when the VM is built.
    #[error("cannot hotplug a virtio-pmem device: add it to the builder with `.pmem(…)`")]
    Image,
    /// As for images.
    #[error("cannot hotplug a virtio-mem device: build the VM with `.hotplug_memory(…)`")]
    Memory,
    /// A guest has one context identifier.
    #[error("cannot hotplug a second socket device: the VM has {there}")]
    SecondSocket {
        /// The name of the one that it has.
        there: String,
    },
    /// The device provides memory, which is part of the guest's address space.
    #[error("cannot unplug {device}: the VM keeps its memory and its images until it ends")]
    Permanent {
        /// The device's name.
        device: String,
    },
    /// An event loop for it could not be created.
    #[error("failed to add {device} to an event loop")]
    EventLoop {
        /// The device's name.
        device: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The guest cannot be asked for a device.
    #[error("the guest is not told of PCI devices: build the VM with `.pci_hotplug()`")]
    NotTold,
    /// The device does not exist, or is busy.
    #[error(transparent)]
    Device(#[from] HandleError),
}

impl Vm {
    /// Adds a device to a running guest, on PCI: of a type that has a `DeviceType`, as in
    /// [`VmBuilder::device`](crate::vm::VmBuilder::device). A guest of a VM that was built with
    /// [`VmBuilder::pci_hotplug`](crate::vm::VmBuilder::pci_hotplug) is told. Others find it when
    /// they rescan the bus: Linux does at a write of `1` to `/sys/bus/pci/rescan`.
    ///
    /// # Errors
    /// See [`PlugError`]; nothing of the device remains then.
    pub fn plug(&self, device: impl VirtioDevice) -> Result<PluggedDevice, PlugError> {
        self.plug_boxed(None, Box::new(device))
    }

    /// As [`Self::plug`], with an id as in
    /// [`VmBuilder::device_as`](crate::vm::VmBuilder::device_as).
    ///
    /// # Errors
    /// See [`PlugError`]; nothing of the device remains then.
    pub fn plug_as(&self, id: &str, device: impl VirtioDevice) -> Result<PluggedDevice, PlugError> {
        self.plug_boxed(Some(id), Box::new(device))
    }

    fn plug_boxed(
        &self,
        id: Option<&str>,
        mut device: Box<dyn VirtioDevice>,
    ) -> Result<PluggedDevice, PlugError> {
        let pci = self.pci.as_ref().ok_or(PlugError::NotPci)?;
        let any: &mut dyn Any = &mut *device;
        if let Some(disk) = any.downcast_mut::<BlockDevice>() {
            disk.check()?;
        }
        if any.is::<PmemDevice>() {
            return Err(PlugError::Image);
        }
        if any.is::<MemDevice>() {
            return Err(PlugError::Memory);
        }
        let _transition = lock(&self.transition);
        self.legal(&self.control().lock(), Action::Plug)?;
        let info = device.info();
        if info.device_type == DeviceType::Vsock {
            let devices = lock(&self.devices);
            let mut devices = devices.iter();
            if let Some(one) = devices.find(|one| one.info.device_type == DeviceType::Vsock) {
                return Err(PlugError::SecondSocket {
                    there: one.name.clone(),
                });
            }
        }
        let name = match id {
            Some(id) => self.free_id(id)?,
            None => self.free_name(info.device_type.name()),
        };
        // A loop that ends with its VM accepts no device.
        let failed = |source| match self.legal(&self.control().lock(), Action::Plug) {
            Ok(_) => PlugError::EventLoop {
                device: name.clone(),
                source,
            },
            Err(ended) => PlugError::State(ended),
        };
        let loops = &self.context.loops;
        let slot = loops
            .reserve(&name, device.placement(), &self.faults)
            .map_err(failed)?;
        let link = slot.link.clone();
        let TransportHandle {
            registers: function,
            irq,
            kicks,
        } = pci.connect(
            None,
            TransportSetup {
                info: &info,
                link: Arc::new(link.clone()),
                mem: &self.context.machine.memory,
            },
        )?;
        let kind = Any::type_id(&*device);
        let shares_loop = AtomicBool::new(device.placement() == Placement::Shared);
        let mut worker = Worker::new(name.clone(), device, irq);
        let queues = NamedQueue::of(&mut worker);
        let counters = Arc::new(CountersWithFaults::new(&info, worker.faults()));
        let installed = slot.install(worker, kicks).map_err(failed);
        let running = installed.and_then(|event_loop| {
            let mut inner = self.control().lock();
            // A thread that ends the VM finds the loop, or this finds that the VM has ended.
            self.legal(&inner, Action::Plug)?;
            inner.threads += queues.len() + usize::from(event_loop.is_some());
            if let Some(event_loop) = &event_loop {
                loops.add(event_loop);
            }
            drop(inner);
            let queues = queues.into_iter().map(|queue| self.queue_thread(queue));
            let event_loop = event_loop.map(|event_loop| self.loop_thread(event_loop));
            Ok(self.spawn(queues.chain(event_loop).collect())?)
        });
        let published = running.and_then(|()| {
            function.prepare();
            Ok(pci.publish(&function)?)
        });
        if let Err(error) = published {
            pci.disconnect(&function);
            // It may not have got a worker.
            let _ = io::remove(link);
            return Err(error);
        }
        lock(&self.devices).push(Arc::new(AttachedDevice {
            name: name.clone(),
            kind,
            info,
            counters,
            link,
            shares_loop,
            registers: TransportRegisters::Pci(function.clone()),
        }));
        let address = PciAddress {
            slot: function.slot(),
        };
        if let Some(events) = &self.events {
            events.insert(address.slot);
        }
        Ok(PluggedDevice { name, address })
    }

    /// Gives the block device `name` of a running or paused guest a disk, as
    /// [`crate::vm::BlockHandle::replace_disk`] does; one that was built as [`BlockDevice::spare`]
    /// first gets its own thread, where the disk may block without blocking other devices.
    ///
    /// # Errors
    /// See [`PlugError`]; the device keeps its previous disk, also with [`HandleError::Busy`].
    /// With [`HandleError::Unfinished`] it gets the new one when its host side answers again.
    pub fn insert_disk(
        &self,
        name: &str,
        disk: Box<dyn Disk>,
        serial: &str,
    ) -> Result<(), PlugError> {
        let device = self.block(name)?;
        self.legal(&self.control().lock(), Action::Insert)?;
        self.give_loop(name)?;
        Ok(device.replace_disk(disk, serial)?)
    }

    fn give_loop(&self, name: &str) -> Result<(), PlugError> {
        let _transition = lock(&self.transition);
        let attached = {
            let devices = lock(&self.devices);
            devices.iter().find(|device| device.name == name).cloned()
        };
        let shares = |device: &Arc<AttachedDevice>| device.shares_loop.load(Ordering::SeqCst);
        let Some(attached) = attached.filter(shares) else {
            return Ok(());
        };
        let made = own_loop(name, &self.faults);
        let (mut event_loop, place) = made.map_err(|source| PlugError::EventLoop {
            device: name.to_owned(),
            source,
        })?;
        let loops = &self.context.loops;
        let mut inner = self.control().lock();
        // A thread that ends the VM finds the loop, or this finds that the VM has ended.
        if self.legal(&inner, Action::Insert)? == State::Paused {
            event_loop.pause();
        }
        inner.threads += 1;
        loops.add(&event_loop);
        drop(inner);
        let thread = self.loop_thread(event_loop);
        self.spawn(vec![thread])?;
        attached.link.move_to(place);
        attached.shares_loop.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Asks a running guest to release a device before [`Vm::unplug`]; the answer is the guest's
    /// own decision, and takes it time.
    ///
    /// # Errors
    /// See [`PlugError`]; [`PlugError::NotTold`] if the VM was built without
    /// [`VmBuilder::pci_hotplug`](crate::vm::VmBuilder::pci_hotplug).
    pub fn request_unplug(&self, name: &str) -> Result<UnplugRequest, PlugError> {
        let address = self.pci_address(name)?.ok_or(PlugError::NotPci)?;
        let _transition = lock(&self.transition);
        self.legal(&self.control().lock(), Action::Unplug)?;
        let asked = self.events.as_ref().filter(|port| port.ask(address.slot));
        let port = asked.ok_or(PlugError::NotTold)?;
        Ok(UnplugRequest::new(port.clone(), address.slot))
    }

    /// Removes a device from a running guest, whether it was built in or plugged in on PCI. The
    /// guest should have released it before: Linux does at a write of `1` to
    /// `/sys/bus/pci/devices/ADDRESS/remove`. A driver that has not sees all ones from then on, and
    /// requests that are never answered. When this returns, the device's host side is closed.
    ///
    /// The memory device and images ([`VmBuilder::pmem`](crate::vm::VmBuilder::pmem)) stay: what
    /// they provide is part of the guest's address space, and of every snapshot.
    ///
    /// # Errors
    /// See [`PlugError`]; [`PlugError::Permanent`] for the memory device and images. With
    /// [`HandleError::Busy`] the guest has lost the device, whose host side is closed when it
    /// answers again; until then [`Vm::pause`] returns [`VmError::Busy`], too.
    pub fn unplug(&self, name: &str) -> Result<(), PlugError> {
        let pci = self.pci.as_ref().ok_or(PlugError::NotPci)?;
        let transition = lock(&self.transition);
        self.legal(&self.control().lock(), Action::Unplug)?;
        let attached = {
            let mut devices = lock(&self.devices);
            let at = devices.iter().position(|device| device.name == name);
            let Some(at) = at else {
                return Err(PlugError::Device(HandleError::NoSuchDevice {
                    kind: "device",
                    name: name.to_owned(),
                    there: devices.iter().map(|device| device.name.clone()).collect(),
                }));
            };
            let permanent = [TypeId::of::<MemDevice>(), TypeId::of::<PmemDevice>()];
            if permanent.contains(&devices[at].kind) {
                return Err(PlugError::Permanent {
                    device: name.to_owned(),
                });
            }
            devices.remove(at)
        };
        if let TransportRegisters::Pci(function) = &attached.registers {
            pci.disconnect(function);
            if let Some(events) = &self.events {
                events.forget(function.slot());
            }
        }
        // A disk that does not answer blocks only this call.
        drop(transition);
        let removed = io::remove(attached.link.clone());
        lock(&self.threads).retain(|thread| !thread.is_finished());
        removed.map_err(|_| {
            PlugError::Device(HandleError::Busy {
                device: name.to_owned(),
            })
        })
    }

    /// Returns the device's address on PCI, if it is on PCI.
    ///
    /// # Errors
    /// [`HandleError::NoSuchDevice`].
    pub fn pci_address(&self, name: &str) -> Result<Option<PciAddress>, HandleError> {
        let devices = lock(&self.devices);
        let device = devices.iter().find(|device| device.name == name);
        let device = device.ok_or_else(|| HandleError::NoSuchDevice {
            kind: "device",
            name: name.to_owned(),
            there: devices.iter().map(|device| device.name.clone()).collect(),
        })?;
        Ok(match &device.registers {
            TransportRegisters::Mmio(_) => None,
            TransportRegisters::Pci(function) => Some(PciAddress {
                slot: function.slot(),
            }),
        })
    }

    /// Checks an id that the program has chosen.
    fn free_id(&self, id: &str) -> Result<String, PlugError> {
        let is_taken = || lock(&self.devices).iter().any(|device| device.name == id);
        let fault = match id::check(id) {
            Ok(()) if !is_taken() => return Ok(id.to_owned()),
            Ok(()) => IdFault::Taken,
            Err(fault) => fault,
        };
        Err(PlugError::Id {
            id: id.to_owned(),
            why: fault.why(),
        })
    }

    fn free_name(&self, type_name: &str) -> String {
        let devices = lock(&self.devices);
        let taken = |name: &String| devices.iter().any(|device| device.name == *name);
        let mut names = (0u32..).map(|number| format!("{type_name}{number}"));
        // There are at most 31 devices.
        names.find(|name| !taken(name)).unwrap_or_default()
    }
}
