//! What the owner of a VM sees of its guest's memory.

use vm_memory::{Bytes as _, GuestAddress};

use super::Vm;

impl Vm {
    /// Reads the guest's memory from a physical address on, as far as it goes without a hole: says
    /// how many bytes it has read, which is 0 where there is no memory. The guest may run, also
    /// after it has ended it can be read. What is there is the guest's word, to be believed in
    /// nothing.
    pub fn read_memory(&self, address: u64, buffer: &mut [u8]) -> usize {
        let ram = self.context.machine.memory.ram();
        // Nothing at that address is no error of who looks.
        ram.read(buffer, GuestAddress(address)).unwrap_or(0)
    }
}
