//! The interrupt of a device on PCI (§4.1.5.3, §4.1.5.4): an MSI-X vector for each queue and one
//! for configuration changes.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::SavedPci;
use crate::pci::{MAX_VECTORS, MessageInterrupt, Msix, NO_VECTOR};
use crate::virtio::transport::TransportInterrupt;
use crate::virtio::{Interrupt, RestoreError};

/// ISR status bits (§4.1.4.5).
const ISR_QUEUE: u8 = 1;
const ISR_CONFIG: u8 = 2;

/// Which vectors the driver chose; [`NO_VECTOR`] for none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Vectors {
    pub(super) config: u16,
    pub(super) queues: Vec<u16>,
}

impl Vectors {
    fn none(queues: usize) -> Self {
        Self {
            config: NO_VECTOR,
            queues: vec![NO_VECTOR; queues],
        }
    }
}

#[derive(Debug)]
struct State {
    msix: Msix,
    vectors: Vectors,
}

/// The interrupt of one device, shared by the threads of the device and of the vCPUs. Its lock is
/// held for a few instructions and the delivery of a message.
#[derive(Debug)]
pub struct PciInterrupt {
    state: Mutex<State>,
    isr: AtomicU8,
    needs_reset: AtomicBool,
}

impl PciInterrupt {
    /// Creates the interrupt of a device with this number of queues: a vector for each queue, as
    /// far as there are enough, and one for its configuration.
    #[must_use]
    pub fn new(queues: usize, messages: impl MessageInterrupt + 'static) -> Self {
        let vectors = u16::try_from(queues)
            .unwrap_or(MAX_VECTORS)
            .saturating_add(1);
        Self {
            state: Mutex::new(State {
                msix: Msix::new(vectors, messages),
                vectors: Vectors::none(queues),
            }),
            isr: AtomicU8::new(0),
            needs_reset: AtomicBool::new(false),
        }
    }

    pub(super) fn msix<R>(&self, work: impl FnOnce(&mut Msix) -> R) -> R {
        work(&mut self.lock().msix)
    }

    pub(super) fn set_control(&self, control: u16) {
        self.msix(|msix| msix.set_control(control));
    }

    pub(super) fn vectors(&self) -> Vectors {
        self.lock().vectors.clone()
    }

    /// Sets the vector that the driver chose; one that does not exist becomes [`NO_VECTOR`]
    /// (§4.1.5.1.2.1).
    pub(super) fn set_config_vector(&self, vector: u16) {
        let mut state = self.lock();
        state.vectors.config = known(&state.msix, vector);
    }

    pub(super) fn set_queue_vector(&self, queue: u16, vector: u16) {
        let mut state = self.lock();
        let vector = known(&state.msix, vector);
        if let Some(to) = state.vectors.queues.get_mut(usize::from(queue)) {
            *to = vector;
        }
    }

    pub(super) fn config_vector(&self) -> u16 {
        self.lock().vectors.config
    }

    pub(super) fn queue_vector(&self, queue: u16) -> u16 {
        let state = self.lock();
        let vector = state.vectors.queues.get(usize::from(queue));
        vector.copied().unwrap_or(NO_VECTOR)
    }

    pub(super) fn isr(&self) -> u8 {
        self.isr.load(Ordering::SeqCst)
    }

    /// Whether the PCI status register shows an interrupt (§4.1.4.5.1).
    pub(super) fn shows_interrupt(&self) -> bool {
        let state = self.lock();
        !state.msix.is_enabled() && self.isr() != 0
    }

    /// §4.1.4.5: reading clears it.
    pub(super) fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::SeqCst)
    }

    /// Checks whether `saved`, which is not trusted, can be a state of this device.
    pub(super) fn check(&self, saved: &SavedPci) -> Result<(), RestoreError> {
        let state = self.lock();
        state.msix.check(&saved.msix)?;
        let all = saved.queue_vectors.iter().chain([&saved.config_vector]);
        let mut unknown = all.filter(|vector| known(&state.msix, **vector) != **vector);
        if saved.queue_vectors.len() != state.vectors.queues.len()
            || unknown.next().is_some()
            || saved.isr & !(ISR_QUEUE | ISR_CONFIG) != 0
        {
            return Err(RestoreError::Invalid {
                what: "interrupt vectors that this device does not have",
            });
        }
        Ok(())
    }

    /// Restores a state that passed [`Self::check`].
    pub(super) fn restore(&self, saved: &SavedPci) {
        let mut state = self.lock();
        state.msix.restore(&saved.msix);
        state.vectors = Vectors {
            config: saved.config_vector,
            queues: saved.queue_vectors.clone(),
        };
        self.isr.store(saved.isr, Ordering::SeqCst);
    }

    fn signal(&self, isr: u8, vector: impl FnOnce(&Vectors) -> Option<u16>) {
        let mut state = self.lock();
        // §4.1.4.5.1: the queue bit is for a driver that polls, since there is no INTx.
        if isr == ISR_CONFIG || !state.msix.is_enabled() {
            self.isr.fetch_or(isr, Ordering::SeqCst);
        }
        if !state.msix.is_enabled() {
            return;
        }
        if let Some(vector) = vector(&state.vectors) {
            state.msix.signal(vector);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn known(msix: &Msix, vector: u16) -> u16 {
    if vector < msix.vectors() {
        vector
    } else {
        NO_VECTOR
    }
}

impl TransportInterrupt for PciInterrupt {
    fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::SeqCst)
    }

    fn restore_needs_reset(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
    }

    /// The MSI-X table belongs to PCI and keeps what the driver wrote.
    fn reset(&self) {
        let mut state = self.lock();
        state.vectors = Vectors::none(state.vectors.queues.len());
        state.msix.clear_pending();
        self.isr.store(0, Ordering::SeqCst);
        self.needs_reset.store(false, Ordering::SeqCst);
    }
}

impl Interrupt for PciInterrupt {
    fn signal_queue(&self, queue: u16) {
        self.signal(ISR_QUEUE, |vectors| {
            vectors.queues.get(usize::from(queue)).copied()
        });
    }

    fn signal_config(&self) {
        self.signal(ISR_CONFIG, |vectors| Some(vectors.config));
    }

    fn signal_needs_reset(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
        self.signal_config();
    }
}
