//! What the owner of a VM does with its serial port.

use super::{Vm, lock};

impl Vm {
    /// Puts bytes into the receive FIFO of the serial port, as far as there is room: at most 64 are
    /// there that the guest has not read. Returns how many were taken; `None` without a serial
    /// port. It waits for a writer of the port's output that blocks.
    pub fn serial_input(&self, bytes: &[u8]) -> Option<usize> {
        let port = self.serial.as_ref()?;
        Some(lock(port).input(bytes))
    }

    /// Has `tell` called, on a vCPU's thread, each time that the guest has read all input of its
    /// serial port. It must not block, but may call [`Self::serial_input`]; a panic of it
    /// poisons the VM. The first call counts, further ones change nothing.
    pub fn on_serial_drained(&self, tell: impl Fn() + Send + Sync + 'static) {
        if let Some(port) = &self.serial {
            lock(port).on_drained(tell);
        }
    }
}
