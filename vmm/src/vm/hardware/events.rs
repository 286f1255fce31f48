//! Events of which the guest is told by ACPI's generic event device: its power button, and a new
//! generation ID.

use std::io;
use std::sync::{Arc, Mutex};

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
pub(crate) type EventPort = Arc<Mutex<EventRegister<Line>>>;

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
        if !lock(port).known().has(Event::PowerButton) {
            return Err(PowerButtonError::NoButton);
        }
        let _transition = lock(&self.transition);
        self.legal(&self.control().lock(), Action::PressPowerButton)?;
        lock(port).raise(Event::PowerButton);
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
        let register = match saved {
            Some(saved) => {
                EventRegister::restored(line(), saved).map_err(restore::refused("events"))?
            }
            None if known.is_empty() => return Ok(()),
            None => EventRegister::new(line(), known),
        };
        let port = Arc::new(Mutex::new(register));
        self.events = Some(port.clone());
        self.bus
            .ports
            .insert(events::PORT.into(), 1, port)
            .map_err(|error| BuildError::Addresses(Box::new(error)))
    }

    /// Gives the guest a generation ID that no other VM has, and tells it so, if it has one.
    pub(crate) fn renew_generation_id(&self, memory: &GuestMemory) -> Result<(), BuildError> {
        let Some(port) = &self.events else {
            return Ok(());
        };
        if lock(port).known().has(Event::NewGeneration) {
            write_generation_id(memory.ram())?;
            lock(port).raise(Event::NewGeneration);
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

impl BusDevice for Mutex<EventRegister<Line>> {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some(first) = data.first_mut() {
            *first = lock(self).read();
        }
    }

    fn write(&self, _offset: u64, _data: &[u8]) -> Option<PowerRequest> {
        None
    }

    fn has_byte_registers(&self) -> bool {
        true
    }
}
