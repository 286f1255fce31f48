//! Access of the owner of a VM to its guest's memory.

use vm_memory::{Bytes as _, GuestAddress};

use crate::vm::lifecycle::Vm;

impl Vm {
    /// Reads the guest's memory from a physical address on, up to the next hole. Returns the number
    /// of bytes read, which is 0 if there is no memory at the address. The guest may be running; it
    /// can also be read after it has ended. The content is controlled by the guest and must not be
    /// trusted.
    pub fn read_memory(&self, address: u64, buffer: &mut [u8]) -> usize {
        let ram = self.context.machine.memory.ram();
        // No memory at that address is not an error of the caller.
        ram.read(buffer, GuestAddress(address)).unwrap_or(0)
    }
}
