//! The power button of a VM.

use podvisor_devices::legacy::events::Event;

use crate::vm::lifecycle::{Vm, VmError};
use crate::vm::lock::lock;
use crate::vm::state::Action;

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
        if !port.has(Event::PowerButton) {
            return Err(PowerButtonError::NoButton);
        }
        let _transition = lock(&self.transition);
        self.legal(&self.control().lock(), Action::PressPowerButton)?;
        port.raise(Event::PowerButton);
        Ok(())
    }
}
