//! The state of KVM's interrupt controllers and clock.

use std::ops::RangeInclusive;
use std::time::Duration;

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
};
use kvm_ioctls::VmFd;

use super::format::{Reader, Writer};
use crate::kvm::KvmError;

/// The version of the record.
pub(super) const VERSION: u32 = 2;
/// The versions that can be read.
pub(super) const READABLE: RangeInclusive<u32> = 2..=VERSION;

const CHIPS: [u32; 3] = [
    KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE,
    KVM_IRQCHIP_IOAPIC,
];

/// The state that a VM has only once.
#[derive(Clone, Debug)]
pub(crate) struct ChipState {
    irqchips: [kvm_irqchip; CHIPS.len()],
    /// Nanoseconds of kvm-clock.
    clock: u64,
}

impl ChipState {
    /// Reads the state of a VM whose vCPUs are stopped.
    pub(crate) fn gather(vm: &VmFd) -> Result<Self, KvmError> {
        let get = KvmError::ioctl;
        let mut irqchips = [kvm_irqchip::default(); CHIPS.len()];
        for (chip, id) in irqchips.iter_mut().zip(CHIPS) {
            chip.chip_id = id;
            vm.get_irqchip(chip).map_err(get("KVM_GET_IRQCHIP"))?;
        }
        Ok(Self {
            irqchips,
            clock: vm.get_clock().map_err(get("KVM_GET_CLOCK"))?.clock,
        })
    }

    /// Sets the state of a new VM, whose vCPUs already have theirs. kvm-clock continues from where
    /// it was: a guest sees only by the time of day how long it was stored.
    pub(crate) fn apply(&self, vm: &VmFd) -> Result<(), KvmError> {
        let set = KvmError::ioctl;
        for chip in &self.irqchips {
            vm.set_irqchip(chip).map_err(set("KVM_SET_IRQCHIP"))?;
        }
        let clock = kvm_clock_data {
            clock: self.clock,
            ..Default::default()
        };
        vm.set_clock(&clock).map_err(set("KVM_SET_CLOCK"))
    }

    /// Moves kvm-clock on.
    pub(super) fn advance(&mut self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.clock = self.clock.saturating_add(nanos);
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        for chip in &self.irqchips {
            out.abi(chip);
        }
        out.u64(self.clock);
        out.finish()
    }

    pub(super) fn decode(input: &mut Reader<'_>) -> Result<Self, &'static str> {
        let mut irqchips = [kvm_irqchip::default(); CHIPS.len()];
        for (chip, id) in irqchips.iter_mut().zip(CHIPS) {
            *chip = input.abi()?;
            if chip.chip_id != id {
                return Err("interrupt controllers in another order");
            }
        }
        Ok(Self {
            irqchips,
            clock: input.u64()?,
        })
    }
}
