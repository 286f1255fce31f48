//! Events of which the guest is told by ACPI's generic event device: its power button, a new
//! generation ID, PCI devices that come and go, and CPUs that come.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use podvisor_devices::legacy::events::{self, Event, EventRegister, LevelLine};
use podvisor_devices::legacy::power::PowerRequest;
use podvisor_devices::virtio::SavedDevice;

use super::bus::BusDevice;
use super::line::Line;
use crate::vm::lock::lock;

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
    pub(crate) fn new(register: EventRegister<Line>) -> Self {
        Self {
            register: Mutex::new(register),
            released: Condvar::new(),
        }
    }

    /// Whether the guest is told of this event.
    pub(crate) fn has(&self, event: Event) -> bool {
        lock(&self.register).known().has(event)
    }

    /// Tells the guest of an event.
    pub(crate) fn raise(&self, event: Event) {
        lock(&self.register).raise(event);
    }

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

/// The guest was asked to release a device, by [`Vm::request_unplug`](crate::Vm::request_unplug).
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
