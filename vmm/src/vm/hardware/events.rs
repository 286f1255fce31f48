//! Events of which the guest is told by ACPI's generic event device: its power button, a new
//! generation ID, PCI devices that come and go, and CPUs that come.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use podvisor_devices::GuestRam;
use podvisor_devices::legacy::events::{self, Event, EventRegister, Events, LevelLine};
use podvisor_devices::legacy::power::PowerRequest;
use podvisor_devices::virtio::SavedDevice;
use rustix::rand::{GetRandomFlags, getrandom};
use vm_memory::{Bytes as _, GuestAddress};

use super::Hardware;
use super::bus::BusDevice;
use super::line::Line;
use crate::layout;
use crate::memory::{GuestMemory, MemoryError};
use crate::vm::builder::BuildError;
use crate::vm::lifecycle::restore;
use crate::vm::{Action, Vm, VmError, lock};

/// The register of a VM whose guest is told of events.
pub(crate) type EventPort = Arc<EventDevice>;

/// The registers, and who waits for the guest.
#[derive(Debug)]
pub(crate) struct EventDevice {
    register: Mutex<EventRegister<Line>>,
    /// The guest has released a device that it was asked for.
    released: Condvar,
}

impl EventDevice {
    /// Returns the state for a snapshot.
    pub(crate) fn save(&self) -> SavedDevice {
        lock(&self.register).save()
    }

    /// Tells the guest of a device in `slot`, if it is told of such.
    pub(crate) fn insert(&self, slot: u8) {
        lock(&self.register).insert(slot);
    }

    /// Forgets what the guest was told of `slot`, whose device is gone.
    pub(crate) fn forget(&self, slot: u8) {
        lock(&self.register).forget(slot);
        self.released.notify_all();
    }

    /// Tells the guest that there are `count` vCPUs now, if it is told of such.
    pub(crate) fn add_cpus(&self, count: u8) {
        lock(&self.register).add_cpus(count);
    }

    /// Asks the guest to release the device in `slot`; `false` if it is not told of such.
    pub(crate) fn ask(&self, slot: u8) -> bool {
        lock(&self.register).ask(slot)
    }
}

/// The guest was asked to release a device, by [`Vm::request_unplug`].
#[derive(Debug)]
pub struct UnplugRequest {
    port: EventPort,
    slot: u8,
}

impl UnplugRequest {
    pub(crate) fn new(port: EventPort, slot: u8) -> Self {
        Self { port, slot }
    }

    /// Waits until the guest has released the device, or the limit is over; returns whether it
    /// has. It does not keep the VM.
    #[must_use]
    pub fn wait(&self, limit: Duration) -> bool {
        let register = lock(&self.port.register);
        let waited = self
            .port
            .released
            .wait_timeout_while(register, limit, |register| register.awaits(self.slot))
            .unwrap_or_else(PoisonError::into_inner);
        !waited.1.timed_out()
    }
}

/// Why a power button was not pressed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PowerButtonError {
    /// The VM has none.
    #[error("this VM has no power button: build it with `.power_button()`")]
    NoButton,
    /// The VM is not running.
    #[error(transparent)]
    State(#[from] VmError),
}

impl Vm {
    /// Presses the power button of a running guest, once. What the guest does about it is its own
    /// decision, and takes it time: most operating systems shut down, and power off, which ends the
    /// VM. A guest whose driver is not there yet gets the event when it is.
    ///
    /// # Errors
    /// [`PowerButtonError::NoButton`] for a VM that was built without
    /// [`VmBuilder::power_button`](crate::VmBuilder::power_button); [`PowerButtonError::State`] if
    /// the VM is not running.
    pub fn press_power_button(&self) -> Result<(), PowerButtonError> {
        let port = self.events.as_ref().ok_or(PowerButtonError::NoButton)?;
        if !lock(&port.register).known().has(Event::PowerButton) {
            return Err(PowerButtonError::NoButton);
        }
        let _transition = lock(&self.transition);
        self.legal(&self.control().lock(), Action::PressPowerButton)?;
        lock(&port.register).raise(Event::PowerButton);
        Ok(())
    }
}

impl Hardware {
    /// Adds the register for these events, in a saved state or as after RESET; none if there are no
    /// events.
    pub(crate) fn add_events(
        &mut self,
        known: Events,
        saved: Option<&SavedDevice>,
    ) -> Result<(), BuildError> {
        let line = || Line::new(&self.vm_fd, events::IRQ);
        let mut register = match saved {
            Some(saved) => {
                EventRegister::restored(line(), saved).map_err(restore::refused("events"))?
            }
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
        let port = Arc::new(EventDevice {
            register: Mutex::new(register),
            released: Condvar::new(),
        });
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
        if lock(&port.register).known().has(Event::NewGeneration) {
            write_generation_id(memory.ram())?;
            lock(&port.register).raise(Event::NewGeneration);
        }
        Ok(())
    }
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

impl LevelLine for Line {
    fn set(&self, is_high: bool) {
        self.set_level(is_high);
    }
}

impl BusDevice for EventDevice {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match (offset, data) {
            (0, [first, rest @ ..]) => {
                *first = lock(&self.register).read();
                rest.fill(0xff);
            }
            (offset, [count]) if offset == u64::from(events::CPUS) => {
                *count = lock(&self.register).cpus();
            }
            (offset, [a, b, c, d]) => {
                [*a, *b, *c, *d] = lock(&self.register).read_slots(offset).to_le_bytes();
            }
            (_, data) => data.fill(0),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<PowerRequest> {
        if offset == u64::from(events::RELEASED)
            && let Ok(slots) = data.try_into().map(u32::from_le_bytes)
            && lock(&self.register).release(slots)
        {
            self.released.notify_all();
        }
        None
    }

    fn has_byte_registers(&self) -> bool {
        true
    }
}
