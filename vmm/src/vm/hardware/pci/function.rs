//! A device on the bus.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use podvisor_devices::legacy::power::PowerRequest;
use podvisor_devices::pci::PciFunction;
use podvisor_devices::virtio::transport::{PciTransport, SavedPci};
use podvisor_devices::virtio::{QueueState, RestoreError};

use super::windows::Windows;
use crate::vm::hardware::bus::BusDevice;

/// A device's registers, in configuration space and in the BAR.
#[derive(Debug)]
pub(crate) struct Function {
    slot: u8,
    transport: Mutex<PciTransport>,
    windows: Arc<Windows>,
}

impl Function {
    pub(super) fn new(slot: u8, transport: PciTransport, windows: Arc<Windows>) -> Self {
        Self {
            slot,
            transport: Mutex::new(transport),
            windows,
        }
    }

    /// Returns the device number on the bus.
    pub(crate) fn slot(&self) -> u8 {
        self.slot
    }

    /// Registers with KVM the notification addresses of the BAR where it is now, before the guest
    /// enables it: that waits for a grace period for each queue, for which the guest would wait
    /// otherwise.
    pub(crate) fn prepare(&self) {
        let bar = self.lock().bar();
        self.windows.prepare(self.slot, bar);
    }

    pub(crate) fn save(&self) -> SavedPci {
        self.lock().save()
    }

    pub(crate) fn restore(
        &self,
        saved: &SavedPci,
        running: &[(u16, QueueState)],
    ) -> Result<(), RestoreError> {
        let mut transport = self.lock();
        transport.restore(saved, running)?;
        self.windows.set(self.slot, self, transport.window());
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, PciTransport> {
        // A device whose thread panicked still has consistent registers.
        self.transport
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl PciFunction for Function {
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.lock().read_config(offset, data);
    }

    fn write_config(&self, offset: u64, data: &[u8]) {
        let mut transport = self.lock();
        let before = transport.window();
        transport.write_config(offset, data);
        let after = transport.window();
        if before != after {
            // Under the lock, so that the last of two vCPUs' moves counts.
            self.windows.set(self.slot, self, after);
        }
    }
}

impl BusDevice for Function {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.lock().read_bar(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<PowerRequest> {
        self.lock().write_bar(offset, data);
        None
    }
}
