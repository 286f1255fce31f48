//! Devices on PCI, with well-behaved and hostile drivers.
//!
//! This file has the driver; `bars.rs` has tests of the bus and of BARs, `address_writes.rs` of the
//! port that selects a register, `messages.rs` of interrupts, `damage.rs` of manipulated snapshots.

mod address_writes;
mod bars;
mod damage;
mod messages;

use podvisor_devices::pci::NO_VECTOR;
use podvisor_devices::virtio::transport::pci::{
    BAR_SIZE, COMMON, DEVICE, MSIX_TABLE, NOTIFY, PENDING,
};

use super::devices::{BUFFER, RINGS, fill, request};
use super::*;
use crate::Transport;

/// Where a local APIC is.
const APIC: u64 = 0xfee0_0000;

/// Registers of configuration space.
const COMMAND: u8 = 0x04;
const BAR: u8 = 0x10;
/// The command register with memory and bus mastering on.
const ENABLED: u32 = 6;

pub(super) fn on_pci(configure: impl FnOnce(VmBuilder) -> VmBuilder) -> Guest {
    Guest::start(|vm| configure(vm.transport(Transport::Pci)))
}

impl Guest {
    pub(super) fn config(&self, slot: u32, register: u8) -> u32 {
        let address = 1 << 31 | slot << 11 | u32::from(register);
        self.carry_out(Order::Out32, 0xcf8, address);
        self.carry_out(Order::In32, 0xcfc, 0)
    }

    pub(super) fn set_config(&self, slot: u32, register: u8, value: u32) {
        let address = 1 << 31 | slot << 11 | u32::from(register);
        self.carry_out(Order::Out32, 0xcf8, address);
        self.carry_out(Order::Out32, 0xcfc, value);
    }

    /// Returns the function in `slot`, enabled where firmware put it.
    pub(super) fn function(&self, slot: u32) -> Function<'_> {
        self.set_config(slot, COMMAND, ENABLED);
        Function {
            guest: self,
            slot,
            bar: u64::from(self.config(slot, BAR) & !0xf),
        }
    }

    /// Returns whether interrupt `vector` is pending in the first vCPU's APIC.
    fn requested(&self, vector: u32) -> bool {
        self.requested_of(0, vector)
    }

    /// As [`Self::requested`], of any vCPU.
    fn requested_of(&self, vcpu: usize, vector: u32) -> bool {
        self.pause();
        let lapic = self
            .vm
            .control()
            .with_vcpus(|vcpu| vcpu.get_lapic().unwrap());
        self.vm.resume().unwrap();
        let at = 0x200 + 0x10 * (vector as usize / 32) + (vector as usize % 32) / 8;
        lapic.unwrap()[vcpu].regs[at].cast_unsigned() & 1 << (vector % 8) != 0
    }
}

/// A device's driver.
#[derive(Clone, Copy)]
pub(super) struct Function<'g> {
    guest: &'g Guest,
    slot: u32,
    bar: u64,
}

impl Notify for Function<'_> {
    fn guest(&self) -> &Guest {
        self.guest
    }

    fn notify(&self) {
        self.guest.carry_out(Order::Write16, self.bar + NOTIFY, 0);
    }
}

impl<'g> Function<'g> {
    /// Returns the same function in a clone.
    pub(super) fn of(self, guest: &'g Guest) -> Self {
        Self { guest, ..self }
    }
}

impl Function<'_> {
    pub(super) fn write(self, offset: u64, value: u32) {
        self.guest.write(self.bar + offset, value);
    }

    pub(super) fn read(self, offset: u64) -> u32 {
        self.guest.read(self.bar + offset)
    }

    fn write16(self, offset: u64, value: u16) {
        let at = self.bar + COMMON + offset;
        self.guest.carry_out(Order::Write16, at, value.into());
    }

    fn read16(self, offset: u64) -> u32 {
        self.guest
            .carry_out(Order::Read16, self.bar + COMMON + offset, 0)
    }

    fn set_status(self, status: u32) {
        self.guest
            .carry_out(Order::Write8, self.bar + COMMON + 0x14, status);
    }

    fn status(self) -> u32 {
        self.guest
            .carry_out(Order::Read8, self.bar + COMMON + 0x14, 0)
    }

    /// Moves the BAR.
    fn move_to(&mut self, address: u64) {
        self.guest
            .set_config(self.slot, BAR, u32::try_from(address).unwrap());
        self.bar = address;
    }

    /// Resets the device and starts it with its first queue, of 16 descriptors at `rings`, which
    /// interrupts by `vector`.
    pub(super) fn start(self, rings: u64, vector: u16) -> DriverQueue {
        let queue = DriverQueue::new(&self.guest.mem, rings, 16);
        let config = queue.config();
        self.set_status(0);
        wait_for("the end of a reset", || self.status() == 0);
        self.set_status(1);
        self.set_status(3);
        self.write(0x08, 1);
        self.write(0x0c, 1);
        self.set_status(11);
        self.write16(0x16, 0);
        self.write16(0x18, u16::try_from(config.size).unwrap());
        self.write16(0x1a, vector);
        for (register, address) in [
            (0x20, config.desc_table),
            (0x28, config.avail_ring),
            (0x30, config.used_ring),
        ] {
            self.write(register, u32::try_from(address).unwrap());
            self.write(register + 4, 0);
        }
        self.write16(0x1c, 1);
        self.set_status(15);
        queue
    }

    /// Sets the message of a vector to interrupt `number` of the first vCPU, masked or not.
    fn set_vector(self, vector: u64, number: u32, masked: bool) {
        let entry = MSIX_TABLE + 16 * vector;
        self.write(entry, u32::try_from(APIC).unwrap());
        self.write(entry + 4, 0);
        self.write(entry + 8, number);
        self.write(entry + 12, masked.into());
    }

    /// Sets MSI-X's message control.
    fn set_msix(self, control: u32) {
        assert_eq!(self.guest.config(self.slot, 0x40) & 0xff, 0x11);
        self.guest.set_config(self.slot, 0x40, control << 16);
    }
}

const MSIX_ON: u32 = 0x8000;
const MSIX_ON_MASKED: u32 = 0xc000;
