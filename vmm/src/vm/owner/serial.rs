//! The serial port, as the owner of a VM uses it.

use crate::vm::lifecycle::Vm;
use crate::vm::lock::lock;

impl Vm {
    /// Puts bytes into the receive FIFO of the serial port, as far as there is room: it holds at
    /// most 64 that the guest has not read. Returns how many were accepted; `None` without a serial
    /// port. It blocks while a writer of the port's output blocks.
    pub fn serial_input(&self, bytes: &[u8]) -> Option<usize> {
        let port = self.serial.as_ref()?;
        Some(lock(port).input(bytes))
    }

    /// Sets `tell`, which is called on a vCPU's thread each time the guest has read all input of
    /// its serial port. It must not block, but may call [`Self::serial_input`]; if it panics, the
    /// VM is poisoned. The first call counts, later ones change nothing.
    pub fn on_serial_drained(&self, tell: impl Fn() + Send + Sync + 'static) {
        if let Some(port) = &self.serial {
            lock(port).on_drained(tell);
        }
    }
}
