//! The register of ACPI's generic event device (ACPI 6.5 §5.6.9): by one interrupt line and one byte
//! that says what happened, the host tells a guest of events.
//!
//! The line is level-triggered: it stays high until the guest has read the register, which clears
//! it. So an event that comes while the guest has no driver yet, or while one kernel replaces
//! another, is not lost. Which devices an event concerns is in the tables of the VM.

use std::fmt::Debug;

use crate::virtio::{RestoreError, SavedDevice};

/// The port of the register, of one byte.
pub const PORT: u16 = 0x610;
/// The interrupt line: that of the keyboard, which such a machine never has.
pub const IRQ: u32 = 1;

/// Version of the saved state.
const VERSION: u32 = 1;

/// What a guest is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The power button was pressed.
    PowerButton,
    /// The VM is a new one with the state of another: its generation ID has changed.
    NewGeneration,
}

impl Event {
    /// Returns the event's bit in the register.
    #[must_use]
    pub const fn bit(self) -> u8 {
        match self {
            Self::PowerButton => 1 << 0,
            Self::NewGeneration => 1 << 1,
        }
    }
}

/// A set of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events(u8);

impl Events {
    /// All that there are.
    const ALL: u8 = Event::PowerButton.bit() | Event::NewGeneration.bit();

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
}

impl<L: LevelLine> EventRegister<L> {
    /// Creates a register for the events that the guest's tables name.
    pub fn new(line: L, known: Events) -> Self {
        Self {
            line,
            known,
            pending: 0,
        }
    }

    /// Creates a register in a saved state. Its line is high if the guest has not read all.
    ///
    /// # Errors
    /// [`RestoreError`] if the state is none of such a register.
    pub fn restored(line: L, saved: &SavedDevice) -> Result<Self, RestoreError> {
        let (known, pending) = parse(saved)?;
        if pending != 0 {
            line.set(true);
        }
        Ok(Self {
            line,
            known,
            pending,
        })
    }

    /// Returns the events that a saved register knows.
    ///
    /// # Errors
    /// As [`Self::restored`].
    pub fn known_in(saved: &SavedDevice) -> Result<Events, RestoreError> {
        parse(saved).map(|(known, _)| known)
    }

    /// Returns the state, which [`Self::restored`] takes.
    #[must_use]
    pub fn save(&self) -> SavedDevice {
        SavedDevice {
            version: VERSION,
            bytes: vec![self.known.0, self.pending],
        }
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

    /// The guest reads the register, and so clears it.
    pub fn read(&mut self) -> u8 {
        let pending = std::mem::take(&mut self.pending);
        if pending != 0 {
            self.line.set(false);
        }
        pending
    }
}

/// Returns the known and the pending events of a saved register.
fn parse(saved: &SavedDevice) -> Result<(Events, u8), RestoreError> {
    let [known, pending] = *saved.of_version(VERSION)? else {
        return Err(RestoreError::Invalid {
            what: "events that are not two bytes",
        });
    };
    if known == 0 || known & !Events::ALL != 0 || pending & !known != 0 {
        return Err(RestoreError::Invalid {
            what: "events that the guest does not know",
        });
    }
    Ok((Events(known), pending))
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
    fn states_that_no_register_has_are_refused() {
        let wrong: [(u32, &[u8]); 7] = [
            (2, &[3, 0]),
            (1, &[]),
            (1, &[3]),
            (1, &[3, 0, 0]),
            (1, &[0, 0]),
            (1, &[4, 0]),
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
