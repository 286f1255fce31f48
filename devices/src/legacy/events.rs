//! The register of ACPI's generic event device (ACPI 6.5 §5.6.9): by one interrupt line and one
//! byte that says what happened, the host tells a guest of events.
//!
//! The line is level-triggered: it stays high until the guest has read the register, which clears
//! it. So an event that comes while the guest has no driver yet, or while one kernel replaces
//! another, is not lost. Which devices an event concerns is in the tables of the VM.
//!
//! A guest whose PCI devices come and go finds three more registers after it, of 32 bits with a bit
//! for each slot of bus 0:
//!
//! | offset | read | written |
//! | --- | --- | --- |
//! | [`INSERTED`] | slots that got a device, and clears them | – |
//! | [`ASKED`] | slots whose device the guest is to release, and clears them | – |
//! | [`RELEASED`] | 0 | slots whose device the guest has released |
//!
//! A guest whose CPUs may become more finds at [`CPUS`], in one byte, how many there are. It only
//! reads it: CPUs come in the order of their numbers, and none goes.

use std::fmt::Debug;

use crate::virtio::{RestoreError, SavedDevice};

/// The port of the register, of one byte.
pub const PORT: u16 = 0x610;
/// Offset of the register with the number of CPUs.
pub const CPUS: u8 = 1;
/// How many ports there are where CPUs come, but PCI devices do not.
pub const PORTS_WITH_CPUS: u16 = 2;
/// How many ports there are where PCI devices come and go.
pub const PORTS_WITH_SLOTS: u16 = 16;
/// Offset of the register of slots that got a device.
pub const INSERTED: u8 = 4;
/// Offset of the register of slots whose device is to be released.
pub const ASKED: u8 = 8;
/// Offset of the register of slots whose device was released.
pub const RELEASED: u8 = 12;
/// The interrupt line: that of the keyboard, which such a machine never has.
pub const IRQ: u32 = 1;

/// Version of the saved state, without and with slots.
const VERSION: u32 = 1;
const VERSION_WITH_SLOTS: u32 = 2;

/// What a guest is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The power button was pressed.
    PowerButton,
    /// The VM is a new one with the state of another: its generation ID has changed.
    NewGeneration,
    /// A PCI device was plugged in, or the guest is to release one.
    PciSlots,
    /// There are more CPUs.
    Cpus,
}

impl Event {
    /// Returns the event's bit in the register.
    #[must_use]
    pub const fn bit(self) -> u8 {
        match self {
            Self::PowerButton => 1 << 0,
            Self::NewGeneration => 1 << 1,
            Self::PciSlots => 1 << 2,
            Self::Cpus => 1 << 3,
        }
    }
}

/// A set of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events(u8);

impl Events {
    /// All that there are.
    const ALL: u8 = Event::PowerButton.bit()
        | Event::NewGeneration.bit()
        | Event::PciSlots.bit()
        | Event::Cpus.bit();

    /// Adds an event.
    #[must_use]
    pub const fn with(self, event: Event) -> Self {
        Self(self.0 | event.bit())
    }

    /// Returns whether the event is among them.
    #[must_use]
    pub const fn has(self, event: Event) -> bool {
        self.0 & event.bit() != 0
    }

    /// Returns whether there is none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// A level-triggered interrupt line. Called from any thread; never waits for the guest.
pub trait LevelLine: Debug + Send {
    /// Sets it high or low.
    fn set(&self, is_high: bool);
}

/// The register of a VM whose guest knows some events.
#[derive(Debug)]
pub struct EventRegister<L> {
    line: L,
    known: Events,
    pending: u8,
    slots: Slots,
    cpus: u8,
}

/// A bit for each slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Slots {
    inserted: u32,
    asked: u32,
    /// Asked for and not released, whether the guest has read it or not.
    awaited: u32,
}

impl<L: LevelLine> EventRegister<L> {
    /// Creates a register for the events that the guest's tables name.
    pub fn new(line: L, known: Events) -> Self {
        Self {
            line,
            known,
            pending: 0,
            slots: Slots::default(),
            cpus: 0,
        }
    }

    /// Creates a register in a saved state. Its line is high if the guest has not read all. The
    /// number of CPUs is no part of the state: see [`Self::set_cpus`].
    ///
    /// # Errors
    /// [`RestoreError`] if the state is none of such a register.
    pub fn restored(line: L, saved: &SavedDevice) -> Result<Self, RestoreError> {
        let (known, pending, slots) = parse(saved)?;
        if pending != 0 {
            line.set(true);
        }
        Ok(Self {
            line,
            known,
            pending,
            slots,
            cpus: 0,
        })
    }

    /// Returns the events that a saved register knows.
    ///
    /// # Errors
    /// As [`Self::restored`].
    pub fn known_in(saved: &SavedDevice) -> Result<Events, RestoreError> {
        parse(saved).map(|(known, ..)| known)
    }

    /// Returns the state, which [`Self::restored`] takes.
    #[must_use]
    pub fn save(&self) -> SavedDevice {
        let mut bytes = vec![self.known.0, self.pending];
        let version = match self.known.has(Event::PciSlots) {
            true => {
                bytes.extend(self.slots.inserted.to_le_bytes());
                bytes.extend(self.slots.asked.to_le_bytes());
                VERSION_WITH_SLOTS
            }
            false => VERSION,
        };
        SavedDevice { version, bytes }
    }

    /// Returns the events that the guest knows.
    #[must_use]
    pub fn known(&self) -> Events {
        self.known
    }

    /// Tells the guest of an event; `false`, without an effect, if it does not know it. One that
    /// the guest has not read yet stays one.
    pub fn raise(&mut self, event: Event) -> bool {
        if !self.known.has(event) {
            return false;
        }
        self.pending |= event.bit();
        self.line.set(true);
        true
    }

    /// Sets the number of CPUs, as a machine begins with it.
    pub fn set_cpus(&mut self, count: u8) {
        self.cpus = count;
    }

    /// Tells the guest that there are `count` CPUs now, if there were fewer.
    pub fn add_cpus(&mut self, count: u8) {
        if count > self.cpus {
            self.cpus = count;
            self.raise(Event::Cpus);
        }
    }

    /// The guest reads the number of CPUs.
    #[must_use]
    pub fn cpus(&self) -> u8 {
        self.cpus
    }

    /// Tells the guest that `slot` got a device.
    pub fn insert(&mut self, slot: u8) {
        let bit = bit_of(slot);
        self.forget(slot);
        if self.raise(Event::PciSlots) {
            self.slots.inserted |= bit;
        }
    }

    /// Asks the guest to release the device in `slot`; `false`, without an effect, if it knows no
    /// such event.
    pub fn ask(&mut self, slot: u8) -> bool {
        let bit = bit_of(slot);
        let is_told = self.raise(Event::PciSlots);
        if is_told {
            self.slots.asked |= bit;
            self.slots.awaited |= bit;
        }
        is_told
    }

    /// Returns whether the guest was asked to release the device in `slot`, and has not.
    #[must_use]
    pub fn awaits(&self, slot: u8) -> bool {
        self.slots.awaited & bit_of(slot) != 0
    }

    /// Forgets what the guest was told of `slot` and has not read.
    pub fn forget(&mut self, slot: u8) {
        let others = !bit_of(slot);
        self.slots.inserted &= others;
        self.slots.asked &= others;
        self.slots.awaited &= others;
    }

    /// The guest reads four bytes at this offset; 0 where no register of slots begins.
    pub fn read_slots(&mut self, offset: u64) -> u32 {
        match u8::try_from(offset) {
            Ok(INSERTED) => std::mem::take(&mut self.slots.inserted),
            Ok(ASKED) => std::mem::take(&mut self.slots.asked),
            _ => 0,
        }
    }

    /// The guest has released the devices of these slots; `true` if it was asked to.
    pub fn release(&mut self, slots: u32) -> bool {
        let was_asked = self.slots.awaited & slots != 0;
        self.slots.awaited &= !slots;
        self.slots.asked &= !slots;
        was_asked
    }

    /// The guest reads the register, and so clears it.
    pub fn read(&mut self) -> u8 {
        let pending = std::mem::take(&mut self.pending);
        if pending != 0 {
            self.line.set(false);
        }
        pending
    }
}

fn bit_of(slot: u8) -> u32 {
    1u32.checked_shl(slot.into()).unwrap_or(0)
}

/// Returns the known and the pending events of a saved register, and its slots. Nobody waits for
/// the guest any more.
fn parse(saved: &SavedDevice) -> Result<(Events, u8, Slots), RestoreError> {
    let has_slots = saved.version == VERSION_WITH_SLOTS;
    let (bytes, slots) = match has_slots {
        true => saved
            .bytes
            .split_at_checked(2)
            .ok_or(RestoreError::Invalid {
                what: "events that are not two bytes",
            })?,
        false => (saved.of_version(VERSION)?, [].as_slice()),
    };
    let [known, pending] = *bytes else {
        return Err(RestoreError::Invalid {
            what: "events that are not two bytes",
        });
    };
    if known == 0 || known & !Events::ALL != 0 || pending & !known != 0 {
        return Err(RestoreError::Invalid {
            what: "events that the guest does not know",
        });
    }
    if Events(known).has(Event::PciSlots) != has_slots {
        return Err(RestoreError::Invalid {
            what: "slots of which the guest is not told, or no slots",
        });
    }
    let slots = match *slots {
        [] if !has_slots => Slots::default(),
        [a, b, c, d, e, f, g, h] => Slots {
            inserted: u32::from_le_bytes([a, b, c, d]),
            asked: u32::from_le_bytes([e, f, g, h]),
            awaited: 0,
        },
        _ => {
            return Err(RestoreError::Invalid {
                what: "slots that are not two words",
            });
        }
    };
    Ok((Events(known), pending, slots))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;

    #[derive(Clone, Debug, Default)]
    struct Wire {
        is_high: Arc<AtomicBool>,
        changes: Arc<AtomicU32>,
    }

    impl LevelLine for Wire {
        fn set(&self, is_high: bool) {
            self.is_high.store(is_high, Ordering::SeqCst);
            self.changes.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn both() -> Events {
        Events::default()
            .with(Event::PowerButton)
            .with(Event::NewGeneration)
    }

    #[test]
    fn the_line_is_high_until_all_events_are_read_at_once() {
        let wire = Wire::default();
        let mut register = EventRegister::new(wire.clone(), both());
        let is_high = || wire.is_high.load(Ordering::SeqCst);
        assert_eq!(register.read(), 0);
        assert_eq!(wire.changes.load(Ordering::SeqCst), 0);
        assert!(register.raise(Event::PowerButton) && is_high());
        assert!(register.raise(Event::NewGeneration) && is_high());
        assert!(register.raise(Event::PowerButton) && is_high());
        assert_eq!((register.read(), is_high()), (3, false));
        assert_eq!(register.read(), 0);
        assert!(register.raise(Event::PowerButton) && is_high());
        assert_eq!((register.read(), is_high()), (1, false));
    }

    #[test]
    fn an_event_that_the_guest_does_not_know_changes_nothing() {
        let wire = Wire::default();
        let known = Events::default().with(Event::NewGeneration);
        let mut register = EventRegister::new(wire.clone(), known);
        assert!(!register.raise(Event::PowerButton));
        assert_eq!(register.read(), 0);
        assert_eq!(wire.changes.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_restored_register_interrupts_for_what_was_not_read() {
        let mut register = EventRegister::new(Wire::default(), both());
        let idle = register.save();
        register.raise(Event::PowerButton);
        let saved = register.save();
        for (saved, pending) in [(idle, 0), (saved, 1)] {
            let wire = Wire::default();
            let mut again = EventRegister::restored(wire.clone(), &saved).unwrap();
            assert_eq!(wire.is_high.load(Ordering::SeqCst), pending != 0);
            assert_eq!((again.known(), again.read()), (both(), pending));
        }
    }

    #[test]
    fn a_slot_is_told_once_and_released_only_where_it_was_asked_for() {
        let wire = Wire::default();
        let known = both().with(Event::PciSlots);
        let mut register = EventRegister::new(wire.clone(), known);
        let words = |register: &mut EventRegister<Wire>| {
            [INSERTED, ASKED, RELEASED].map(|at| register.read_slots(at.into()))
        };
        register.insert(3);
        register.insert(31);
        assert_eq!(register.read(), Event::PciSlots.bit());
        assert_eq!(words(&mut register), [1 << 31 | 1 << 3, 0, 0]);
        assert_eq!(words(&mut register), [0; 3], "each is read once");
        // What nobody asked for is nobody's answer.
        assert!(!register.release(u32::MAX));
        assert!(register.ask(3) && register.awaits(3) && !register.awaits(31));
        assert_eq!(words(&mut register), [0, 1 << 3, 0]);
        assert!(!register.release(1 << 31) && register.awaits(3));
        assert!(register.release(1 << 3) && !register.awaits(3));
        assert!(register.ask(3));
        register.insert(3);
        assert_eq!(words(&mut register), [1 << 3, 0, 0], "it is another device");
        let mut other = EventRegister::new(wire, both());
        other.insert(3);
        assert!(!other.ask(3));
        assert_eq!((words(&mut other), other.read()), ([0; 3], 0));
    }

    #[test]
    fn what_a_guest_has_not_read_of_slots_is_restored() {
        let mut register = EventRegister::new(Wire::default(), both().with(Event::PciSlots));
        register.insert(1);
        register.ask(2);
        let wire = Wire::default();
        let mut again = EventRegister::restored(wire.clone(), &register.save()).unwrap();
        assert!(wire.is_high.load(Ordering::SeqCst));
        assert_eq!(again.read_slots(INSERTED.into()), 1 << 1);
        assert_eq!(again.read_slots(ASKED.into()), 1 << 2);
        assert!(!again.awaits(2));
    }

    #[test]
    fn more_cpus_are_an_event_and_fewer_are_none() {
        let wire = Wire::default();
        let mut register = EventRegister::new(wire.clone(), both().with(Event::Cpus));
        register.set_cpus(2);
        assert_eq!((register.cpus(), register.read()), (2, 0));
        register.add_cpus(4);
        register.add_cpus(3);
        assert_eq!((register.cpus(), register.read()), (4, Event::Cpus.bit()));
        register.add_cpus(4);
        assert_eq!(register.read(), 0, "it is known");
        let saved = register.save();
        let mut again = EventRegister::restored(wire.clone(), &saved).unwrap();
        again.set_cpus(4);
        assert!(again.known().has(Event::Cpus) && again.read() == 0);
        let mut other = EventRegister::new(wire, both());
        other.add_cpus(4);
        assert_eq!(other.read(), 0, "it knows no such event");
    }

    #[test]
    fn states_that_no_register_has_are_refused() {
        let wrong: [(u32, &[u8]); 12] = [
            (3, &[3, 0]),
            (2, &[3, 0]),
            (2, &[7]),
            (2, &[7, 0, 1, 2, 3, 4, 5, 6, 7]),
            (2, &[3, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            (1, &[7, 0]),
            (1, &[]),
            (1, &[3]),
            (1, &[3, 0, 0]),
            (1, &[0, 0]),
            (1, &[16, 0]),
            (1, &[1, 2]),
        ];
        for (version, bytes) in wrong {
            let bytes = bytes.to_vec();
            let saved = SavedDevice { version, bytes };
            assert!(
                EventRegister::restored(Wire::default(), &saved).is_err(),
                "{saved:?}"
            );
        }
    }
}
